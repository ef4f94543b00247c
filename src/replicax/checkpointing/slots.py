"""Slots: the values of a program that a checkpoint saves and restores."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from typing_extensions import override

from replicax.bundle import dtypes
from replicax.checkpointing import plain
from replicax.checkpointing.manifest import WORKER_STATES, ArrayEntry, Entry, PlainEntry
from replicax.contexts import frames
from replicax.foundation import errors, jax_compat
from replicax.foundation.options import VariableAggregation
from replicax.variables.variable import Variable

# Replaces an object in its parent.
Setter = Callable[[Any], None]


class HasState(Protocol):
    """An object such as a dataset iterator, whose state is plain data.

    In a group of workers, `get_state` is called on all of them. States that are equal are saved
    once. Where they differ, each worker gets its own back; on another number of workers the object
    needs a method `set_worker_states(states)`, which gets those of all workers by index.
    """

    def get_state(self) -> object: ...
    def set_state(self, state: Any, /) -> None: ...


class HasArray(Protocol):
    """A variable of another library."""

    @property
    def shape(self) -> tuple[int | None, ...]: ...
    @property
    def dtype(self) -> DTypeLike: ...
    @property
    def checkpoint_array(self) -> jax.Array: ...
    def restore_array(self, value: np.ndarray, /) -> None: ...


@dataclasses.dataclass
class Slot(abc.ABC):
    """One value of the program: reads it, compares it with a checkpoint, and writes it.

    Attributes:
      name: Its path in the checkpoint.
      target: The object.
      put: Replaces the object in its parent.
    """

    name: str
    target: Any
    put: Setter

    kind = ""

    @abc.abstractmethod
    def read(self) -> Any:
        """Returns the value to save: an array, or the JSON form of a plain value."""

    @abc.abstractmethod
    def check(self, entry: Entry, file: str) -> None:
        """Raises if the value of `entry` does not fit here."""

    @abc.abstractmethod
    def write(self, value: Any) -> None:
        """Stores a value: an array, or a decoded plain value."""

    def refuse(self, entry: Entry, mine: str, file: str) -> errors.InvalidArgumentError:
        """Returns the error for a value that does not fit."""
        return errors.InvalidArgumentError(
            f"{self.name!r} needs {mine}",
            f"{file} holds {describe(entry)} under this name",
            "Nothing was restored. Build the program as it was when it was saved, or leave "
            "this object out of the Checkpoint.",
        )


def describe(entry: Entry) -> str:
    """Returns kind, shape and type of an entry, for people."""
    if isinstance(entry, PlainEntry):
        return f"a {entry.kind} of type {entry.encoded.type}"
    return f"a {entry.kind} of shape {entry.shape} and dtype {entry.dtype}"


class ArraySlot(Slot):
    """An array of JAX, which keeps its sharding, or of NumPy."""

    kind = "array"

    @override
    def read(self) -> Any:
        return self.target

    @override
    def check(self, entry: Entry, file: str) -> None:
        shape, dtype = tuple(self.target.shape), self._dtype_name()
        mine = f"a value of shape {shape} and dtype {dtype}"
        if not isinstance(entry, ArrayEntry) or entry.kind == "key":
            raise self.refuse(entry, mine, file)
        if entry.shape != shape or entry.dtype != dtype:
            raise self.refuse(entry, mine, file)

    def _dtype_name(self) -> str:
        return require_dtype_name(self.name, np.dtype(self.target.dtype))

    @override
    def write(self, value: np.ndarray) -> None:
        if isinstance(self.target, jax.Array):
            with jax_compat.eagerly():
                self.put(_placed(value, self.target))
        elif isinstance(self.target, np.generic):
            self.put(value[()])
        else:
            self.put(value.copy())


class VariableSlot(ArraySlot):
    """A variable of any kind, under any strategy: one logical array."""

    kind = "variable"

    @override
    def read(self) -> Any:
        variable: Variable = self.target
        if variable.is_per_replica:
            if variable.aggregation is VariableAggregation.NONE:
                raise errors.InvalidArgumentError(
                    f"Saving the ON_READ variable {self.name!r} ({variable.name!r}) needs a "
                    "rule to combine its copies",
                    "its aggregation is NONE",
                    "Create it with aggregation=rx.VariableAggregation.SUM, MEAN or "
                    "ONLY_FIRST_REPLICA, or leave it out of the Checkpoint.",
                )
            return variable.read(frames.current())
        if variable.stored is None:
            # Raises an error that explains that the function which creates it has not run.
            return variable.read(frames.current())
        return variable.read_copy(0)

    @override
    def write(self, value: np.ndarray) -> None:
        variable: Variable = self.target
        frame = frames.current()
        if variable.stored is None and frame.overlay is not None:
            # Created by the trace that runs now, so the value is its initial value.
            self._require_equal_copies(variable)
            frame.overlay.adopt(variable, jnp.asarray(value))
            return
        with jax_compat.eagerly(), jax_compat.any_dtype(variable.dtype):
            # On CPU devices the variable may share memory with the value, until it is written.
            variable.store_all_copies(frame.with_overlay(None), value)

    def _require_equal_copies(self, variable: Variable) -> None:
        if variable.is_per_replica and variable.aggregation is VariableAggregation.SUM:
            raise errors.UnsupportedError(
                f"The ON_READ variable {self.name!r} must exist before its restored value "
                "is dealt out to the replicas",
                "a compiled function is just creating it",
                "Create it outside of `rx.function`, or restore after the first call.",
            )


class ForeignVariableSlot(ArraySlot):
    """A variable of another library, which no strategy knows."""

    kind = "variable"

    @override
    def read(self) -> Any:
        return self.target.checkpoint_array

    @override
    def write(self, value: np.ndarray) -> None:
        self.target.restore_array(_copied(value))


class KeySlot(Slot):
    """A typed key of `jax.random`."""

    kind = "key"

    @property
    def key_impl(self) -> str:
        """The name of the PRNG implementation of the key."""
        return str(jax.random.key_impl(self.target))

    @override
    def read(self) -> Any:
        return jax.random.key_data(local(self.name, self.target))

    @override
    def check(self, entry: Entry, file: str) -> None:
        data = jax.random.key_data(local(self.name, self.target))
        mine = f"a {self.key_impl} key with data of shape {data.shape}"
        if not isinstance(entry, ArrayEntry) or entry.kind != "key":
            raise self.refuse(entry, mine, file)
        if entry.shape != data.shape or entry.key_impl != self.key_impl or entry.dtype != "uint32":
            raise self.refuse(entry, mine, file)

    @override
    def write(self, value: np.ndarray) -> None:
        with jax_compat.eagerly():
            self.put(jax.random.wrap_key_data(_copied(value), impl=self.key_impl))


class ValueSlot(Slot):
    """A number, text, bytes or None."""

    kind = "value"

    @override
    def read(self) -> Any:
        return plain.encode(self.target)

    @override
    def check(self, entry: Entry, file: str) -> None:
        if not isinstance(entry, PlainEntry) or entry.kind != "value":
            raise self.refuse(entry, f"a plain value like {self.target!r}", file)

    @override
    def write(self, value: object) -> None:
        self.put(value)


class StateSlot(Slot):
    """An object with `get_state()` and `set_state(state)`, such as a dataset iterator."""

    kind = "state"

    @override
    def read(self) -> Any:
        return plain.encode_state(self.name, self.target.get_state())

    @override
    def check(self, entry: Entry, file: str) -> None:
        if not isinstance(entry, PlainEntry) or entry.kind not in ("state", WORKER_STATES):
            raise self.refuse(entry, f"the state of a {type(self.target).__name__}", file)

    @override
    def write(self, value: object) -> None:
        self.target.set_state(value)

    def write_entry(self, entry: PlainEntry, worker: int, num_workers: int) -> None:
        """Restores a saved state: the one of all workers, or that of this worker."""
        if entry.kind != WORKER_STATES:
            self.write(plain.decode(entry.encoded))
            return
        states = plain.decode_each(entry.encoded)
        set_worker_states = getattr(self.target, "set_worker_states", None)
        if len(states) == num_workers:
            self.write(states[worker])
        elif callable(set_worker_states):
            set_worker_states(states)
        else:
            raise errors.InvalidArgumentError(
                f"The state of {self.name!r} needs {len(states)} workers, which had a state each "
                "when it was saved",
                f"there are {num_workers}",
                "Restore on as many workers, or leave this object out of the Checkpoint.",
            )


def local(name: str, value: Any) -> Any:
    """Returns a value that this process can read: of an array of all processes, its own copy."""
    if not isinstance(value, jax.Array) or value.is_fully_addressable:
        return value
    if not value.is_fully_replicated:
        raise errors.UnsupportedError(
            f"The array {name!r} must be whole on each worker to be saved",
            f"its parts are on several workers ({value.sharding})",
            "Put it into a variable of the strategy, or gather it before.",
        )
    return value.addressable_data(0)


def _placed(value: np.ndarray, like: jax.Array) -> jax.Array:
    """Returns a value in memory of its own, on the devices of an array."""
    if like.is_fully_addressable:
        return jax.device_put(_copied(value), like.sharding)
    # `device_put` would make all processes compare the value, by a collective.
    whole = value.copy()
    return jax.make_array_from_callback(value.shape, like.sharding, lambda index: whole[index])


def _copied(value: np.ndarray) -> jax.Array:
    """Returns a JAX array in memory of its own."""
    with jax_compat.any_dtype(value.dtype):
        return jnp.array(value, copy=True)


def require_dtype_name(name: str, dtype: np.dtype) -> str:
    """Returns the name under which a type is saved, or raises for the object `name`."""
    found = dtypes.name_of_dtype(dtype)
    if found is None:
        raise errors.ArgumentTypeError(
            f"The array {name!r} needs numbers, bools or text of fixed length to be saved",
            f"its dtype is {dtype}",
            "Convert it, or leave it out of the Checkpoint.",
        )
    return found
