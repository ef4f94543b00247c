"""`extended.update`: running a function on every copy of a variable."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import jax

from replicax.contexts import frames
from replicax.contexts.frames import Frame, Mode
from replicax.contexts.overlay import View
from replicax.execution import spmd
from replicax.foundation import devices, errors, jax_compat
from replicax.foundation.jax_compat import Device
from replicax.foundation.types import Tree
from replicax.values.distributed_values import Mirrored, PerReplica
from replicax.values.layout import ReplicaLayout
from replicax.values.regroup import leaves_of, map_structure, regroup, select_mirrored
from replicax.variables.replicated import ReplicatedVariable, VariableComponent
from replicax.variables.variable import Variable


def refuse_per_replica(api: str, structure: Tree) -> None:
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
    frame: Frame,
    var: Variable,
    fn: Callable[..., Tree],
    args: tuple[Tree, ...],
    kwargs: dict[str, Tree],
    group: bool,
) -> Tree:
    """Calls `fn(copy, *args)` for each copy of `var`."""
    overlay = frame.overlay
    if not isinstance(var, ReplicatedVariable):
        own_args, own_kwargs = select_mirrored(0, (args, kwargs))
        with _updating(frame, None, var.placement[0]):
            result = fn(var, *own_args, **own_kwargs)
        return result if group else map_structure(lambda leaf: (leaf,), result)
    layout = var.replicas
    if overlay is None or overlay.view is View.READ:
        results: list[Tree] = []
        for i, component in enumerate(var.components):
            own_args, own_kwargs = select_mirrored(i, (args, kwargs))
            with _updating(frame, i, layout.local_devices[i]):
                results.append(fn(component, *own_args, **own_kwargs))
        return _merge_eager(results, layout, group)

    def on_copy(*own_args: Tree, **own_kwargs: Tree) -> Tree:
        return fn(VariableComponent(var, 0), *own_args, **own_kwargs)

    own_args, own_kwargs = select_mirrored(0, (args, kwargs))
    if overlay.view is View.STORED and layout.num_replicas > 1:
        merged = spmd.run_replicas(frame, on_copy, own_args, own_kwargs, Mode.UPDATE)
    else:
        with _updating(frame, None, None):
            merged = on_copy(*own_args, **own_kwargs)
    return map_structure(lambda leaf: _merge_traced(leaf, layout, group), merged)


def update_on_devices(
    frame: Frame,
    targets: Sequence[Device | None],
    fn: Callable[..., Tree],
    args: tuple[Tree, ...],
    kwargs: dict[str, Tree],
    group: bool,
) -> Tree:
    """Calls `fn(*args)` once for each device; None stands for the current one."""
    results: list[Tree] = []
    for i, device in enumerate(targets):
        own_args, own_kwargs = select_mirrored(i, (args, kwargs))
        if frame.overlay is not None:
            # One trace stands for all devices.
            with _updating(frame, None, None):
                results = [fn(*own_args, **own_kwargs)] * len(targets)
            break
        with _updating(frame, i if len(targets) > 1 else None, device):
            results.append(fn(*own_args, **own_kwargs))
    return _merge_eager(results, frame.layout, group)


@contextlib.contextmanager
def _updating(frame: Frame, replica_id: int | None, device: Device | None) -> Iterator[None]:
    """Enters update mode for one copy."""
    inner = frame.entered(Mode.UPDATE, replica_id=replica_id, overlay=frame.overlay)
    with devices.device(device if jax_compat.is_eager() else None), frames.pushed(inner):
        yield


def _merge_eager(results: list[Tree], layout: ReplicaLayout | None, group: bool) -> Tree:
    if group and len(results) == 1:
        return map_structure(_whole, results[0])
    if group:
        return regroup(results, layout, Mirrored)
    return map_structure(lambda *leaves: leaves, *results)


def _whole(leaf: Tree) -> Tree:
    return leaf.container if isinstance(leaf, VariableComponent) else leaf


def _merge_traced(leaf: Tree, layout: ReplicaLayout, group: bool) -> Tree:
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
