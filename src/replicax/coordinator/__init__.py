"""The coordinator of parameter servers and workers."""
