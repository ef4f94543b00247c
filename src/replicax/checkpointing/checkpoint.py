"""`Checkpoint`: saves and restores the state of named objects."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from replicax.bundle.names import child_name
from replicax.bundle.writers import Writers
from replicax.checkpointing import snapshot, together
from replicax.checkpointing.graph import Graph
from replicax.checkpointing.slots import Setter, ValueSlot
from replicax.checkpointing.snapshot import Snapshot
from replicax.checkpointing.status import RestoreStatus
from replicax.contexts import frames, guards
from replicax.foundation import errors, gate, jax_compat, spans

_COUNTER = "save_counter"


class Checkpoint:
    """Saves named objects to disk and restores them, all together.

    Takes variables of any strategy, modules, optimizers, metrics, dataset iterators,
    `jax.random` keys, arrays, plain values, lists and dicts of these, and pytrees of other
    libraries. Objects can be added later as attributes; they get the values that were restored
    before.

    Objects of a strategy over several workers are saved and restored by all workers together: all
    make the same calls, and the chief writes. The directory must be one that all workers share.

    >>> import replicax as rx, tempfile
    >>> directory = tempfile.mkdtemp()
    >>> step = rx.Variable(3, name="step")
    >>> checkpoint = rx.train.Checkpoint(step=step, note="first try")
    >>> path = checkpoint.save(directory + "/ckpt")
    >>> step.assign(0), setattr(checkpoint, "note", "")
    (<rx.Variable 'step:0' shape=() dtype=int32, numpy=0>, None)
    >>> status = checkpoint.restore(path).assert_consumed()
    >>> int(step), checkpoint.note
    (3, 'first try')
    """

    # Called with name and value of every object that is added: the restored values of a checkpoint
    # that this one is an object of wait for them.
    on_new_child: Callable[[str, Any], None] | None = None

    def __init__(self, **objects: object) -> None:
        self.__dict__["_objects"] = {}
        self.__dict__["_counter"] = 0
        # The last restore, as long as it may keep values for objects to come.
        self.__dict__["_last_restore"] = None
        for name, value in objects.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "on_new_child":
            self.__dict__[name] = value
            return
        if hasattr(type(self), name) or name.startswith("_"):
            raise errors.InvalidArgumentError(
                "An object in a Checkpoint needs a name of its own",
                f"{name!r} is private or a part of Checkpoint itself",
                "Choose another name.",
            )
        _require_savable(name, value, self.child_setter(name))
        self._objects[name] = value
        if self._last_restore is not None:
            self._last_restore.give(child_name("", name), value, self.child_setter(name))
        if self.on_new_child is not None:
            self.on_new_child(name, value)

    def __getattr__(self, name: str) -> Any:
        objects = self.__dict__.get("_objects", {})
        if name in objects:
            return objects[name]
        raise AttributeError(f"this Checkpoint has no object {name!r}, but {sorted(objects)}")

    def __delattr__(self, name: str) -> None:
        if name not in self._objects:
            raise AttributeError(name)
        del self._objects[name]

    def checkpoint_children(self) -> dict[str, object]:
        """Returns the objects by name: a checkpoint may be an object of another one.

        >>> Checkpoint(step=3).checkpoint_children()
        {'step': 3}
        """
        return dict(self._objects)

    def child_setter(self, name: str) -> Setter:
        """Returns a function that replaces an object, as a restore does with plain values."""
        return lambda new: self._objects.__setitem__(name, new)

    @property
    def save_counter(self) -> int:
        """The number of the last save; saved and restored with the objects."""
        return self._counter

    def save(self, file_prefix: str | os.PathLike[str]) -> str:
        """Saves to `file_prefix-<number>`, with the next number; returns that path."""
        writers, number = self.writers(), self._counter + 1
        number, target = writers.from_chief(
            "Checkpoint.save",
            lambda: (number, f"{os.fspath(file_prefix)}-{number}"),
            tuple[int, str],
        )
        self._write("Checkpoint.save", number, Path(target), writers)
        return target

    def write(self, path: str | os.PathLike[str]) -> str:
        """Saves to exactly `path`; a checkpoint that is there is replaced."""
        writers, number = self.writers(), self._counter
        number, target = writers.from_chief(
            "Checkpoint.write", lambda: (number, os.fspath(path)), tuple[int, str]
        )
        self._write("Checkpoint.write", number, Path(target), writers)
        return target

    def _write(self, api: str, number: int, path: Path, writers: Writers) -> None:
        taken = self.take_snapshot(api, number, path, writers, is_copied=False)
        writers.from_chief(f"{api} to disk", lambda: taken.write(path, number), None)

    def restore(self, path: str | os.PathLike[str] | None) -> RestoreStatus:
        """Restores every object that the checkpoint at `path` has a value for.

        The path may also be that of a TensorFlow 2 checkpoint (its prefix, or the directory with
        its state file), or of a SavedModel, whose values are found by the names of attributes,
        layers and list indices.

        Everything is read and checked first: if a name, shape, type or checksum is wrong,
        nothing changes. Objects that are created later are restored when they are created. With
        None (no checkpoint yet) nothing happens. Several workers restore the same checkpoint: if
        one of them cannot read it, or reads another one, all raise, and nothing changes.

        Raises:
          TracingError: This code is being compiled.
          CheckpointError: There is no such checkpoint, or it cannot be read.
          DataLossError: It is damaged.
        """
        _require_plain_code("Checkpoint.restore")
        source = None if path is None else Path(path)
        status = RestoreStatus(source, self._walk)
        writers = self.writers()
        together.require_same_path(source, writers)
        if source is not None:
            self.__dict__["_last_restore"] = status.load(source, writers)
        return status

    read = restore

    def writers(self) -> Writers:
        """Returns the processes that save and restore this together: the peers of its variables.

        Without variables, those of the current strategy.
        """
        layout = frames.current().layout
        return Writers(self._walk().peers or (None if layout is None else layout.peers))

    def take_snapshot(
        self,
        api: str,
        number: int,
        path: Path,
        writers: Writers,
        *,
        is_copied: bool,
        spare: np.ndarray | None = None,
    ) -> Snapshot:
        """Reads all values, as save `number`; see `snapshot.take`.

        Raises:
          TracingError: This code is being compiled.
        """
        _require_plain_code(api)
        # Only the chief reads the values; the initial ones of new variables are agreed by all.
        gate.settle()
        if self._last_restore is not None:
            # Restores objects that were put into a list or dict meanwhile.
            _ = self._last_restore.pending
        before, self.__dict__["_counter"] = self._counter, number
        try:
            with spans.block("checkpoint", "copy"):
                return snapshot.take(self._walk(), path, writers, is_copied=is_copied, spare=spare)
        except BaseException:
            self.__dict__["_counter"] = before
            raise

    def _walk(self) -> Graph:
        graph = Graph()
        graph.roots = dict(self._objects)
        counter = ValueSlot(_COUNTER, self._counter, self._put_counter)
        graph.slots[_COUNTER] = counter
        for name, value in self._objects.items():
            graph.add(child_name("", name), value, self.child_setter(name))
        return graph

    def _put_counter(self, value: object) -> None:
        self.__dict__["_counter"] = value if type(value) is int else 0

    def __repr__(self) -> str:
        return f"Checkpoint({', '.join(self._objects)})"


def _require_savable(name: str, value: object, put: Setter) -> None:
    if not Graph().add(child_name("", name), value, put):
        raise errors.ArgumentTypeError(
            f"The object {name!r} needs state that can be saved",
            f"it is a {type(value).__name__}",
            "Pass a variable, rx.Module, optimizer, metric, array, pytree, plain value, or "
            "an object with get_state() and set_state(state), or checkpoint_children().",
        )


def _require_plain_code(api: str) -> None:
    """Raises inside replica code and inside compiled code."""
    frame = guards.require_cross_replica(api)
    if frame.overlay is not None or jax_compat.is_staging():
        raise errors.TracingError(
            f"`{api}` needs values",
            "this code is being compiled",
            "Call it outside of `rx.function` and `jax.jit`.",
        )
