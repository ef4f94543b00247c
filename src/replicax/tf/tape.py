"""`GradientTape`: gradients of code that has run, by what was recorded."""

from __future__ import annotations

import contextlib
import enum
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.foundation import errors, jax_compat
from replicax.tf import dispatch, tape_recording, tape_regions, tape_sources
from replicax.tf.arguments import ShapeLike, Value, VariableLike
from replicax.tf.dispatch import op
from replicax.tf.tape_recording import Node, Region
from replicax.tf.tensor import Tensor, raw
from replicax.values.distributed_values import DistributedValues
from replicax.values.indexed_slices import IndexedSlices
from replicax.variables.variable import Variable

_log = logging.getLogger(__name__)


class UnconnectedGradients(enum.Enum):
    """What the gradient of a source is that the target does not depend on."""

    NONE = "none"  # None
    ZERO = "zero"  # zeros of the shape of the source


class GradientTape:
    """Records ops, so that gradients of their results can be taken afterwards.

    Each op is differentiated where it is called, so `gradient` repeats no computation. Under a
    strategy, open the tape inside the function that `strategy.run` calls: the gradients are those
    of one replica.

    Args:
      persistent: Whether `gradient` may be called several times.
      watch_accessed_variables: Whether trainable variables are watched when they are read.

    >>> import jax.numpy as jnp
    >>> import replicax as rx
    >>> from replicax.tf.tensor import Tensor
    >>> x = Tensor(jnp.asarray(3.0))
    >>> with GradientTape() as tape:
    ...     tape.watch(x)
    ...     y = x * x
    >>> tape.gradient(y, x)
    <tf.Tensor: shape=(), dtype=float32, numpy=6.0>
    """

    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True) -> None:
        self.region: Region | None = None
        self._persistent = persistent
        self._watches_variables = watch_accessed_variables
        self._nodes: list[Node] = []
        # Recorded arrays and variables by identity; see Note [Recorded values].
        self._tracked: dict[int, Any] = {}
        self._variables: dict[int, Any] = {}
        self._lookups: list[tape_sources.Lookup] = []
        self._is_open = False
        self._is_paused = False
        self._is_used = False

    def __enter__(self) -> GradientTape:
        if self._is_open:
            raise errors.ContextError(
                "A GradientTape must be left before it is entered again",
                "it is still open",
                "Use another tape inside this one.",
            )
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_open:
            self._close()

    def _open(self) -> None:
        self.region = tape_recording.current_region()
        self._is_open = True
        tape_recording.set_open_tapes((*tape_recording.open_tapes(), self))

    def _close(self) -> None:
        self._is_open = False
        rest = tuple(tape for tape in tape_recording.open_tapes() if tape is not self)
        tape_recording.set_open_tapes(rest)

    # What recording calls.

    def is_recording(self) -> bool:
        """Tells whether ops are recorded now."""
        return self._is_open and not self._is_paused

    def tracks(self, key: int) -> bool:
        """Tells whether the array or variable with an identity is recorded."""
        return key in self._tracked

    def note_read(self, variable: VariableLike) -> None:
        """Watches a trainable variable that is read."""
        if self._watches_variables and getattr(variable, "trainable", False):
            self._watch_variable(variable)

    def note_lookup(self, table: Value, ids: Value, rows: Value) -> None:
        """Follows rows that were taken from a table, if the table is watched."""
        self.note_read(table)
        if self.tracks(id(tape_recording.identity_of(table))):
            self._tracked[id(rows)] = rows
            self._lookups.append(tape_sources.Lookup(table, ids, rows))

    def add(self, node: Node) -> None:
        """Adds a recorded call."""
        self._nodes.append(node)
        for output in node.outputs:
            self._tracked[id(output)] = output

    # What users call.

    def watch(self, tensor: Value) -> None:
        """Records what is computed from a tensor, a variable, or a structure of them."""
        for leaf in _leaves(tensor):
            if tape_recording.is_variable(leaf):
                self._watch_variable(leaf)
                continue
            if not isinstance(leaf, Tensor):
                raise _not_recorded("`watch` needs tensors or variables", leaf)
            array = tape_recording.resolved(leaf._raw)
            if not tape_recording.is_inexact(array):
                _log.warning("A watched tensor has dtype %s, and no gradient.", leaf.dtype.name)
            if not isinstance(array, jax.Array):
                # Two tensors may hold one NumPy array, and JAX makes a new one of it at each use.
                array = leaf._raw = jnp.asarray(array)
            self._tracked[id(array)] = array

    def _watch_variable(self, variable: VariableLike) -> None:
        identity = tape_recording.identity_of(variable)
        self._tracked[id(identity)] = identity
        self._variables.setdefault(id(identity), variable)

    def watched_variables(self) -> tuple[Any, ...]:
        """Returns the variables that were watched, in the order of their first read."""
        return tuple(self._variables.values())

    @contextlib.contextmanager
    def stop_recording(self) -> Iterator[None]:
        """Lets code run that is not recorded."""
        if not self._is_open:
            raise errors.ContextError(
                "`stop_recording` needs a tape that records",
                "this one was left",
                "Call it inside `with tape:`.",
            )
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def reset(self) -> None:
        """Forgets everything that was recorded."""
        self._nodes.clear()
        self._tracked.clear()
        self._variables.clear()
        self._lookups.clear()
        self._is_used = False

    def gradient(
        self,
        target: Value,
        sources: Value,
        output_gradients: Value = None,
        unconnected_gradients: UnconnectedGradients | str = UnconnectedGradients.NONE,
    ) -> Any:
        """Returns the gradients of targets with respect to sources.

        Args:
          target: A tensor, or a structure of tensors, which are summed.
          sources: Tensors and variables, in any structure of lists, tuples and dicts.
          output_gradients: One for each target, by which it is multiplied; by default ones.
          unconnected_gradients: What a source gets that no target depends on.

        Returns:
          The structure of `sources` with a tensor, or None, for each; `IndexedSlices` for a table
          on parameter servers whose rows were looked up.
        """
        unconnected = UnconnectedGradients(unconnected_gradients)
        self._use("gradient")
        targets, given = _leaves(target), [None] * len(_leaves(target))
        if output_gradients is not None:
            given = _leaves(output_gradients)
        if len(given) != len(targets):
            raise errors.StructureError(
                f"`output_gradients` must have one for each of {len(targets)} targets",
                f"it has {len(given)}",
                "Pass None for a target whose gradient is one.",
            )
        flat = _leaves(sources)
        wanted = tape_sources.Sources(flat, self._lookups, _source_key)
        if not self._persistent:
            self._end()
        recorders = tape_recording.recording_tapes()
        start = [
            (_target_array(leaf), _target_key(leaf), own)
            for leaf, own in zip(targets, given, strict=True)
        ]
        walk = _Walk(self._nodes, wanted.keys, is_recorded=bool(recorders))
        # JAX transposes a loop only now.
        with tape_regions.explaining_loops():
            followed = walk.gradients([entry for entry in start if _is_differentiable(entry[0])])
        found = wanted.combined(followed)
        if not self._persistent:
            self._nodes, self._tracked, self._lookups = [], {}, []
        results = iter(
            _zeros_like(leaf)
            if gradient is None and unconnected is UnconnectedGradients.ZERO
            else gradient
            for leaf, gradient in zip(flat, found, strict=True)
        )
        return _map(lambda _: next(results), sources)

    def jacobian(
        self,
        target: Value,
        sources: Value,
        unconnected_gradients: UnconnectedGradients | str = UnconnectedGradients.NONE,
        parallel_iterations: int | None = None,
        experimental_use_pfor: bool = True,
    ) -> Any:
        """Returns, for each source, an array of shape `target.shape + source.shape`.

        Args:
          target: A tensor.
          sources: As for `gradient`.
          unconnected_gradients: As for `gradient`.
          parallel_iterations: Accepted for portability, without effect.
          experimental_use_pfor: Accepted for portability, without effect.
        """
        del parallel_iterations, experimental_use_pfor
        array = _target_array(target)
        seeds = jnp.eye(array.size, dtype=array.dtype).reshape((array.size, *array.shape))
        unconnected = UnconnectedGradients(unconnected_gradients)
        stacked = self._stacked("jacobian", target, sources, seeds)

        def shaped(rows: Value, source: Value) -> Any:
            shape = (*array.shape, *np.shape(raw(source)))
            if rows is not None:
                return _reshape(rows, shape)
            is_zero = unconnected is UnconnectedGradients.ZERO
            return Tensor(jnp.zeros(shape, raw(source).dtype)) if is_zero else None

        return _map_pairs(shaped, stacked, sources)

    def batch_jacobian(
        self,
        target: Value,
        source: Value,
        unconnected_gradients: UnconnectedGradients | str = UnconnectedGradients.NONE,
        parallel_iterations: int | None = None,
        experimental_use_pfor: bool = True,
    ) -> Any:
        """Returns an array of shape `target.shape + source.shape[1:]`, row by row of a batch.

        Row i of the target must depend on row i of the source only.

        Args:
          target: A tensor whose first dimension is the batch.
          source: A tensor whose first dimension is the batch.
          unconnected_gradients: As for `gradient`.
          parallel_iterations: Accepted for portability, without effect.
          experimental_use_pfor: Accepted for portability, without effect.
        """
        del parallel_iterations, experimental_use_pfor
        array, given = _target_array(target), raw(source)
        if not array.ndim or not np.ndim(given) or array.shape[0] != np.shape(given)[0]:
            raise errors.InvalidArgumentError(
                "`batch_jacobian` needs a target and a source with one batch dimension",
                f"their shapes are {array.shape} and {np.shape(given)}",
                "Use `jacobian`, or add the dimension.",
            )
        size = int(np.prod(array.shape[1:], dtype=int))
        each = jnp.eye(size, dtype=array.dtype).reshape((size, 1, *array.shape[1:]))
        seeds = jnp.broadcast_to(each, (size, *array.shape))
        rows = self._stacked("batch_jacobian", target, source, seeds)
        shape = (*array.shape, *np.shape(given)[1:])
        if rows is None:
            is_zero = UnconnectedGradients(unconnected_gradients) is UnconnectedGradients.ZERO
            return Tensor(jnp.zeros(shape, given.dtype)) if is_zero else None
        return _reshape(_swap(rows), shape)

    def _stacked(self, name: str, target: Value, sources: Value, seeds: jax.Array) -> Any:
        """Returns the gradients for each of some output gradients, stacked."""
        self._use(name)
        flat = _leaves(sources)
        keys, key, array = [_source_key(s) for s in flat], _target_key(target), raw(target)
        if not self._persistent:
            self._end()
        if tape_recording.recording_tapes():
            walk = _Walk(self._nodes, keys, is_recorded=True)
            rows = [walk.gradients([(array, key, Tensor(seed))]) for seed in seeds]
            found = [None if c[0] is None else _stack(list(c)) for c in zip(*rows, strict=True)]
        else:
            walk = _Walk(self._nodes, keys, is_recorded=False)

            def one(seed: jax.Array) -> list[Any]:
                return [raw(g) for g in walk.gradients([(array, key, seed)])]

            found = [None if g is None else Tensor(g) for g in jax.vmap(one)(seeds)]
        if not self._persistent:
            self._nodes, self._tracked = [], {}
        results = iter(found)
        return _map(lambda _: next(results), sources)

    def _use(self, name: str) -> None:
        if self._is_used and not self._persistent:
            raise errors.ContextError(
                f"A second `{name}` needs a tape that keeps what it recorded",
                "this tape is not persistent, and was used",
                "Make it with `tf.GradientTape(persistent=True)`, or ask for all gradients in "
                "one call.",
            )
        if self._is_open and self.region is not tape_recording.current_region():
            raise errors.ContextError(
                f"`{name}` must be called where the tape was opened",
                "it is called inside a layer, branch or loop that the tape records as a whole",
                "Open a tape of its own there.",
            )
        self._is_used = True

    def _end(self) -> None:
        if self._is_open:
            self._close()


class _Walk:
    """A walk from targets back to sources over recorded nodes.

    Args:
      nodes: The nodes, in the order of their calls.
      keys: The identities of the sources.
      is_recorded: Whether other tapes record the walk. Then each node is differentiated again, as a
        function of its inputs, so that the result has gradients.
    """

    def __init__(self, nodes: Sequence[Node], keys: Sequence[int], is_recorded: bool) -> None:
        self._keys = keys
        self._is_recorded = is_recorded
        # Only nodes between sources and targets are visited.
        reached = set(keys)
        self._nodes: list[Node] = []
        for node in nodes:
            if not reached.isdisjoint(node.sources):
                reached.update(map(id, node.outputs))
                self._nodes.append(node)

    def gradients(self, targets: Sequence[tuple[Any, int, Any]]) -> list[Any]:
        """Returns the gradient of each source, as a tensor or None."""
        found: dict[int, Any] = {}
        for array, key, given in targets:
            self._add(found, key, _seed(array, given, self._is_recorded))
        for node in reversed(self._nodes):
            cotangents = [found.get(id(output)) for output in node.outputs]
            if all(cotangent is None for cotangent in cotangents):
                continue
            gradients = self._pull(node, cotangents)
            connected = _connected(node, cotangents)
            for index, (key, gradient) in enumerate(zip(node.sources, gradients, strict=True)):
                if index in connected:
                    self._add(found, key, gradient)
        results = [found.get(key) for key in self._keys]
        return [g if g is None or isinstance(g, Tensor) else Tensor(g) for g in results]

    def _pull(self, node: Node, cotangents: Sequence[Any]) -> Sequence[Any]:
        filled = [
            jnp.zeros_like(output) if cotangent is None else cotangent
            for output, cotangent in zip(node.outputs, cotangents, strict=True)
        ]
        if not self._is_recorded:
            return node.pullback(tuple(filled))

        def backward(inputs: list[Any], filled: list[Any]) -> list[Any]:
            _, pullback = jax.vjp(node.function, *inputs)
            return list(pullback(tuple(filled)))

        return _record_backward(backward, node, filled)

    def _add(self, found: dict[int, Any], key: int, gradient: Value) -> None:
        known = found.get(key)
        if known is None:
            found[key] = gradient
        else:
            found[key] = known + gradient


def _record_backward(
    backward: Callable[..., list[Any]], node: Node, cotangents: list[Any]
) -> list[Any]:
    """Runs the backward pass of a node as a node of the tapes that record it."""
    tapes = tape_recording.recording_tapes()
    inputs = tape_recording.Inputs(tapes)
    identities = dict(zip(node.sources, node.kept, strict=True))
    slots = [
        inputs.add(identities[key], array) if any(t.tracks(key) for t in tapes) else array
        for key, array in zip(node.sources, node.inputs, strict=True)
    ]
    own = [inputs.slot_for(cotangent) for cotangent in cotangents]

    def call(*arrays: Any) -> list[Any]:
        return backward(*tape_recording.filled((slots, own), arrays))

    return dispatch.wrap_tree(tape_recording.add_node(call, inputs, tapes))


def _connected(node: Node, cotangents: Sequence[Any]) -> set[int]:
    """Returns the inputs of a node that those of its outputs depend on that have a cotangent."""
    everything = set(range(len(node.sources)))
    if all(cotangent is not None for cotangent in cotangents):
        return everything
    program = jax.make_jaxpr(node.function)(*node.inputs)
    needed = jax_compat.dependencies(program.jaxpr)
    own = [needed[i] for i, cotangent in enumerate(cotangents) if cotangent is not None]
    return everything.intersection(set().union(*own))


def _seed(array: Value, given: Value, is_recorded: bool) -> Any:
    """Returns the gradient of a target with respect to itself."""
    if given is None:
        ones = jnp.ones_like(array)
        return Tensor(ones) if is_recorded else ones
    value = raw(given)
    if np.shape(value) != np.shape(array):
        raise errors.InvalidArgumentError(
            f"An output gradient must have the shape of its target, {np.shape(array)}",
            f"it has shape {np.shape(value)}",
            "Broadcast it with tf.broadcast_to.",
        )
    if not is_recorded:
        return jnp.asarray(value, array.dtype)
    return given if isinstance(given, Tensor) else Tensor(jnp.asarray(value, array.dtype))


def _target_array(target: Value) -> Any:
    if isinstance(target, Tensor) or tape_recording.is_variable(target):
        return raw(target)
    raise _not_recorded("The target of a gradient must be a tensor", target)


def _target_key(target: Value) -> int:
    if isinstance(target, Tensor):
        return id(tape_recording.resolved(target._raw))
    return id(tape_recording.identity_of(target))


def _source_key(source: Value) -> int:
    if isinstance(source, Tensor) or tape_recording.is_variable(source):
        return _target_key(source)
    raise _not_recorded("The sources of a gradient must be tensors or variables", source)


def _is_differentiable(array: Value) -> bool:
    if tape_recording.is_inexact(array):
        return True
    _log.warning("The target of a gradient has dtype %s, and no gradient.", array.dtype)
    return False


def _not_recorded(required: str, found: object) -> errors.ArgumentTypeError:
    if isinstance(found, DistributedValues) and not isinstance(found, Variable):
        return errors.ArgumentTypeError(
            required,
            "a value of all replicas was given",
            "Open the tape, and take the gradient, inside the function that `strategy.run` calls.",
        )
    is_array = isinstance(found, jax.Array | np.ndarray | IndexedSlices)
    return errors.ArgumentTypeError(
        required,
        f"{type(found).__name__} was given" + (", which no tape records" if is_array else ""),
        "Make a tensor with `tf.convert_to_tensor` before the computation, and compute with "
        "functions of `tf` or Keras.",
    )


def _zeros_like(source: Value) -> Tensor:
    array = raw(source)
    return Tensor(jnp.zeros(np.shape(array), array.dtype))


def _leaves(structure: Value) -> list[Any]:
    found: list[Any] = []
    tape_recording.map_leaves(found.append, structure)
    return found


def _map(fn: Callable[[Any], Any], structure: Value) -> Any:
    return tape_recording.map_leaves(fn, structure)


def _map_pairs(fn: Callable[[Any, Any], Any], first: Value, second: Value) -> Any:
    others = iter(_leaves(second))
    return _map(lambda leaf: fn(leaf, next(others)), first)


@op
def _stack(rows: Value) -> Any:
    return jnp.stack(rows)


@op
def _reshape(array: Value, shape: ShapeLike) -> Any:
    return jnp.reshape(array, shape)


@op
def _swap(array: Value) -> Any:
    """Exchanges the first two dimensions: seeds come before the batch."""
    return jnp.swapaxes(array, 0, 1)
