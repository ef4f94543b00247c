"""Checkpoints of training programs."""
