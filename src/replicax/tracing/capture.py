"""Capture: running a stateful function once, on tracers, and getting a pure program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax.contexts.overlay import Overlay, View
from replicax.foundation import jax_compat
from replicax.values.layout import AXIS


class CapturingOverlay(Overlay):
    """An overlay that brings variables into its trace as constants that stand for them.

    The first read of a variable emits a copy of a stand-in array. JAX lists the stand-in
    among the constants of the finished program, and its identity says which variable's
    value has to take its place.
    """

    def __init__(self, parent: Overlay | None, view: View) -> None:
        super().__init__(parent, view)
        # Keeps stand-ins alive while their ids are in use.
        self.stand_ins: dict[int, tuple[Any, Any]] = {}
        # Variables created inside the trace, with their traced initial values.
        self.created: dict[Any, Any] = {}
        # Place of each array that a data iterator feeds, by the id of its stand-in.
        self.fed_places: dict[int, int] = {}

    def first_read(self, variable: Any) -> Any:
        with jax_compat.eagerly():
            stand_in = self._stand_in(variable)
        self.stand_ins[id(stand_in)] = (variable, stand_in)
        return jnp.copy(stand_in)

    def _stand_in(self, variable: Any) -> jax.Array:
        stored = variable.stored
        if self.view is View.LOCAL and variable.layout is not None:
            if variable.is_per_replica or stored is None:
                return jnp.zeros(variable.shape, variable.dtype)
            stored = variable.layout.copy_for(stored, 0)
        if stored is None:
            shape = variable.shape
            if variable.is_per_replica and variable.layout is not None:
                shape = variable.layout.global_shape(shape)
            return jnp.zeros(shape, variable.dtype)
        # A new array object over the same buffers: its identity is ours alone.
        parts = [shard.data for shard in stored.addressable_shards]
        return jax.make_array_from_single_device_arrays(stored.shape, stored.sharding, parts)

    def adopt(self, variable: Any, initial_value: Any) -> None:
        self.created[variable] = initial_value

    def close(self) -> None:
        """Lets go of the trace's values, which must not outlive it."""
        self.values = {}
        self.created = dict.fromkeys(self.created)
        self.trace = None


@dataclasses.dataclass
class Capture:
    """A pure program, and what its inputs and outputs stand for.

    The program takes the values of `variables`, then `constants`, then what data iterators
    feed, then the arguments; it returns the new values of `written`, the initial values of
    `created`, then the results.
    """

    jaxpr: Any
    variables: list[Any]
    constants: list[Any]
    written: list[Any]
    created: list[Any]
    # For each constant of the jaxpr, its place among variables + constants + fed arrays.
    order: list[int]

    def needs(self, created: int) -> set[Any]:
        """Returns the variables that the initial value of a created variable depends on."""
        outputs = self.jaxpr.outvars
        wanted = {outputs[len(self.written) + created]}
        for eqn in reversed(self.jaxpr.eqns):
            if wanted.intersection(eqn.outvars):
                wanted.update(v for v in eqn.invars if not hasattr(v, "val"))
        read = zip(self.jaxpr.constvars, self.order, strict=True)
        places = [i for var, i in read if var in wanted]
        return {self.variables[i] for i in places if i < len(self.variables)}

    def run(
        self,
        variables: Sequence[Any],
        constants: Sequence[Any],
        args: Sequence[Any],
        fed: Sequence[Any] = (),
    ) -> Any:
        """Runs the program in the current trace."""
        given = [*variables, *constants, *fed]
        return jax_compat.eval_jaxpr(self.jaxpr, [given[i] for i in self.order], *args)


def capture(
    body: Callable[..., list[Any]],
    args: Sequence[Any],
    overlay: CapturingOverlay,
    num_replicas: int | None = None,
) -> Capture:
    """Traces `body` once.

    Args:
      body: Takes arrays and returns a flat list of arrays; runs with `overlay` in force.
      args: Arrays or shapes of the arguments.
      overlay: Collects what is read, written and created.
      num_replicas: If given, the code may use collectives over this many replicas.
    """

    def flat(*traced: Any) -> Any:
        with overlay.opened():
            results = body(*traced)
            written = [overlay.values[v] for v in overlay.written]
            initial = list(overlay.created.values())
            overlay.close()
            return written, initial, results

    axis_env = None if num_replicas is None else [(AXIS, num_replicas)]
    closed = jax.make_jaxpr(flat, axis_env=axis_env)(*args)
    variables: list[Any] = []
    constants: list[Any] = []
    places: list[tuple[int, int]] = []
    for const in closed.consts:
        found = overlay.stand_ins.get(id(const))
        if found is not None:
            places.append((0, len(variables)))
            variables.append(found[0])
        elif id(const) in overlay.fed_places:
            places.append((2, overlay.fed_places[id(const)]))
        else:
            places.append((1, len(constants)))
            constants.append(const)
    starts = (0, len(variables), len(variables) + len(constants))
    order = [starts[kind] + i for kind, i in places]
    return Capture(
        closed.jaxpr, variables, constants, list(overlay.written), list(overlay.created), order
    )
