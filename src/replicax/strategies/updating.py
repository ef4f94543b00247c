"""`extended.update`: running a function on every copy of a variable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from replicax.contexts import frames
from replicax.contexts.frames import Frame, Mode
from replicax.contexts.overlay import View
from replicax.execution import spmd
from replicax.foundation import devices, errors, jax_compat
from replicax.foundation.jax_compat import Device
from replicax.values.distributed_values import Mirrored, PerReplica
from replicax.values.layout import ReplicaLayout
from replicax.values.regroup import leaves_of, map_structure, regroup, select_mirrored
from replicax.variables.replicated import ReplicatedVariable, VariableComponent
from replicax.variables.variable import Variable


def refuse_per_replica(api: str, structure: Any) -> None:
    """Raises if arguments of an update differ between replicas."""
    for leaf in leaves_of(structure):
        if isinstance(leaf, PerReplica):
            found = "a PerReplica value was given"
        elif isinstance(leaf, ReplicatedVariable) and leaf.is_per_replica:
            found = f"the ON_READ variable {leaf.name!r} was given, whose copies differ"
        else:
            continue
        raise errors.InvalidArgumentError(
            f"`{api}` needs arguments that are equal on all replicas",
            found,
            "Combine it first with `extended.reduce_to(op, value, destinations=var)`.",
        )


def update_variable(
    strategy: Any, var: Variable, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool
) -> Any:
    """Calls `fn(copy, *args)` for each copy of `var`."""
    layout = var.layout
    frame = frames.current()
    if not isinstance(var, ReplicatedVariable):
        own_args, own_kwargs = select_mirrored(0, (args, kwargs))
        with _update_frame(strategy, layout, frame, None, var.placement[0]):
            result = fn(var, *own_args, **own_kwargs)
        return result if group else map_structure(lambda leaf: (leaf,), result)
    if frame.overlay is None or frame.overlay.view is View.READ:
        results = []
        for i, component in enumerate(var.components):
            own_args, own_kwargs = select_mirrored(i, (args, kwargs))
            with _update_frame(strategy, layout, frame, i, layout.devices[i]):
                results.append(fn(component, *own_args, **own_kwargs))
        return _merge_eager(results, layout, group)

    def on_copy(*own_args: Any, **own_kwargs: Any) -> Any:
        return fn(VariableComponent(var, 0), *own_args, **own_kwargs)

    own_args, own_kwargs = select_mirrored(0, (args, kwargs))
    if frame.overlay.view is View.STORED and layout.num_replicas > 1:
        merged = spmd.run_replicas(strategy, layout, on_copy, own_args, own_kwargs, Mode.UPDATE)
    else:
        with _update_frame(strategy, layout, frame, None, None):
            merged = on_copy(*own_args, **own_kwargs)
    return map_structure(lambda leaf: _merge_traced(leaf, layout, group), merged)


def update_on_devices(
    strategy: Any,
    layout: ReplicaLayout | None,
    targets: Sequence[Device],
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    group: bool,
) -> Any:
    """Calls `fn(*args)` once for each device."""
    frame = frames.current()
    results = []
    for i, device in enumerate(targets):
        own_args, own_kwargs = select_mirrored(i, (args, kwargs))
        if frame.overlay is not None:
            # One trace stands for all devices.
            with _update_frame(strategy, layout, frame, None, None):
                results = [fn(*own_args, **own_kwargs)] * len(targets)
            break
        with _update_frame(strategy, layout, frame, i if len(targets) > 1 else None, device):
            results.append(fn(*own_args, **own_kwargs))
    return _merge_eager(results, layout, group)


class _update_frame:
    """Enters update mode for one copy."""

    def __init__(
        self,
        strategy: Any,
        layout: ReplicaLayout | None,
        frame: Frame,
        replica_id: int | None,
        device: Device | None,
    ) -> None:
        inner = Frame(
            Mode.UPDATE,
            strategy,
            layout,
            replica_id=replica_id,
            overlay=frame.overlay,
            is_default=frame.is_default,
            opened_at=frame.opened_at,
        )
        self._frame = frames.pushed(inner)
        self._device = devices.device(device if jax_compat.is_eager() else None)

    def __enter__(self) -> None:
        self._device.__enter__()
        self._frame.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._frame.__exit__(*exception)
        self._device.__exit__(*exception)


def _merge_eager(results: list[Any], layout: ReplicaLayout | None, group: bool) -> Any:
    if group and len(results) == 1:
        return map_structure(_whole, results[0])
    if group:
        return regroup(results, layout, Mirrored)
    return map_structure(lambda *leaves: leaves, *results)


def _whole(leaf: Any) -> Any:
    return leaf.container if isinstance(leaf, VariableComponent) else leaf


def _merge_traced(leaf: Any, layout: ReplicaLayout, group: bool) -> Any:
    if isinstance(leaf, VariableComponent) and group:
        return leaf.container
    if isinstance(leaf, PerReplica):
        values = leaf.values
    elif isinstance(leaf, jax.Array):
        values = (leaf,) * layout.num_replicas
    else:
        values = (leaf,) * layout.num_replicas
        if group:
            return leaf
    return Mirrored(values) if group else values
