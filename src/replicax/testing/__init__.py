"""Clusters of real processes on this machine, for tests, notebooks and demos."""

from replicax.testing.local_cluster import LocalCluster as LocalCluster
