"""Optimizers whose variables live on parameter servers, where their updates are computed.

The servers do not know the transformation: they get one compiled program per variable, which
takes its gradient, value and slots, and what belongs to no variable, and returns the new ones.
So a transformation can run there if what it does to a variable depends on that variable alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
from jax import export

from replicax.contexts.frames import Frame
from replicax.contexts.overlay import Change
from replicax.foundation import errors, jax_compat, lazy
from replicax.training.optimizer.state import LeafOrigin, StateVariables, origins_of, split
from replicax.values.distributed_values import Mirrored
from replicax.values.indexed_slices import IndexedSlices
from replicax.variables.remote import VariableClient
from replicax.variables.sharded import ShardedVariable
from replicax.variables.variable import Variable

if TYPE_CHECKING:
    import optax
else:
    optax = lazy.module("optax")


@dataclasses.dataclass(frozen=True)
class Update:
    """How servers change one trained variable.

    Attributes:
      variable: The variable.
      slots: Its slots, in the order that the program takes and returns them.
      program: From (gradient, value, slots..., shared...) to (value, slots..., shared...).
      is_row_wise: Whether rows without a gradient may stay as they are.
    """

    variable: Variable
    slots: Sequence[Variable]
    program: bytes
    is_row_wise: bool


class OptimizerHost(Protocol):
    """What makes the state of optimizers on servers; the strategy has it."""

    def make_slot(self, variable: Variable, name: str, spec: Any, first: Any) -> Variable:
        """Makes a slot next to a variable, part by part.

        Args:
          variable: The variable.
          name: The name of the slot.
          spec: Its shape and type.
          first: A function from the value of the variable, or of a part, to the first slot.
        """
        ...

    def make_shared(self, variables: Sequence[Variable], name: str, value: Any) -> Variable:
        """Makes a variable with a copy on each server that holds a part of some variables."""
        ...

    def register(self, shared: Sequence[Variable], updates: Sequence[Update]) -> int:
        """Tells the servers how to change variables; returns the number of the optimizer."""
        ...


class RemoteOptimizer:
    """What a step of an optimizer is told to, on its way to the servers.

    Attributes:
      name: For messages.
      number: The number of the optimizer on the servers.
      trained: The variables that it changes.
    """

    name = "the state of an optimizer"

    def __init__(
        self,
        number: int,
        trained: Sequence[Variable],
        state: Sequence[Variable],
        accumulates: bool = False,
    ) -> None:
        self.number = number
        self.trained = list(trained)
        self._state = list(state)
        # Whether steps are summed up: then no gradient counts as zero.
        self._accumulates = accumulates

    @property
    def client(self) -> VariableClient:
        """How the servers are reached: not kept, as it stays behind when a step travels."""
        return self.trained[0].components[0].client  # type: ignore[attr-defined]

    def touches(self, variable: Any) -> bool:
        """Tells whether a step changes a variable."""
        return any(
            variable is part
            for changed in (*self.trained, *self._state)
            for part in (changed, *changed.components, *getattr(changed, "copies", ()))
        )

    def apply(self, frame: Frame, gradients: Sequence[Any], condition: Any = None) -> None:
        """Sends a step off, or leaves it to the program that is being traced.

        Args:
          frame: Where the code runs.
          gradients: One per variable, or None.
          condition: Whether to make the step, all of it or nothing, if that has to be decided.
        """
        found = [_fitting(g, v) for g, v in zip(gradients, self.trained, strict=True)]
        if self._accumulates:
            found = [
                jnp.zeros(v.shape, v.dtype) if g is None else g
                for g, v in zip(found, self.trained, strict=True)
            ]
        if frame.overlay is not None and condition is not None:
            frame.overlay.record(Change(self, "apply", found, condition))
        elif condition is None or condition:
            self.apply_directly(frame, "apply", found)

    def apply_directly(self, frame: Frame, kind: str, payload: Any) -> None:
        """Does as remote variables do with a change."""
        change = Change(self, kind, payload)
        if frame.overlay is not None:
            frame.overlay.record(change)
        else:
            self.client.push([change])


def _fitting(gradient: Any, variable: Variable) -> Any:
    """Returns a gradient of the type of its variable, which the servers expect."""
    if isinstance(gradient, IndexedSlices):
        own = gradient.map_arrays(lambda x: x.values[0] if isinstance(x, Mirrored) else x)
        return own.map_values(lambda rows: jnp.asarray(rows, variable.dtype))
    if isinstance(gradient, Mirrored):
        gradient = gradient.values[0]
    return None if gradient is None else jnp.asarray(gradient, variable.dtype)


class StateProgram:
    """A transformation, seen as programs of single variables.

    Args:
      transformation: The transformation.
      template: The structure of its parameters, with their numbers as leaves.
      variables: The variables.
      accumulates: Whether its state counts the updates that change variables.
    """

    def __init__(
        self, transformation: Any, template: Any, variables: Sequence[Variable], accumulates: bool
    ) -> None:
        self._transformation = transformation
        self.template = template
        self.variables = list(variables)
        self.accumulates = accumulates
        specs = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in variables]
        with jax_compat.eagerly():
            self.state = jax.eval_shape(lambda *p: transformation.init(self._tree(p)), *specs)
        self._leaves, self._treedef = jax.tree.flatten(self.state)
        self.origins: list[LeafOrigin] = origins_of(self.state, template)

    def _tree(self, arrays: Sequence[Any]) -> Any:
        return jax.tree.map(lambda number: arrays[number], self.template)

    def leaves_of(self, owner: int) -> list[Any]:
        """Returns shapes and types of the slots of a variable."""
        return [self._leaves[place] for place in self.places(owner)]

    def places(self, owner: int | None) -> list[int]:
        """Returns the places of the arrays that belong to one variable, or to none."""
        return [i for i, origin in enumerate(self.origins) if origin.owner == owner]

    def first_slot(self, place: int, owner: int) -> Any:
        """Returns a function from the value of a variable, or a part, to the first slot."""

        def initial(value: Any) -> Any:
            params = [jnp.zeros(v.shape, v.dtype) for v in self.variables]
            params[owner] = value
            state = self._transformation.init(self._tree(params))
            return jnp.asarray(jax.tree.leaves(state)[place])

        return initial

    def first_shared(self, place: int) -> Any:
        """Returns an array of the first state that belongs to no variable."""

        def initial() -> Any:
            params = [jnp.zeros(v.shape, v.dtype) for v in self.variables]
            state = self._transformation.init(self._tree(params))
            return jnp.asarray(jax.tree.leaves(state)[place])

        with jax_compat.eagerly():
            return jax.jit(initial)()

    def update(self, owner: int) -> Any:
        """Returns the program of one variable."""
        own, shared = self.places(owner), self.places(None)
        constraint = self.variables[owner].constraint

        def program(gradient: Any, value: Any, *rest: Any) -> list[Any]:
            params = [jnp.zeros(v.shape, v.dtype) for v in self.variables]
            gradients = list(params)
            params[owner], gradients[owner] = value, gradient
            leaves: list[Any] = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in self._leaves]
            for place, array in zip((*own, *shared), rest[:-1], strict=True):
                leaves[place] = array
            state = jax.tree.unflatten(self._treedef, leaves)
            tree = self._tree(params)
            updates, state = self._transformation.update(self._tree(gradients), state, tree)
            found = split(self.template, optax.apply_updates(tree, updates))
            new = dict(found or ())[owner]
            if constraint is not None:
                new = constraint(new)
            after = jax.tree.leaves(state)
            slots = [jnp.asarray(after[p], self._leaves[p].dtype) for p in own]
            others = [jnp.asarray(after[p], self._leaves[p].dtype) for p in shared]
            return [jnp.asarray(new, value.dtype), *slots, *others, self._count(after, rest[-1])]

        return program

    def _count(self, leaves: list[Any], iterations: Any) -> Any:
        if not self.accumulates:
            return iterations + 1
        names = ["/".join(origin.path) for origin in self.origins]
        return jnp.asarray(leaves[names.index("gradient_step")], iterations.dtype)

    def require_separable(self) -> None:
        """Raises if what happens to a variable depends on others."""

        def whole(gradients: Any, leaves: Any, params: Any) -> Any:
            state = jax.tree.unflatten(self._treedef, leaves)
            tree = self._tree(params)
            updates, state = self._transformation.update(self._tree(gradients), state, tree)
            found = dict(split(self.template, optax.apply_updates(tree, updates)) or ())
            return [found[i] for i in range(len(params))], jax.tree.leaves(state)

        specs = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in self.variables]
        with jax_compat.eagerly():
            closed = jax.make_jaxpr(whole)(specs, self._leaves, specs)
        count = len(specs)
        owners = [*range(count), *(origin.owner for origin in self.origins)]
        inputs = [*range(count), *owners[count:], *range(count)]
        for owner, found in zip(owners, jax_compat.dependencies(closed.jaxpr), strict=True):
            needs = {inputs[place] for place in found} - {None, owner}
            if needs:
                raise self._coupled(owner, min(needs))

    def _coupled(self, owner: int | None, other: Any) -> errors.UnsupportedError:
        what = "what it counts" if owner is None else repr(self.variables[owner].name)
        return errors.UnsupportedError(
            "A transformation on parameter servers must treat each variable by itself",
            f"{what} depends on the gradient of {self.variables[other].name!r}",
            "Do what combines gradients, such as optax.clip_by_global_norm, in the step "
            "function before `apply_gradients`.",
        )

    def exported(self, owner: int) -> bytes:
        """Returns the program of one variable for servers, for any number of rows."""
        variable = self.variables[owner]
        slots = self.leaves_of(owner)
        shared = [self._leaves[p] for p in self.places(None)]
        counter = jax.ShapeDtypeStruct((), jnp.int32)
        rows = variable.shape[:1]
        is_open = bool(rows) and all(s.shape[:1] == rows for s in slots)
        if not is_open and isinstance(variable, ShardedVariable):
            raise errors.UnsupportedError(
                f"A transformation of {variable.name!r}, which is cut into parts, needs slots "
                "with a row per row",
                f"it has slots of shapes {[s.shape for s in slots]}",
                "Use another transformation, or create the variable in one part.",
            )

        def spec(like: Any) -> Any:
            if not is_open:
                return jax.ShapeDtypeStruct(like.shape, like.dtype)
            rest = ", ".join(map(str, like.shape[1:]))
            shape = export.symbolic_shape(f"n, {rest}" if rest else "n,", scope=scope)
            return jax.ShapeDtypeStruct(shape, like.dtype)

        scope = export.SymbolicScope()
        own = [spec(variable), spec(variable), *(spec(s) for s in slots)]
        arguments = [*own, *shared, counter]
        with jax_compat.eagerly():
            program = export.export(jax.jit(self.update(owner)), platforms=("cpu",))(*arguments)
        return bytes(program.serialize())


def make_remote(
    program: StateProgram, host: OptimizerHost, is_row_wise: Sequence[bool]
) -> tuple[StateVariables, Variable, RemoteOptimizer]:
    """Makes the state of an optimizer on servers, and tells them how to change it.

    Returns:
      The state, the count of updates, and what steps are told to.
    """
    program.require_separable()
    variables = program.variables
    places = iter(range(len(program.origins)))

    def make(leaf: Any, origin: LeafOrigin, name: str) -> Variable:
        place = next(places)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise errors.UnsupportedError(
                "The state of a transformation on parameter servers must consist of arrays",
                f"{name!r} is a key of jax.random",
                "Use jax.random.PRNGKey instead, or a strategy on this machine.",
            )
        if origin.owner is None:
            return host.make_shared(variables, name, program.first_shared(place))
        first = program.first_slot(place, origin.owner)
        return host.make_slot(variables[origin.owner], name, leaf, first)

    state = StateVariables(program.state, program.template, variables, make)
    count = host.make_shared(variables, "optimizer/iterations", jnp.zeros((), jnp.int32))
    updates = [
        Update(
            v, [state.variables[p] for p in program.places(i)], program.exported(i), is_row_wise[i]
        )
        for i, v in enumerate(variables)
    ]
    shared = [*(state.variables[p] for p in program.places(None)), count]
    number = host.register(shared, updates)
    kept = [*state.variables, count]
    return state, count, RemoteOptimizer(number, variables, kept, program.accumulates)
