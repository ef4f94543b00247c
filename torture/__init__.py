"""Reliability checks with real faults: `python -m torture.run`."""
