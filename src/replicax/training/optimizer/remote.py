"""Optimizers of variables on parameter servers, where their updates are computed.

The servers run one compiled program per variable, which takes its gradient, value and slots, and
the state that belongs to no variable, and returns the new values. So a transformation can run there
if its update of a variable depends on that variable alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import jax
import jax.numpy as jnp
from jax import export
from jax.typing import ArrayLike

from replicax.contexts.frames import Frame
from replicax.contexts.overlay import Change
from replicax.foundation import errors, jax_compat, lazy
from replicax.foundation.types import Tree
from replicax.training.optimizer.gradients import Gradient
from replicax.training.optimizer.state import (
    LeafSource,
    StateVariables,
    parts_by_number,
    sources_of,
    with_leaves,
)
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
    """The program with which servers update one trained variable.

    Attributes:
      variable: The variable.
      slots: Its slots, in the order in which the program takes and returns them.
      program: From (gradient, value, slots..., shared...) to (value, slots..., shared...).
      is_row_wise: Whether rows without a gradient may stay as they are.
    """

    variable: Variable
    slots: Sequence[Variable]
    program: bytes
    is_row_wise: bool


class OptimizerHost(Protocol):
    """Creates the state of optimizers on servers; a part of the strategy."""

    def make_slot(
        self,
        variable: Variable,
        name: str,
        spec: jax.ShapeDtypeStruct,
        first: Callable[[jax.Array], jax.Array],
    ) -> Variable:
        """Creates a slot next to a variable, part by part.

        Args:
          variable: The variable.
          name: The name of the slot.
          spec: Its shape and type.
          first: A function from the value of the variable, or of a part, to the first slot.
        """
        ...

    def make_shared(self, variables: Sequence[Variable], name: str, value: ArrayLike) -> Variable:
        """Creates a variable with a copy on each server that holds a part of some variables."""
        ...

    def register(self, shared: Sequence[Variable], updates: Sequence[Update]) -> int:
        """Sends the programs to the servers; returns the number of the optimizer."""
        ...


class RemoteOptimizer:
    """Sends the steps of an optimizer to the servers that compute its updates.

    Attributes:
      name: A name for error messages.
      number: The number of the optimizer on the servers.
      trained: The variables that it updates.
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
        # Whether gradients are accumulated: then a missing gradient counts as zero.
        self._accumulates = accumulates

    @property
    def client(self) -> VariableClient:
        """The client of the servers: not stored, as it differs in each process."""
        return self.trained[0].components[0].client  # type: ignore[attr-defined]

    def touches(self, variable: object) -> bool:
        """Returns whether a step changes a variable."""
        return any(
            variable is part
            for changed in (*self.trained, *self._state)
            for part in (changed, *changed.components, *getattr(changed, "copies", ()))
        )

    def apply(
        self,
        frame: Frame,
        gradients: Sequence[Gradient | None],
        condition: jax.Array | None = None,
    ) -> None:
        """Sends a step to the servers, or records it in the program that is being traced.

        Args:
          frame: The current frame.
          gradients: One per variable, or None.
          condition: Whether to make the step, if it may be skipped.
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

    def apply_directly(self, frame: Frame, kind: str, payload: Tree) -> None:
        """Pushes a change, or records it in the program that is being traced."""
        change = Change(self, kind, payload)
        if frame.overlay is not None:
            frame.overlay.record(change)
        else:
            self.client.push([change])


def _fitting(gradient: Gradient | None, variable: Variable) -> jax.Array | IndexedSlices | None:
    """Returns a gradient of the type of its variable, which the servers expect."""
    if isinstance(gradient, IndexedSlices):
        own = gradient.map_arrays(lambda x: x.values[0] if isinstance(x, Mirrored) else x)
        return own.map_values(lambda rows: jnp.asarray(rows, variable.dtype))
    if isinstance(gradient, Mirrored):
        gradient = gradient.values[0]
    return None if gradient is None else jnp.asarray(gradient, variable.dtype)


class StateProgram:
    """A transformation as programs of single variables.

    Args:
      transformation: The transformation.
      template: The structure of its parameters, with their numbers as leaves.
      variables: The variables.
      accumulates: Whether its state counts the updates that change variables.
    """

    def __init__(
        self,
        transformation: optax.GradientTransformationExtraArgs,
        template: Tree,
        variables: Sequence[Variable],
        accumulates: bool,
    ) -> None:
        self._transformation = transformation
        self.template = template
        self.variables = list(variables)
        self.accumulates = accumulates
        specs = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in variables]
        with jax_compat.eagerly():
            self.state = jax.eval_shape(lambda *p: transformation.init(self._tree(p)), *specs)
        self._leaves, self._treedef = jax.tree.flatten(self.state)
        self.sources = sources_of(self.state, template)

    def _tree(self, arrays: Sequence[jax.Array]) -> Tree:
        return with_leaves(self.template, arrays)

    def leaves_of(self, owner: int) -> list[jax.ShapeDtypeStruct]:
        """Returns shapes and types of the slots of a variable."""
        return [self._leaves[index] for index in self.indices(owner)]

    def indices(self, owner: int | None) -> list[int]:
        """Returns the indices of the arrays that belong to one variable, or to none."""
        return [i for i, source in enumerate(self.sources) if source.owner == owner]

    def first_slot(self, index: int, owner: int) -> Callable[[jax.Array], jax.Array]:
        """Returns a function from the value of a variable, or a part, to the first slot."""
        return lambda value: self._first(index, {owner: value})

    def first_shared(self, index: int) -> jax.Array:
        """Returns an array of the first state that belongs to no variable."""
        with jax_compat.eagerly():
            return jax.jit(lambda: self._first(index, {}))()

    def _first(self, index: int, values: dict[int, jax.Array]) -> jax.Array:
        params = [jnp.zeros(v.shape, v.dtype) for v in self.variables]
        for number, value in values.items():
            params[number] = value
        return jnp.asarray(jax.tree.leaves(self._transformation.init(self._tree(params)))[index])

    def _updated(
        self,
        gradients: Sequence[jax.Array],
        leaves: Sequence[jax.Array],
        params: Sequence[jax.Array],
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns the new parameters and the arrays of the new state."""
        state, tree = jax.tree.unflatten(self._treedef, leaves), self._tree(params)
        updates, state = self._transformation.update(self._tree(gradients), state, tree)
        new = parts_by_number(self.template, optax.apply_updates(tree, updates), len(params))
        return new, jax.tree.leaves(state)

    def update(self, owner: int) -> Callable[..., list[jax.Array]]:
        """Returns the program of one variable."""
        own, shared = self.indices(owner), self.indices(None)
        constraint = self.variables[owner].constraint

        def program(gradient: jax.Array, value: jax.Array, *rest: jax.Array) -> list[jax.Array]:
            params = [jnp.zeros(v.shape, v.dtype) for v in self.variables]
            gradients = list(params)
            params[owner], gradients[owner] = value, gradient
            leaves = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in self._leaves]
            for index, array in zip((*own, *shared), rest[:-1], strict=True):
                leaves[index] = array
            new_params, after = self._updated(gradients, leaves, params)
            new = new_params[owner]
            if constraint is not None:
                new = constraint(new)
            state = [jnp.asarray(after[i], self._leaves[i].dtype) for i in (*own, *shared)]
            return [jnp.asarray(new, value.dtype), *state, self._count(after, rest[-1])]

        return program

    def _count(self, leaves: list[jax.Array], iterations: jax.Array) -> jax.Array:
        if not self.accumulates:
            return iterations + 1
        names = ["/".join(source.path) for source in self.sources]
        return jnp.asarray(leaves[names.index("gradient_step")], iterations.dtype)

    def require_separable(self) -> None:
        """Raises if the update of a variable depends on other variables."""
        specs = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in self.variables]
        with jax_compat.eagerly():
            closed = jax.make_jaxpr(self._updated)(specs, self._leaves, specs)
        count = len(specs)
        owners = [*range(count), *(source.owner for source in self.sources)]
        inputs = [*range(count), *owners[count:], *range(count)]
        for owner, found in zip(owners, jax_compat.dependencies(closed.jaxpr), strict=True):
            needs = {n for index in found if (n := inputs[index]) not in (None, owner)}
            if needs:
                raise self._coupled(owner, min(n for n in needs if n is not None))

    def _coupled(self, owner: int | None, other: int) -> errors.UnsupportedError:
        what = "its shared state" if owner is None else repr(self.variables[owner].name)
        return errors.UnsupportedError(
            "A transformation on parameter servers must update each variable independently",
            f"{what} depends on the gradient of {self.variables[other].name!r}",
            "Do what combines gradients, such as optax.clip_by_global_norm, in the step "
            "function before `apply_gradients`.",
        )

    def exported(self, owner: int) -> bytes:
        """Returns the program of one variable for servers, for any number of rows."""
        variable = self.variables[owner]
        slots = self.leaves_of(owner)
        shared = [self._leaves[i] for i in self.indices(None)]
        counter = jax.ShapeDtypeStruct((), jnp.int32)
        rows = variable.shape[:1]
        is_open = bool(rows) and all(s.shape[:1] == rows for s in slots)
        if not is_open and isinstance(variable, ShardedVariable):
            raise errors.UnsupportedError(
                f"A transformation of {variable.name!r}, which is sharded, needs slots "
                "with a row per row",
                f"it has slots of shapes {[s.shape for s in slots]}",
                "Use another transformation, or create the variable in one part.",
            )

        def spec(like: Variable | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
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
    """Creates the state of an optimizer on servers, and registers its programs there.

    Returns:
      The state, the count of updates, and the sender of steps.
    """
    program.require_separable()
    variables = program.variables
    indices = iter(range(len(program.sources)))

    def make(leaf: Tree, source: LeafSource, name: str) -> Variable:
        index = next(indices)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise errors.UnsupportedError(
                "The state of a transformation on parameter servers must consist of arrays",
                f"{name!r} is a key of jax.random",
                "Use jax.random.PRNGKey instead, or a strategy on this machine.",
            )
        if source.owner is None:
            return host.make_shared(variables, name, program.first_shared(index))
        first = program.first_slot(index, source.owner)
        return host.make_slot(variables[source.owner], name, leaf, first)

    state = StateVariables(program.state, program.template, variables, make)
    count = host.make_shared(variables, "optimizer/iterations", jnp.zeros((), jnp.int32))
    updates = [
        Update(
            v, [state.variables[j] for j in program.indices(i)], program.exported(i), is_row_wise[i]
        )
        for i, v in enumerate(variables)
    ]
    shared = [*(state.variables[j] for j in program.indices(None)), count]
    number = host.register(shared, updates)
    kept = [*state.variables, count]
    return state, count, RemoteOptimizer(number, variables, kept, program.accumulates)
