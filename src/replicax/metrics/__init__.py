"""Metrics that count on every replica and are combined when they are read."""
