"""Initializes variables from the checkpoint of another program."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from replicax.bundle import manifest as bundles
from replicax.bundle.names import child_name
from replicax.checkpointing.graph import Graph
from replicax.checkpointing.manifest import ArrayEntry, SavedCheckpoint
from replicax.checkpointing.reading import latest_checkpoint
from replicax.checkpointing.slots import VariableSlot
from replicax.contexts import guards
from replicax.foundation import errors
from replicax.variables.variable import Variable


def warm_start(
    ckpt_to_initialize_from: str | os.PathLike[str],
    vars_to_warm_start: str | Sequence[str] | Sequence[Variable] | None = ".*",
    var_name_to_prev_var_name: Mapping[str, str] | None = None,
    *,
    objects: Mapping[str, object] | None = None,
) -> None:
    """Initializes variables with the values of another program's checkpoint.

    Unlike `Checkpoint.restore`, it restores a part of a checkpoint, possibly under other names, and
    every chosen variable must have a value of its shape and type there. Everything is checked
    before anything changes.

    Args:
      ckpt_to_initialize_from: A checkpoint, or a directory of them, whose newest is used.
      vars_to_warm_start: A list of variables, identified by their `name`; or regular
        expressions, one or a list, that match from the start of the names of variables in
        `objects`. None for no variable.
      var_name_to_prev_var_name: The name in the checkpoint, by the name here, where they differ.
      objects: Objects by name, as `rx.train.Checkpoint` takes them: a variable in them is named
        by its path, such as "model/dense/kernel".

    Raises:
      InvalidArgumentError: A name or an expression matches no variable.
      ArgumentTypeError: `vars_to_warm_start` holds something else.
      NotFoundError: There is no checkpoint, or no such array in it.

    >>> import tempfile
    >>> import replicax as rx
    >>> old = rx.Variable([1.0, 2.0], name="kernel")
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = rx.train.Checkpoint(encoder=old).write(folder.name + "/a")
    >>> new = rx.Variable([0.0, 0.0], name="kernel")
    >>> rx.train.warm_start(path, [new], {"kernel": "encoder"})
    >>> new.numpy().tolist()
    [1.0, 2.0]
    >>> folder.cleanup()
    """
    guards.require_cross_replica("rx.train.warm_start")
    slots = _chosen(vars_to_warm_start, objects)
    renamed = dict(var_name_to_prev_var_name or {})
    unused = sorted(set(renamed) - set(slots))
    if unused:
        raise errors.InvalidArgumentError(
            "`var_name_to_prev_var_name` must name variables that are warm-started: "
            f"{', '.join(slots) or 'there are none'}",
            f"{', '.join(unused)} are not among them",
            "Correct the names, or the choice of variables.",
        )
    path = _checkpoint_at(Path(ckpt_to_initialize_from))
    with SavedCheckpoint(path) as saved:
        entries = {
            name: _entry(saved, path, renamed.get(name, name), slot) for name, slot in slots.items()
        }
        arrays = saved.read({entry.name for entry in entries.values()})
    for name, slot in slots.items():
        slot.write(arrays[entries[name].name])


def _chosen(
    chosen: str | Sequence[str] | Sequence[Variable] | None, objects: Mapping[str, object] | None
) -> dict[str, VariableSlot]:
    if chosen is None:
        return {}
    items: list[str | Variable] = [chosen] if isinstance(chosen, str) else list(chosen)
    patterns = [item for item in items if isinstance(item, str)]
    variables = [item for item in items if isinstance(item, Variable)]
    if variables and len(variables) == len(items):
        return {v.name: VariableSlot(v.name, v, lambda new: None) for v in variables}
    if len(patterns) < len(items):
        raise errors.ArgumentTypeError(
            "`vars_to_warm_start` must be variables, or regular expressions",
            f"there are {sorted({type(item).__name__ for item in items})}",
            "Pass one kind.",
        )
    if objects is None:
        raise errors.InvalidArgumentError(
            "Regular expressions choose among the variables of `objects`",
            "`objects` is None",
            "Pass objects={'model': model}, or a list of variables.",
        )
    graph = Graph()
    for name, value in objects.items():
        graph.add(child_name("", name), value, lambda new: None)
    known = {name: s for name, s in graph.slots.items() if isinstance(s, VariableSlot)}
    found = {n: s for n, s in known.items() if any(re.match(p, n) for p in patterns)}
    if not found:
        raise errors.InvalidArgumentError(
            f"{chosen!r} must match the name of a variable",
            f"the names are {', '.join(list(known)[:10]) or 'none'}",
            "Correct the expression.",
        )
    return found


def _checkpoint_at(path: Path) -> Path:
    if (path / bundles.FILE_NAME).is_file():
        return path
    latest = latest_checkpoint(path)
    if latest is None:
        raise errors.NotFoundError(
            f"{path} must be a checkpoint, or a directory of checkpoints",
            "there is none",
            "Correct the path.",
        )
    return Path(latest)


def _entry(saved: SavedCheckpoint, path: Path, name: str, slot: VariableSlot) -> ArrayEntry:
    entry = saved.find(name)
    if not isinstance(entry, ArrayEntry):
        names = [entry.name for entry in saved.arrays]
        raise errors.NotFoundError(
            f"{name!r} must be an array in the checkpoint {path}",
            f"it holds {', '.join(names[:10]) or 'no array'}",
            "Pass its name there in `var_name_to_prev_var_name`; "
            "`rx.train.list_variables` lists all.",
        )
    slot.check(entry, str(path))
    return entry
