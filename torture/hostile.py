"""Checks of power loss and of unauthenticated peers, which the safeguard checks depend on."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import replicax as rx
from replicax.foundation import errors
from replicax.protocol import messages
from replicax.protocol.tasks import Task
from replicax.transport import addresses, keys
from replicax.transport.channel import Channel
from torture.checks import Outcome, Plan, check
from torture.jobs import cluster
from torture.programs import run_program

# Saves once, with a safeguard off if one is named.
_SAVE = """
import contextlib, sys
import numpy as np
import replicax as rx
from torture import safeguards as saboteurs
directory, saboteur = sys.argv[1:]
variable = rx.Variable(np.ones(1 << 18, np.float32))
off = saboteurs.disabled(saboteur) if saboteur else contextlib.nullcontext()
with off, rx.train.CheckpointManager(rx.train.Checkpoint(v=variable), directory) as manager:
    manager.save()
"""
_CALL = re.compile(r"(fsync|fdatasync|rename|renameat|renameat2)\((.*)\)\s+= (\S+)")


@check(
    36,
    claim="a save reaches the disk in order: data, manifest, rename, directory",
    limit="the order, as the kernel saw it",
)
def order_of_a_save(plan: Plan) -> Outcome:
    """Traces the system calls of a save."""
    target, trace = plan.directory / "run", plan.directory / "trace"
    command = ["strace", "-f", "-y", "-e", "trace=fsync,fdatasync,rename,renameat,renameat2"]
    command += ["-o", str(trace), sys.executable, "-c", _SAVE, str(target), plan.saboteur]
    done = run_program(command, plan, seconds=120)
    events = _events(trace, target)
    outcome = Outcome(f"{len(events)} calls: {_short(events)}", {"calls": len(events)})
    outcome.require(done.status == 0, f"the save failed: {done.last_line}")
    renames = [i for i, (call, _) in enumerate(events) if call == "rename"]
    outcome.require_landed(len(renames) == 1, f"{len(renames)} renames were seen")
    if renames:
        before = [path for call, path in events[: renames[0]] if call == "sync"]
        after = [path for call, path in events[renames[0] :] if call == "sync"]
        data = [i for i, path in enumerate(before) if path.endswith(".safetensors")]
        manifest = [i for i, path in enumerate(before) if path.endswith("manifest.json")]
        outcome.require(bool(data), "the data was not synced before the rename")
        outcome.require(bool(manifest), "the manifest was not synced before the rename")
        outcome.require(after[-1:] == [str(target)], "the directory was not synced after it")
        if data and manifest:
            outcome.require(max(data) < manifest[-1], "data was synced after the manifest")
    return outcome


def _events(trace: Path, target: Path) -> list[tuple[str, str]]:
    """The syncs and renames below a directory, in order."""
    found: list[tuple[str, str]] = []
    for line in _whole_calls(trace.read_text().splitlines()):
        match = _CALL.search(line)
        if match is None or str(target) not in match[2] or match[3] != "0":
            continue
        paths = re.findall(r'[<"](/[^>"]*)[>"]', match[2])
        is_rename = match[1].startswith("rename")
        if is_rename and Path(paths[-1]).parent != target:
            # Inside of what is not yet there for others.
            continue
        found.append(("rename" if is_rename else "sync", paths[-1]))
    return found


def _whole_calls(lines: Iterable[str]) -> list[str]:
    """Joins the halves of calls that were interrupted by events of other threads.

    A sync counts where it ends, and a rename where it begins.

    >>> _whole_calls(["7 fsync(4</a> <unfinished ...>", "8 exit", "7 <... fsync resumed>) = 0"])
    ['8 exit', '7 fsync(4</a>) = 0']
    """
    found: list[str] = []
    # By thread: the first half of a call, and its place.
    begun: dict[str, tuple[str, int]] = {}
    for line in lines:
        thread = line.partition(" ")[0]
        if line.endswith("<unfinished ...>"):
            begun[thread] = line.removesuffix("<unfinished ...>").rstrip(), len(found)
            found.append("")
        elif thread in begun and " resumed>" in line:
            half, place = begun.pop(thread)
            whole = half + line.partition(" resumed>")[2]
            if "rename" in half:
                found[place] = whole
            else:
                found.append(whole)
        else:
            found.append(line)
    return [line for line in found if line]


def _short(events: list[tuple[str, str]]) -> str:
    counts = [0, 0]
    is_after = False
    for call, _ in events:
        is_after |= call == "rename"
        counts[is_after] += call == "sync"
    return f"{counts[0]} syncs, rename, {counts[1]} syncs"


@check(
    42,
    claim="an unauthenticated peer with its own keys is rejected",
    limit="refused each time, no effect",
)
def unauthenticated_peers(plan: Plan) -> Outcome:
    """Connects to servers with certificates of another authority, and of another role."""
    times = plan.size(10, 1)
    refused, served = 0, 0
    with cluster(plan, workers=1, ps=1, protocol="tcp") as made:
        assert made.keys_directory is not None
        where = made.cluster_spec.task_address("ps", 0)
        for turn in range(times):
            forged = keys.load(keys.make(plan.directory / f"forged-{turn}"), "coordinator")
            stolen = keys.load(made.keys_directory, "worker", 0)
            start = time.monotonic()
            refused += not _is_let_in(where, forged) and not _is_let_in(where, stolen)
            plan.report(f"{turn + 1} of {times}, {time.monotonic() - start:.1f} s")
        strategy = rx.ParameterServerStrategy(made.resolver, keys=made.keys_directory)
        with strategy.scope():
            served = float(rx.Variable(7.0).numpy()) == 7.0
        strategy.close()
    outcome = Outcome(f"{refused} of {times} refused", {"refused": refused})
    outcome.require(refused == times, f"{times - refused} unauthenticated peers were let in")
    outcome.require_landed(served, "the servers serve no peer")
    return outcome


def _is_let_in(address: str, own: keys.Keys) -> bool:
    """Returns whether a server replies to a process that claims to be the coordinator."""
    where = addresses.resolve(address, "tcp", own)
    with Channel(where, Task("coordinator", 0), own, peer=Task("ps", 0)) as channel:
        try:
            channel.request(messages.QueryJob(), timeout=30)
        except errors.PermissionDeniedError:
            return False
    return True
