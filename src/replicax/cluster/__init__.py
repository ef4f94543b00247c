"""The tasks of a cluster and their addresses."""
