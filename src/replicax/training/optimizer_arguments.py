"""What an optimizer is made from: a transformation, its options, and variables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp

from replicax.contexts import frames
from replicax.contexts.frames import Mode
from replicax.foundation import errors, lazy
from replicax.values.regroup import leaves_of
from replicax.variables.replicated import VariableComponent
from replicax.variables.variable import Variable

if TYPE_CHECKING:
    import optax
else:
    optax = lazy.module("optax")

_SPARSE = ("auto", "rows", "dense")


def check_options(transformation: Any, steps: Any, sparse: Any) -> None:
    """Raises if an option of the optimizer is not one."""
    for method in ("init", "update"):
        if not callable(getattr(transformation, method, None)):
            raise errors.ArgumentTypeError(
                errors.message(
                    "`transformation` must be an optax.GradientTransformation",
                    f"{transformation!r} has no `{method}`",
                    "Pass e.g. optax.adam(1e-3).",
                )
            )
    is_count = isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1
    if steps is not None and not is_count:
        raise errors.InvalidArgumentError(
            errors.message(
                "`gradient_accumulation_steps` must be a positive int or None",
                f"it is {steps!r}",
                "Pass the number of calls that make one update.",
            )
        )
    if sparse not in _SPARSE or (sparse == "rows" and steps is not None):
        raise errors.InvalidArgumentError(
            errors.message(
                '`sparse` must be "auto", "rows" or "dense", and not "rows" with gradient '
                "accumulation",
                f"sparse={sparse!r} and gradient_accumulation_steps={steps!r} were given",
                "Rows of several calls differ; leave `sparse` out.",
            )
        )


def with_extra_args(transformation: Any, steps: int | None) -> Any:
    """Returns a transformation whose `update` takes any further arguments."""
    if steps is not None:
        transformation = optax.MultiSteps(transformation, steps)
    if isinstance(transformation, optax.MultiSteps):
        init, update = transformation.init, cast(Any, transformation.update)
        return optax.GradientTransformationExtraArgs(init, update)
    return optax.with_extra_args_support(transformation)


def refuse_lookahead(state: Any) -> None:
    """Raises for a transformation that keeps a second set of parameters outside of itself."""

    def is_lookahead(node: Any) -> bool:
        return isinstance(node, optax.LookaheadState)

    if any(map(is_lookahead, jax.tree.leaves(state, is_leaf=is_lookahead))):
        raise errors.UnsupportedError(
            errors.message(
                "`transformation` must work on one set of parameters",
                "optax.lookahead works on two, of which it keeps neither",
                "Leave it out; optax.contrib.schedule_free averages parameters as well.",
            )
        )


def trainable_list(variables: Any) -> tuple[Any, list[Variable]]:
    """Returns the structure of variables that an optimizer changes, and all of them.

    A single variable, a tuple and an iterator become a list: a state keeps tuples of
    states, which must not be taken for one entry per variable.
    """
    if isinstance(variables, Variable):
        variables = [variables]
    is_named = hasattr(variables, "_fields")
    if isinstance(variables, Iterator) or (isinstance(variables, tuple) and not is_named):
        variables = list(variables)
    found = leaves_of(variables)
    for leaf in found:
        _require_trainable(leaf)
    if not found:
        raise errors.InvalidArgumentError(
            errors.message(
                "An optimizer needs variables to change",
                "there are none",
                "Create the variables first, e.g. pass `model.trainable_variables`.",
            )
        )
    twice = [v.name for i, v in enumerate(found) if any(v is w for w in found[:i])]
    if twice:
        raise errors.InvalidArgumentError(
            errors.message(
                "An optimizer needs each variable once",
                f"{twice[0]!r} is there twice",
                "Leave the second one out.",
            )
        )
    return variables, found


def _require_trainable(leaf: Any) -> None:
    if not isinstance(leaf, Variable) or isinstance(leaf, VariableComponent):
        raise errors.ArgumentTypeError(
            errors.message(
                "An optimizer needs rx.Variable objects",
                f"{type(leaf).__name__} was given",
                "Pass variables; `rx.make_variables` turns a pytree of arrays into them.",
            )
        )
    found = None
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        found = f"{leaf.name!r} has type {leaf.dtype}"
    elif leaf.is_per_replica:
        found = f"{leaf.name!r} is synchronized ON_READ, so that its copies differ"
    elif not leaf.trainable:
        found = f"{leaf.name!r} is not trainable"
    if found is not None:
        raise errors.InvalidArgumentError(
            errors.message(
                "An optimizer needs trainable variables of floating type with equal copies",
                found,
                "Leave it out, or create it differently.",
            )
        )


def common_strategy(variables: Sequence[Variable]) -> Any:
    """Returns the strategy of the variables, which must be the one in force."""
    frame = frames.current()
    if frame.mode is not Mode.CROSS_REPLICA and not frame.is_default:
        raise errors.ContextError(
            errors.message(
                "An optimizer must be made once for all replicas",
                f"this is {frame.describe()}",
                "Make it inside `with strategy.scope():`, before `strategy.run`.",
            )
        )
    here = None if frame.is_default else frame.strategy.extended
    for variable in variables:
        if variable.owner is not here:
            owner = variable.owner
            home = "no scope" if owner is None else type(owner.container_strategy).__name__
            place = "outside of every scope" if here is None else frame.describe()
            raise errors.InvalidArgumentError(
                errors.message(
                    "An optimizer must be made in the scope in which its variables were made",
                    f"variable {variable.name!r} belongs to {home} and this is {place}",
                    "Make variables and optimizer inside one `with strategy.scope():`.",
                )
            )
        if variable.stored is None:
            raise errors.TracingError(
                errors.message(
                    "An optimizer needs the values of its variables",
                    f"{variable.name!r} is being created by the function being compiled",
                    "Make the optimizer after the first call of that function.",
                )
            )
    if here is None and len({variable.placement for variable in variables}) > 1:
        raise errors.InvalidArgumentError(
            errors.message(
                "An optimizer outside of every scope needs variables on one device",
                "they are on several",
                "Create them on one device, or in the scope of a strategy.",
            )
        )
    return frame.strategy
