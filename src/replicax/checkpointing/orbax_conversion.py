"""Conversion between checkpoints of replicax and of Orbax, which Flax programs write.

An array of a replicax checkpoint has the path of its leaf in the Orbax tree:
`params/Dense_0/kernel` is `tree["params"]["Dense_0"]["kernel"]`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

import jax
import numpy as np

from replicax.bundle.names import child_name
from replicax.bundle.writers import Writers
from replicax.checkpointing import plain, snapshot
from replicax.checkpointing.graph import Graph
from replicax.checkpointing.manifest import ArrayEntry, SavedCheckpoint
from replicax.foundation import errors, lazy
from replicax.foundation.types import Tree

if TYPE_CHECKING:
    import orbax.checkpoint as orbax
else:
    orbax = lazy.module("orbax.checkpoint", "replicax[orbax]")

# Files that each Orbax checkpoint of a tree has, and where a CheckpointManager of Orbax puts it.
_TREE_METADATA = "_METADATA"
_DEFAULT_ITEM = "default"
# Every Checkpoint has a counter of its saves.
_COUNTER = "save_counter"


def from_orbax(source: Path, target: Path) -> list[str]:
    """Writes the tree of an Orbax checkpoint as a replicax checkpoint.

    Args:
      source: What a StandardCheckpointer or PyTreeCheckpointer of Orbax wrote, or one step of an
        Orbax CheckpointManager.
      target: The checkpoint to write.

    Returns:
      The names of all objects.

    Raises:
      NotFoundError: There is no Orbax checkpoint.
      CheckpointError: The target cannot be written, or the source cannot be read.
    """
    tree = _read_tree(_tree_directory(source))
    graph = Graph()
    items = tree if isinstance(tree, dict) else {"tree": tree}
    for key, value in items.items():
        graph.add(child_name("", key), value, _ignore)
    names = list(graph.slots)
    graph.add(_COUNTER, 0, _ignore)
    taken = snapshot.take(graph, target, Writers(None), is_copied=False)
    taken.write(target, _step_of(source))
    return names


def to_orbax(source: Path, target: Path) -> list[str]:
    """Writes the arrays and plain values of a replicax checkpoint as an Orbax checkpoint.

    Keys of `jax.random` become their data, which is what Orbax has for them.

    Returns:
      The names that were left out: values that a tree of Orbax cannot contain.
    """
    left_out: list[str] = []
    tree: dict[str, Tree] = {}
    with SavedCheckpoint(source) as saved:
        saved.bundle.check_files()
        arrays = saved.read()
        for name, entry in saved.entries.items():
            value = arrays[name] if isinstance(entry, ArrayEntry) else plain.decode(entry.encoded)
            if name == _COUNTER:
                continue
            if _is_leaf(value):
                _put(tree, name, value)
            else:
                left_out.append(name)
    try:
        with orbax.StandardCheckpointer() as checkpointer:
            checkpointer.save(os.path.abspath(target), tree)
    except (OSError, ValueError) as error:
        raise errors.CheckpointError(
            f"The Orbax checkpoint {target} must be written",
            f"that failed: {error}",
            "Choose a directory that does not exist.",
        ) from error
    return left_out


def _ignore(_: object) -> None:
    """Converted values are not restored."""


def _is_leaf(value: object) -> bool:
    """Returns whether a tree of Orbax may contain a value: numbers, and arrays of numbers."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind not in "US"
    return isinstance(value, int | float) and not isinstance(value, bool)


def _tree_directory(source: Path) -> Path:
    for candidate in (source, source / _DEFAULT_ITEM):
        if (candidate / _TREE_METADATA).is_file():
            return candidate
    raise errors.NotFoundError(
        f"{source} must be an Orbax checkpoint of a tree, or a step of an Orbax CheckpointManager",
        f"it has no file {_TREE_METADATA}",
        "Give the directory that a StandardCheckpointer or PyTreeCheckpointer wrote.",
    )


def _step_of(source: Path) -> int:
    return int(source.name) if source.name.isdecimal() else 0


def _read_tree(path: Path) -> Tree:
    """Reads all leaves into host memory, whatever devices they were saved from."""
    absolute = os.path.abspath(path)
    try:
        with orbax.PyTreeCheckpointer() as checkpointer:
            metadata = checkpointer.metadata(absolute).item_metadata
            arguments = jax.tree.map(
                lambda _: orbax.RestoreArgs(restore_type=np.ndarray), metadata.tree
            )
            return checkpointer.restore(absolute, restore_args=arguments)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise errors.CheckpointError(
            f"Orbax must read {path}",
            f"it cannot: {type(error).__name__}: {str(error)[:200]}",
            "Check that it is complete, and of a version of Orbax that is not newer.",
        ) from error


def _put(tree: dict[str, Tree], name: str, value: Tree) -> None:
    *parents, last = [unquote(part) for part in name.split("/")]
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise _clash(name)
    if last in tree:
        raise _clash(name)
    tree[last] = value


def _clash(name: str) -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError(
        "A tree of Orbax has arrays at its leaves only",
        f"{name!r} lies below another array, or above one",
        "Save the objects under other names.",
    )
