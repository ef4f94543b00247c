"""A compiled program of a function: building it, calling it, and donating its state safely."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import ArrayLike

from replicax.contexts import frames
from replicax.contexts.overlay import Overlay, View
from replicax.foundation import device_spans, devices, gate, jax_compat, placement, spans
from replicax.foundation.jax_compat import Device
from replicax.foundation.types import Tree
from replicax.observe import progress
from replicax.tracing import capture as capturing
from replicax.tracing import exchange, feeds, signature
from replicax.tracing.capture import Capture
from replicax.tracing.consumption import Consumption
from replicax.tracing.reach import Bindings, Reach
from replicax.tracing.structures import Results
from replicax.values.layout import ProgramLayout, ReplicaLayout, copier
from replicax.values.regroup import leaves_of
from replicax.variables.variable import Variable

# References to a variable's array in the loop that counts them: the variable's own, the local
# name, and the argument of getrefcount. More means that other code holds the array.
_OWN_REFERENCES = 3

_Arrays: TypeAlias = Sequence[ArrayLike]
_A = TypeVar("_A", bound=ArrayLike | None)


class ProgramOverlay(capturing.CapturingOverlay):
    """The overlay of a compiled function."""

    def __init__(self, supply: feeds.Supply, consumption: Consumption) -> None:
        super().__init__(None, View.STORED)
        self._consumption = consumption
        # Set by the first `run` of a strategy with several devices.
        self.program_layout = ProgramLayout()
        self.creations: list[Variable] = []
        self.feed_inputs = feeds.FeedInputs(supply)
        self.fed_indices = self.feed_inputs.indices

    def outside_program(self) -> contextlib.AbstractContextManager[None]:
        return self._consumption.allowed()

    def note_creation(self, variable: object) -> None:
        assert isinstance(variable, Variable)
        self.creations.append(variable)


def note_layout(overlay: Overlay, layout: ReplicaLayout) -> None:
    """Sets the layout of the function being compiled."""
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
        fn: Callable[..., Tree],
        arguments: signature.Arguments,
        supply: feeds.Supply,
    ) -> None:
        self._name = name
        leaves = leaves_of(arguments.skeleton)
        consumption = Consumption(name, Reach(fn, leaves))
        overlay = ProgramOverlay(supply, consumption)
        frame = frames.current().with_overlay(overlay)
        results: list[Results] = []

        def body(*arrays: jax.Array) -> list[jax.Array]:
            args, kwargs = signature.fill(arguments.skeleton, arrays)
            results.append(Results(fn(*args, **kwargs)))
            return results[0].take_arrays()

        with frames.pushed(frame), overlay.program_layout.in_force(), consumption.watched():
            captured = capturing.capture(body, arguments.arrays, overlay)
        consumption.require_none()
        # After the trace, which may have created what was missing.
        self.bindings = Bindings(Reach(fn, leaves))
        self._results = results[0]
        # The elements taken from data iterators; another sequence needs another program.
        self.events = [event for event, _ in supply.events]
        # The inputs that the program makes of them.
        self.fed = tuple(overlay.feed_inputs.fed)
        layouts = signature.layouts_of(arguments.skeleton) + overlay.feed_inputs.layouts
        arrays = [*arguments.arrays, *map(supply.input_of, self.fed)]
        self._finish(captured, overlay, layouts, arrays)

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The variables that the program reads, writes or creates."""
        remote = [] if self._exchange is None else self._exchange.variables
        return tuple(dict.fromkeys([*self._local, *remote, *self._written, *self.created]))

    @property
    def constants(self) -> tuple[ArrayLike, ...]:
        """Arrays that the function captured from outside."""
        return tuple(self._constants)

    @property
    def structured_outputs(self) -> Tree:
        """The structure of the results, with a spec for each array."""
        return self._results.specs(self._result_shapes)

    def _finish(
        self,
        captured: Capture,
        overlay: ProgramOverlay,
        layouts: list[ReplicaLayout],
        arrays: _Arrays,
    ) -> None:
        self.created = overlay.creations
        self._num_fed = len(overlay.fed_indices)
        used = overlay.program_layout.layout or self._results.layout
        self._layout = used or _nearest(_layout_of(captured, layouts), captured, layouts)
        is_mesh = self._layout is not None and self._layout.is_mesh
        self._mesh = self._layout if is_mesh else None
        self._takes_turns = self._mesh is not None and gate.needs_turns(self._mesh.devices)
        self._devices = _devices_of(self._layout, captured)
        self._constants = self._on_devices(captured.constants)
        if self._devices is None:
            self._constants = [placement.uncommitted(c) for c in self._constants]
        outputs = captured.jaxpr.outvars[captured.num_states :]
        self._result_shapes = [jax_compat.shape_of(out.aval) for out in outputs]
        is_on_one_device = self._devices is not None and self._mesh is None
        self._rebuilt = self._results.rebuilder(self._layout, self._result_shapes, is_on_one_device)
        self._written = captured.written
        # Read and written: the buffer of the old value is reused for the new one.
        changed = set(captured.written)
        self._donated = [v for v in captured.variables if v in changed]
        self._kept = [v for v in captured.variables if v not in changed and not v.is_remote]
        self._local = [v for v in captured.variables if not v.is_remote]
        self._exchange: exchange.RemoteExchange | None = None
        if exchange.is_needed(captured):
            self._exchange = exchange.RemoteExchange(captured, self._compiled_part)
        self._is_cold = self._exchange is not None
        self._has_effects = bool(captured.jaxpr.effects)
        # The outputs of a program without inputs, the same in each call.
        self._is_fixed = captured.is_fixed
        # The processes that run the program together, and its number among theirs.
        self._peers = None if self._mesh is None else self._mesh.peers
        changes_state = bool(captured.written) or self._exchange is not None
        self._runs = progress.counter_of(self._name, changes_state)
        self._number: int | None = None
        self._has_run = False
        if self._peers is not None:
            self._fingerprint = jax_compat.fingerprint(captured.jaxpr)
        self._fixed: tuple[list[jax.Array], list[jax.Array]] | None = None
        self._build(captured if self._exchange is None else self._exchange.program)
        if captured.created:
            self._initialize(captured, arrays)
        # Variables on other devices than the program's.
        used = dict.fromkeys((*self._donated, *self._kept))
        self._moved = dict.fromkeys(v for v in used if self._is_on_other_devices(v))
        # For each of them that the program writes: its index among the written variables, the
        # nearest shard of the new value, and the sharding to move it to, if it has to move.
        self._returns = [
            (i, *self._return_path(v.stored.sharding))
            for i, v in enumerate(self._written)
            if self._is_on_other_devices(v)
        ]

    def _build(self, captured: Capture) -> None:
        index_of = {v: i for i, v in enumerate(captured.variables)}
        indices = [index_of[v] for v in (*self._donated, *self._kept)]
        indices += [i for i, v in enumerate(captured.variables) if v.is_remote]
        num_written, num_created = len(captured.written), len(captured.created)
        start = num_written + num_created
        run, takes_turns = self._run_captured, self._takes_turns

        def program(
            old: _Arrays,
            read: _Arrays,
            constants: _Arrays,
            arrays: _Arrays,
            pulled: exchange.Pulled,
        ) -> Tree:
            pulled_values, rows, handed = pulled
            values: list[ArrayLike | None] = [None] * len(indices)
            for i, value in zip(indices, (*old, *read, *pulled_values), strict=True):
                values[i] = value
            outs = run(captured, values, constants, arrays, rows, handed)
            changed = outs[start : start + captured.num_changed]
            results = outs[captured.num_states :]
            # For the gate: a result that nothing else refers to.
            token = jnp.zeros((), jnp.int8) if takes_turns else None
            return outs[:num_written], results, changed, token

        donate = () if jax_compat.has_callbacks(captured.jaxpr) else (0,)
        self._run = jax.jit(program, donate_argnums=donate, out_shardings=self._shardings(captured))

    def _shardings(self, captured: Capture) -> Tree:
        """Returns the shardings of the program's outputs; None to leave them to JAX."""
        if self._devices is None:
            return None
        here, layout = self._devices.sharding, self._layout
        state = [
            layout.per_replica
            if layout is not None and v.is_per_replica and not self._is_on_other_devices(v)
            else here
            for v in self._written
        ]
        changed = [here] * captured.num_changed
        token = here if self._takes_turns else None
        return state, self._results.shardings(layout, here), changed, token

    def _run_captured(
        self,
        captured: Capture,
        values: Sequence[ArrayLike | None],
        constants: _Arrays,
        arrays: _Arrays,
        rows: Sequence[ArrayLike | None] = (),
        handed: _Arrays = (),
    ) -> list[jax.Array]:
        """Runs the captured program; `arrays` are the arguments, then the fed arrays."""
        start = len(arrays) - self._num_fed
        return captured.run(values, constants, [*arrays[:start], *handed], arrays[start:], rows)

    def _compiled_part(self, part: Capture) -> Callable[..., list[jax.Array]]:
        """Compiles a part of the captured program, which may need few of its inputs."""

        def run(local: Tree, remote: Tree, rows: Tree, arrays: Tree, handed: Tree) -> Tree:
            here, pulled = iter(local), iter(remote)
            values = [next(pulled, None) if v.is_remote else next(here) for v in part.variables]
            return self._run_captured(part, values, self._constants, arrays, rows, handed)

        compiled = jax.jit(run)

        def called(
            local: _Arrays, remote: _Arrays, rows: _Arrays, arrays: _Arrays, handed: _Arrays
        ) -> list[jax.Array]:
            if self._mesh is not None:
                remote, rows = self._on_devices(remote), self._on_devices(rows)
            with gate.state():
                if self._takes_turns:
                    gate.wait_for_previous()
                # Its outputs are pushed or used at once.
                return jax.block_until_ready(compiled(local, remote, rows, arrays, handed))

        return called

    def _initialize(self, captured: Capture, arrays: _Arrays) -> None:
        """Computes, once, the first values of variables that the function created.

        An initial value may depend on another created variable, which then comes first.
        """
        waiting = dict(enumerate(captured.created))
        while waiting:
            ready = [i for i in waiting if not captured.needs(i) & set(waiting.values())]
            ready = ready or list(waiting)

            def initial(
                values: _Arrays, constants: _Arrays, arrays: _Arrays, ready: list[int] = ready
            ) -> list[jax.Array]:
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

    def __call__(self, arrays: Sequence[ArrayLike]) -> Tree:
        self._runs.count += 1
        arrays = self._on_devices(arrays)
        if self._fixed is not None:
            outs, changed = self._fixed
            if self._exchange is not None:
                self._exchange.push(changed)
            return self._rebuilt(outs)
        pulled: exchange.Pulled = ((), (), ())
        if self._exchange is not None:
            local = [v.stored for v in self._local] if self._local else []
            if self._is_cold:
                self._warm_up(local, arrays)
            pulled = self._exchange.pull(local, arrays)
            if self._mesh is not None:
                values, rows, handed = pulled
                on = self._on_devices
                pulled = on(values), on(rows), on(handed)
        began = spans.now()
        with gate.state():
            outs, changed = self._dispatch(arrays, pulled)
        if began and self._exchange is None:
            spans.record("call", began, label=self._name)
        elif began:
            # The push would wait for the program.
            jax.block_until_ready((outs, changed))
            spans.record("compute", began, label=self._name)
        if self._is_fixed:
            self._fixed = outs, changed
        if self._exchange is not None:
            self._exchange.push(changed)
        return self._rebuilt(outs)

    def _warm_up(self, local: list[jax.Array], arrays: list[ArrayLike]) -> None:
        """Compiles before values are pulled: other workers would change them meanwhile."""
        self._is_cold = False
        if self._exchange is None or self._written or self._has_effects:
            return
        pulled = self._exchange.rehearsed(local, arrays)
        with gate.state():
            self._dispatch(arrays, pulled)

    def _dispatch(
        self, arrays: list[ArrayLike], pulled: exchange.Pulled
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        old, kept = self._moved_state() if self._moved else self._state()
        if self._peers is None:
            new, outs, changed = self._run_in_turn(old, kept, arrays, pulled)
        else:
            if self._number is None:
                self._number = self._peers.confirm(self._name, self._fingerprint)
            with self._peers.guarded():
                self._peers.record(self._number)
                new, outs, changed = self._run_in_turn(old, kept, arrays, pulled)
        for variable, value in zip(self._written, new, strict=True):
            variable.stored = value
            variable.is_lent = False
        if self._returns:
            self._return_values(new)
        return outs, changed

    def _run_in_turn(
        self,
        old: list[jax.Array],
        kept: list[jax.Array],
        arrays: list[ArrayLike],
        pulled: exchange.Pulled,
    ) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
        if self._takes_turns:
            began = spans.now()
            gate.wait_for_previous(self)
            if began:
                spans.record("wait", began, label="devices")
        began = spans.now()
        new, outs, changed, token = self._run(old, kept, self._constants, arrays, pulled)
        if began:
            self._record_run(began, device_spans.output_to_watch(token, outs, new))
        self._has_run = True
        if self._takes_turns:
            gate.set_running(token)
        return new, outs, changed

    def _record_run(self, began: int, output: jax.Array | None) -> None:
        if not self._has_run:
            spans.record("compile", began, label=self._name)
            began = spans.now()
        # The caller waits for a program that exchanges values with servers.
        if began and self._exchange is None:
            device_spans.watch(output, began, "compute", self._name)

    def _state(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns the arrays of the variables: those to be replaced, and the others."""
        # The hot loop: no call per variable but getrefcount.
        old: list[jax.Array] = []
        count_references = sys.getrefcount
        for variable in self._donated:
            array = variable.stored
            if variable.is_lent or count_references(array) > _OWN_REFERENCES:
                array = copier(array.sharding)(array)
            old.append(array)
        return old, [variable.stored for variable in self._kept]

    def _moved_state(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns the state with copies, on the program's devices, of variables on other devices.

        A copy is valid until the variable changes; a program that changes the variable keeps
        the new value on its own devices as the next copy.
        """
        assert self._devices is not None
        here = self._devices.sharding
        stale = [v for v in self._moved if not _is_copy_of(v.mesh_copy, v.stored, here)]
        if stale:
            moved = self._on_devices([variable.stored for variable in stale])
            for variable in reversed(stale):
                variable.mesh_copy = variable.stored, moved.pop()
        old: list[jax.Array] = []
        for variable in self._donated:
            array = variable.stored
            if variable in self._moved:
                assert variable.mesh_copy is not None
                array, variable.mesh_copy = variable.mesh_copy[1], None
            if variable.is_lent or sys.getrefcount(array) > _OWN_REFERENCES:
                array = copier(array.sharding)(array)
            old.append(array)
        kept = [
            v.mesh_copy[1] if v in self._moved and v.mesh_copy is not None else v.stored
            for v in self._kept
        ]
        return old, kept

    def _return_values(self, new: list[jax.Array]) -> None:
        """Stores new values on the devices of their variables, and keeps them here as well."""
        for i, shard, sharding in self._returns:
            variable, value = self._written[i], new[i]
            # Twice as fast as the list of shards; of replicated arrays it returns shard 0 only.
            part = value.addressable_data(0) if shard == 0 else value.addressable_shards[shard].data
            variable.stored = part if sharding is None else jax.device_put(part, sharding)
            variable.mesh_copy = variable.stored, value

    def _is_on_other_devices(self, variable: Variable) -> bool:
        return self._devices is not None and not self._devices.holds(variable)

    def _return_path(self, target: Sharding) -> tuple[int, Sharding | None]:
        """Returns the shard of a result nearest to a variable, and the sharding to move it to."""
        assert self._devices is not None
        # Shards of other processes are not in the list of shards.
        here = self._devices.sharding.addressable_devices
        devices = [device for device in self._devices.devices if device in here]
        if len(target.device_set) > 1 or not target.device_set <= set(devices):
            return 0, target
        return devices.index(next(iter(target.device_set))), None

    def _on_devices(self, arrays: Sequence[_A]) -> list[_A]:
        """Copies arrays of other devices to the devices of the program."""
        if self._devices is None:
            return _reconciled(arrays)
        return self._devices.take(arrays)


def _is_copy_of(
    copy: tuple[jax.Array, jax.Array] | None, stored: jax.Array, sharding: Sharding
) -> bool:
    return copy is not None and copy[0] is stored and copy[1].sharding == sharding


def _layout_of(captured: Capture, layouts: list[ReplicaLayout]) -> ReplicaLayout | None:
    """Returns the layout of a function that runs no replicas, from its variables and arguments.

    If there are several, the layout of most variables, which then need not move.
    """
    variables = dict.fromkeys((*captured.variables, *captured.written))
    found = [v.layout for v in variables if v.layout is not None] + layouts
    return max(found, key=found.count, default=None)


def _nearest(
    layout: ReplicaLayout | None, captured: Capture, layouts: list[ReplicaLayout]
) -> ReplicaLayout | None:
    """Returns the layout of this process for a function that only reads variables with copies.

    Any process may call such a function by itself, for example to evaluate a model.
    """
    if layout is None or not layout.spans_processes:
        return layout
    is_shared = captured.written or captured.created or layouts
    if is_shared or any(variable.is_per_replica for variable in captured.variables):
        return layout
    return ReplicaLayout(layout.local_devices[:1])


class _ProgramDevices:
    """The devices of one program: those of its replicas, or the one of its variables.

    Attributes:
      sharding: The sharding of arrays that are equal on all of the devices.
      devices: The devices, in the order of the mesh.
    """

    def __init__(
        self,
        sharding: Sharding,
        devices: tuple[Device, ...],
        layout: ReplicaLayout | None = None,
    ) -> None:
        self.sharding = sharding
        self.devices = devices
        self._layout = layout
        self._device_set = sharding.device_set
        self._mesh = getattr(sharding, "mesh", None)
        # The sharding of the last array that was found to be on these devices.
        self._last_seen: Sharding | None = None

    def holds(self, variable: Variable) -> bool:
        """Returns whether the array behind a variable is on these devices, in this order."""
        return _devices_with(variable) == self.devices

    def take(self, arrays: Sequence[_A]) -> list[_A]:
        """Copies arrays of other devices to these."""
        result = list(arrays)
        moving = [
            i for i, a in enumerate(result) if isinstance(a, jax.Array) and self._is_remote(a)
        ]
        if moving:
            moved = self._moved([result[i] for i in moving])
            for i, array in zip(moving, moved, strict=True):
                result[i] = array
        return result

    def _moved(self, arrays: list[Tree]) -> list[Any]:
        if self._layout is None or not self._layout.spans_processes:
            # Of arrays that span processes, the local copy.
            here = [a if a.is_fully_addressable else a.addressable_data(0) for a in arrays]
            return jax.device_put(here, self.sharding)
        # `device_put` would make all processes compare the values, by a collective.
        layout = self._layout
        return [layout.from_copies([array] * layout.num_local) for array in arrays]

    def _is_remote(self, array: jax.Array) -> bool:
        sharding = array.sharding
        # Most arrays are of the program that made those of the call before.
        if sharding is self._last_seen:
            return False
        if sharding.device_set != self._device_set:
            return True
        mesh = getattr(sharding, "mesh", None)
        if mesh is not None and mesh is not self._mesh and tuple(mesh.devices.flat) != self.devices:
            return True
        self._last_seen = sharding
        return False


def _devices_of(layout: ReplicaLayout | None, captured: Capture) -> _ProgramDevices | None:
    """Returns the devices of a program; None if it has neither replicas nor variables."""
    if layout is not None:
        return _ProgramDevices(layout.replicated, _ordered(layout), layout)
    variables = dict.fromkeys((*captured.variables, *captured.written, *captured.created))
    sizes: dict[Device, int] = {}
    for variable in variables:
        if variable.is_remote:
            continue
        found = _devices_with(variable)
        if len(found) != 1:
            return None  # an array that the user spread over devices: left to JAX
        sizes[found[0]] = sizes.get(found[0], 0) + math.prod(variable.shape)
    if not sizes:
        return None
    # The device with most of the state: the rest moves with each call.
    device = max(sizes, key=lambda device: sizes[device])
    return _ProgramDevices(SingleDeviceSharding(device), (device,))


def _reconciled(arrays: Sequence[_A]) -> list[_A]:
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
    return list(arrays)


def _devices_with(variable: Variable) -> tuple[Device, ...]:
    return variable.placement if variable.layout is None else _ordered(variable.layout)


def _ordered(layout: ReplicaLayout) -> tuple[Device, ...]:
    return layout.devices if layout.is_mesh else layout.devices[:1]
