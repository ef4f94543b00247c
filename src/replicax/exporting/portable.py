"""Exports stateful functions as programs that need neither their source nor a strategy.

Note [One replica]
    A function is traced as code that runs alone: with one copy of each variable, one
    replica, no devices and no collectives. Writes to ON_READ variables other than
    `assign` exist only in replica code, so a function that makes them is traced again, as
    the code of the only replica.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import logging
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from replicax.contexts import frames
from replicax.contexts.frames import Frame, Mode, StrategyHooks
from replicax.contexts.overlay import Change, TracedState, View
from replicax.exporting import structures
from replicax.foundation import errors, jax_compat
from replicax.foundation.types import Tree
from replicax.tracing import capture as capturing
from replicax.tracing.function import Function, translated_errors
from replicax.variables import row_numbers, updates
from replicax.variables.sharded import ShardedVariable
from replicax.variables.variable import Variable

_log = logging.getLogger(__name__)
# Programs are lowered for all of these where that is possible.
_PLATFORMS = ("cpu", "cuda", "tpu")


@dataclasses.dataclass(frozen=True)
class PortableProgram:
    """An exported function of variables and arguments.

    Attributes:
      blob: A serialized `jax.export.Exported`. It takes the values of `read`, then the
        arguments; it returns the new values of `written`, then the results.
      read: The variables that it reads.
      written: The variables that it writes.
      facts: What the manifest contains about the program: names and structures.
    """

    blob: bytes
    read: tuple[Variable, ...]
    written: tuple[Variable, ...]
    facts: dict[str, Any]


# Programs by function, then by signature and settings; later saves reuse them.
_programs: weakref.WeakKeyDictionary[Any, dict[Any, PortableProgram]] = weakref.WeakKeyDictionary()


def portable(
    fn: Callable[..., Any],
    specs: Sequence[Tree],
    name: str,
    frame: Frame,
    owners: list[StrategyHooks],
) -> PortableProgram:
    """Returns the portable program of a function, which is traced at the first call.

    Args:
      fn: An `rx.function` or a plain Python function.
      specs: One TensorSpec, or a structure of them, per argument.
      name: The name of the function in error messages.
      frame: The frame of code that runs under no strategy.
      owners: The owners of ON_READ variables, which replica code may write.
    """
    arguments, shapes = _described_arguments(specs, name)
    key = (json.dumps(arguments), jax_compat.thread_settings())
    # Programs of bound methods are not cached: each lookup of the method is a new object.
    is_kept = isinstance(fn, Function | types.FunctionType)
    known = _programs.setdefault(fn, {}) if is_kept else {}
    if key not in known:
        known[key] = _trace(fn, name, arguments, shapes, frame, owners)
    return known[key]


class _OneReplicaOverlay(capturing.CapturingOverlay):
    """The overlay of an export: every variable is one logical array."""

    def __init__(self) -> None:
        # Values are read as they are: there is nothing to combine.
        super().__init__(None, View.READ)
        self.creations: list[Variable] = []

    def note_creation(self, variable: object) -> None:
        assert isinstance(variable, Variable)
        self.creations.append(variable)

    def holds(self, variable: TracedState) -> bool:
        # A sharded variable is exported as a whole.
        return isinstance(variable, ShardedVariable) or super().holds(variable)

    def first_read(self, variable: TracedState) -> jax.Array:
        assert isinstance(variable, Variable)
        whole = getattr(variable, "container", variable)
        if isinstance(whole, ShardedVariable) and whole is not variable:
            return whole.piece_of(variable, self.read(whole))
        with jax_compat.eagerly():
            stand_in = self._logical(whole)
        self.stand_ins[id(stand_in)] = (whole, stand_in)
        return jnp.copy(stand_in)

    def read_rows(self, variable: TracedState, ids: ArrayLike) -> jax.Array:
        assert isinstance(variable, Variable)
        # A loaded model has no servers that could look up rows.
        return row_numbers.take(variable.read(frames.current()), ids)

    def record(self, change: Change) -> None:
        """Applies a change of a remote variable to its value in this trace."""
        target = change.target
        if not isinstance(target, Variable):
            raise errors.UnsupportedError(
                "An exported function can change variables",
                f"it changes {target.name}, which is on parameter servers",
                "Export the part of the model that does not train.",
            )
        whole: Any = getattr(target, "container", target)
        value = updates.apply(change.kind, self.read(target), change.payload)
        if whole is not target:
            start = whole.starts[next(i for i, v in enumerate(whole.variables) if v is target)]
            value = self.read(whole).at[start : start + target.shape[0]].set(value)
            # Values of its parts are sliced from the new value.
            parts = set(map(id, whole.variables))
            self.values = {v: a for v, a in self.values.items() if id(v) not in parts}
        self.write(whole, value)

    def _logical(self, variable: Variable) -> jax.Array:
        if variable.is_per_replica or variable.stored is None:
            return jnp.zeros(variable.shape, variable.dtype)
        # The primary copy, as an object of its own over the same buffer.
        copy = variable.read_copy(0)
        return jax.make_array_from_single_device_arrays(copy.shape, copy.sharding, [copy])


def _trace(
    fn: Callable[..., Any],
    name: str,
    arguments: structures.Described,
    shapes: list[jax.ShapeDtypeStruct],
    frame: Frame,
    owners: list[StrategyHooks],
) -> PortableProgram:
    python_function = fn.python_function if isinstance(fn, Function) else fn
    try:
        captured, results = _capture(python_function, name, arguments, shapes, frame)
    except errors.InvalidArgumentError as error:
        if len(owners) != 1:
            raise
        replica = _replica_frame(frame, owners[0])
        try:
            captured, results = _capture(python_function, name, arguments, shapes, replica)
        except errors.DistributeError:
            raise error from None
    facts = {
        "name": name,
        "parameters": _parameter_names(python_function, len(arguments["tuple"])),
        "arguments": arguments,
        "results": results,
    }
    blob, more = _serialized(captured, name, shapes)
    return PortableProgram(blob, tuple(captured.variables), tuple(captured.written), facts | more)


def _replica_frame(frame: Frame, owner: StrategyHooks) -> Frame:
    """Returns the frame of the only replica; see Note [One replica]."""
    return Frame(
        Mode.REPLICA,
        owner.container_strategy,
        owner,
        None,
        frame.reducer,
        replica_context=frame.replica_context,
        executor=frame.executor,
    )


def _capture(
    fn: Callable[..., Any],
    name: str,
    arguments: structures.Described,
    shapes: list[jax.ShapeDtypeStruct],
    frame: Frame,
) -> tuple[capturing.Capture, structures.Described]:
    overlay = _OneReplicaOverlay()
    results: list[structures.Described] = []

    def body(*arrays: Any) -> list[Any]:
        args = structures.build(arguments, lambda leaf: arrays[leaf["leaf"]])
        found: list[jax.Array] = []
        results.append(structures.describe(fn(*args), lambda leaf: _result(leaf, found, name)))
        return found

    inner = frame.with_overlay(overlay)
    with _explained_errors(name), translated_errors(name), frames.pushed(inner):
        captured = capturing.capture(body, shapes, overlay)
    if overlay.creations or captured.created:
        raise errors.InvalidArgumentError(
            f"The variables of {name!r} must exist before it is saved",
            f"it created {[v.name for v in overlay.creations]} while it was traced",
            "Call it once first.",
        )
    return captured, results[0]


@contextlib.contextmanager
def _explained_errors(name: str) -> Iterator[None]:
    """Adds to errors of the trace what an export has to do with them."""
    try:
        yield
    except errors.ContextError as error:
        error.add_note(
            f"replicax: {name!r} is exported as the code of one replica. If it calls "
            "`strategy.run`, export the function that it passes to `run`."
        )
        raise
    except errors.DistributeError:
        raise
    except Exception as error:
        # JAX keeps the class of this error to itself; operations raise the other two.
        is_inconclusive = type(error).__name__ == "InconclusiveDimensionOperation"
        if not is_inconclusive and not isinstance(error, TypeError | ValueError):
            raise
        raise errors.InvalidArgumentError(
            f"{name!r} must work for every size that its input_signature leaves open",
            f"it does not: {_first_line(error)}",
            "Give the size in the input_signature instead of None, or name sizes that are "
            "equal in `signatures`.",
        ) from error


def _described_arguments(
    specs: Sequence[Tree], name: str
) -> tuple[structures.Described, list[jax.ShapeDtypeStruct]]:
    """Returns the description of the arguments, and shapes with symbols for open sizes."""
    leaves: list[tuple[list[int | str], DTypeLike]] = []
    # An open size of axis 0 is the batch size of all arguments; others are independent.
    fresh = (f"d{i}" for i in range(1_000_000))

    def describe_leaf(spec: object) -> dict[str, Any]:
        shape, dtype = getattr(spec, "shape", None), getattr(spec, "dtype", None)
        if shape is None or dtype is None:
            raise errors.InvalidArgumentError(
                f"The input_signature of {name!r} must give a TensorSpec with a shape for "
                "each argument",
                f"it gives {spec!r}",
                "Use None for sizes that may differ between calls.",
            )
        sizes = [_size(axis, size, fresh) for axis, size in enumerate(shape)]
        leaves.append((sizes, dtype))
        return {"leaf": len(leaves) - 1, "shape": sizes, "dtype": jnp.dtype(dtype).name}

    described = structures.describe(tuple(specs), describe_leaf)
    symbols = list(dict.fromkeys(s for sizes, _ in leaves for s in sizes if isinstance(s, str)))
    known = dict(zip(symbols, jax.export.symbolic_shape(", ".join(symbols)), strict=True))
    shapes = [
        jax.ShapeDtypeStruct(tuple(known[s] if isinstance(s, str) else s for s in sizes), dtype)
        for sizes, dtype in leaves
    ]
    return described, shapes


def _size(axis: int, size: object, fresh: Iterator[str]) -> int | str:
    if size is None:
        return "b" if axis == 0 else next(fresh)
    return size if isinstance(size, int) else str(size)


def _result(leaf: Tree, found: list[jax.Array], name: str) -> dict[str, Any]:
    if isinstance(leaf, Variable):
        leaf = leaf.read_value()
    try:
        array = jnp.asarray(leaf)
    except TypeError as error:
        raise errors.ArgumentTypeError(
            f"An exported function such as {name!r} must return arrays in lists, tuples and dicts",
            f"it returned a {type(leaf).__name__}",
            "Return its arrays instead.",
        ) from error
    found.append(array)
    sizes = [size if isinstance(size, int) else str(size) for size in array.shape]
    return {"leaf": len(found) - 1, "shape": sizes, "dtype": str(array.dtype)}


def _parameter_names(fn: Callable[..., Any], count: int) -> list[str] | None:
    """Returns the names of the arguments, for calls by keyword."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())[:count]
    except (TypeError, ValueError):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
    names = [p.name for p in parameters if p.kind in by_name]
    return names if len(names) == count else None


def _serialized(
    captured: capturing.Capture, name: str, shapes: list[jax.ShapeDtypeStruct]
) -> tuple[bytes, dict[str, Any]]:
    """Lowers a captured function for as many platforms as possible, with its gradient."""
    # NumPy arrays are on no device.
    constants = [np.asarray(c) for c in captured.constants]
    num_read = len(captured.variables)

    def pure(*inputs: Any) -> list[Any]:
        return captured.run(inputs[:num_read], constants, inputs[num_read:])

    pure.__name__ = name if name.isidentifier() else "exported"
    values = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in captured.variables]
    exported = None
    for platforms in (_PLATFORMS, (jax.export.default_export_platform(),)):
        try:
            exported = jax.export.export(jax.jit(pure), platforms=platforms)(*values, *shapes)
            break
        except Exception as error:
            # JAX raises errors of many kinds for operations that a platform lacks.
            if platforms != _PLATFORMS:
                raise _not_portable(name, error) from error
            _log.info("%s is exported for this platform only: %s", name, _first_line(error))
    assert exported is not None
    try:
        blob, is_differentiable = exported.serialize(vjp_order=1), True
    except Exception as error:
        # A while loop, for example, has no reverse-mode gradient, for which JAX raises errors of
        # many kinds. The function still works; any other error is raised by the next line.
        _log.info("%s is exported without a gradient: %s", name, _first_line(error))
        try:
            blob, is_differentiable = exported.serialize(), False
        except Exception as error:
            raise _not_portable(name, error) from error
    facts = {"platforms": list(exported.platforms), "is_differentiable": is_differentiable}
    return bytes(blob), facts


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _not_portable(name: str, error: Exception) -> errors.UnsupportedError:
    return errors.UnsupportedError(
        f"{name!r} must be made of operations that jax.export can write",
        f"it is not: {_first_line(error)}",
        "Leave callbacks, prints and custom kernels out of exported functions.",
    )
