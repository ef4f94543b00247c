"""A program that counts on parameter servers until it is killed: `python -m torture.driver`.

It says when it is ready, and begins when it is told to by a line: how long Python takes to start
is no matter of the check. It takes its job over if the servers hold it already. The exit status is
3 if another program has taken it over from this one.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time

import replicax as rx
from replicax.cluster.spec import ClusterSpec
from replicax.coordinator.scheduling.timing import Timing
from replicax.foundation import errors

_REFUSED = 3
# The lease of the servers.
LEASE_S = 10.0


def main(spec: str, batch: int) -> int:
    """Counts in batches, and reports the count after each."""
    _report(ready=1.0)
    sys.stdin.readline()
    start = time.monotonic()
    resolver = rx.cluster_resolver.SimpleClusterResolver(
        ClusterSpec(json.loads(spec)), task_type="chief", task_id=0
    )
    strategy = rx.ParameterServerStrategy(resolver, job="counting", lease=LEASE_S)
    # Workers that were without a coordinator have exited, and need time to restart.
    timing = dataclasses.replace(Timing.fast(), no_workers_s=60.0)
    coordinator = rx.coordinator.ClusterCoordinator(strategy, timing=timing)
    with strategy.scope():
        counter = rx.Variable(0.0, name="counter")

    def count() -> None:
        time.sleep(0.005)
        counter.assign_add(1.0)

    try:
        _report(found=float(counter.numpy()), seconds=time.monotonic() - start)
        while True:
            for _ in range(batch):
                coordinator.schedule(count)
            coordinator.join(timeout=60)
            _report(found=float(counter.numpy()))
    except errors.FencedError:
        _report(refused_s=time.monotonic())
        return _REFUSED


def _report(**content: float) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
