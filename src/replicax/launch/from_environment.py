"""The strategy of a program, as the launcher that started it describes the cluster."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import NoReturn

from replicax.cluster_resolver import ClusterResolver, TFConfigClusterResolver
from replicax.foundation.public_names import show_in_package
from replicax.process import roles, shutdown, system_limits
from replicax.process.server import Server
from replicax.strategies.base import Strategy
from replicax.strategies.mirrored import MirroredStrategy
from replicax.strategies.multi_worker import MultiWorkerMirroredStrategy
from replicax.strategies.parameter_server import ParameterServerStrategy

# The seconds that a running closure may take after a signal to exit.
_ENDING_SECONDS = 8.0


def strategy_from_environment(
    cluster_resolver: ClusterResolver | None = None,
    *,
    parameter_servers: Mapping[str, object] | None = None,
) -> Strategy:
    """Returns the strategy for the cluster that this process is part of.

    Call it first in the program. The same program then runs under `replicax run`, with any number
    of workers and parameter servers, under other launchers that set TF_CONFIG, and by itself:

    - A process by itself gets a `MirroredStrategy`, on all of its devices.
    - A worker, chief or evaluator of a cluster without parameter servers gets a
      `MultiWorkerMirroredStrategy`; that of the evaluator has its own devices only.
    - With parameter servers, the chief, and a process that is not a task of the cluster, get a
      `ParameterServerStrategy`. In a worker or a server the call does not return: it serves, and
      exits when it is stopped.

    Args:
      cluster_resolver: The cluster and this task; by default those of TF_CONFIG.
      parameter_servers: Arguments of `ParameterServerStrategy`, if it is one.

    >>> import replicax as rx
    >>> type(rx.strategy_from_environment()).__name__
    'MirroredStrategy'
    """
    resolver = TFConfigClusterResolver() if cluster_resolver is None else cluster_resolver
    spec = resolver.cluster_spec()
    if not spec:
        return MirroredStrategy()
    if "ps" not in spec.jobs or resolver.task_type == "evaluator":
        return MultiWorkerMirroredStrategy(resolver)
    if resolver.task_type in roles.SERVING:
        _serve(Server(spec, resolver.task_type, resolver.task_id, start=False))
    options = dict(parameter_servers or {})
    return ParameterServerStrategy(resolver, **options)  # type: ignore[arg-type]


def _serve(server: Server) -> NoReturn:
    """Runs the task of this process until it is stopped, and exits."""
    system_limits.tune_for_serving()
    # Installed before the task listens: from then on it shuts down in order.
    with shutdown.ended_by_signals(server.interrupt, seconds=_ENDING_SECONDS), server:
        server.start()
        server.join()
    sys.exit(0 if server.ending is None else shutdown.START_AGAIN)


show_in_package(strategy_from_environment)
