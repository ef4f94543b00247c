"""Promises put to the test by real faults: `python -m torture.run`."""
