"""`Optimizer`: any optax transformation, applied to the variables of a strategy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from replicax.contexts import frames
from replicax.contexts.frames import Frame, Mode
from replicax.foundation import errors, jax_compat, lazy
from replicax.foundation.types import Tree
from replicax.tracing.function import Function
from replicax.training.optimizer import (
    arguments,
    probe,
    row_updates,
)
from replicax.training.optimizer.gradients import Gradient, by_variable, checked, summed
from replicax.training.optimizer.remote import (
    OptimizerHost,
    RemoteOptimizer,
    StateProgram,
    make_remote,
)
from replicax.training.optimizer.state import (
    StateVariables,
    local_maker,
    make_variable,
    parts_by_number,
    with_leaves,
)
from replicax.training.optimizer.step_guard import DynamicLossScale, StepGuard, are_finite
from replicax.values import printing
from replicax.values.array_surface import as_operand
from replicax.values.distributed_values import DistributedValues, Mirrored
from replicax.values.indexed_slices import IndexedSlices
from replicax.values.regroup import leaves_of, map_structure
from replicax.variables.variable import Variable

if TYPE_CHECKING:
    import optax
else:
    optax = lazy.module("optax")


# For slots of optax: the names of the same quantities in Keras 1 to 3.
_KERAS_SLOTS = {
    "mu": ("m", "momentum"),
    "nu": ("v", "velocity", "rms"),
    "sum_of_squares": ("accumulator",),
}

# Smaller tables on servers get dense gradients: the probe for rows costs more.
_TABLE_ROWS = 1024


class Optimizer:
    """Applies gradients to variables using an optax transformation.

    The state of the transformation becomes variables: slots are placed like their variable,
    counters and hyperparameters as the strategy decides.

    Args:
      transformation: Any `optax.GradientTransformation`, e.g. `optax.adam(1e-3)`.
      variables: The variables to update: a list, a dict or any other structure, which is
        the structure of the transformation's parameters. They must have been created in the
        current scope.
      gradient_accumulation_steps: If given, variables change at every k-th call only, by
        the mean of the k gradients.
      sparse: The handling of `IndexedSlices`. "auto" touches only the rows that have a
        gradient if a trial shows that this is exact for the transformation, and makes the
        gradient dense otherwise. "rows" touches only these rows always, which makes e.g.
        Adam "lazy". "dense" makes the gradient dense always.
      skip_nonfinite: Whether a step is skipped, on all replicas, if a gradient is infinite or not
        a number after the sum over replicas: no variable, no slot and no count changes.
      loss_scale: A `DynamicLossScale`, or a number, for `get_scaled_loss` and
        `get_unscaled_gradients`; steps are then skipped as with `skip_nonfinite`.

    >>> import optax
    >>> import replicax as rx
    >>> w = rx.Variable(3.0, name="w")
    >>> optimizer = rx.optimizers.Optimizer(optax.sgd(0.5), [w])
    >>> optimizer.apply_gradients([(2.0, w)])
    >>> float(w), int(optimizer.iterations)
    (2.0, 1)
    """

    def __init__(
        self,
        transformation: optax.GradientTransformation | optax.MultiSteps,
        variables: Tree,
        *,
        gradient_accumulation_steps: int | None = None,
        sparse: str = "auto",
        skip_nonfinite: bool = False,
        loss_scale: DynamicLossScale | float | None = None,
    ) -> None:
        arguments.check_options(transformation, gradient_accumulation_steps, sparse)
        arguments.check_loss_scale(loss_scale)
        self._structure, found = arguments.trainable_list(variables)
        whole, self._trained = arguments.without_parts(self._structure, found)
        numbers = itertools.count()
        self._template = map_structure(lambda _: next(numbers), whole)
        self._accumulates = gradient_accumulation_steps is not None
        self._transformation = arguments.with_extra_args(
            transformation, gradient_accumulation_steps
        )
        self._sparse = sparse
        self._is_row_wise: dict[tuple[int, *tuple[str, ...]], bool] = {}
        # Strong: variables alone do not keep their strategy alive.
        self._strategy = arguments.common_strategy(self._trained)
        hooks = self._hooks = frames.current().hooks
        # Set if servers hold the variables and the state, and compute the updates.
        self._remote: RemoteOptimizer | None = None
        if any(v.is_remote for v in self._trained):
            self._make_remote(cast("OptimizerHost", hooks))
        else:
            make = local_maker(self._trained, hooks)
            self._state = StateVariables(self._first_state(), self._template, self._trained, make)
            near = hooks.non_slot_devices(self._trained)
            self._iterations = make_variable(
                jnp.zeros((), jnp.int32), "optimizer/iterations", near, hooks
            )
        # Decides which steps are made; None if all are.
        self._guard: StepGuard | None = None
        if skip_nonfinite or loss_scale is not None:
            self._guard = self._make_guard(loss_scale)
        self._compiled = Function(self._update, name="Optimizer.apply_gradients")

    def __repr__(self) -> str:
        count = printing.count(len(self._trained), "variable")
        names = printing.listing([variable.name for variable in self._trained])
        return f"<rx.optimizers.Optimizer of {count}: {names}>"

    def _first_state(self) -> Tree:
        with jax_compat.eagerly(), arguments.explained_init():
            state = self._transformation.init(self._tree([v.read_copy(0) for v in self._trained]))
        arguments.refuse_lookahead(state)
        return state

    def _make_remote(self, host: OptimizerHost) -> None:
        with arguments.explained_init():
            program = StateProgram(
                self._transformation, self._template, self._trained, self._accumulates
            )
        arguments.refuse_lookahead(program.state)
        row_wise = [self._is_for_rows(i, program) for i in range(len(self._trained))]
        self._state, self._iterations, self._remote = make_remote(program, host, row_wise)

    def _make_guard(self, loss_scale: DynamicLossScale | float | None) -> StepGuard:
        near = self._hooks.non_slot_devices(self._trained)
        return StepGuard(
            lambda value, name: make_variable(value, name, near, self._hooks), loss_scale
        )

    def _is_for_rows(self, number: int, program: StateProgram) -> bool:
        """Returns whether the servers apply sparse gradients of a variable by rows."""
        shape = self._trained[number].shape
        is_table = len(shape) > 1 and (shape[0] >= _TABLE_ROWS or self._sparse == "rows")
        return is_table and self._may_touch_rows(number, program.leaves_of(number), {})

    # The state.

    @property
    def iterations(self) -> Variable:
        """The number of updates of the variables."""
        return self._iterations

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The variables of the optimizer itself: `iterations`, slots, and the other state."""
        own = {} if self._guard is None else self._guard.checkpoint_children()
        return (self._iterations, *self._state.variables, *own.values())

    @property
    def skipped(self) -> Variable | None:
        """The number of skipped steps; None if the optimizer never skips steps."""
        return None if self._guard is None else self._guard.skipped

    @property
    def loss_scale(self) -> Variable | None:
        """The current loss scale; None if the optimizer has none."""
        return None if self._guard is None else self._guard.scale

    def get_scaled_loss(self, loss: ArrayLike) -> Any:
        """Returns the loss times the loss scale, whose gradient is to be computed.

        Without a loss scale this is the loss itself.

        >>> import optax
        >>> import replicax as rx
        >>> w = rx.Variable(3.0)
        >>> optimizer = rx.optimizers.Optimizer(optax.sgd(0.5), [w], loss_scale=1024.0)
        >>> scaled = rx.grad(lambda: optimizer.get_scaled_loss(w * w), [w])()
        >>> optimizer.get_unscaled_gradients(scaled)
        [Array(6., dtype=float32)]
        """
        return loss if self._guard is None else self._guard.scaled(loss)

    def get_unscaled_gradients(self, gradients: Tree) -> Tree:
        """Returns gradients of a scaled loss divided by the loss scale."""
        return gradients if self._guard is None else self._guard.unscaled(gradients)

    def slots(self, variable: Variable) -> dict[str, Variable]:
        """Returns the slots of a variable, by name.

        Raises:
          InvalidArgumentError: The variable is not one of the optimizer.

        >>> import optax
        >>> import replicax as rx
        >>> w = rx.Variable([3.0], name="w")
        >>> sorted(rx.optimizers.Optimizer(optax.adam(0.1), [w]).slots(w))
        ['mu', 'nu']
        """
        for number, trained in enumerate(self._trained):
            if trained is variable:
                return self._state.slots(number)
        raise errors.InvalidArgumentError(
            "Slots belong to the variables of the optimizer",
            f"{getattr(variable, 'name', variable)!r} is not one of them",
            "Pass one of them.",
        )

    def get_slot(self, variable: Variable, name: str) -> Variable:
        """Returns one slot of a variable.

        Raises:
          NotFoundError: There is no such slot.
        """
        return _named(self.slots(variable), name, f"slot of {variable.name!r}")

    @property
    def hyperparams(self) -> dict[str, Variable]:
        """The hyperparameters that `optax.inject_hyperparams` made part of the state."""
        return self._state.hyperparams()

    @property
    def learning_rate(self) -> jax.Array:
        """The learning rate, if `optax.inject_hyperparams` made it part of the state.

        Raises:
          NotFoundError: The transformation keeps no such hyperparameter.
        """
        return _named(self.hyperparams, "learning_rate", "hyperparameter").read_value()

    @learning_rate.setter
    def learning_rate(self, value: ArrayLike) -> None:
        rate = _named(self.hyperparams, "learning_rate", "hyperparameter")
        if self._state.is_scheduled(rate):
            raise errors.InvalidArgumentError(
                "Only a constant learning rate can be set",
                "a schedule sets this one at each update",
                "Pass a number to optax.inject_hyperparams(...)(learning_rate=...).",
            )
        rate.assign(value)

    def checkpoint_children(self) -> dict[str, Variable]:
        """Returns all variables of the optimizer by stable names.

        >>> import optax
        >>> import replicax as rx
        >>> w = rx.Variable([3.0], name="w")
        >>> list(rx.optimizers.Optimizer(optax.adam(0.1), [w]).checkpoint_children())
        ['iterations', '0/count', '0/mu/0', '0/nu/0']
        """
        children = {"iterations": self._iterations}
        for path, variable in self._state.by_path().items():
            children[f"state/{path}" if path in ("", "iterations") else path] = variable
        if self._guard is not None:
            # A prefix that no path of a state has.
            for name, variable in self._guard.checkpoint_children().items():
                children[f"guard/{name}"] = variable
        return children

    # What corresponds to it in a TensorFlow checkpoint.

    def tensorflow_children(self, names: Sequence[str]) -> list[tuple[str, object]]:
        """Returns variables by the names that an optimizer of Keras has for them."""
        del names
        steps = [self._iterations, *([] if self._accumulates else self._state.counts())]
        found: list[tuple[str, object]] = [
            (name, step) for name in ("iterations", "iter") for step in steps
        ]
        rate = self.hyperparams.get("learning_rate")
        if rate is not None and not self._state.is_scheduled(rate):
            found.append(("learning_rate", rate))
        return found

    def tensorflow_slots(self) -> list[tuple[object, object, Sequence[str]]]:
        """Returns slots, their variables, and the names of the same quantities in Keras.

        The momentum of Keras is scaled by the learning rate, unlike `optax.trace`.
        """
        return [
            (slot, owner, _KERAS_SLOTS[name])
            for number, owner in enumerate(self._trained)
            for name, slot in self._state.slots(number).items()
            if name in _KERAS_SLOTS
        ]

    def tensorflow_trained(self) -> Sequence[object]:
        """Returns nothing: the order of the variables may differ from that in TensorFlow."""
        return ()

    # Applying.

    def apply_gradients(self, gradients: Tree, variables: Tree = None, **extra_args: Tree) -> None:
        """Updates the variables with gradients.

        In replica code the gradients of all replicas are summed first, and the variables
        change once, in sync. In cross-replica code `PerReplica` gradients are summed, and
        others are used as they are. A gradient that is None, or not given, leaves its
        variable and slots unchanged; with gradient accumulation it counts as zero.

        Args:
          gradients: Pairs (gradient, variable), or a structure of gradients.
          variables: The variables of a structure of gradients, if not all of the optimizer.
          **extra_args: Further arguments of the transformation's `update`, such as the
            `value` of the loss for `optax.polyak_sgd`. Arrays are summed over replicas like
            the gradients.

        Raises:
          ContextError: This is the update of a variable, or the scope of another strategy.
          InvalidArgumentError: A gradient does not fit its variable, or gradients are said to be
            summed already.
        """
        _require_sums(extra_args)
        found = by_variable(gradients, variables, self._structure, self._trained)
        frame = frames.current()
        for variable in self._trained:
            variable.check_frame(frame, "The update of")
        if frame.is_default and frame.strategy is not self._strategy:
            with self._strategy.scope():
                self._apply(self._strategy, found, extra_args, False)
        elif frame.mode is Mode.REPLICA:
            assert frame.executor is not None
            given = (found, extra_args, not frame.is_default)
            frame.executor.merge_call(self._apply, given, {})
        elif frame.mode is Mode.CROSS_REPLICA:
            self._apply(frame.strategy, found, extra_args, False)
        else:
            raise errors.ContextError(
                "`apply_gradients` needs replica or cross-replica code",
                f"this is {frame.describe()}",
                "Call it in the function that `strategy.run` calls.",
            )

    def _apply(
        self,
        strategy: object,
        gradients: list[Gradient | None],
        extra: dict[str, Tree],
        is_sum: bool,
    ) -> None:
        """Applies gradients in cross-replica code.

        Args:
          strategy: The current strategy; `merge_call` passes it.
          gradients: One per variable.
          extra: Further arguments of the transformation.
          is_sum: Whether values that are equal on all replicas are to be summed as well.
        """
        del strategy
        pairs: list[tuple[Any, Variable]] = list(zip(gradients, self._trained, strict=True))
        anywhere = self._trained[0]
        arrays = [leaf for leaf in leaves_of(extra) if _is_array(leaf)]
        pairs += [(leaf, anywhere) for leaf in arrays]
        reduced = iter(summed(pairs, is_sum))
        whole = [checked(next(reduced), variable) for variable in self._trained]
        extra = map_structure(lambda x: next(reduced) if _is_array(x) else x, extra)
        if self._remote is None:
            self._compiled(whole, extra)
        else:
            arguments.refuse_extra(extra)
            self._apply_remotely(self._remote, whole)

    def _apply_remotely(self, remote: RemoteOptimizer, gradients: list[Gradient | None]) -> None:
        """Sends a step to the servers; the guard decides here, from all gradients."""
        frame = frames.current()
        if self._guard is None:
            remote.apply(frame, gradients)
            return
        is_good = are_finite(gradients)
        remote.apply(frame, gradients, is_good)
        self._guard.after(frame, is_good)

    # The update itself: one pure function of arrays, compiled unless it is part of a trace.

    def _update(self, gradients: list[Gradient | None], extra: dict[str, Tree]) -> None:
        frame = frames.current()
        gradients, extra = map_structure(_first_copy, (gradients, extra))
        params = [variable.read(frame) for variable in self._trained]
        arrays = self._state.read(frame)
        blocks: dict[int, row_updates.RowBlock] = {}
        inputs: list[Any] = list(gradients)
        for i, gradient in enumerate(gradients):
            if gradient is None:
                inputs[i] = jnp.zeros_like(params[i])
            elif isinstance(gradient, IndexedSlices):
                variable = self._trained[i]
                if self._touches_rows(i, extra):
                    blocks[i] = row_updates.RowBlock(gradient, variable.shape[0])
                    inputs[i] = blocks[i].gradient
                else:
                    inputs[i] = row_updates.densify(gradient, variable.shape)
        own = [blocks.get(s.owner) if s.owner is not None else None for s in self._state.sources]
        seen = [b.take(a) if b else a for a, b in zip(arrays, own, strict=True)]
        seen_params = [blocks[i].take(p) if i in blocks else p for i, p in enumerate(params)]
        updates, new_params, new_arrays = self._transformed(inputs, seen, seen_params, extra)
        is_good = None if self._guard is None else are_finite(gradients)
        updates = _chosen(is_good, updates, [jnp.zeros_like(update) for update in updates])
        new_params = _chosen(is_good, new_params, seen_params)
        new_arrays = _chosen(is_good, new_arrays, seen)
        kept = set() if self._accumulates else {i for i, g in enumerate(gradients) if g is None}
        for i, variable in enumerate(self._trained):
            if i not in kept:
                block = blocks.get(i)
                value = new_params[i]
                if block is not None:
                    value = block.put_sums(params[i], updates[i], value)
                value = _constrained(variable, value, is_good)
                _store(variable, frame, value)
        states = zip(self._state.sources, self._state.variables, strict=True)
        for i, (source, variable) in enumerate(states):
            if source.owner not in kept:
                block = own[i]
                value = block.put(arrays[i], new_arrays[i]) if block else new_arrays[i]
                _store(variable, frame, value)
        self._count(frame, is_good)

    def _transformed(
        self,
        gradients: list[jax.Array],
        arrays: list[jax.Array],
        params: list[jax.Array],
        extra: dict[str, Tree],
    ) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
        """Returns updates, new parameters, and the arrays of the new state."""
        tree = self._tree(params)
        try:
            updates, state = self._transformation.update(
                self._tree(gradients), self._state.assemble(arrays), tree, **extra
            )
        except TypeError as error:
            if "required keyword-only argument" not in str(error):
                raise
            raise errors.ArgumentTypeError(
                "The transformation needs further arguments",
                str(error),
                "Pass them by name, e.g. apply_gradients(gradients, value=loss).",
            ) from error
        new = optax.apply_updates(tree, updates)
        count = len(self._trained)
        return (
            parts_by_number(self._template, updates, count),
            parts_by_number(self._template, new, count),
            self._state.arrays_of(state),
        )

    def _count(self, frame: Frame, is_good: jax.Array | None) -> None:
        if self._accumulates:
            new = self._state.by_path()["gradient_step"].read(frame)
        else:
            new = self._iterations.read(frame) + (1 if is_good is None else is_good)
        _store(self._iterations, frame, new)
        if self._guard is not None and is_good is not None:
            self._guard.after(frame, is_good)

    def _touches_rows(self, number: int, extra: dict[str, Tree]) -> bool:
        """Returns whether a sparse gradient is applied by rows."""
        slots = list(self._state.slots(number).values())
        return self._may_touch_rows(number, slots, extra)

    def _may_touch_rows(
        self,
        number: int,
        slots: Sequence[Variable | jax.ShapeDtypeStruct],
        extra: dict[str, Tree],
    ) -> bool:
        variable = self._trained[number]
        misfit = next((s for s in slots if s.shape[:1] != variable.shape[:1]), None)
        if self._sparse == "dense" or (self._sparse == "auto" and misfit is not None):
            return False
        if misfit is not None:
            raise errors.InvalidArgumentError(
                'sparse="rows" needs a transformation whose slots have a row per row of '
                f"{variable.name!r}",
                f"slot {getattr(misfit, 'name', '')!r} has shape {misfit.shape}",
                'Use sparse="auto" or "dense".',
            )
        if self._sparse == "rows":
            return True
        key = (number, *sorted(extra))
        if key not in self._is_row_wise:
            shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in self._trained]
            self._is_row_wise[key] = probe.is_row_wise(
                probe.Sample(self._transformation, self._template, shapes, number, dict(extra))
            )
        return self._is_row_wise[key]

    def _tree(self, arrays: Sequence[jax.Array]) -> Tree:
        return with_leaves(self._template, arrays)


def _require_sums(extra_args: dict[str, Tree]) -> None:
    """Refuses the options of Keras optimizers for gradients that were summed before.

    Transformations of optax ignore arguments that they do not know.
    """
    if extra_args.get("skip_gradients_aggregation", False) is True:
        name = "skip_gradients_aggregation"
    elif extra_args.get("experimental_aggregate_gradients", True) is False:
        name = "experimental_aggregate_gradients"
    else:
        return
    raise errors.InvalidArgumentError(
        "`apply_gradients` in replica code sums the gradients of all replicas",
        f"`{name}` asks it not to",
        "Pass gradients that are not summed yet. To change the sums, e.g. to clip them, chain a "
        "transformation: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)).",
    )


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | DistributedValues | IndexedSlices) or hasattr(leaf, "dtype")


def _chosen(
    is_good: jax.Array | None, new: Sequence[jax.Array], old: Sequence[jax.Array]
) -> list[jax.Array]:
    """Returns new arrays, or the old ones if the step is skipped."""
    if is_good is None:
        return list(new)
    return [jnp.where(is_good, jnp.asarray(a, b.dtype), b) for a, b in zip(new, old, strict=True)]


def _constrained(variable: Variable, value: jax.Array, is_good: jax.Array | None) -> jax.Array:
    if variable.constraint is None:
        return value
    return _chosen(is_good, [variable.constraint(value)], [value])[0]


def _first_copy(leaf: Tree) -> Tree:
    if isinstance(leaf, IndexedSlices):
        return leaf.map_arrays(_first_copy)
    return leaf.values[0] if isinstance(leaf, Mirrored) else as_operand(leaf)


def _store(variable: Variable, frame: Frame, value: jax.Array) -> None:
    if jnp.shape(value) != variable.shape:
        raise errors.UnsupportedError(
            "A transformation and a constraint must keep shapes",
            f"{variable.name!r} of shape {variable.shape} became {jnp.shape(value)}",
            "Return arrays of the shape that went in.",
        )
    variable.store_all_copies(frame, jnp.asarray(value, variable.dtype))


def _named(found: dict[str, Variable], name: str, kind: str) -> Variable:
    if name in found:
        return found[name]
    known = ", ".join(map(repr, sorted(found))) or "none"
    raise errors.NotFoundError(
        f"The optimizer needs a {kind} called {name!r}",
        f"it has {known}",
        "Wrap the transformation, e.g. optax.inject_hyperparams(optax.sgd)"
        "(learning_rate=0.1), to be able to change hyperparameters."
        if kind == "hyperparameter"
        else "Use one of these names.",
    )
