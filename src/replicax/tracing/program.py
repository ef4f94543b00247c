"""One compiled program of a function: how it is built, called, and keeps state safe."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from replicax.contexts import frames
from replicax.contexts.overlay import View
from replicax.foundation import devices, gate, jax_compat, placement
from replicax.foundation.jax_compat import Device
from replicax.tracing import capture as capturing
from replicax.tracing import exchange, feeds, signature
from replicax.tracing.consumption import Consumption
from replicax.tracing.reach import Bindings, Reach
from replicax.values.array_surface import ArraySurface
from replicax.values.distributed_values import Mirrored, PerReplica, TracedPerReplica
from replicax.values.indexed_slices import IndexedSlices
from replicax.values.layout import ProgramLayout, ReplicaLayout, copier
from replicax.values.regroup import leaves_of, map_structure

# References to a variable's array while it is looked at: the variable's own, the local
# name, and the argument of getrefcount. More means that somebody else holds it.
_OWN_REFERENCES = 3


class ProgramOverlay(capturing.CapturingOverlay):
    """The overlay of a compiled function; knows the replicas that the function runs on."""

    def __init__(self, supply: feeds.Supply, consumption: Consumption) -> None:
        super().__init__(None, View.STORED)
        self._consumption = consumption
        # Set by the first `run` of a strategy with several devices.
        self.program_layout = ProgramLayout()
        self.creations: list[Any] = []
        self.feed_inputs = feeds.FeedInputs(supply)
        self.fed_places = self.feed_inputs.positions

    def outside_program(self) -> contextlib.AbstractContextManager[None]:
        return self._consumption.allowed()

    def note_creation(self, variable: Any) -> None:
        self.creations.append(variable)


def note_layout(overlay: Any, layout: ReplicaLayout) -> None:
    """Tells the function being compiled which replicas it runs."""
    while overlay.parent is not None:
        overlay = overlay.parent
    if not isinstance(overlay, ProgramOverlay):
        return
    found = overlay.program_layout
    # A program of several devices computes what one device would as well.
    if found.layout is None or (layout.is_mesh and not found.layout.is_mesh):
        found.layout = layout


class Program:
    """A compiled function for one key of arguments, and one sequence of fed elements."""

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        arguments: signature.Arguments,
        supply: feeds.Supply,
    ) -> None:
        leaves = leaves_of(arguments.skeleton)
        consumption = Consumption(name, Reach(fn, leaves))
        overlay = ProgramOverlay(supply, consumption)
        frame = frames.current().with_overlay(overlay)
        results: list[Any] = []

        def body(*arrays: Any) -> list[Any]:
            args, kwargs = signature.fill(arguments.skeleton, arrays)
            results.append(_Results(fn(*args, **kwargs)))
            return results[0].take_arrays()

        with frames.pushed(frame), overlay.program_layout.in_force(), consumption.watched():
            captured = capturing.capture(body, arguments.arrays, overlay)
        consumption.require_none()
        # As the trace has left them: it may have created what it found missing.
        self.bindings = Bindings(Reach(fn, leaves))
        self._results: _Results = results[0]
        # What the function took from data iterators; another sequence needs another program.
        self.events = [event for event, _ in supply.events]
        # What the program makes of it.
        self.fed = tuple(overlay.feed_inputs.fed)
        layouts = signature.layouts_of(arguments.skeleton) + overlay.feed_inputs.layouts
        arrays = [*arguments.arrays, *map(supply.input_of, self.fed)]
        self._finish(captured, overlay, layouts, arrays)

    @property
    def variables(self) -> tuple[Any, ...]:
        """The variables that the program reads, writes or creates."""
        remote = [] if self._exchange is None else self._exchange.variables
        return tuple(dict.fromkeys([*self._local, *remote, *self._written, *self.created]))

    @property
    def constants(self) -> tuple[Any, ...]:
        """Arrays that the function captured from outside."""
        return tuple(self._constants)

    @property
    def structured_outputs(self) -> Any:
        """The structure of the results, with a spec for each array."""
        return self._results.specs(self._result_shapes)

    def _finish(
        self, captured: Any, overlay: ProgramOverlay, layouts: list[Any], arrays: list[Any]
    ) -> None:
        self.created: list[Any] = overlay.creations
        self._num_fed = len(overlay.fed_places)
        self._layout = (
            overlay.program_layout.layout or self._results.layout or _layout_of(captured, layouts)
        )
        is_mesh = self._layout is not None and self._layout.is_mesh
        self._mesh = self._layout if is_mesh else None
        self._takes_turns = self._mesh is not None and gate.needs_turns(self._mesh.devices)
        self._home = _home_of(self._layout, captured)
        self._constants = self._on_devices(captured.constants)
        if self._home is None:
            self._constants = [placement.uncommitted(c) for c in self._constants]
        outputs = captured.jaxpr.outvars[captured.num_states :]
        self._result_shapes = [(out.aval.shape, out.aval.dtype) for out in outputs]
        self._written: list[Any] = captured.written
        # Read and written: the old value goes in, and its buffer is reused for the new one.
        changed = set(captured.written)
        self._donated = [v for v in captured.variables if v in changed]
        self._kept = [v for v in captured.variables if v not in changed and not v.is_remote]
        self._local = [v for v in captured.variables if not v.is_remote]
        self._exchange: exchange.RemoteExchange | None = None
        if exchange.is_needed(captured):
            self._exchange = exchange.RemoteExchange(captured, self._compiled_part)
        self._is_cold = self._exchange is not None
        self._has_effects = bool(captured.jaxpr.effects)
        # What a program without inputs gives, which is the same each time.
        self._is_fixed = captured.is_fixed
        self._fixed: tuple[list[Any], list[Any]] | None = None
        self._build(captured if self._exchange is None else self._exchange.program)
        if captured.created:
            self._initialize(captured, arrays)
        # Variables of other devices than the program's, and of those that it writes their
        # index in the list, the nearest shard, and where that has to be moved, if it has to be.
        used = dict.fromkeys((*self._donated, *self._kept))
        self._near = dict.fromkeys(v for v in used if self._is_foreign(v))
        self._homes = [
            (i, *self._way_home(v.stored.sharding))
            for i, v in enumerate(self._written)
            if self._is_foreign(v)
        ]

    def _build(self, captured: Any) -> None:
        place = {v: i for i, v in enumerate(captured.variables)}
        places = [place[v] for v in (*self._donated, *self._kept)]
        places += [i for i, v in enumerate(captured.variables) if v.is_remote]
        num_written, num_created = len(captured.written), len(captured.created)
        start = num_written + num_created
        run = self._run_captured

        def program(old: Any, read: Any, constants: Any, arrays: Any, pulled: Any) -> Any:
            pulled_values, rows, handed = pulled
            values: list[Any] = [None] * len(places)
            for i, value in zip(places, (*old, *read, *pulled_values), strict=True):
                values[i] = value
            outs = run(captured, values, constants, arrays, rows, handed)
            changed = outs[start : start + captured.num_changed]
            # The last output belongs to the gate alone.
            results = outs[captured.num_states :]
            return outs[:num_written], results, changed, jnp.zeros((), jnp.int8)

        donate = () if jax_compat.has_callbacks(captured.jaxpr) else (0,)
        self._run = jax.jit(program, donate_argnums=donate, out_shardings=self._shardings(captured))

    def _shardings(self, captured: Any) -> Any:
        """Returns where the outputs of the program have to be; None to leave it to JAX."""
        if self._home is None:
            return None
        here, layout = self._home.sharding, self._layout
        state = [
            layout.per_replica
            if layout is not None and v.is_per_replica and not self._is_foreign(v)
            else here
            for v in self._written
        ]
        changed = [here] * captured.num_changed
        return state, self._results.shardings(layout, here), changed, here

    def _run_captured(
        self,
        captured: Any,
        values: Any,
        constants: Any,
        arrays: Any,
        rows: Any = (),
        handed: Any = (),
    ) -> Any:
        """Runs the captured program; `arrays` are the arguments, then what was fed."""
        start = len(arrays) - self._num_fed
        return captured.run(values, constants, [*arrays[:start], *handed], arrays[start:], rows)

    def _compiled_part(self, part: Any) -> Callable[..., list[Any]]:
        """Compiles a part of the captured program, which may need few of its inputs."""

        def run(local: Any, remote: Any, rows: Any, arrays: Any, handed: Any) -> Any:
            here, pulled = iter(local), iter(remote)
            values = [next(pulled, None) if v.is_remote else next(here) for v in part.variables]
            return self._run_captured(part, values, self._constants, arrays, rows, handed)

        compiled = jax.jit(run)

        def called(local: Any, remote: Any, rows: Any, arrays: Any, handed: Any) -> list[Any]:
            if self._mesh is not None:
                remote, rows = self._on_devices(remote), self._on_devices(rows)
            with gate.state():
                if self._takes_turns:
                    gate.wait_for_previous()
                # What it computes is sent off or used at once.
                return jax.block_until_ready(compiled(local, remote, rows, arrays, handed))

        return called

    def _initialize(self, captured: Any, arrays: list[Any]) -> None:
        """Computes, once, the first values of variables that the function created.

        An initial value may depend on another created variable, which then comes first.
        """
        waiting = dict(enumerate(captured.created))
        while waiting:
            ready = [i for i in waiting if not captured.needs(i) & set(waiting.values())]
            ready = ready or list(waiting)

            def initial(values: Any, constants: Any, arrays: Any, ready: Any = ready) -> Any:
                outs = self._run_captured(captured, values, constants, arrays)
                return [outs[len(captured.written) + i] for i in ready]

            values = [
                jnp.zeros(v.shape, v.dtype) if v.stored is None else v.stored
                for v in captured.variables
            ]
            with gate.state():
                gate.wait_for_previous()
                found = jax.jit(initial)(
                    self._on_devices(values), self._constants, self._on_devices(arrays)
                )
                jax.block_until_ready(found)
            for i, value in zip(ready, found, strict=True):
                waiting.pop(i).initialize(value.addressable_shards[0].data)

    def __call__(self, arrays: list[Any]) -> Any:
        arrays = self._on_devices(arrays)
        if self._fixed is not None:
            outs, changed = self._fixed
            if self._exchange is not None:
                self._exchange.push(changed)
            return self._results.rebuild(outs, self._layout)
        pulled: Any = ((), (), ())
        if self._exchange is not None:
            local = [v.stored for v in self._local] if self._local else []
            if self._is_cold:
                self._warm_up(local, arrays)
            pulled = self._exchange.pull(local, arrays)
            if self._mesh is not None:
                pulled = tuple(map(self._on_devices, pulled))
        with gate.state():
            outs, changed = self._dispatch(arrays, pulled)
        if self._is_fixed:
            self._fixed = outs, changed
        if self._exchange is not None:
            self._exchange.push(changed)
        return self._results.rebuild(outs, self._layout)

    def _warm_up(self, local: list[Any], arrays: list[Any]) -> None:
        """Compiles before values are pulled: others would change them meanwhile."""
        self._is_cold = False
        if self._exchange is None or self._written or self._has_effects:
            return
        pulled: Any = self._exchange.rehearsed(local, arrays)
        with gate.state():
            self._dispatch(arrays, pulled)

    def _dispatch(self, arrays: list[Any], pulled: Any) -> tuple[list[Any], list[Any]]:
        old, kept = self._near_state() if self._near else self._state()
        if self._takes_turns:
            gate.wait_for_previous()
        new, outs, changed, token = self._run(old, kept, self._constants, arrays, pulled)
        if self._takes_turns:
            gate.set_running(token)
        for variable, value in zip(self._written, new, strict=True):
            variable.stored = value
            variable.is_lent = False
        if self._homes:
            self._bring_home(new)
        return outs, changed

    def _state(self) -> tuple[list[Any], list[Any]]:
        """Returns the arrays of the variables: those to be replaced, and the others."""
        # The hot loop: no call per variable but getrefcount.
        old: list[Any] = []
        count_references = sys.getrefcount
        for variable in self._donated:
            array = variable.stored
            if variable.is_lent or count_references(array) > _OWN_REFERENCES:
                array = copier(array.sharding)(array)
            old.append(array)
        return old, [variable.stored for variable in self._kept]

    def _near_state(self) -> tuple[list[Any], list[Any]]:
        """Returns the same where variables live on other devices: copies on the program's.

        A copy serves until the variable changes. The last program that changed it has left
        one behind.
        """
        assert self._home is not None
        here = self._home.sharding
        stale = [v for v in self._near if not _is_copy_of(v.mesh_copy, v.stored, here)]
        if stale:
            moved = self._on_devices([variable.stored for variable in stale])
            for variable in reversed(stale):
                variable.mesh_copy = variable.stored, moved.pop()
        old: list[Any] = []
        for variable in self._donated:
            array = variable.stored
            if variable in self._near:
                array, variable.mesh_copy = variable.mesh_copy[1], None
            if variable.is_lent or sys.getrefcount(array) > _OWN_REFERENCES:
                array = copier(array.sharding)(array)
            old.append(array)
        kept = [v.mesh_copy[1] if v in self._near else v.stored for v in self._kept]
        return old, kept

    def _bring_home(self, new: list[Any]) -> None:
        """Stores new values on the devices of their variables, and keeps them here as well."""
        for i, shard, home in self._homes:
            variable, value = self._written[i], new[i]
            # Twice as fast as the list of shards, but for replicated arrays it knows one only.
            part = value.addressable_data(0) if shard == 0 else value.addressable_shards[shard].data
            variable.stored = part if home is None else jax.device_put(part, home)
            variable.mesh_copy = variable.stored, value

    def _is_foreign(self, variable: Any) -> bool:
        return self._home is not None and not self._home.holds(variable)

    def _way_home(self, home: Any) -> tuple[int, Any]:
        """Returns which shard of a result is nearest to a variable, and where to move it."""
        assert self._home is not None
        if len(home.device_set) > 1 or not home.device_set <= set(self._home.devices):
            return 0, home
        return self._home.devices.index(next(iter(home.device_set))), None

    def _on_devices(self, arrays: list[Any]) -> list[Any]:
        """Copies arrays of other devices to the devices of the program."""
        if self._home is None:
            return _reconciled(arrays)
        return self._home.take(arrays)


def _is_copy_of(copy: tuple[Any, Any] | None, stored: Any, sharding: Any) -> bool:
    return copy is not None and copy[0] is stored and copy[1].sharding == sharding


def _layout_of(captured: Any, layouts: list[Any]) -> ReplicaLayout | None:
    """Returns the replicas of a function that runs none, by its variables and arguments.

    If there are several, those of most variables, which then need not move.
    """
    variables = dict.fromkeys((*captured.variables, *captured.written))
    found = [v.layout for v in variables if v.layout is not None] + layouts
    return max(found, key=found.count, default=None)


class _Home:
    """The devices of one program: those of its replicas, or the one of its variables.

    Attributes:
      sharding: How arrays that are equal on all of the devices are placed.
      devices: The devices, in the order of the mesh.
    """

    def __init__(self, sharding: Sharding, devices: tuple[Device, ...]) -> None:
        self.sharding = sharding
        self.devices = devices
        self._device_set = sharding.device_set
        self._mesh = getattr(sharding, "mesh", None)

    def holds(self, variable: Any) -> bool:
        """Tells whether the array behind a variable is on these devices, in this order."""
        return _places_of(variable) == self.devices

    def take(self, arrays: list[Any]) -> list[Any]:
        """Copies arrays of other devices to these."""
        moving = [
            i for i, a in enumerate(arrays) if isinstance(a, jax.Array) and self._is_elsewhere(a)
        ]
        if not moving:
            return arrays
        arrays = list(arrays)
        moved = jax.device_put([arrays[i] for i in moving], self.sharding)
        for i, array in zip(moving, moved, strict=True):
            arrays[i] = array
        return arrays

    def _is_elsewhere(self, array: jax.Array) -> bool:
        sharding = array.sharding
        if sharding.device_set != self._device_set:
            return True
        mesh = getattr(sharding, "mesh", None)
        if mesh is None or mesh is self._mesh:
            return False
        return tuple(mesh.devices.flat) != self.devices


def _home_of(layout: ReplicaLayout | None, captured: Any) -> _Home | None:
    """Returns where a program runs; None if it has neither replicas nor variables."""
    if layout is not None:
        return _Home(layout.replicated, _ordered(layout))
    variables = dict.fromkeys((*captured.variables, *captured.written, *captured.created))
    sizes: dict[Device, int] = {}
    for variable in variables:
        if variable.is_remote:
            continue
        places = _places_of(variable)
        if len(places) != 1:
            return None  # an array that the user spread over devices: JAX knows best
        sizes[places[0]] = sizes.get(places[0], 0) + math.prod(variable.shape)
    if not sizes:
        return None
    # Where most of the state is: the rest moves with each call.
    device = max(sizes, key=lambda device: sizes[device])
    return _Home(SingleDeviceSharding(device), (device,))


def _reconciled(arrays: list[Any]) -> list[Any]:
    """Copies arrays to the current device if they are committed to different ones."""
    first = None
    for array in arrays:
        if not isinstance(array, jax.Array) or not array.committed:
            continue
        if first is None:
            first = array.sharding
        elif array.sharding is not first and array.sharding.device_set != first.device_set:
            device = devices.current()
            return [placement.usable_on(a, device) for a in arrays]
    return arrays


def _places_of(variable: Any) -> tuple[Device, ...]:
    return variable.placement if variable.layout is None else _ordered(variable.layout)


def _ordered(layout: ReplicaLayout) -> tuple[Device, ...]:
    return layout.devices if layout.is_mesh else layout.devices[:1]


class _Results:
    """The results of a trace: their arrays, and how to put new arrays in their place."""

    def __init__(self, structure: Any) -> None:
        self._arrays: list[Any] = []
        self.layout: ReplicaLayout | None = None
        # For each array of all replicas, the replicas; None for any other array.
        self._layouts: list[ReplicaLayout | None] = []
        self._skeleton = map_structure(self._record, structure)

    def _record(self, leaf: Any) -> Any:
        start = len(self._arrays)
        if isinstance(leaf, PerReplica) and not isinstance(leaf, TracedPerReplica):
            return self._record_per_replica(leaf)
        if isinstance(leaf, Mirrored):
            self._add([leaf.values[0]])
            return signature.Slot(start, "mirrored", len(leaf.values))
        if isinstance(leaf, ArraySurface) or leaf is None:
            return leaf
        is_python = isinstance(leaf, bool | int | float | complex)
        if is_python or isinstance(leaf, np.ndarray) or signature.is_numpy_number(leaf):
            leaf = jnp.asarray(leaf)
        if isinstance(leaf, jax.Array):
            self._add([leaf])
            return signature.Slot(start, "array")
        return leaf.map_arrays(self._record) if isinstance(leaf, IndexedSlices) else leaf

    def _record_per_replica(self, leaf: PerReplica) -> Any:
        start = len(self._arrays)
        stored = None if leaf.layout is None else leaf.stored(leaf.layout)
        if stored is None:
            # Components of different shapes: results of their own, joined again afterwards.
            return PerReplica([self._record(v) for v in leaf.values], leaf.layout)
        self.layout = leaf.layout
        self._add(stored, leaf.layout)
        return signature.Slot(
            start, "per_replica", len(stored), leaf.layout, leaf.treedef, leaf.scalars
        )

    def take_arrays(self) -> list[Any]:
        """Hands the traced arrays over; keeping them would leak the trace."""
        arrays, self._arrays = self._arrays, []
        return arrays

    def _add(self, arrays: Any, layout: ReplicaLayout | None = None) -> None:
        self._arrays += arrays
        self._layouts += [layout] * len(arrays)

    def specs(self, shapes: list[tuple[tuple[int, ...], Any]]) -> Any:
        """Returns the structure of the results, with a spec for each array."""

        def visit(leaf: Any) -> Any:
            if isinstance(leaf, PerReplica):
                return signature.PerReplicaSpec(tuple(visit(v) for v in leaf.values))
            if isinstance(leaf, IndexedSlices):
                return leaf.map_arrays(visit)
            if not isinstance(leaf, signature.Slot):
                return leaf
            if leaf.kind != "per_replica":
                return signature.TensorSpec(*shapes[leaf.index])
            own = [
                signature.PerReplicaSpec(
                    (signature.TensorSpec(leaf.layout.local_shape(shape, is_scalar), dtype),)
                    * leaf.layout.num_replicas
                )
                for (shape, dtype), is_scalar in zip(
                    shapes[leaf.index : leaf.index + leaf.count], leaf.scalars, strict=True
                )
            ]
            return jax.tree.unflatten(leaf.treedef, own)

        return map_structure(visit, self._skeleton)

    def shardings(self, layout: ReplicaLayout | None, here: Sharding) -> list[Any]:
        """Returns where the program has to leave each result array."""
        is_own = [layout is not None and own == layout for own in self._layouts]
        return [layout.per_replica if own and layout else here for own in is_own]

    def rebuild(self, arrays: list[Any], layout: ReplicaLayout | None) -> Any:
        """Returns the structure of the results with other arrays in it."""
        mesh = layout if layout is not None and layout.is_mesh else None

        def visit(leaf: Any) -> Any:
            if isinstance(leaf, PerReplica):
                return PerReplica([visit(v) for v in leaf.values], leaf.layout)
            if isinstance(leaf, IndexedSlices):
                return leaf.map_arrays(visit)
            if not isinstance(leaf, signature.Slot):
                return leaf
            if leaf.kind == "per_replica":
                stored = arrays[leaf.index : leaf.index + leaf.count]
                if leaf.layout != layout:
                    # Replicas of another strategy than the one whose devices ran the program.
                    stored = jax.device_put(stored, leaf.layout.per_replica)
                return PerReplica.from_stored(stored, leaf.scalars, leaf.treedef, leaf.layout)
            array = arrays[leaf.index]
            if leaf.kind == "mirrored":
                copies = (array,) if mesh is None else mesh.copies(array)
                copies = tuple(map(placement.uncommitted, copies))
                return Mirrored(copies if len(copies) == leaf.count else copies[:1] * leaf.count)
            first = array if mesh is None else array.addressable_shards[0].data
            return placement.uncommitted(first)

        return map_structure(visit, self._skeleton)
