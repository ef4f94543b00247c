"""`Metric`: state that each replica updates by itself, combined when it is read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.typing import DTypeLike
from typing_extensions import override

from replicax.contexts import frames
from replicax.contexts.frames import Frame, Mode
from replicax.foundation import errors, jax_compat
from replicax.foundation.options import VariableAggregation, VariableSynchronization
from replicax.foundation.types import Tree
from replicax.values import printing
from replicax.values.array_surface import as_operand
from replicax.variables.module import Module
from replicax.variables.variable import Variable

Initializer: TypeAlias = float | str | Callable[..., jax.typing.ArrayLike] | None
# Arguments of `update_state`.
Values: TypeAlias = jax.Array | npt.ArrayLike
Weights: TypeAlias = Values | None
# The type of state and result; None for the default.
DType: TypeAlias = DTypeLike | None
# Arrays on a device, traced, or on the host.
Array: TypeAlias = jax.Array | np.ndarray
_NAMED_INITIALIZERS = {"zeros": 0, "ones": 1}
_HOST = (np.ndarray, np.generic)


class Metric(Module):
    """The base class of metrics: define `update_state` and `result`, add state with `add_weight`.

    `update_state` inside `strategy.run` updates the state of each replica without communication.
    `result` combines the states: outside of `run` when the host reads it, inside of `run` in a
    `merge_call`, so that each replica gets the result over all of them.

    Args:
      dtype: The type of the state and of the result; float32 by default.
      name: The metric's name; the name of the class by default.

    Raises:
      NotImplementedError: A subclass does not define `update_state` or `result`.

    >>> import jax.numpy as jnp
    >>> class Largest(Metric):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.above = self.add_weight("above")
    ...     def update_state(self, values):
    ...         self.above.assign_add(jnp.sum(jnp.asarray(values) > 0.5, dtype=self.dtype))
    ...     def result(self):
    ...         return self.above.read_value()
    >>> float(Largest()([0.2, 0.7, 0.9]))
    2.0
    """

    def __init__(self, dtype: DType = None, name: str | None = None) -> None:
        super().__init__(name)
        self._dtype = jnp.dtype(dtype or jnp.float32)
        self._weights: dict[str, Variable] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Wraps the methods that subclasses define, to handle the context of the call.
        super().__init_subclass__(**kwargs)
        if "update_state" in cls.__dict__:
            cls.update_state = _on_one_replica(cls.__dict__["update_state"])
        if "result" in cls.__dict__:
            cls.result = _over_all_replicas(cls.__dict__["result"])

    @property
    def dtype(self) -> np.dtype:
        """The type of the state and of the result."""
        return self._dtype

    def add_weight(
        self,
        name: str,
        shape: tuple[int, ...] = (),
        initializer: Initializer = 0.0,
        dtype: DType = None,
    ) -> Variable:
        """Creates a variable with a copy per replica, whose copies are summed on read.

        Args:
          name: Its name, unique within the metric.
          shape: Its shape.
          initializer: A number, "zeros", "ones", or a function of shape and dtype.
          dtype: Its type; that of the metric by default.

        Raises:
          InvalidArgumentError: The name is taken, or the initialiser is not one.
        """
        if name in self._weights:
            raise errors.InvalidArgumentError(
                f"Weights of metric {self.name!r} must have different names",
                f"{name!r} exists already",
                "Choose another name.",
            )
        dtype = jnp.dtype(dtype or self._dtype)
        variable = Variable(
            _initial_value(initializer, tuple(shape), dtype),
            name=name,
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )
        self._weights[name] = variable
        if self.on_new_child is not None:
            # A restored checkpoint may hold a value for this weight.
            self.on_new_child(name, variable)
        return variable

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Updates the state with one batch. Subclasses define it."""
        raise NotImplementedError

    def result(self) -> Tree:
        """Returns the value of the metric. Subclasses define it."""
        raise NotImplementedError

    def reset_state(self) -> None:
        """Sets all state to zero; in replica code, the state of this replica."""
        for variable in self.variables:
            variable.assign(np.zeros(variable.shape, variable.dtype))

    def reset_states(self) -> None:
        """Calls `reset_state`; an older name."""
        self.reset_state()

    def __call__(self, *args: Any, **kwargs: Any) -> Tree:
        """Updates the state with one batch, and returns the result so far."""
        self.update_state(*args, **kwargs)
        return self.result()

    def checkpoint_children(self) -> dict[str, Any]:
        """Returns weights and inner metrics by name."""
        inner = {key: value for key, value in vars(self).items() if isinstance(value, Metric)}
        return {**self._weights, **inner}

    def __format__(self, spec: str) -> str:
        """Formats the result, so that `f"{loss:.3f}"` is a number."""
        return format(self.result(), spec)

    @override
    def __repr__(self) -> str:
        return f"<{printing.public_name(type(self))} name={self.name}>"


class RunningTotal:
    """A compensated sum in two variables.

    A float32 of 16,777,216 stays the same when one is added. The second variable keeps the
    rounding errors of the first, which gives 48 bits. A parameter server uses only the first,
    because several workers add to it at the same time.
    """

    def __init__(self, metric: Metric, name: str, shape: tuple[int, ...] = ()) -> None:
        self._total = metric.add_weight(name, shape)
        self._rest = metric.add_weight(f"{name}_rest", shape)

    def add(self, value: jax.typing.ArrayLike) -> None:
        """Adds to the sum, on this replica."""
        if self._total.is_remote:
            self._total.assign_add(jnp.asarray(value, self._total.dtype))
            return
        total, rest = _sum_with_rest(
            self._total.read_value(), self._rest.read_value(), jnp.asarray(value, self._total.dtype)
        )
        self._total.assign(total)
        self._rest.assign(rest)

    def value(self) -> Array:
        """Returns the sum in the current context; on the host unless it is traced.

        Results are rarely read: compiling their arithmetic would take longer than running it.
        """
        total, rest = self._total.read_value(), self._rest.read_value()
        if jax_compat.is_traced(total) or jax_compat.is_traced(rest):
            return total + rest
        return np.asarray(total) + np.asarray(rest)


@jax.jit
def _sum_with_rest(
    total: jax.Array, rest: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array]:
    rounded = total + value
    # The exact rounding error (Knuth's two-sum).
    kept = rounded - total
    lost = (total - (rounded - kept)) + (value - kept)
    rest = rest + lost
    # Moves the accumulated rest into the total, so that the rest stays small.
    moved = rounded + rest
    return moved, rest - (moved - rounded)


def as_array(value: Values) -> jax.Array:
    """Returns an argument of `update_state` as an array."""
    return jnp.asarray(as_operand(value))


def numpy_for(*values: Array) -> Any:
    """Returns `numpy` if all values are on the host, otherwise `jax.numpy`."""
    return np if all(isinstance(value, _HOST) for value in values) else jnp


def divide(numerator: Array, denominator: Array) -> Any:
    """Divides; the result is 0 where the denominator is 0."""
    xnp = numpy_for(numerator, denominator)
    is_zero = denominator == 0
    return xnp.where(is_zero, 0, numerator / xnp.where(is_zero, 1, denominator))


def _initial_value(
    initializer: Initializer, shape: tuple[int, ...], dtype: np.dtype
) -> Callable[[], jax.typing.ArrayLike]:
    if callable(initializer):
        return lambda: initializer(shape, dtype)
    if isinstance(initializer, str):
        if initializer not in _NAMED_INITIALIZERS:
            raise errors.InvalidArgumentError(
                '`initializer` must be a number, "zeros", "ones" or a function',
                f"it is {initializer!r}",
                "Pass a number or a function of shape and dtype.",
            )
        initializer = _NAMED_INITIALIZERS[initializer]
    fill = 0 if initializer is None else initializer
    return lambda: jnp.full(shape, fill, dtype)


def _on_one_replica(update_state: Callable[..., None]) -> Callable[..., None]:
    """Wraps `update_state` to raise in a cross-replica context with several replicas."""

    @functools.wraps(update_state)
    def checked(self: Metric, *args: Any, **kwargs: Any) -> None:
        frame = frames.current()
        if _is_outside_of_run(frame) and _num_copies(self) > 1:
            raise errors.InvalidArgumentError(
                f"`update_state` of metric {self.name!r} needs a replica context, because "
                f"each of {_num_copies(self)} replicas has its own state",
                f"this is {frame.describe()}",
                "Call it inside the function that `strategy.run` runs.",
            )
        _require_own_scope(self, frame)
        update_state(self, *args, **kwargs)

    return checked


def _require_own_scope(metric: Metric, frame: Frame) -> None:
    """Raises in replica code for a metric that was created under another strategy."""
    if frame.mode is not Mode.REPLICA or frame.is_default:
        return
    several = frame.layout is not None and frame.layout.num_replicas > 1
    for variable in metric.variables:
        owner = variable.owner
        if owner is None and (variable.is_remote or not several):
            continue
        if owner is not None and owner.container_strategy is frame.strategy:
            continue
        where = "outside of every scope" if owner is None else "in the scope of another strategy"
        raise errors.ContextError(
            f"Metric {metric.name!r} must be created under the strategy that runs "
            f"`update_state`, {type(frame.strategy).__name__}, to have state for each replica",
            f"the metric was created {where}",
            "Create it inside `with strategy.scope():` of the strategy whose `run` is called.",
        )


def _over_all_replicas(result: Callable[..., Tree]) -> Callable[..., Tree]:
    """Wraps `result` to compute it once for all replicas in replica code."""

    @functools.wraps(result)
    def combined(self: Metric) -> Tree:
        frame = frames.current()
        if frame.mode is not Mode.REPLICA or frame.is_default or not _num_copies(self):
            return jax.tree.map(_from_host, result(self))
        assert frame.replica_context is not None
        merged = frame.replica_context.merge_call(
            lambda strategy: jax.tree.map(_from_host, result(self))
        )
        # A program places its values itself.
        if frame.replica_id is None or frame.layout is None or not jax_compat.is_eager():
            return merged
        device = frame.layout.local_devices[frame.replica_id]
        return jax.tree.map(lambda leaf: jax.device_put(leaf, device), merged)

    return combined


def _from_host(leaf: object) -> object:
    return jnp.asarray(leaf) if isinstance(leaf, _HOST) else leaf


def _is_outside_of_run(frame: Frame) -> bool:
    return frame.mode is Mode.CROSS_REPLICA or frame.is_default


def _num_copies(metric: Metric) -> int:
    """Returns the number of replicas with their own state; 0 if all share one copy."""
    counts = [v.replicas.num_replicas for v in metric.variables if v.is_per_replica]
    return max(counts, default=0)
