"""The arguments of an optimizer: a transformation, its options, and variables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp

from replicax.contexts import frames
from replicax.contexts.frames import Mode, Strategy
from replicax.foundation import errors, lazy
from replicax.foundation.types import Tree
from replicax.training.optimizer.step_guard import DynamicLossScale
from replicax.values.regroup import leaves_of
from replicax.variables.replicated import VariableComponent
from replicax.variables.sharded import ShardedVariable
from replicax.variables.variable import Variable

if TYPE_CHECKING:
    import optax
else:
    optax = lazy.module("optax")

_SPARSE = ("auto", "rows", "dense")


def check_loss_scale(loss_scale: object) -> None:
    """Raises if the argument is not a loss scale."""
    if isinstance(loss_scale, DynamicLossScale | None):
        return
    if isinstance(loss_scale, int | float) and not isinstance(loss_scale, bool) and loss_scale > 0:
        return
    raise errors.InvalidArgumentError(
        "`loss_scale` must be an rx.optimizers.DynamicLossScale, a positive number or None",
        f"it is {loss_scale!r}",
        "Pass rx.optimizers.DynamicLossScale().",
    )


def check_options(transformation: object, steps: object, sparse: object) -> None:
    """Raises if an option of the optimizer is invalid."""
    for method in ("init", "update"):
        if not callable(getattr(transformation, method, None)):
            raise errors.ArgumentTypeError(
                "`transformation` must be an optax.GradientTransformation",
                f"a {type(transformation).__name__} has no `{method}`",
                "Pass e.g. optax.adam(1e-3) first, and the variables after it.",
            )
    is_count = isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1
    if steps is not None and not is_count:
        raise errors.InvalidArgumentError(
            "`gradient_accumulation_steps` must be a positive int or None",
            f"it is {steps!r}",
            "Pass the number of calls that make one update.",
        )
    if sparse not in _SPARSE or (sparse == "rows" and steps is not None):
        raise errors.InvalidArgumentError(
            '`sparse` must be "auto", "rows" or "dense", and not "rows" with gradient accumulation',
            f"sparse={sparse!r} and gradient_accumulation_steps={steps!r} were given",
            "Rows of several calls differ; leave `sparse` out.",
        )


def with_extra_args(
    transformation: optax.GradientTransformation | optax.MultiSteps, steps: int | None
) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation whose `update` takes any further arguments."""
    if steps is not None:
        transformation = optax.MultiSteps(cast(Any, transformation), steps)
    if isinstance(transformation, optax.MultiSteps):
        init, update = transformation.init, cast(Any, transformation.update)
        return optax.GradientTransformationExtraArgs(init, update)
    return optax.with_extra_args_support(transformation)


def refuse_lookahead(state: Tree) -> None:
    """Raises for a transformation that works on two sets of parameters."""

    def is_lookahead(node: object) -> bool:
        return isinstance(node, optax.LookaheadState)

    if any(map(is_lookahead, jax.tree.leaves(state, is_leaf=is_lookahead))):
        raise errors.UnsupportedError(
            "`transformation` must work on one set of parameters",
            "optax.lookahead works on two sets, which are not part of its state",
            "Leave it out; optax.contrib.schedule_free averages parameters as well.",
        )


def trainable_list(variables: Tree) -> tuple[Tree, list[Variable]]:
    """Returns the structure of variables that an optimizer updates, and its leaves.

    A single variable, a tuple and an iterator become a list: states contain tuples of
    states, which must differ in structure from one entry per variable.
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
            "An optimizer needs variables to update",
            "there are none",
            "Create the variables first, e.g. pass `model.trainable_variables`.",
        )
    twice = [v.name for i, v in enumerate(found) if any(v is w for w in found[:i])]
    if twice:
        raise errors.InvalidArgumentError(
            "An optimizer needs each variable once",
            f"{twice[0]!r} is given twice",
            "Leave the second one out.",
        )
    return variables, found


def without_parts(structure: Tree, found: list[Variable]) -> tuple[Tree, list[Variable]]:
    """Replaces all parts of a sharded variable by the variable, in a flat list.

    So the state has slots of the whole, which do not depend on the number of parts.
    """
    if not isinstance(structure, list) or len(structure) != len(found):
        return structure, found
    whole: list[Variable] = []
    rest = list(found)
    while rest:
        container = getattr(rest[0], "container", rest[0])
        parts = container.variables if isinstance(container, ShardedVariable) else []
        if isinstance(container, ShardedVariable) and container.consists_of(rest[: len(parts)]):
            whole.append(container)
            rest = rest[len(parts) :]
        else:
            whole.append(rest.pop(0))
    return (structure, found) if len(whole) == len(found) else (whole, whole)


@contextlib.contextmanager
def explained_init() -> Iterator[None]:
    """Explains why a transformation cannot start from the variables."""
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        raise errors.InvalidArgumentError(
            "`transformation` must be able to start from the values of the variables",
            f"its `init` raised {type(error).__name__}: {error}",
            "Compare the structure of the variables with masks and labels in it.",
        ) from error


def refuse_extra(extra: dict[str, Tree]) -> None:
    """Raises for arguments of an update that the programs on servers do not accept."""
    if extra:
        raise errors.UnsupportedError(
            "Updates on parameter servers take gradients only",
            f"{sorted(extra)} were given as well",
            "Use a transformation without further arguments.",
        )


def _require_trainable(leaf: object) -> None:
    if not isinstance(leaf, Variable) or isinstance(leaf, VariableComponent):
        raise errors.ArgumentTypeError(
            "An optimizer needs rx.Variable objects",
            f"{type(leaf).__name__} was given",
            "Pass variables; `rx.make_variables` turns a pytree of arrays into them.",
        )
    found = None
    if isinstance(leaf, ShardedVariable) and not leaf.is_whole_remote:
        found = f"{leaf.name!r} has parts in this process; pass its `variables` instead"
    elif not jnp.issubdtype(leaf.dtype, jnp.inexact):
        found = f"{leaf.name!r} has type {leaf.dtype}"
    elif leaf.is_per_replica:
        found = f"{leaf.name!r} is synchronized ON_READ, so that its copies differ"
    elif not leaf.trainable:
        found = f"{leaf.name!r} is not trainable"
    if found is not None:
        raise errors.InvalidArgumentError(
            "An optimizer needs trainable variables of floating type with equal copies",
            found,
            "Leave it out, or create it differently.",
        )


def _require_one_kind(variables: Sequence[Variable]) -> None:
    kinds = {variable.is_remote for variable in variables}
    if len(kinds) > 1:
        near = next(v for v in variables if not v.is_remote)
        raise errors.InvalidArgumentError(
            "An optimizer needs variables that are all on parameter servers, or none",
            f"{near.name!r} is on {near.device}",
            "Create all of them in the scope of the strategy.",
        )


def common_strategy(variables: Sequence[Variable]) -> Strategy:
    """Returns the strategy of the variables, which must be the one in force."""
    frame = frames.current()
    if frame.mode is not Mode.CROSS_REPLICA and not frame.is_default:
        raise errors.ContextError(
            "An optimizer must be created once for all replicas",
            f"this is {frame.describe()}",
            "Create it inside `with strategy.scope():`, before `strategy.run`.",
        )
    here = None if frame.is_default else frame.hooks
    for variable in variables:
        if variable.owner is not here:
            owner = variable.owner
            scope = "no scope" if owner is None else type(owner.container_strategy).__name__
            current = "outside of every scope" if here is None else frame.describe()
            raise errors.InvalidArgumentError(
                "An optimizer must be created in the scope of its variables",
                f"variable {variable.name!r} belongs to {scope} and this is {current}",
                "Create variables and optimizer inside one `with strategy.scope():`.",
            )
        if variable.stored is None and not variable.is_remote:
            raise errors.TracingError(
                "An optimizer needs the values of its variables",
                f"{variable.name!r} is being created by the function being compiled",
                "Create the optimizer after the first call of that function.",
            )
    _require_one_kind(variables)
    if here is None and len({variable.placement for variable in variables}) > 1:
        raise errors.InvalidArgumentError(
            "An optimizer outside of every scope needs variables on one device",
            "they are on several",
            "Create them on one device, or in the scope of a strategy.",
        )
    return frame.strategy
