"""The state of an optax transformation as variables: slots next to their variable, and the rest.

Note [Whose state is it]
    optax keeps what it knows about each parameter in trees of the shape of the parameters:
    `ScaleByAdamState(count, mu=[...], nu=[...])` for a list of parameters. So a part of the
    state that has the structure of the variables holds slots, whatever its arrays look
    like; everything outside of such parts belongs to no single variable. Parts that a mask
    left out are `optax.MaskedNode`, which fits any structure.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path

from replicax.contexts.frames import Frame
from replicax.foundation import devices, errors, jax_compat, lazy
from replicax.foundation.options import VariableAggregation
from replicax.values.distributed_values import is_array_like
from replicax.variables.variable import Variable

if TYPE_CHECKING:
    import optax
else:
    optax = lazy.module("optax")

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class LeafOrigin:
    """Where an array of the state comes from.

    Attributes:
      path: Its path in the state.
      owner: The number of the variable that it is a slot of, or None.
      slot_path: Its path without the part that names the variable.
    """

    path: Path
    owner: int | None
    slot_path: Path


def origins_of(state: Any, template: Any) -> list[LeafOrigin]:
    """Says of each array of a state, in order, whose it is.

    Args:
      state: The state of a transformation.
      template: A structure like the parameters, with their numbers as leaves.
    """
    names = {number: _parts(path) for path, number in tree_flatten_with_path(template)[0]}
    found: list[LeafOrigin] = []
    nodes, _ = tree_flatten_with_path(state, is_leaf=lambda n: split(template, n) is not None)
    for path, node in nodes:
        start = _parts(path)
        slots = split(template, node)
        if slots is None:
            found.append(LeafOrigin(start, None, start))
            continue
        for owner, part in slots:
            for inner, _ in tree_flatten_with_path(part)[0]:
                end = _parts(inner)
                whole = (*start, *names[owner], *end)
                found.append(LeafOrigin(whole, owner, (*start, *end)))
    return found


def split(template: Any, node: Any) -> list[tuple[int, Any]] | None:
    """Takes a tree of the structure of the parameters apart.

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
    found: list[tuple[int, Any]] = []
    for child, other in zip(children, others, strict=True):
        inner = split(child, other)
        if inner is None:
            return None
        found += inner
    return found


def _children(node: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(node, is_leaf=lambda inner: inner is not node)


def _parts(path: Any) -> Path:
    return tuple(keystr((key,), simple=True) for key in path)


def shortest_names(paths: Sequence[Path]) -> list[str]:
    """Names each path by its last parts, as few as tell it from the others.

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


class StateVariables:
    """The variables behind the state of one transformation.

    Attributes:
      origins: Where each variable comes from.
      variables: One variable per array of the state.
    """

    def __init__(
        self,
        state: Any,
        template: Any,
        owners: Sequence[Variable],
        make: Callable[[Any, LeafOrigin, str], Variable],
    ) -> None:
        leaves, self._treedef = jax.tree.flatten(state)
        self.origins = origins_of(state, template)
        self._key_kinds = [_kind_of_key(leaf) for leaf in leaves]
        self._short = _names_by_owner(self.origins)
        self.variables: list[Variable] = []
        for leaf, origin, short in zip(leaves, self.origins, self._short, strict=True):
            name = "optimizer" if origin.owner is None else owners[origin.owner].name
            self.variables.append(make(leaf, origin, f"{name}/{short}"))

    def read(self, frame: Frame) -> list[Any]:
        """Returns the arrays of the state; keys as their data."""
        return [variable.read(frame) for variable in self.variables]

    def assemble(self, arrays: Sequence[Any]) -> Any:
        """Returns the state around some arrays."""
        leaves = [
            array if kind is None else jax.random.wrap_key_data(array, impl=kind)
            for array, kind in zip(arrays, self._key_kinds, strict=True)
        ]
        return jax.tree.unflatten(self._treedef, leaves)

    def arrays_of(self, state: Any) -> list[Any]:
        """Returns the arrays of a later state, or raises if it has another structure."""
        leaves, treedef = jax.tree.flatten(state)
        if treedef != self._treedef:
            raise errors.UnsupportedError(
                "A transformation must keep the structure of its state",
                f"{self._treedef} became {treedef}",
                "Return the same containers from `update` as from `init`.",
            )
        return [
            leaf if kind is None else jax.random.key_data(leaf)
            for leaf, kind in zip(leaves, self._key_kinds, strict=True)
        ]

    def slots(self, owner: int) -> dict[str, Variable]:
        """Returns the slots of one variable, by name."""
        found = zip(self.origins, self._short, self.variables, strict=True)
        return {short: v for origin, short, v in found if origin.owner == owner}

    def slot_places(self, owner: int) -> list[int]:
        """Returns the places of one variable's slots among `variables`."""
        return [i for i, origin in enumerate(self.origins) if origin.owner == owner]

    def hyperparams(self) -> dict[str, Variable]:
        """Returns what `optax.inject_hyperparams` keeps in the state, by name."""
        found = [
            (origin.path, variable)
            for origin, variable in zip(self.origins, self.variables, strict=True)
            if len(origin.path) > 1 and origin.path[-2] == "hyperparams" and origin.owner is None
        ]
        names = shortest_names([path for path, _ in found])
        return {name: variable for name, (_, variable) in zip(names, found, strict=True)}

    def is_scheduled(self, hyperparam: Variable) -> bool:
        """Tells whether a schedule sets a hyperparameter anew at each update."""
        place = next(i for i, v in enumerate(self.variables) if v is hyperparam)
        *start, _, name = self.origins[place].path
        schedule = (*start, "hyperparams_states", name)
        return any(origin.path[: len(schedule)] == schedule for origin in self.origins)

    def by_path(self) -> dict[str, Variable]:
        """Returns all variables, by their path in the state."""
        names = ["/".join(origin.path) for origin in self.origins]
        return dict(zip(names, self.variables, strict=True))


def local_maker(
    owners: Sequence[Variable], extended: Any
) -> Callable[[Any, LeafOrigin, str], Variable]:
    """Returns what makes a variable of each array of a state, near its owner."""
    others = extended.non_slot_devices(owners)

    def make(leaf: Any, origin: LeafOrigin, name: str) -> Variable:
        near = others if origin.owner is None else owners[origin.owner]
        return make_variable(_as_array(leaf, origin), name, near, extended)

    return make


def make_variable(value: Any, name: str, near: Any, extended: Any) -> Variable:
    """Makes a variable of the optimizer on the devices of another one, or on named ones."""
    aggregation = VariableAggregation.ONLY_FIRST_REPLICA
    # The default strategy puts variables where the code says: say it.
    has_one_home = isinstance(near, Variable) and near.owner is None
    here = devices.device(near.placement[0]) if has_one_home else contextlib.nullcontext()
    with extended.colocate_vars_with(near), here:
        return Variable(value, False, name=name, aggregation=aggregation)


def _names_by_owner(origins: Sequence[LeafOrigin]) -> list[str]:
    names: dict[int, str] = {}
    for owner in {origin.owner for origin in origins}:
        own = [i for i, origin in enumerate(origins) if origin.owner == owner]
        paths = [origins[i].slot_path for i in own]
        # What belongs to no variable keeps its whole path: "count" alone would say little.
        short = ["/".join(p) for p in paths] if owner is None else shortest_names(paths)
        names.update(zip(own, short, strict=True))
    return [names[i] for i in range(len(origins))]


def _kind_of_key(leaf: Any) -> Any:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_impl(leaf) if is_key else None


def _as_array(leaf: Any, origin: LeafOrigin) -> Any:
    if not is_array_like(leaf):
        raise errors.UnsupportedError(
            "The state of a transformation must consist of arrays",
            f"it has a {type(leaf).__name__} at {'/'.join(origin.path)!r}",
            "Keep such objects outside of the state.",
        )
    with jax_compat.eagerly():
        return jnp.asarray(leaf if _kind_of_key(leaf) is None else jax.random.key_data(leaf))
