"""The state of an optax transformation as variables: slots next to their variable, and the rest.

Note [Slots in the state of a transformation]
    optax keeps the state of each parameter in trees of the structure of the parameters:
    `ScaleByAdamState(count, mu=[...], nu=[...])` for a list of parameters. So a part of the
    state that has the structure of the variables holds slots, whatever the shapes of its
    arrays; everything outside of such parts belongs to no single variable. Parts that a mask
    leaves out are `optax.MaskedNode`, which fits any structure.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path
from jax.typing import ArrayLike

from replicax.contexts.frames import Frame, StrategyHooks
from replicax.foundation import devices, errors, jax_compat, lazy
from replicax.foundation.options import VariableAggregation
from replicax.foundation.types import Tree, TreeDef
from replicax.values.distributed_values import is_array_like
from replicax.variables.variable import Variable

if TYPE_CHECKING:
    import optax
else:
    optax = lazy.module("optax")

Path: TypeAlias = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class LeafSource:
    """The position of an array in the state of a transformation.

    Attributes:
      path: Its path in the state.
      owner: The number of the variable whose slot it is, or None.
      slot_path: Its path without the part that names the variable.
    """

    path: Path
    owner: int | None
    slot_path: Path


def sources_of(state: Tree, template: Tree) -> list[LeafSource]:
    """Returns the source of each array of a state, in order.

    Args:
      state: The state of a transformation.
      template: A structure like the parameters, with their numbers as leaves.
    """
    names = {number: _parts(path) for path, number in tree_flatten_with_path(template)[0]}
    found: list[LeafSource] = []
    nodes, _ = tree_flatten_with_path(state, is_leaf=lambda n: split(template, n) is not None)
    for path, node in nodes:
        start = _parts(path)
        slots = split(template, node)
        if slots is None:
            found.append(LeafSource(start, None, start))
            continue
        for owner, part in slots:
            for inner, _ in tree_flatten_with_path(part)[0]:
                end = _parts(inner)
                whole = (*start, *names[owner], *end)
                found.append(LeafSource(whole, owner, (*start, *end)))
    return found


def split(template: Tree, node: Tree) -> list[tuple[int, Tree]] | None:
    """Splits a tree of the structure of the parameters.

    Returns:
      The numbers of parameters, each with its part of the tree; None if the tree has
      another structure.

    >>> split({"a": 0, "b": 1}, {"a": "x", "b": ["y", "z"]})
    [(0, 'x'), (1, ['y', 'z'])]
    """
    if isinstance(template, int):
        return [(template, node)]
    if isinstance(node, optax.MaskedNode):
        return []
    children, treedef = _children(template)
    others, other_treedef = _children(node)
    if treedef != other_treedef:
        return None
    found: list[tuple[int, Tree]] = []
    for child, other in zip(children, others, strict=True):
        inner = split(child, other)
        if inner is None:
            return None
        found += inner
    return found


def parts_by_number(template: Tree, tree: Tree, count: int) -> list[Tree]:
    """Returns the part of each of `count` parameters in a tree of their structure."""
    found = dict(split(template, tree) or ())
    return [found[number] for number in range(count)]


def with_leaves(template: Tree, leaves: Sequence[Tree]) -> Tree:
    """Returns a tree of the structure of the parameters with one leaf per parameter."""
    return jax.tree.map(lambda number: leaves[number], template)


def _children(node: Tree) -> tuple[list[Tree], TreeDef]:
    return jax.tree.flatten(node, is_leaf=lambda inner: inner is not node)


def _parts(path: jax.tree_util.KeyPath) -> Path:
    return tuple(keystr((key,), simple=True) for key in path)


def shortest_names(paths: Sequence[Path]) -> list[str]:
    """Names each path by as few of its last parts as are unique.

    >>> shortest_names([("0", "mu"), ("0", "nu")])
    ['mu', 'nu']
    >>> shortest_names([("0", "mu"), ("1", "mu")])
    ['0/mu', '1/mu']
    """

    def shortest(path: Path) -> str:
        for count in range(1, len(path)):
            if sum(other[-count:] == path[-count:] for other in paths) == 1:
                return "/".join(path[-count:])
        return "/".join(path)

    return [shortest(path) for path in paths]


# Creates the variable of an array of the state, or of its shape, under a name.
Maker: TypeAlias = Callable[[Tree, LeafSource, str], Variable]


class StateVariables:
    """The variables that hold the state of one transformation.

    Attributes:
      sources: The source of each variable.
      variables: One variable per array of the state.
    """

    def __init__(
        self, state: Tree, template: Tree, owners: Sequence[Variable], make: Maker
    ) -> None:
        leaves, self._treedef = jax.tree.flatten(state)
        self.sources = sources_of(state, template)
        self._key_impls = [_key_impl(leaf) for leaf in leaves]
        self._short = _names_by_owner(self.sources)
        self.variables: list[Variable] = []
        for leaf, source, short in zip(leaves, self.sources, self._short, strict=True):
            name = "optimizer" if source.owner is None else owners[source.owner].name
            self.variables.append(make(leaf, source, f"{name}/{short}"))

    def read(self, frame: Frame) -> list[jax.Array]:
        """Returns the arrays of the state; random keys as their data."""
        return [variable.read(frame) for variable in self.variables]

    def assemble(self, arrays: Sequence[jax.Array]) -> Tree:
        """Returns the state with the given arrays."""
        leaves = [
            array if impl is None else jax.random.wrap_key_data(array, impl=impl)
            for array, impl in zip(arrays, self._key_impls, strict=True)
        ]
        return jax.tree.unflatten(self._treedef, leaves)

    def arrays_of(self, state: Tree) -> list[jax.Array]:
        """Returns the arrays of a later state, or raises if it has another structure."""
        leaves, treedef = jax.tree.flatten(state)
        if treedef != self._treedef:
            raise errors.UnsupportedError(
                "A transformation must keep the structure of its state",
                f"{self._treedef} became {treedef}",
                "Return the same containers from `update` as from `init`.",
            )
        return [
            leaf if impl is None else jax.random.key_data(leaf)
            for leaf, impl in zip(leaves, self._key_impls, strict=True)
        ]

    def slots(self, owner: int) -> dict[str, Variable]:
        """Returns the slots of one variable, by name."""
        found = zip(self.sources, self._short, self.variables, strict=True)
        return {short: v for source, short, v in found if source.owner == owner}

    def hyperparams(self) -> dict[str, Variable]:
        """Returns the hyperparameters of `optax.inject_hyperparams`, by name."""
        found = [
            (source.path, variable)
            for source, variable in zip(self.sources, self.variables, strict=True)
            if len(source.path) > 1 and source.path[-2] == "hyperparams" and source.owner is None
        ]
        names = shortest_names([path for path, _ in found])
        return {name: variable for name, (_, variable) in zip(names, found, strict=True)}

    def counts(self) -> list[Variable]:
        """Returns the counters of steps."""
        found = zip(self.sources, self.variables, strict=True)
        return [v for source, v in found if source.owner is None and source.path[-1:] == ("count",)]

    def is_scheduled(self, hyperparam: Variable) -> bool:
        """Returns whether a schedule sets a hyperparameter at each update."""
        index = next(i for i, v in enumerate(self.variables) if v is hyperparam)
        *start, _, name = self.sources[index].path
        schedule = (*start, "hyperparams_states", name)
        return any(source.path[: len(schedule)] == schedule for source in self.sources)

    def by_path(self) -> dict[str, Variable]:
        """Returns all variables, by their path in the state."""
        names = ["/".join(source.path) for source in self.sources]
        return dict(zip(names, self.variables, strict=True))


def local_maker(owners: Sequence[Variable], hooks: StrategyHooks) -> Maker:
    """Returns a function that creates variables of the state on the devices of their owners."""
    others = hooks.non_slot_devices(owners)

    def make(leaf: Tree, source: LeafSource, name: str) -> Variable:
        near = others if source.owner is None else owners[source.owner]
        return make_variable(_as_array(leaf, source), name, near, hooks)

    return make


def make_variable(value: ArrayLike, name: str, near: object, hooks: StrategyHooks) -> Variable:
    """Creates a variable of the optimizer on the devices of another one, or on named ones."""
    aggregation = VariableAggregation.ONLY_FIRST_REPLICA
    # The default strategy places variables on the current device.
    here = contextlib.nullcontext()
    if isinstance(near, Variable) and near.owner is None:
        here = devices.device(near.placement[0])
    with hooks.colocate_vars_with(near), here:
        return Variable(value, False, name=name, aggregation=aggregation)


def _names_by_owner(sources: Sequence[LeafSource]) -> list[str]:
    names: dict[int, str] = {}
    for owner in {source.owner for source in sources}:
        own = [i for i, source in enumerate(sources) if source.owner == owner]
        paths = [sources[i].slot_path for i in own]
        # State of no variable keeps its whole path: "count" alone is ambiguous.
        short = ["/".join(p) for p in paths] if owner is None else shortest_names(paths)
        names.update(zip(own, short, strict=True))
    return [names[i] for i in range(len(sources))]


def _key_impl(leaf: object) -> Hashable | None:
    """Returns the implementation of a random key; None for other leaves."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_impl(leaf)
    return None


def _as_array(leaf: Tree, source: LeafSource) -> jax.Array:
    if not is_array_like(leaf):
        raise errors.UnsupportedError(
            "The state of a transformation must consist of arrays",
            f"it has a {type(leaf).__name__} at {'/'.join(source.path)!r}",
            "Keep such objects outside of the state.",
        )
    with jax_compat.eagerly():
        return jnp.asarray(leaf if _key_impl(leaf) is None else jax.random.key_data(leaf))
