"""How the cost of a closure grows with the workers: `python -m simulation.scale`.

The cluster is simulated without faults, by the real classes; what a message costs is given. With
`--check` the same job runs on real processes of this machine: the cost of a message is chosen so
that one worker is as fast as there, and the speed of more workers is compared.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import sys
import threading
import time
from collections.abc import Sequence
from typing import cast

import numpy as np
from typing_extensions import override

from replicax.contexts.overlay import Change
from replicax.coordinator import ClusterCoordinator, outbox
from replicax.coordinator.engine import Engine
from replicax.coordinator.scheduling.timing import Timing
from replicax.coordinator.shipping import serialization
from replicax.foundation import runtime
from replicax.protocol import messages
from replicax.protocol.tasks import Task
from replicax.ps.client.initial_values import Initial
from replicax.strategies.parameter_server import ParameterServerExtended, ParameterServerStrategy
from replicax.testing import LocalCluster
from replicax.variables.remote import Read, RemoteVariable
from replicax.variables.variable import Variable
from simulation import programs, threads
from simulation.faults import Faults
from simulation.network import Costs, Network
from simulation.process import Machine
from simulation.run import quiet
from simulation.server import ServerMachine
from simulation.worker import WorkerMachine
from simulation.world import World

WORKERS = (10, 30, 100, 300, 1_000)
NUM_SERVERS = 100
# Sizes of the real clusters of `--check`, the closures per worker, and the largest error.
CHECKED = (1, 2, 4, 8)
CHECKED_SERVERS = 2
_CHECKED_CLOSURES = 60
TOLERANCE = 0.2
# A message costs this on one core; two machines in one rack.
COSTS = Costs(latency_s=1e-4, handling_s=5e-5, second_per_byte=1e-9)
# And the coordinator needs this to schedule a closure.
SCHEDULING_S = 1e-4
# What a closure does: it computes, and changes a variable of each of some servers.
COMPUTE_S = 0.02
TOUCHED = 2
_NUM_ELEMENTS = 64
# The closures of a job: at least this many, and per worker.
_LEAST_CLOSURES, _PER_WORKER = 4_000, 10
_STACK_BYTES = 256 << 10
_LONGEST_S = 3_600.0
_EXCHANGES = ("Exchange", "Exchanged")
_ORDERS = ("Run", "Finished")
HEADER = " workers  exchanges  orders  others   bytes    seconds  predicted  real s"


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a closure costs, on average.

    Attributes:
      num_workers: The number of workers.
      exchanges: The messages between a worker and the parameter servers about variables.
      orders: The messages between the coordinator and a worker about closures.
      others: All others: handshakes, functions, heartbeats.
      num_bytes: Their size.
      seconds: The time until the job has ended, divided by the number of closures.
    """

    num_workers: int
    exchanges: float
    orders: float
    others: float
    num_bytes: float
    seconds: float


def step(variables: Sequence[RemoteVariable], seconds: float, first: int) -> None:
    """Reads some variables, computes, and changes them."""
    used = [variables[(first + i) % len(variables)] for i in range(TOUCHED)]
    client = used[0].client
    client.pull([Read(variable) for variable in used])
    runtime.sleep(seconds)
    payload = np.ones(used[0].shape, np.float32)
    client.push([Change(variable, "assign_add", payload) for variable in used])


class _User(Machine):
    """Schedules closures once all workers are ready, and joins them."""

    def __init__(
        self,
        world: World,
        network: Network,
        servers: Sequence[Machine],
        workers: Sequence[Machine],
        num_closures: int,
    ) -> None:
        super().__init__(world, Task("coordinator", 0))
        self._network, self._servers, self._workers = network, servers, workers
        self._num_closures = num_closures
        self.measured: Measured | None = None

    @override
    def main(self) -> None:
        strategy = programs.make_strategy(self._servers, self._workers)
        extended = cast(ParameterServerExtended, strategy.extended)
        cluster = extended.require_cluster("The simulation")
        cluster.attach()
        initial = Initial(messages.Fill(bytes(4)), [])
        variables = [
            extended.create_part(programs.attributes(f"part {i}", _NUM_ELEMENTS), initial, i)
            for i in range(len(self._servers))
        ]
        function = serialization.ship(functools.partial(step, variables, COMPUTE_S), strategy)
        engine = Engine(cast("outbox.Cluster", cluster), Timing(), 10 * self._num_closures)
        cluster.follow(engine.loss_of)
        while len(list(engine._core.pool.ready)) < len(self._workers):
            runtime.sleep(0.1)
        network, count, begun_s = self._network, self._num_closures, runtime.now()
        sent_before, bytes_before = network.num_messages.copy(), network.num_bytes
        for number in range(count):
            runtime.sleep(SCHEDULING_S)
            _, buffers = serialization.pack_arguments([number], {}, strategy)
            engine.schedule(function, [], buffers, None)
        engine.join(None)
        sent = network.num_messages - sent_before
        exchanges, orders = (sum(sent[kind] for kind in kinds) for kinds in (_EXCHANGES, _ORDERS))
        self.measured = Measured(
            len(self._workers),
            exchanges / count,
            orders / count,
            (sent.total() - exchanges - orders) / count,
            (network.num_bytes - bytes_before) / count,
            (runtime.now() - begun_s) / count,
        )


def simulate(
    num_workers: int, num_servers: int, costs: Costs = COSTS, num_closures: int | None = None
) -> Measured:
    """Simulates a job without faults, and measures its closures.

    >>> found = simulate(2, 2, num_closures=40)
    >>> found.seconds < COMPUTE_S
    True
    """
    world = World(0, Faults.none())
    network = Network(world, costs)
    # Thousands of threads, each with a small stack.
    stack_bytes = threading.stack_size(_STACK_BYTES)
    with contextlib.ExitStack() as stack:
        stack.callback(threading.stack_size, stack_bytes)
        stack.enter_context(quiet())
        stack.enter_context(threads.installed(world, network))
        made = (ServerMachine(world, i) for i in range(num_servers))
        servers = [stack.enter_context(contextlib.closing(server)) for server in made]
        workers = [WorkerMachine(world, i) for i in range(num_workers)]
        count = num_closures or max(_LEAST_CLOSURES, _PER_WORKER * num_workers)
        user = _User(world, network, servers, workers, count)
        user.start()
        stack.callback(world.end)
        world.run_until(lambda: user.measured is not None, _LONGEST_S)
    assert user.measured is not None, "the job has not ended"
    return user.measured


def predicted(num_workers: int, orders: float, num_servers: int = NUM_SERVERS) -> float:
    """Returns the seconds per closure by the cost model of `docs/concepts/scale.md`.

    Args:
      num_workers: The number of workers.
      orders: The messages between coordinator and workers per closure.
      num_servers: The number of parameter servers.
    """
    latency_s, handling_s = COSTS.latency_s, COSTS.handling_s
    # A worker sends a request to each server and receives the replies, gets orders and reports.
    waiting_s = 2 * latency_s + (4 * TOUCHED + 2) * handling_s
    return max(
        (COMPUTE_S + waiting_s) / num_workers,
        SCHEDULING_S,
        orders * handling_s,
        2 * 2 * TOUCHED * handling_s / num_servers,
    )


def measure_real(num_workers: int) -> float:
    """Runs the same job on processes of this machine; returns the seconds per closure."""
    count, best = _CHECKED_CLOSURES * num_workers, float("inf")
    with LocalCluster(workers=num_workers, ps=CHECKED_SERVERS) as cluster:
        strategy = ParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            variables = [Variable(np.zeros(_NUM_ELEMENTS, np.float32)) for _ in range(TOUCHED)]
        with ClusterCoordinator(strategy) as coordinator:
            for _ in range(4):
                begun_s = time.perf_counter()
                for number in range(count):
                    coordinator.schedule(step, args=(variables, COMPUTE_S, number))
                coordinator.join()
                best = min(best, time.perf_counter() - begun_s)
        strategy.close()
    return best / count


def calibrated(seconds: float) -> Costs:
    """Returns the costs with which one worker takes as long for a closure as measured."""
    free = dataclasses.replace(COSTS, handling_s=0.0)
    least = simulate(1, CHECKED_SERVERS, free, _CHECKED_CLOSURES).seconds
    usual = simulate(1, CHECKED_SERVERS, COSTS, _CHECKED_CLOSURES).seconds
    # Linear: one worker waits for each of its messages.
    factor = max(seconds - least, 0.0) / (usual - least)
    return dataclasses.replace(COSTS, handling_s=COSTS.handling_s * factor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if a prediction is wrong by more than the tolerance."""
    parser = argparse.ArgumentParser(prog="python -m simulation.scale", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with real processes")
    parser.add_argument("--workers", type=int, nargs="*", default=WORKERS)
    parser.add_argument("--servers", type=int, default=NUM_SERVERS)
    options = parser.parse_args(arguments)
    if options.check:
        return _check()
    _print(HEADER)
    for num_workers in options.workers:
        begun_s = time.monotonic()
        _print(row(simulate(num_workers, options.servers), time.monotonic() - begun_s))
    return 0


def row(found: Measured, seconds: float) -> str:
    """Returns a line of the table."""
    return (
        f"{found.num_workers:8,} {found.exchanges:10.2f} {found.orders:7.2f} {found.others:7.2f} "
        f"{found.num_bytes:7,.0f} "
        f"{found.seconds:10.6f} {predicted(found.num_workers, found.orders):10.6f} {seconds:7.1f}"
    )


def _check() -> int:
    real = {count: measure_real(count) for count in CHECKED}
    costs = calibrated(real[1])
    _print(f"a message costs {costs.handling_s * 1e6:.0f} µs")
    worst = 0.0
    for count, seconds in real.items():
        expected = simulate(count, CHECKED_SERVERS, costs, _CHECKED_CLOSURES * count).seconds
        error = expected / seconds - 1
        worst = max(worst, abs(error))
        _print(
            f"{count} workers: {1 / seconds:,.0f} closures/s, predicted {1 / expected:,.0f} "
            f"({error:+.0%} in time)"
        )
    return int(worst > TOLERANCE)


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
