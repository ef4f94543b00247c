"""Steps that are skipped: gradients that are not finite, and a loss scale that adapts to them.

Small gradients vanish in 16-bit types. So the loss is multiplied by a scale, and gradients are
divided by it. A scale that is too large makes gradients infinite: such a step is skipped, and the
scale becomes smaller; after many good steps it is made larger again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from replicax.contexts.frames import Frame
from replicax.contexts.overlay import Change
from replicax.foundation import errors
from replicax.values.distributed_values import Mirrored
from replicax.values.indexed_slices import IndexedSlices
from replicax.values.regroup import map_structure
from replicax.variables.variable import Variable


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that becomes smaller when gradients overflow, and larger when they do not.

    Args:
      initial_scale: What the loss is multiplied by at first.
      growth_steps: After how many steps without overflow the scale is multiplied by `factor`.
      factor: What the scale is divided by when gradients are not finite; never below 1.

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


# Makes a variable of an optimizer: of a first value and a name.
Maker = Callable[[Any, str], Variable]


class StepGuard:
    """Decides about each step of an optimizer whether it is made, and keeps the loss scale.

    Attributes:
      skipped: How many steps were skipped.
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

    # What users do with the scale.

    def scaled(self, loss: Any) -> Any:
        """Returns a loss multiplied by the scale."""
        if self.scale is None:
            return loss
        loss = jnp.asarray(loss)
        return loss * self.scale.read_value().astype(loss.dtype)

    def unscaled(self, gradients: Any) -> Any:
        """Returns gradients divided by the scale."""
        if self.scale is None:
            return gradients
        scale = self.scale.read_value()

        def divided(array: Any) -> Any:
            # In float32: 1 / scale, or the scale itself, may not exist in the type of gradients.
            return (jnp.asarray(array).astype(jnp.float32) / scale).astype(array.dtype)

        def visit(leaf: Any) -> Any:
            if leaf is None:
                return None
            if isinstance(leaf, IndexedSlices):
                return leaf.map_values(divided)
            return divided(leaf)

        return map_structure(visit, gradients)

    # What happens in a step.

    def after(self, frame: Frame, is_good: Any) -> None:
        """Counts a step, and adapts the scale.

        Args:
          frame: Where the code runs.
          is_good: Whether the step is made: known, or traced.
        """
        change_if(self.skipped, frame, ~is_good, "assign_add", 1)
        rule, scale, good_steps = self._rule, self.scale, self._good_steps
        if rule is None or scale is None or good_steps is None:
            return
        value = scale.read(frame)
        larger = value * jnp.float32(rule.factor)
        is_enough = good_steps.read(frame) + 1 >= rule.growth_steps
        grows = is_good & is_enough & jnp.isfinite(larger)
        smaller = jnp.maximum(value / jnp.float32(rule.factor), 1.0)
        change_if(scale, frame, grows | ~is_good, "assign", jnp.where(is_good, larger, smaller))
        ends = ~is_good | is_enough
        change_if(good_steps, frame, ends, "assign", 0)
        change_if(good_steps, frame, ~ends, "assign_add", 1)


def change_if(variable: Variable, frame: Frame, condition: Any, kind: str, payload: Any) -> None:
    """Changes a variable of an optimizer if a condition holds, which may be traced."""
    array = jnp.asarray(payload, variable.dtype)
    if variable.is_remote:
        if frame.overlay is not None:
            frame.overlay.record(Change(variable, kind, array, condition))
        elif condition:
            variable.apply_directly(frame, kind, array)
        return
    old = variable.read(frame)
    new = array if kind == "assign" else old + array
    variable.store_all_copies(frame, jnp.where(condition, new, old))


def are_finite(gradients: Sequence[Any]) -> Any:
    """Tells whether all reduced gradients consist of finite numbers.

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
