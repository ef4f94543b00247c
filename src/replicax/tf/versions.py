"""`tf.version`: the version of TensorFlow whose names and rules `replicax.tf` has."""

from __future__ import annotations

__all__ = [
    "COMPILER_VERSION",
    "GIT_VERSION",
    "GRAPH_DEF_VERSION",
    "GRAPH_DEF_VERSION_MIN_CONSUMER",
    "GRAPH_DEF_VERSION_MIN_PRODUCER",
    "VERSION",
]

VERSION = "2.21.0"
# What makes programs: XLA, by way of JAX.
GIT_VERSION = "replicax"
COMPILER_VERSION = "XLA"
GRAPH_DEF_VERSION = 2286
GRAPH_DEF_VERSION_MIN_CONSUMER = 0
GRAPH_DEF_VERSION_MIN_PRODUCER = 0
