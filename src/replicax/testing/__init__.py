"""Clusters of real processes on this machine, and faults to inject into them.

with rx.testing.LocalCluster(workers=3, ps=2, timing="fast", proxied=("ps",)) as cluster:
    ...
    cluster.kill("worker", 1)  # A process ends.
    cluster.restart("worker", 1)
    cluster.stop("worker", 2)  # One is frozen, and continues.
    cluster.cont("worker", 2)
    cluster.slow("worker", 0, throttle=0.1)  # One is ten times slower.
    cluster.cut("ps", 0)  # All messages are held back silently.
    cluster.mend("ps", 0)
    cluster.blip("ps", 1)  # All connections break once.
    cluster.proxy("ps", 1).harm(drop_requests=0.1, duplicate_requests=0.1)
    ...
    assert cluster.proxy("ps", 1).landed["drop_requests"] > 0

with rx.testing.LocalCluster(workers=2, ps=0) as cluster:
    losses = cluster.run(train, args=(directory,))  # A program in lock step, one process each.
"""

from replicax.foundation.public_names import show_as_public
from replicax.launch.outcomes import Outcome as Outcome
from replicax.testing.disks import fill as fill
from replicax.testing.disks import small_disk as small_disk
from replicax.testing.faults import Faults as Faults
from replicax.testing.local_cluster import LocalCluster as LocalCluster
from replicax.testing.lock_step import LaunchedProgram as LaunchedProgram
from replicax.testing.proxy import Proxy as Proxy

__all__ = [
    "Faults",
    "LaunchedProgram",
    "LocalCluster",
    "Outcome",
    "Proxy",
    "fill",
    "small_disk",
]


def __dir__() -> list[str]:
    return __all__


show_as_public(__name__)
