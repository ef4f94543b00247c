"""Skipped steps: non-finite gradients, and a loss scale that adapts to them.

Small gradients vanish in 16-bit types. So the loss is multiplied by a scale, and gradients are
divided by it. A scale that is too large makes gradients infinite: such a step is skipped, and the
scale becomes smaller; after many finite steps it becomes larger again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from replicax.contexts.frames import Frame
from replicax.contexts.overlay import Change
from replicax.foundation import errors
from replicax.foundation.types import Tree
from replicax.training.optimizer.gradients import Gradient
from replicax.values.distributed_values import Mirrored
from replicax.values.indexed_slices import IndexedSlices
from replicax.values.regroup import map_structure
from replicax.variables.remote import RemoteVariableBase
from replicax.variables.variable import Variable


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that becomes smaller when gradients overflow, and larger when they do not.

    Args:
      initial_scale: The first factor of the loss.
      growth_steps: The number of steps without overflow after which the scale grows by `factor`.
      factor: The divisor of the scale when gradients are not finite; the scale stays >= 1.

    >>> DynamicLossScale(growth_steps=1000)
    DynamicLossScale(initial_scale=32768.0, growth_steps=1000, factor=2.0)
    """

    initial_scale: float = 2.0**15
    growth_steps: int = 2000
    factor: float = 2.0

    def __post_init__(self) -> None:
        if not (self.initial_scale >= 1 and self.growth_steps >= 1 and self.factor > 1):
            raise errors.InvalidArgumentError(
                "A DynamicLossScale needs initial_scale >= 1, growth_steps >= 1 and factor > 1",
                f"it is {self}",
                "Leave them out for the usual values.",
            )


# Creates a variable of an optimizer from a first value and a name.
Maker: TypeAlias = Callable[[jax.Array, str], Variable]


class StepGuard:
    """Decides whether a step of an optimizer is made, and adapts the loss scale.

    Attributes:
      skipped: The number of skipped steps.
      scale: The loss scale; None if the loss is not scaled.
    """

    def __init__(self, make: Maker, loss_scale: DynamicLossScale | float | None) -> None:
        self.skipped = make(jnp.zeros((), jnp.int32), "optimizer/skipped")
        self.scale: Variable | None = None
        self._good_steps: Variable | None = None
        self._rule: DynamicLossScale | None = None
        if isinstance(loss_scale, DynamicLossScale):
            self._rule = loss_scale
            self._good_steps = make(jnp.zeros((), jnp.int32), "optimizer/good_steps")
            loss_scale = loss_scale.initial_scale
        if loss_scale is not None:
            self.scale = make(jnp.asarray(loss_scale, jnp.float32), "optimizer/loss_scale")

    def checkpoint_children(self) -> dict[str, Variable]:
        """Returns the variables by names that stay the same."""
        named = {"skipped": self.skipped, "loss_scale": self.scale, "good_steps": self._good_steps}
        return {name: variable for name, variable in named.items() if variable is not None}

    def scaled(self, loss: ArrayLike) -> ArrayLike:
        """Returns a loss multiplied by the scale."""
        if self.scale is None:
            return loss
        loss = jnp.asarray(loss)
        return loss * self.scale.read_value().astype(loss.dtype)

    def unscaled(self, gradients: Tree) -> Tree:
        """Returns gradients divided by the scale."""
        if self.scale is None:
            return gradients
        scale = self.scale.read_value()

        def divided(array: jax.Array) -> jax.Array:
            # In float32: the scale, or its inverse, may be out of range of the type of gradients.
            return (jnp.asarray(array).astype(jnp.float32) / scale).astype(array.dtype)

        def visit(leaf: Tree) -> Tree:
            if leaf is None:
                return None
            if isinstance(leaf, IndexedSlices):
                return leaf.map_values(divided)
            return divided(leaf)

        return map_structure(visit, gradients)

    def after(self, frame: Frame, is_good: jax.Array) -> None:
        """Counts a step, and adapts the scale.

        Args:
          frame: The current frame.
          is_good: Whether the step is made; may be traced.
        """
        update_if(self.skipped, frame, ~is_good, "assign_add", 1)
        rule, scale, good_steps = self._rule, self.scale, self._good_steps
        if rule is None or scale is None or good_steps is None:
            return
        value = scale.read(frame)
        larger = value * jnp.float32(rule.factor)
        is_enough = good_steps.read(frame) + 1 >= rule.growth_steps
        grows = is_good & is_enough & jnp.isfinite(larger)
        smaller = jnp.maximum(value / jnp.float32(rule.factor), 1.0)
        update_if(scale, frame, grows | ~is_good, "assign", jnp.where(is_good, larger, smaller))
        ends = ~is_good | is_enough
        update_if(good_steps, frame, ends, "assign", 0)
        update_if(good_steps, frame, ~ends, "assign_add", 1)


def update_if(
    variable: Variable, frame: Frame, condition: jax.Array, kind: str, payload: ArrayLike
) -> None:
    """Updates a variable of an optimizer if a condition holds, which may be traced."""
    array = jnp.asarray(payload, variable.dtype)
    if variable.is_remote:
        if frame.overlay is not None:
            assert isinstance(variable, RemoteVariableBase)
            frame.overlay.record(Change(variable, kind, array, condition))
        elif condition:
            variable.apply_directly(frame, kind, array)
        return
    old = variable.read(frame)
    new = array if kind == "assign" else old + array
    variable.store_all_copies(frame, jnp.where(condition, new, old))


def are_finite(gradients: Sequence[Gradient | None]) -> jax.Array:
    """Returns whether all reduced gradients are finite.

    >>> bool(are_finite([jnp.ones(2), None])), bool(are_finite([jnp.asarray([1.0, jnp.nan])]))
    (True, False)
    """
    found = jnp.asarray(True)
    for gradient in gradients:
        if gradient is not None:
            values = gradient.values if isinstance(gradient, IndexedSlices) else gradient
            values = values.values[0] if isinstance(values, Mirrored) else values
            found &= jnp.all(jnp.isfinite(values))
    return found
