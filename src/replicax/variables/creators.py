"""The stack of creators that a call of `rx.Variable` goes through, and its arguments."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, Protocol, TypedDict, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from replicax.contexts import frames
from replicax.foundation import errors, jax_compat, lazy, spelling
from replicax.foundation.options import VariableAggregation, VariableSynchronization
from replicax.values.array_surface import as_operand

Creator = Callable[..., Any]
_E = TypeVar("_E", bound=enum.Enum)

_creators: contextvars.ContextVar[tuple[Creator, ...]] = contextvars.ContextVar(
    "replicax_variable_creators", default=()
)


# Replaces the last resort while a strategy calls the creators outside its scope.
_maker: contextvars.ContextVar[Creator | None] = contextvars.ContextVar(
    "replicax_variable_maker", default=None
)


class _Bottom(metaclass=lazy.SetByPublicApi):
    """The creators below the stacks of all threads."""

    # Makes a variable when no creator is left; set by variables/plain.py.
    last_resort: Creator
    # The creator of the strategy that `experimental_set_strategy` installed.
    installed: tuple[Creator, ...] = ()


@dataclasses.dataclass(frozen=True)
class VariableAttributes:
    """The attributes of a variable that are fixed when it is created."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    trainable: bool
    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    constraint: Callable[[jax.Array], jax.Array] | None = None

    def part(self, number: int, rows: int) -> VariableAttributes:
        """Returns the attributes of a part along the first dimension."""
        shape = (rows, *self.shape[1:])
        return dataclasses.replace(self, name=f"{self.name}/part_{number}", shape=shape)

    def named(self, name: str) -> VariableAttributes:
        """Returns the same attributes under another name."""
        return dataclasses.replace(self, name=name)


class IgnoredArguments(TypedDict, total=False):
    """Arguments of tf.Variable that are accepted and ignored."""

    validate_shape: bool
    caching_device: Any
    variable_def: Any
    import_scope: str | None


def create(
    initial_value: object = None,
    trainable: bool | None = None,
    *,
    name: str | None = None,
    dtype: DTypeLike | None = None,
    shape: int | Sequence[int] | None = None,
    synchronization: VariableSynchronization | None = VariableSynchronization.AUTO,
    aggregation: VariableAggregation | None = VariableAggregation.NONE,
    constraint: Callable[[jax.Array], jax.Array] | None = None,
    per_worker_variable: bool = False,
    **others: Any,
) -> Any:
    """Creates a variable by the creators of this thread, innermost first."""
    kwargs = {
        "initial_value": initial_value,
        "trainable": trainable,
        "name": _checked_name(name),
        "dtype": dtype,
        "shape": shape,
        "synchronization": synchronization or VariableSynchronization.AUTO,
        "aggregation": aggregation or VariableAggregation.NONE,
        "constraint": constraint,
    }
    unknown = others.keys() - IgnoredArguments.__annotations__
    _require_known(unknown, (*kwargs, "per_worker_variable"))
    if per_worker_variable:
        kwargs["per_worker_variable"] = True
    # The last creator is called first; each gets the one before it as `next_creator`.
    chain = (*_Bottom.installed, *_creators.get())
    variable = functools.reduce(_bind, chain, _last)(**kwargs)
    overlay = frames.current().overlay
    if overlay is not None:
        overlay.note_creation(variable)
    return variable


def _last(**kwargs: Any) -> Any:
    """Ends every stack: the maker of the strategy makes the variable, or the last resort."""
    return (_maker.get() or _Bottom.last_resort)(**kwargs)


@contextlib.contextmanager
def made_by(maker: Creator) -> Iterator[None]:
    """Lets a strategy make the variables that creators outside its scope pass on.

    Creators that were opened before `strategy.scope()` are called after the strategy. They may
    change the arguments, but the variable at the end must still be one of the strategy.

    Args:
      maker: Takes the arguments as the last creator passes them on.
    """
    token = _maker.set(maker)
    try:
        yield
    finally:
        _maker.reset(token)


def _checked_name(name: object) -> str | None:
    if name is None or isinstance(name, str):
        return name
    raise errors.ArgumentTypeError(
        "`name` of a variable must be a str",
        f"it is {name!r} of type {type(name).__name__}",
        f"Pass name={str(name)!r}, or leave it out.",
    )


def _require_known(unknown: Set[str], known: Iterable[str]) -> None:
    if unknown:
        raise errors.ArgumentTypeError(
            f"rx.Variable takes {', '.join(known)}",
            f"{', '.join(f'`{name}`' for name in sorted(unknown))} was given",
            spelling.advice(sorted(unknown), known),
        )


def _bind(next_creator: Creator, creator: Creator) -> Creator:
    return functools.partial(creator, next_creator)


def set_last_resort(creator: Creator) -> None:
    """Sets the creator at the bottom of every stack."""
    _Bottom.last_resort = creator


def is_last_resort(creator: Creator) -> bool:
    """Tells whether no creator of the user is left."""
    return creator is _last


def install(*creator: Creator) -> None:
    """Sets the creators below the stacks of all threads."""
    _Bottom.installed = creator


@contextlib.contextmanager
def variable_creator_scope(variable_creator: Creator) -> Iterator[None]:
    """Lets `variable_creator(next_creator, **kwargs)` make the variables created inside.

    Raises:
      ContextError: An inner scope is still open when this one ends.

    >>> import replicax as rx
    >>> def frozen(next_creator, **kwargs):
    ...     return next_creator(**{**kwargs, "trainable": False})
    >>> with rx.variable_creator_scope(frozen):
    ...     rx.Variable(1.0).trainable
    False
    """
    before = _creators.get()
    mine = (*before, variable_creator)
    _creators.set(mine)
    try:
        yield
    finally:
        if _creators.get() is mine:
            _creators.set(before)
        else:
            raise errors.ContextError(
                "Variable creator scopes must be left in the reverse order of entering",
                "an inner one is still open",
                "Leave the inner scope first (a variable creator scope nesting error).",
            )


def creator_stack() -> tuple[Creator, ...]:
    """Returns the creators of this thread, outermost first."""
    return _creators.get()


def set_creator_stack(creators: tuple[Creator, ...]) -> None:
    """Replaces the creators of this thread."""
    _creators.set(creators)


class InitialSpec(Protocol):
    """Shape and type of an initial value."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...


def resolve_attributes(kwargs: dict[str, Any], initial: InitialSpec) -> VariableAttributes:
    """Checks the arguments of `rx.Variable` and fills in the defaults."""
    synchronization = _member(VariableSynchronization, "synchronization", kwargs)
    aggregation = _member(VariableAggregation, "aggregation", kwargs)
    if synchronization is VariableSynchronization.NONE:
        raise errors.InvalidArgumentError(
            "`synchronization` must be AUTO, ON_WRITE or ON_READ",
            "it is NONE",
            "Leave it out, or pass ON_READ for copies that are combined when read.",
        )
    is_float = jnp.issubdtype(initial.dtype, jnp.inexact)
    if aggregation is VariableAggregation.MEAN and not is_float:
        raise errors.InvalidArgumentError(
            "aggregation MEAN needs a variable of floating type",
            f"the type is {initial.dtype}",
            "Pass dtype=, or aggregate with SUM or ONLY_FIRST_REPLICA.",
        )
    on_read = synchronization is VariableSynchronization.ON_READ
    trainable = kwargs.get("trainable")
    return VariableAttributes(
        name=_checked_name(kwargs.get("name")) or "Variable",
        shape=tuple(initial.shape),
        dtype=initial.dtype,
        trainable=not on_read if trainable is None else bool(trainable),
        synchronization=synchronization,
        aggregation=aggregation,
        constraint=kwargs.get("constraint"),
    )


def initial_array(kwargs: dict[str, Any]) -> jax.Array:
    """Returns the initial value as an array of a strong type.

    Inside a trace, a function is called outside of it; a value that the trace computed
    stays with the trace, and the compiled function computes it once, on its first call.
    """
    value, dtype = kwargs.get("initial_value"), kwargs.get("dtype")
    if value is None:
        raise errors.InvalidArgumentError(
            "rx.Variable needs an initial value",
            "none was given",
            "Pass an array, a number, or a function that returns one.",
        )
    overlay = frames.current().overlay
    if callable(value):
        with (
            jax_compat.eagerly(),
            overlay.outside_program() if overlay else contextlib.nullcontext(),
        ):
            value = value()
    with jax_compat.eagerly():
        value = as_operand(value)
        if not jax_compat.is_traced(value):
            try:
                array = jnp.asarray(value)
                value = jnp.array(array, dtype=dtype or array.dtype, copy=True)
            except (TypeError, ValueError) as error:
                raise errors.ArgumentTypeError(
                    "The initial value of a variable must become an array",
                    f"{type(value).__name__} cannot: {error}",
                    "Pass numbers, arrays or nested lists of equal lengths.",
                ) from None
    if jax_compat.is_traced(value):
        value = jnp.array(value, dtype=dtype or value.dtype)
    require_shape(kwargs.get("shape"), value.shape)
    return value


def require_shape(wanted: int | Sequence[int] | None, found: tuple[int, ...]) -> None:
    """Raises if an initial value does not have the shape of the argument `shape`."""
    if wanted is not None and tuple(np.atleast_1d(wanted) if wanted != () else ()) != found:
        raise errors.InvalidArgumentError(
            f"The initial value must have shape {wanted}",
            f"it has shape {found}",
            "Correct `shape=` or the initial value.",
        )


def _member(enum_type: type[_E], argument: str, kwargs: dict[str, Any]) -> _E:
    value = kwargs.get(argument)
    if value is None:
        is_synchronization = enum_type is VariableSynchronization
        return enum_type["AUTO" if is_synchronization else "NONE"]
    if isinstance(value, enum_type):
        return value
    raise errors.InvalidArgumentError(
        f"`{argument}` must be a member of rx.{enum_type.__name__}",
        f"it is {value!r}",
        f"Pass one of {', '.join(enum_type.__members__)}.",
    )
