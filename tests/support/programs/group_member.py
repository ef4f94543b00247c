"""A member of a group, for tests of faults.

Run as: group_member.py INDEX CLUSTER SCENE, where CLUSTER is JSON. It prints what happens, a line
of JSON each, and runs the scene, which may do something else on one member.
"""

import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from replicax.cluster.spec import ClusterSpec
from replicax.foundation import errors
from replicax.group import group as group_module
from replicax.group import members, start
from replicax.group.group import Group, join
from replicax.group.timing import GroupTiming
from replicax.transport import connection

INDEX, CLUSTER, SCENE = int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
IS_ODD_ONE = int(sys.argv[4]) == INDEX if len(sys.argv) > 4 else False


def say(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event, "at": time.time(), **facts}), flush=True)


def report(error: BaseException) -> None:
    say("error", kind=type(error).__name__, text=str(error))


if SCENE == "early":
    import jax.numpy as jnp

    jnp.ones(2).block_until_ready()
if SCENE == "version" and IS_ODD_ONE:
    real = members.versions()
    group_module.versions = lambda: {**real, "jaxlib": "0.0.1"}
if SCENE == "library" and IS_ODD_ONE:
    connection.library_version = lambda: "99.0.0"

# Long enough for processes that start on a busy machine.
join_s = 10.0 if SCENE in ("missing", "uncaught") else 60.0
linger_s = 8.0 if SCENE in ("version", "library") else 1.0
timing = dataclasses.replace(GroupTiming.fast(), join_s=join_s, linger_s=linger_s)
arrive_s = 4.0 if SCENE in ("asleep", "late at barrier") else None

if SCENE == "kill at start" and IS_ODD_ONE:
    say("fault")
    start.start_jax = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

spec = ClusterSpec(CLUSTER)
task = members.Members.of(spec).tasks[INDEX]
say("joining")
try:
    group: Group = join(spec, task.job, task.index, timeout_seconds=arrive_s, timing=timing)
except errors.DistributeError as error:
    report(error)
    if SCENE == "uncaught":
        raise
    say("alive")
    sys.exit(3)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

mesh = Mesh(np.array(group.devices), ("r",))


def summed(size: int, factor: float = 1.0) -> Callable[[], jax.Array]:
    """Returns a function that sums an array of ones over all devices, times a factor."""
    body = jax.shard_map(
        lambda x: jax.lax.psum(factor * x, "r"), mesh=mesh, in_specs=P("r"), out_specs=P()
    )
    one = jax.jit(body)
    shards = [jax.device_put(np.ones(size, np.float32), d) for d in jax.local_devices()]
    where = NamedSharding(mesh, P("r"))
    whole = jax.make_array_from_single_device_arrays((size * len(group.devices),), where, shards)
    name = f"sum of {size}" if factor == 1.0 else f"sum of {size} times {factor:g}"
    program = group.confirm(name, name)

    def call() -> jax.Array:
        with group.guarded():
            group.record(program)
            return one(whole).block_until_ready()

    return call


def train(step: Callable[[], jax.Array], num_steps: int = 1_000_000) -> None:
    for number in range(num_steps):
        if IS_ODD_ONE and number == 20:
            fault()
        step()
        if number == 10:
            say("training", total=float(step()[0]))


def fault() -> None:
    say("fault")
    if SCENE in ("kill", "stop", "kill in exchange", "kill beside a thread"):
        os.kill(os.getpid(), signal.SIGSTOP if SCENE == "stop" else signal.SIGKILL)
    elif SCENE == "raise":
        raise ValueError("the data is bad")
    elif SCENE == "exit early":
        sys.exit(0)
    elif SCENE == "asleep":
        lie_down()


def lie_down() -> None:
    time.sleep(60)


if SCENE == "kill beside a thread":
    threading.Thread(target=lie_down).start()


say("joined", index=group.index, count=group.count, devices=len(group.devices))
try:
    if SCENE == "calls":
        values = [group.exchange("v", b"%d of %d" % (INDEX, n)) for n in range(3)]
        say("values", values=[[v.decode() for v in each] for each in values])
        group.barrier("b")
        for _ in range(50):
            group.exchange("warm", b"x")
        times = []
        for _ in range(200):
            start = time.perf_counter()
            group.exchange("timed", b"x")
            times.append(time.perf_counter() - start)
        say("latency", ms=sorted(times)[100] * 1e3)
        say("again", is_same=join(spec, task.job, task.index) is group)
        try:
            join(ClusterSpec({"worker": ["localhost:1"]}), "worker", 0)
        except errors.ContextError as error:
            report(error)
        sockets = psutil.Process().net_connections("inet")
        say("listening", at=[s.laddr.ip for s in sockets if s.status == "LISTEN"])
        train(summed(4), 15)
    elif SCENE == "fingerprint":
        train(summed(8 if IS_ODD_ONE else 4))
    elif SCENE == "name":
        group.confirm("evaluate" if IS_ODD_ONE else "train", "same")
    elif SCENE == "order":
        a, b = summed(4), summed(8)
        a()
        (b if IS_ODD_ONE else a)()
        train(a)
    elif SCENE == "order, same size":
        a, b = summed(4), summed(4, 2.0)
        a()
        (b if IS_ODD_ONE else a)()
        train(a)
    elif SCENE == "calls differ":
        group.barrier("evaluation" if IS_ODD_ONE else "checkpoint")
    elif SCENE == "kill in exchange":
        for number in range(1_000_000):
            if IS_ODD_ONE and number == 20:
                fault()
            group.exchange("rows", b"x")
    elif SCENE == "late at barrier":
        say("fault")
        if IS_ODD_ONE:
            lie_down()
        group.barrier("checkpoint")
    elif SCENE == "unguarded":
        step = summed(4)
        group.guarded = contextlib.nullcontext
        SCENE = "kill"
        train(step)
    else:
        train(summed(4))
except errors.DistributeError as error:
    report(error)
    if SCENE == "caught":
        say("alive")
    raise
say("end")
