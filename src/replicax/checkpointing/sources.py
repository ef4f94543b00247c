"""What objects are restored from: a checkpoint of this library, or one of TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from replicax.bundle import manifest as bundles
from replicax.checkpointing.graph import Graph
from replicax.checkpointing.manifest import Entry, SavedCheckpoint
from replicax.checkpointing.tensorflow_checkpoint import TensorFlowSource
from replicax.tensorflow_files import checkpoint_paths
from replicax.tensorflow_files.tensor_bundle import INDEX_SUFFIX

Source: TypeAlias = SavedCheckpoint | TensorFlowSource


def tensorflow_prefix(path: Path) -> Path | None:
    """Returns the prefix of the TensorFlow checkpoint at a path; None if there is none.

    A checkpoint of this library at the same path takes precedence.
    """
    if (path / bundles.FILE_NAME).is_file():
        return None
    return checkpoint_paths.find_prefix(path)


def open_source(path: Path) -> Source:
    """Opens the checkpoint at a path.

    Raises:
      CheckpointError: There is none that can be read.
      DataLossError: It is damaged.
    """
    prefix = tensorflow_prefix(path)
    return SavedCheckpoint(path) if prefix is None else TensorFlowSource(prefix)


def file_of(path: Path) -> Path:
    """Returns the file that each worker must have to read the checkpoint at a path."""
    prefix = tensorflow_prefix(path)
    if prefix is None:
        return path / bundles.FILE_NAME
    return prefix.with_name(prefix.name + INDEX_SUFFIX)


def match(source: Source, graph: Graph, wanted: Mapping[str, Entry]) -> dict[str, Entry]:
    """Returns the entries among `wanted` for the slots of a program, by the names of slots."""
    if isinstance(source, TensorFlowSource):
        return source.match(graph, wanted)
    found: dict[str, Entry] = {}
    for name in graph.slots:
        for path in graph.paths_of(name):
            entry = source.find(path)
            if entry is not None and entry.name in wanted:
                found[name] = entry
                break
    return found
