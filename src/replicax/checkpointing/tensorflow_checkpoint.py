"""TensorFlow checkpoints, read without TensorFlow: as a mapping, and as the source of a restore."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from typing_extensions import override

from replicax.bundle import dtypes
from replicax.checkpointing import plain, tensorflow_objects
from replicax.checkpointing.graph import Graph
from replicax.checkpointing.manifest import ArrayEntry, Entry, PlainEntry
from replicax.checkpointing.slots import ArraySlot, Slot, ValueSlot
from replicax.foundation import errors
from replicax.tensorflow_files import checkpoint_paths, object_graph
from replicax.tensorflow_files.object_graph import ObjectGraph
from replicax.tensorflow_files.tensor_bundle import OBJECT_GRAPH_KEY, TensorBundle

# The configuration of a Keras object, which older versions saved beside its variables.
_CONFIGURATION = "OBJECT_CONFIG_JSON"


class TensorFlowCheckpoint(Mapping[str, np.ndarray]):
    """The tensors of a TensorFlow checkpoint by name; each is read when it is asked for.

    A name is that of `tf.train.list_variables`, or the path of the object, without
    "/.ATTRIBUTES/VARIABLE_VALUE". Text is an array of `bytes` objects.

    Attributes:
      path: The prefix of the checkpoint.
    """

    def __init__(self, prefix: Path) -> None:
        self.path = str(prefix)
        self._bundle = TensorBundle(prefix)
        self._names = sorted(
            name
            for name in self._bundle.entries
            if name != OBJECT_GRAPH_KEY and not name.endswith(_CONFIGURATION)
        )

    @functools.cached_property
    def graph(self) -> ObjectGraph | None:
        """The objects of the checkpoint; None if TensorFlow 1 wrote it."""
        return object_graph.graph_of(self._bundle)

    @functools.cached_property
    def object_paths(self) -> Mapping[str, str]:
        """The names of tensors, by the shortest paths of their objects.

        Empty for a checkpoint of TensorFlow 1.
        """
        known = set(self._names)
        paths = {} if self.graph is None else self.graph.paths()
        return {path: name for path, name in paths.items() if name in known}

    def name_of(self, name: str) -> str | None:
        """Returns the name of a tensor, given the name or an object path; None if absent."""
        if name in self._bundle.entries:
            return name
        full = f"{name}/.ATTRIBUTES/VARIABLE_VALUE"
        if full in self._bundle.entries:
            return full
        if self.graph is None or not self.graph.nodes:
            return None
        node = self.graph.walk(0, name)
        return None if node is None else self.graph.nodes[node].key

    @override
    def __getitem__(self, name: str) -> np.ndarray:
        found = self.name_of(name)
        if found is None:
            raise errors.NotFoundError(
                f"{name!r} must be an array in the checkpoint {self.path}",
                f"it holds {', '.join(self._names[:10]) or 'no array'}",
                "Choose one of them; `rx.train.list_variables` lists all.",
            )
        return self._bundle.read(found)

    @override
    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.name_of(name) is not None

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    @override
    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<TensorFlowCheckpoint {self.path!r} of {len(self)} arrays>"

    # As of the CheckpointReader of TensorFlow.

    def has_tensor(self, name: str) -> bool:
        """Returns whether there is a tensor of this name."""
        return name in self

    def get_tensor(self, name: str) -> np.ndarray:
        """Returns a tensor."""
        return self[name]

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        """Returns the shapes of all tensors."""
        return {name: list(self._bundle.entries[name].shape) for name in self}

    def get_variable_to_dtype_map(self) -> dict[str, str]:
        """Returns the names of the types of all tensors; "string" for text."""
        return {name: self._bundle.entries[name].dtype for name in self}

    def listed(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Returns name, shape and type of each tensor, by name."""
        entries = self._bundle.entries
        return [(name, entries[name].shape, entries[name].dtype) for name in self]

    @property
    def bundle(self) -> TensorBundle:
        """The files."""
        return self._bundle


def load_tf_checkpoint(prefix_or_dir: str | os.PathLike[str]) -> TensorFlowCheckpoint:
    """Opens a checkpoint of TensorFlow 2, or the variables of a SavedModel, without TensorFlow.

    Args:
      prefix_or_dir: The prefix of a checkpoint, such as "run/ckpt-3"; a directory of checkpoints,
        whose state file names the newest; or the directory of a SavedModel.

    Returns:
      A mapping from names to arrays, which are read when they are asked for, after their checksums
      were compared. Object paths are names as well; `object_paths` lists them.

    Raises:
      NotFoundError: There is no such checkpoint.
      DataLossError: It is damaged.

    >>> load_tf_checkpoint("/no/such/run/ckpt-3")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    replicax.errors.NotFoundError: /no/such/run/ckpt-3 must be the prefix of a ...
    """
    return TensorFlowCheckpoint(checkpoint_paths.require_prefix(prefix_or_dir))


class TensorFlowSource:
    """A TensorFlow checkpoint that objects are restored from.

    Attributes:
      entries: Its arrays, by the paths of their objects.
      digest: Differs if a tensor differs.
      optional: Slots that are not missed if the checkpoint has no value for them.
    """

    is_own_format = False
    optional: frozenset[str] = frozenset({"save_counter"})

    def __init__(self, prefix: Path) -> None:
        self._checkpoint = TensorFlowCheckpoint(prefix)
        bundle = self._checkpoint.bundle
        self._names = {object_graph.object_path(name): name for name in self._checkpoint}
        self.entries: dict[str, Entry] = {
            path: _entry(path, bundle.entries[name].shape, bundle.entries[name].dtype)
            for path, name in self._names.items()
        }
        self.digest = bundle.digest

    def __enter__(self) -> TensorFlowSource:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def array_names(self) -> Iterable[str]:
        """The names of all arrays."""
        return self.entries.keys()

    def check_files(self) -> None:
        """Raises DataLossError if a file is missing or too short."""
        self._checkpoint.bundle.check_files()

    def read(self, wanted: Iterable[str]) -> dict[str, np.ndarray]:
        """Returns arrays by name, after comparing their checksums."""
        return {path: self._checkpoint[self._names[path]] for path in wanted}

    def match(self, graph: Graph, wanted: Mapping[str, Entry]) -> dict[str, Entry]:
        """Returns the entries for the slots of a program, as far as there are any."""
        theirs = self._checkpoint.graph
        if theirs is None:
            # TensorFlow 1: variables have names, and no objects.
            found = {name: name for name in graph.slots if name in self._checkpoint}
        else:
            found, unsaved = tensorflow_objects.match(graph, theirs)
            self.optional |= unsaved
        entries: dict[str, Entry] = {}
        for name, key in found.items():
            path = object_graph.object_path(key)
            if path in wanted:
                entry = self._entry_for(graph.slots[name], path)
                if entry is not None:
                    entries[name] = entry
        return entries

    def _entry_for(self, slot: Slot, path: str) -> Entry | None:
        """Returns an entry in the form in which a slot takes it."""
        entry = self.entries[path]
        assert isinstance(entry, ArrayEntry)
        if isinstance(slot, ValueSlot):
            return self._plain_entry(slot, entry)
        if not isinstance(slot, ArraySlot):
            # The state of an iterator of TensorFlow, or of its random numbers, has no use here.
            return None
        return self._in_type_of(slot, entry)

    def _plain_entry(self, slot: ValueSlot, entry: ArrayEntry) -> Entry:
        if entry.shape:
            return entry
        value = self._checkpoint[self._names[entry.name]].item()
        if isinstance(value, bytes) and not isinstance(slot.target, bytes):
            value = value.decode("utf-8", "replace")
        return PlainEntry(entry.name, "value", plain.encode(value))

    def _in_type_of(self, slot: ArraySlot, entry: ArrayEntry) -> ArrayEntry:
        """Lets whole numbers have another type of whole numbers, if all of them fit.

        Counters of TensorFlow have 64 bits, those of JAX 32.
        """
        dtype = np.dtype(slot.target.dtype)
        name = dtypes.name_of_dtype(dtype)
        if name in (None, entry.dtype) or "int" not in entry.dtype or dtype.kind not in "iu":
            return entry
        values = self._checkpoint[self._names[entry.name]]
        limits = np.iinfo(dtype)
        if values.size and not (limits.min <= values.min() and values.max() <= limits.max):
            return entry
        return _entry(entry.name, entry.shape, str(name))


def _entry(name: str, shape: tuple[int, ...], dtype: str) -> ArrayEntry:
    return ArrayEntry(name, "variable", shape, dtype)
