"""What tapes record: one `jax.vjp` for each op, when it is called.

Note [Recorded values]
    A tape knows values by the identity of their arrays, and variables by their own. Both are kept
    alive by the tape, so an identity stays unique. A variable is an input of each node that reads
    it: an assignment between two reads changes neither node, and the gradient is the sum of both.

Note [Regions]
    A region is a node whose body is code of a user or of Keras: a layer, a branch, a loop. While
    its body runs, tapes that were opened outside do not record; the body is differentiated as a
    whole. It may use recorded tensors and variables that are not among its arguments. So a region
    has a table, which replaces recorded arrays by inputs of the node. An array or a variable that
    is not in the table is noted, and the body runs again with it as a further input.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from replicax.foundation import jax_compat
from replicax.tf.arguments import Value, VariableLike
from replicax.values import regroup
from replicax.variables.sharded import ShardedVariable
from replicax.variables.variable import Variable


class Tape(Protocol):
    """The part of a GradientTape that recording uses."""

    region: Region | None

    def is_recording(self) -> bool: ...

    def tracks(self, key: int) -> bool: ...

    def note_read(self, variable: VariableLike) -> None: ...

    def note_lookup(self, table: Value, ids: Value, rows: Value) -> None: ...

    def add(self, node: Node) -> None: ...


class Node(NamedTuple):
    """One recorded call.

    Attributes:
      function: Computes the outputs that have gradients from the inputs.
      pullback: Maps cotangents of the outputs to those of the inputs.
      inputs: The arrays of the differentiated inputs.
      sources: The identity of each input: an array, or a variable.
      outputs: The arrays of the results that have gradients.
      kept: Objects whose identity is used, so that no other object gets it.
    """

    function: Callable[..., tuple[jax.Array, ...]]
    pullback: Callable[[tuple[jax.Array, ...]], tuple[jax.Array, ...]]
    inputs: tuple[jax.Array, ...]
    sources: tuple[int, ...]
    outputs: tuple[jax.Array, ...]
    kept: tuple[Any, ...]


class Region:
    """A node whose body is running. See Note [Regions].

    Attributes:
      parent: The region around it.
      tapes: The tapes that record the node.
      table: The input of the node for each recorded array and variable, by identity.
      unknown: Recorded arrays and variables that the body used and that are not in the table.
      read: The entries of the table that the body used.
    """

    def __init__(self, parent: Region | None, tapes: Sequence[Tape]) -> None:
        self.parent = parent
        self.tapes = tapes
        self.table: dict[int, Any] = {}
        self.unknown: dict[int, Any] = {}
        self.read: set[int] = set()

    def input_for(self, array: Value) -> Any:
        """Returns the input of the node that stands for an array."""
        found = self.table.get(id(array))
        if found is not None:
            self.read.add(id(array))
            return found
        if any(tape.tracks(id(array)) for tape in self.tapes):
            self.unknown[id(array)] = array
        return array

    def variable_value(self, variable: VariableLike) -> Any:
        """Returns the input that stands for a variable, or None."""
        key = id(identity_of(variable))
        found = self.table.get(key)
        if found is not None:
            self.read.add(key)
        return found

    def note_variable(self, variable: VariableLike) -> None:
        """Notes a read of a variable that is no input of the node."""
        if is_watched(variable, self.tapes):
            self.unknown[id(identity_of(variable))] = variable


_tapes: contextvars.ContextVar[tuple[Tape, ...]] = contextvars.ContextVar(
    "replicax_tf_tapes", default=()
)
_region: contextvars.ContextVar[Region | None] = contextvars.ContextVar(
    "replicax_tf_region", default=None
)


def open_tapes() -> tuple[Tape, ...]:
    """Returns the tapes that were entered and not left, outermost first."""
    return _tapes.get()


def set_open_tapes(tapes: tuple[Tape, ...]) -> None:
    """Replaces the tapes that were entered and not left."""
    _tapes.set(tapes)


def current_region() -> Region | None:
    """Returns the region whose body is running."""
    return _region.get()


def recording_tapes() -> tuple[Tape, ...]:
    """Returns the tapes that record ops of the running code."""
    tapes = _tapes.get()
    if not tapes:
        return ()
    region = _region.get()
    return tuple(t for t in tapes if t.region is region and t.is_recording())


@contextlib.contextmanager
def entered(region: Region | None) -> Iterator[None]:
    """Makes a region the current one while its body runs; with None, there is no region."""
    token = _region.set(region)
    try:
        yield
    finally:
        _region.reset(token)


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Lets code run that no tape records, such as an update of a metric."""
    token = _tapes.set(())
    try:
        yield
    finally:
        _tapes.reset(token)


def resolved(array: Value) -> Any:
    """Returns the array that stands for a recorded one in the running body."""
    region = _region.get()
    return array if region is None else _resolved_in(region, array)


def _resolved_in(region: Region, array: Value) -> Any:
    if region.parent is not None:
        array = _resolved_in(region.parent, array)
    return region.input_for(array)


def is_tracked(array: Value) -> bool:
    """Tells whether a tape that records the running code knows an array."""
    tapes = recording_tapes()
    return bool(tapes) and any(tape.tracks(id(resolved(array))) for tape in tapes)


# Variables.


def is_variable(value: object) -> bool:
    """Tells whether a value is a variable of replicax or of Keras."""
    if isinstance(value, Variable):
        return True
    cls = getattr(sys.modules.get("keras"), "Variable", None)
    return cls is not None and isinstance(value, cls)


def is_keras_loaded() -> bool:
    """Tells whether Keras was imported completely."""
    return hasattr(sys.modules.get("keras"), "StatelessScope")


def identity_of(variable: VariableLike) -> Any:
    """Returns the object that stands for a variable: a Keras variable may have a twin.

    A copy of a variable stands for the whole, a part of a sharded one for itself.
    """
    is_plain = isinstance(variable, Variable)
    found = getattr(variable, "container" if is_plain else "twin", None)
    is_part = is_plain and isinstance(found, ShardedVariable)
    return variable if found is None or is_part else found


def value_of(variable: VariableLike) -> Any:
    """Returns the value of a variable that the running code sees."""
    with suspended():
        return Variable.read_value(variable) if isinstance(variable, Variable) else variable.value


def is_watched(variable: VariableLike, tapes: Sequence[Tape]) -> bool:
    """Tells whether one of the tapes differentiates with respect to a variable."""
    for tape in tapes:
        tape.note_read(variable)
    key = id(identity_of(variable))
    return any(tape.tracks(key) for tape in tapes)


# Nodes.


class _Slot(NamedTuple):
    """Stands for a differentiated input in the arguments of a node."""

    number: int


class Inputs:
    """The recorded arrays and variables among the arguments of a node."""

    def __init__(self, tapes: Sequence[Tape]) -> None:
        self._tapes = tapes
        self.arrays: list[Any] = []
        self.sources: list[int] = []
        self.kept: list[Any] = []
        self._index: dict[int, int] = {}

    def slot_for(self, leaf: Value) -> Any:
        """Returns a slot for a recorded leaf, and the array of another one."""
        if is_tensor(leaf):
            array = resolved(leaf._raw)
            return self.add(array, array) if self._is_tracked(array) else array
        if is_variable(leaf):
            array = value_of(leaf)
            if is_watched(leaf, self._tapes) and is_inexact(array):
                return self.add(identity_of(leaf), array)
            return array
        return leaf

    def _is_tracked(self, array: Value) -> bool:
        return any(tape.tracks(id(array)) for tape in self._tapes) and is_inexact(array)

    def add_unknown(self, leaf: Value) -> None:
        """Adds a recorded array or a variable that a body was found to use."""
        if is_variable(leaf):
            self.slot_for(leaf)
        else:
            self.add(leaf, leaf)

    def add(self, identity: Value, array: Value) -> _Slot:
        """Adds an input; the same one only once."""
        key = id(identity)
        if key not in self._index:
            self._index[key] = len(self.arrays)
            self.arrays.append(array)
            self.sources.append(key)
            self.kept.append(identity)
        return _Slot(self._index[key])


def record(
    body: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wrap_results: Callable[[Any], Any],
) -> Any:
    """Calls a function of arrays as one node of the tapes that record its arguments."""
    tapes = recording_tapes()
    inputs = Inputs(tapes)
    slots = map_leaves(inputs.slot_for, (args, kwargs))
    if not inputs.arrays:
        args, kwargs = slots
        return wrap_results(map_leaves(array_of, body(*args, **kwargs)))

    def call(*arrays: Any) -> Any:
        own_args, own_kwargs = filled(slots, arrays)
        return map_leaves(array_of, body(*own_args, **own_kwargs))

    return wrap_results(add_node(call, inputs, tapes))


def filled(slots: Value, arrays: Sequence[Any]) -> Any:
    """Returns a structure with an array in the place of each slot."""
    return map_leaves(lambda leaf: arrays[leaf.number] if isinstance(leaf, _Slot) else leaf, slots)


def add_node(
    call: Callable[..., Any],
    inputs: Inputs,
    tapes: Sequence[Tape],
    is_valid: Callable[[], bool] = lambda: True,
) -> Any:
    """Differentiates a function of arrays where it is called, and records the node.

    Args:
      call: A function of the differentiated inputs, which returns a structure.
      inputs: The inputs.
      tapes: The tapes that record.
      is_valid: Tells, after the call, whether the node is recorded.

    Returns:
      The result of the function.
    """
    if not inputs.arrays:
        return map_leaves(lambda leaf: leaf.array if isinstance(leaf, Effect) else leaf, call())
    structure: list[Any] = []

    def split(*arrays: Any) -> tuple[tuple[jax.Array, ...], tuple[Any, ...]]:
        outputs: list[jax.Array] = []
        others: list[Any] = []

        def place(leaf: Value) -> Any:
            is_output = not isinstance(leaf, Effect)
            leaf = leaf if is_output else leaf.array
            if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
                return leaf
            is_output = is_output and is_inexact(leaf)
            found = outputs if is_output else others
            found.append(jnp.asarray(leaf))
            return _Place(is_output, len(found) - 1)

        structure[:] = [map_leaves(place, call(*arrays))]
        return tuple(outputs), tuple(others)

    outputs, pullback, others = jax.vjp(split, *inputs.arrays, has_aux=True)
    places = structure[0]
    outputs = _apart(outputs, inputs.arrays)
    if outputs and is_valid():
        node = Node(
            lambda *arrays: split(*arrays)[0],
            pullback,
            tuple(inputs.arrays),
            tuple(inputs.sources),
            outputs,
            tuple(inputs.kept),
        )
        for tape in tapes:
            if any(map(tape.tracks, node.sources)):
                tape.add(node)

    def put(leaf: Value) -> Any:
        if not isinstance(leaf, _Place):
            return leaf
        return (outputs if leaf.is_output else others)[leaf.number]

    return map_leaves(put, places)


class Effect:
    """An array that a node leaves beside its result, and that has no gradient."""

    __slots__ = ("array",)

    def __init__(self, array: Value) -> None:
        self.array = array


class _Place(NamedTuple):
    """Stands for an array in the result of a node."""

    is_output: bool
    number: int


def _apart(outputs: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Gives each output an identity of its own, where a node returns what it was given."""
    seen = {id(array) for array in inputs}
    found = []
    for output in outputs:
        own = jax_compat.alias(output) if id(output) in seen else output
        seen.add(id(own))
        found.append(own)
    return tuple(found)


def is_inexact(array: Value) -> bool:
    """Tells whether an array can have a gradient."""
    return jnp.issubdtype(array.dtype, jnp.inexact)


# Structures: lists, tuples, named tuples and dicts, as ops take and return them.


def is_tensor(value: object) -> bool:
    """Tells whether a value is a tensor."""
    return type(value) in _TensorTypes.known


class _TensorTypes:
    # Filled by tensor.py, which imports this module.
    known: set[type] = set()


def register_tensor_type(cls: type) -> None:
    """Adds a class of tensors, which keep their array in `_raw`."""
    _TensorTypes.known.add(cls)


def array_of(leaf: Value) -> Any:
    """Returns the array of a tensor, and everything else as it is."""
    return resolved(leaf._raw) if is_tensor(leaf) else leaf


def map_leaves(fn: Callable[[Any], Any], structure: Value) -> Any:
    """Applies a function to each leaf: anything but a list, tuple or dict."""
    if isinstance(structure, list | tuple) and type(structure) not in (_Slot, _Place):
        return sequence(structure, lambda item: map_leaves(fn, item))
    if isinstance(structure, dict):
        return mapping(structure, lambda item: map_leaves(fn, item))
    return fn(structure)


def sequence(items: Value, fn: Callable[[Any], Any]) -> Any:
    """Applies a function to the items of a list or tuple of any class."""
    cls = type(items)
    if cls is list:
        return [fn(item) for item in items]
    if cls is tuple:
        return tuple([fn(item) for item in items])
    if not items or getattr(items, "is_shape", False):
        return items
    return regroup.sequence_like(items, [fn(item) for item in items])


def mapping(items: Mapping[Any, Any], fn: Callable[[Any], Any]) -> Any:
    """Applies a function to the values of a dict of any class."""
    found = {key: fn(value) for key, value in items.items()}
    return found if type(items) is dict else regroup.mapping_like(items, found)
