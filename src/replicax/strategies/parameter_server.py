"""ParameterServerStrategy: variables on servers, computation on workers, a coordinator between."""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, final

import jax
from typing_extensions import override

from replicax.cluster import parameter_servers
from replicax.cluster_resolver.base import ClusterResolver
from replicax.contexts import frames
from replicax.foundation import devices, errors
from replicax.protocol.tasks import Task
from replicax.ps.client import initial_values
from replicax.ps.client.cluster import Cluster
from replicax.ps.client.creation import create_part
from replicax.ps.client.initial_values import Initial, InitialValue, PartValue
from replicax.ps.client.variable_client import ParameterClient
from replicax.strategies import parameter_server_options as options
from replicax.strategies import server_optimizers
from replicax.strategies.base import Strategy
from replicax.strategies.consistency import Staleness, settings_of
from replicax.strategies.extended import StrategyExtended
from replicax.strategies.inputs import UnplacedDataset
from replicax.transport import addresses
from replicax.transport import keys as key_files
from replicax.transport.keys import Keys
from replicax.values.layout import ReplicaLayout
from replicax.variables import creators
from replicax.variables.partitioners import checked_counts, split_rows
from replicax.variables.per_worker import PerWorkerVariables, create_per_worker
from replicax.variables.remote import CopiedVariable, RemoteVariable, RemoteVariableBase
from replicax.variables.sharded import ShardedVariable
from replicax.variables.shipped import VariableBook
from replicax.variables.variable import Variable

_log = logging.getLogger(__name__)


@final
class ParameterServerExtended(StrategyExtended):
    """Places variables on parameter servers, in turn, and cuts those that a partitioner cuts.

    Attributes:
      cluster: The coordinator's hold on the cluster; None on a worker.
      client: How variables are read and changed.
      per_worker: The variables that workers keep.
    """

    def __init__(
        self,
        container_strategy: Any,
        layout: ReplicaLayout,
        client: ParameterClient,
        cluster: Cluster | None = None,
        partitioner: Any = None,
    ) -> None:
        super().__init__(container_strategy, layout)
        self.client = client
        self.cluster = cluster
        self._partitioner = partitioner
        self._book = VariableBook(client, self)
        if cluster is not None:
            cluster.variable = self._book.adopt
        # Round-robin must not be disturbed by a second thread between two parts.
        self._lock = threading.RLock()
        self._has_warned = False
        self.per_worker = PerWorkerVariables()

    # Facts.

    @property
    @override
    def worker_devices(self) -> tuple[str, ...]:
        if self.cluster is None:
            return super().worker_devices
        count = len(self.cluster.workers)
        return tuple(Task("worker", i).device("CPU", 0) for i in range(count))

    @property
    @override
    def parameter_devices(self) -> tuple[str, ...]:
        count = len(self.require_cluster("`parameter_devices`").servers)
        return tuple(Task("ps", i).device("CPU", 0) for i in range(count))

    def require_cluster(self, what: str) -> Cluster:
        """Returns the coordinator's hold on the cluster, or raises on a worker."""
        if self.cluster is None:
            raise errors.ContextError(
                f"{what} needs the coordinator",
                "this is a worker",
                "Do it before scheduling, in the program that made the strategy.",
            )
        return self.cluster

    # Running.

    @override
    def _call_for_each_replica(self, fn: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if self.cluster is not None and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "`strategy.run` of a ParameterServerStrategy runs here, on the coordinator. Pass "
                "the function that calls it to ClusterCoordinator.schedule to run it on workers."
            )
        return super()._call_for_each_replica(fn, args, kwargs)

    @override
    def distribute_dataset(self, dataset: Any, options: Any) -> Any:
        if self.cluster is not None:
            return UnplacedDataset(dataset, options, is_function=False)
        return super().distribute_dataset(dataset, options)

    @override
    def distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        if self.cluster is not None:
            return UnplacedDataset(dataset_fn, options, is_function=True)
        return super().distribute_datasets_from_function(dataset_fn, options)

    # Variables.

    @override
    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        name = kwargs.get("name") or "Variable"
        self.require_cluster(f"The creation of variable {name!r}")
        # A block that a creator opens below this one can move the variable; one around us cannot.
        make = functools.partial(self._make_uncut, devices.requested())
        with self._lock, creators.made_by(make):
            is_one = kwargs.get("colocate_with") is not None or kwargs.get("per_worker_variable")
            if self._partitioner is None or is_one:
                return self._owned(next_creator(**kwargs))
            initial = initial_values.describe(kwargs, is_cut=True)
            shape, dtype = initial.shape, initial.dtype
            count = checked_counts(self._partitioner, shape, dtype) if shape else 1
            if count == 1:
                if creators.is_last_resort(next_creator):
                    kwargs["initial_value"] = initial
                return self._owned(next_creator(**kwargs))
            parts = []
            for i, (start, stop) in enumerate(split_rows(shape[0], count)):
                own = dict(kwargs, name=f"{name}/part_{i}", shape=(stop - start, *shape[1:]))
                part = PartValue(initial, start, stop)
                parts.append(next_creator(**dict(own, dtype=dtype, initial_value=part)))
        return ShardedVariable(parts, name=name)

    def _owned(self, variable: Any) -> Any:
        """Takes in a variable that a creator outside the scope has made by itself."""
        if isinstance(variable, Variable) and variable.owner is None:
            variable.owner = self
        return variable

    def _make_uncut(self, around: Any, **kwargs: Any) -> Variable:
        """Makes a variable, or a part of one, as the last creator asks for it."""
        if kwargs.get("per_worker_variable"):
            spec = initial_values.describe(kwargs, is_cut=False)
            variable = create_per_worker(self, spec, kwargs)
            self.per_worker.add(variable)
            return variable
        near = kwargs.pop("colocate_with", None)
        block = devices.requested()
        if near is None and block is not around and block is not None and block.job == "ps":
            near = Task("ps", block.task or 0).device("CPU", 0)
        value = kwargs.get("initial_value")
        is_known = isinstance(value, InitialValue | PartValue)
        if not is_known or kwargs.get("dtype") not in (None, value.dtype):
            value = initial_values.describe(kwargs, is_cut=False)
        attributes = creators.resolve_attributes(kwargs, value)
        return self.make_part(attributes, value.whole(), self._server_near(near))

    def next_server(self) -> int:
        """Returns the server whose turn it is."""
        return self.require_cluster("The placement of a variable").next_server()

    def make_part(
        self, attributes: creators.VariableAttributes, initial: Initial, server: int
    ) -> RemoteVariable:
        """Makes a variable, or a part of one, on a server."""
        cluster = self.require_cluster(f"The creation of variable {attributes.name!r}")
        variable = create_part(cluster, self.client, self, attributes, initial, server)
        self._book.add(variable)
        return variable

    def _server_near(self, near: Any) -> int:
        """Returns the server of a variable, or of the first device named; else whose turn it is."""
        first = near[0] if isinstance(near, list | tuple) else near
        if isinstance(first, ShardedVariable):
            first = first.variables[0]
        if isinstance(first, CopiedVariable):
            first = first.copies[0]
        if isinstance(first, RemoteVariable):
            return first.server
        if isinstance(first, str) and first.startswith("/job:ps"):
            return Task.parse(first).index
        return self.next_server()

    def adopt(self, key: tuple[Any, ...]) -> Variable:
        """Returns this process's handle of a variable that the coordinator made."""
        return self._book.adopt(key)

    # Optimizers.

    def make_slot(self, variable: Variable, name: str, spec: Any, first: Any) -> Variable:
        """Makes a slot next to a variable; see `OptimizerHost`."""
        return server_optimizers.make_slot(self, variable, name, spec, first)

    def make_shared(self, variables: Sequence[Variable], name: str, value: Any) -> Variable:
        """Makes state of an optimizer that belongs to no variable; see `OptimizerHost`."""
        return server_optimizers.make_shared(self, variables, name, value)

    def register(self, shared: Sequence[Variable], updates: Sequence[Any]) -> int:
        """Tells the servers how an optimizer changes variables; see `OptimizerHost`."""
        return server_optimizers.register(self, shared, updates)

    @override
    def colocate_vars_with(self, colocate_with_variable: Any) -> Any:
        if frames.current().strategy is not self.container_strategy:
            # Explains which scope it needs.
            return super().colocate_vars_with(colocate_with_variable)
        self._validate_colocate_with_variable(colocate_with_variable)

        def creator(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
            return next_creator(**kwargs, colocate_with=colocate_with_variable)

        return creators.variable_creator_scope(creator)

    @override
    def non_slot_devices(self, var_list: Sequence[Any]) -> Any:
        return min(var_list, key=lambda v: v.name)

    @override
    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        near = colocate_with
        if isinstance(near, RemoteVariableBase):
            near = [devices.name_of(near.placement[0])]
        return super().update_non_slot(near, fn, args, kwargs, group)


@final
class ParameterServerStrategy(Strategy):
    """Trains with variables on parameter servers and steps on workers that may come and go.

    This process is the coordinator. Make variables, optimizers and metrics inside
    `scope()`, and run steps with an `rx.coordinator.ClusterCoordinator`.

    Args:
      cluster_resolver: Knows the cluster: jobs "ps" and "worker", and perhaps a "chief".
      variable_partitioner: Says into how many parts a variable is cut; see
        `rx.experimental.partitioners`. None to cut none.
      replicas_per_worker: How many replicas a worker runs; by default one for each of its
        accelerators, and one on a worker without.
      pull_ahead: Whether workers fetch the values for their next step while they compute this
        one. That is faster, and each step then lacks the changes of the step before it on the
        same worker, as it may lack those of other workers anyway.
      consistency: How much of each other's work workers see. "async": each step uses the values
        that are there, and changes them when it is done. `rx.Staleness(bound)`: the same, but
        steps that would lack too many others wait. "sync": the gradients of one step of each
        worker are averaged, and change the values together.
      backup_workers: With "sync": so many of the workers need not be waited for; a gradient that
        comes too late is dropped.
      protocol: "tcp" to talk over TCP also on one machine.
      keys: The directory with the keys of the cluster, which TCP needs; by default that of
        the environment variable REPLICAX_KEYS.
      connect_timeout: How long to wait for parameter servers that are not there yet.
      job: A name for the job, so that it outlives this process: when the program is started
        again with the same name while the servers are still there, it takes the job over, and
        its variables are as they were. See `is_resumed`. Ends with `close`.
      lease: How many seconds the servers keep the variables of a job without a coordinator.
      mirror: Whether each server keeps a copy of another one. A change then counts when both have
        made it, and a server that is lost and started again goes on with all of them. Needs two
        servers or more, twice the memory, and time.

    >>> import replicax as rx
    >>> rx.ParameterServerStrategy(
    ...     rx.cluster_resolver.SimpleClusterResolver(rx.train.ClusterSpec({"ps": ["a:1"]}))
    ... )
    Traceback (most recent call last):
      ...
    replicax.errors.InvalidArgumentError: ... the cluster has no worker. ...
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver,
        variable_partitioner: Any = None,
        *,
        replicas_per_worker: int | None = None,
        pull_ahead: bool = False,
        consistency: Literal["async", "sync"] | Staleness = "async",
        backup_workers: int = 0,
        protocol: str | None = None,
        keys: str | os.PathLike[str] | None = None,
        connect_timeout: float = 60.0,
        job: str | None = None,
        lease: float = 300.0,
        mirror: bool = False,
    ) -> None:
        options.require_resolver(cluster_resolver)
        options.require_partitioner(variable_partitioner)
        spec = cluster_resolver.cluster_spec()
        parameter_servers.check(spec, cluster_resolver.task_type, cluster_resolver.task_id)
        self._resolver = cluster_resolver
        found = _keys(keys)
        layer = protocol or ("tcp" if cluster_resolver.rpc_layer == "tcp" else None)
        servers, workers = (
            [addresses.resolve(str(a), layer, found) for a in spec.job_tasks(job)]
            for job in ("ps", "worker")
        )
        replicas = options.checked_replicas(replicas_per_worker)
        settings: dict[str, Any] = {"replicas": replicas, "pull_ahead": bool(pull_ahead)}
        settings["lease"] = options.checked_lease(lease)
        if options.checked_mirror(mirror, len(servers)):
            settings["mirror"] = True
        settings |= settings_of(consistency, backup_workers, len(workers), bool(pull_ahead))
        name = options.checked_job(job)
        cluster = Cluster(servers, workers, settings, found, connect_timeout, name)
        client = ParameterClient(cluster.channels, cluster)
        layout = ReplicaLayout([devices.current()], replicas or 1)
        extended = ParameterServerExtended(self, layout, client, cluster, variable_partitioner)
        super().__init__(extended)
        # A job with a name waits for its next coordinator, unless this one says that it is over.
        self._ending = weakref.finalize(self, _leave, cluster, client, keeps=job is not None)

    @property
    @override
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver that was given; None on a worker."""
        return self._resolver

    @property
    def is_resumed(self) -> bool:
        """Whether the servers held the job already, when this process joined it.

        Then the variables that the program makes have the values that they had: there is
        nothing to restore from a checkpoint. Waits for the servers, if it has to.
        """
        extended = self.extended
        assert isinstance(extended, ParameterServerExtended)
        cluster = extended.require_cluster("`is_resumed`")
        cluster.attach()
        return cluster.is_resumed

    @override
    def _facts(self) -> dict[str, str]:
        extended = self.extended
        assert isinstance(extended, ParameterServerExtended)
        cluster = extended.cluster
        if cluster is None:
            return {"on": "a worker", "replicas": str(self.num_replicas_in_sync)}
        return {
            "workers": str(len(cluster.workers)),
            "parameter servers": str(len(cluster.servers)),
        }

    def close(self) -> None:
        """Leaves the cluster; the parameter servers drop all variables."""
        ending = self._ending.detach()
        if ending is not None:
            _, leave, args, _ = ending
            leave(*args)

    @classmethod
    def on_worker(cls, client: ParameterClient, replicas: int | None) -> ParameterServerStrategy:
        """Makes the strategy that closures see on a worker."""
        strategy = object.__new__(cls)
        strategy._resolver = None  # type: ignore[assignment]
        layout = _worker_layout(replicas)
        Strategy.__init__(strategy, ParameterServerExtended(strategy, layout, client))
        strategy._ending = weakref.finalize(strategy, client.close)
        return strategy


def _leave(cluster: Cluster, client: ParameterClient, keeps: bool = False) -> None:
    try:
        cluster.close(keeps=keeps)
    finally:
        client.close()


def _keys(directory: str | os.PathLike[str] | None) -> Keys | None:
    if directory is not None:
        return key_files.load(directory, "coordinator")
    return key_files.from_environment("coordinator")


def _worker_layout(replicas: int | None) -> ReplicaLayout:
    """Returns the devices of this worker's replicas; more replicas than devices share one."""
    local = jax.local_devices()
    if replicas is None:
        return ReplicaLayout(local if local[0].platform != "cpu" else local[:1])
    if replicas <= len(local):
        return ReplicaLayout(local[:replicas])
    return ReplicaLayout(local[:1], replicas)
