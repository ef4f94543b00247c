"""Speed, side by side with the peers: `python -m benchmarks.run`."""
