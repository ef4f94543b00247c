"""Clusters of real processes on this machine, for tests, notebooks and demos."""
