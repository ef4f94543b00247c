"""Optimizers: any optax transformation, applied to variables."""
