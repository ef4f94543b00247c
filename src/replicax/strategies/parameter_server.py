"""ParameterServerStrategy: variables on parameter servers, steps on workers, one coordinator."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, cast, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.typing import ArrayLike, DTypeLike
from typing_extensions import override

from replicax.cluster import parameter_servers
from replicax.cluster_resolver.base import ClusterResolver
from replicax.contexts import frames
from replicax.foundation import device_names, devices, errors, jax_compat
from replicax.foundation.options import VariableAggregation, VariableSynchronization
from replicax.foundation.public_names import show_in_package
from replicax.foundation.types import Tree
from replicax.input.input_context import InputContext, InputOptions
from replicax.protocol import messages
from replicax.protocol.tasks import Task
from replicax.ps.client import initial_values
from replicax.ps.client.cluster import Cluster
from replicax.ps.client.initial_values import Initial, InitialValue, PartValue, uniform_element
from replicax.ps.client.variable_client import ParameterClient
from replicax.strategies.base import Strategy
from replicax.strategies.consistency import Staleness, settings_of
from replicax.strategies.extended import StrategyExtended
from replicax.strategies.inputs import UnplacedDataset
from replicax.training.optimizer.remote import Update
from replicax.transport import addresses
from replicax.transport import keys as key_files
from replicax.transport.keys import Keys
from replicax.values.layout import ReplicaLayout
from replicax.variables import creators
from replicax.variables.partitioners import AnyPartitioner, checked_counts, split_rows
from replicax.variables.per_worker import PerWorkerVariables, create_per_worker
from replicax.variables.remote import CopiedVariable, RemoteVariable, RemoteVariableBase
from replicax.variables.sharded import ShardedVariable
from replicax.variables.shipped import VariableRegistry
from replicax.variables.variable import Variable

_log = logging.getLogger(__name__)

# The name of a job is sent with every message.
_LONGEST_JOB = 128


@final
class ParameterServerExtended(StrategyExtended):
    """Places variables on parameter servers in round-robin order, partitioned by a partitioner.

    Attributes:
      cluster: The cluster; None on a worker.
      client: Reads and updates variables.
      per_worker: The variables of workers.
    """

    def __init__(
        self,
        container_strategy: Strategy,
        layout: ReplicaLayout,
        client: ParameterClient,
        cluster: Cluster | None = None,
        partitioner: AnyPartitioner | None = None,
    ) -> None:
        super().__init__(container_strategy, layout)
        self.client = client
        self.cluster = cluster
        self._partitioner = partitioner
        self._registry = VariableRegistry(client, self)
        if cluster is not None:
            cluster.variable = self._registry.adopt
        # Serializes creation, so that the parts of a variable are on consecutive servers.
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
        """Returns the cluster, or raises on a worker."""
        if self.cluster is None:
            raise errors.ContextError(
                f"{what} needs the coordinator",
                "this is a worker",
                "Do it before scheduling, in the program that created the strategy.",
            )
        return self.cluster

    # Running.

    @override
    def _call_for_each_replica(
        self, fn: Callable[..., Tree], args: tuple[Tree, ...], kwargs: dict[str, Tree]
    ) -> Tree:
        if self.cluster is not None and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "`strategy.run` of a ParameterServerStrategy runs here, on the coordinator. Pass "
                "the function that calls it to ClusterCoordinator.schedule to run it on workers."
            )
        return super()._call_for_each_replica(fn, args, kwargs)

    @override
    def distribute_dataset(self, dataset: object, options: InputOptions | None) -> Iterable[Tree]:
        if self.cluster is not None:
            return UnplacedDataset(dataset, options, is_function=False)
        return super().distribute_dataset(dataset, options)

    @override
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None
    ) -> Iterable[Tree]:
        if self.cluster is not None:
            return UnplacedDataset(dataset_fn, options, is_function=True)
        return super().distribute_datasets_from_function(dataset_fn, options)

    # Variables.

    @override
    def _create_variable(self, next_creator: creators.Creator, **kwargs: Any) -> Variable:
        name = kwargs.get("name") or "Variable"
        self.require_cluster(f"The creation of variable {name!r}")
        # A device block that a creator opens moves the variable; one around the scope does not.
        make = functools.partial(self._create_unpartitioned, devices.requested())
        with self._lock, creators.made_by(make):
            is_one = kwargs.get("colocate_with") is not None or kwargs.get("per_worker_variable")
            if self._partitioner is None or is_one:
                return self._owned(next_creator(**kwargs))
            initial = initial_values.describe(kwargs, is_partitioned=True)
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

    def _owned(self, variable: Variable) -> Variable:
        """Sets the owner of a variable that a creator has created by itself."""
        if isinstance(variable, Variable) and variable.owner is None:
            variable.owner = self
        return variable

    def _create_unpartitioned(
        self, around: device_names.DeviceSpec | None, **kwargs: Any
    ) -> Variable:
        """Creates a variable, or a part of one."""
        if kwargs.get("per_worker_variable"):
            spec = initial_values.describe(kwargs, is_partitioned=False)
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
            value = initial_values.describe(kwargs, is_partitioned=False)
        attributes = creators.resolve_attributes(kwargs, value)
        return self.create_part(attributes, value.whole(), self._server_near(near))

    def create_part(
        self, attributes: creators.VariableAttributes, initial: Initial, server: int
    ) -> RemoteVariable:
        """Creates a variable, or a part of one, on a server."""
        cluster = self.require_cluster(f"The creation of variable {attributes.name!r}")
        variable = cluster.create_part(self.client, self, attributes, initial, server)
        self._registry.add(variable)
        return variable

    def _server_near(self, near: object) -> int:
        """Returns the server of a variable or of the first device; else the next in turn."""
        first = near[0] if isinstance(near, list | tuple) else near
        if isinstance(first, ShardedVariable):
            first = first.variables[0]
        if isinstance(first, CopiedVariable):
            first = first.copies[0]
        if isinstance(first, RemoteVariable):
            return first.server
        if isinstance(first, str) and first.startswith("/job:ps"):
            return Task.parse(first).index
        return self.require_cluster("The placement of a variable").next_server()

    def adopt(self, key: tuple[Any, ...]) -> Variable:
        """Returns this process's handle of a variable that the coordinator created."""
        return self._registry.adopt(key)

    # Optimizers; see `OptimizerHost`.

    def make_slot(
        self,
        variable: Variable,
        name: str,
        spec: jax.ShapeDtypeStruct,
        first: Callable[[jax.Array], jax.Array],
    ) -> Variable:
        """Creates a slot on the servers of a variable, part by part."""
        attributes = _attributes(name, spec.shape, spec.dtype)
        if isinstance(variable, RemoteVariable):
            return self.create_part(attributes, _first_slot(first, variable, spec), variable.server)
        slots = []
        for i, part in enumerate(_parts_of(variable)):
            own = attributes.part(i, part.shape[0])
            piece = jax.ShapeDtypeStruct(own.shape, spec.dtype)
            slots.append(self.create_part(own, _first_slot(first, part, piece), part.server))
        return ShardedVariable(slots, name=name)

    def make_shared(
        self, variables: Sequence[Variable], name: str, value: ArrayLike
    ) -> CopiedVariable:
        """Creates a variable with a copy on each server that holds a part of some variables."""
        array = np.asarray(value)
        attributes = _attributes(name, array.shape, array.dtype)
        servers = sorted({part.server for v in variables for part in _parts_of(v)})
        first = Initial(messages.FromBuffer(), [array])
        copies = [
            self.create_part(attributes.named(f"{name}/copy_{i}"), first, server)
            for i, server in enumerate(servers)
        ]
        return CopiedVariable(attributes, copies, self)

    def register(self, shared: Sequence[Variable], updates: Sequence[Update]) -> int:
        """Registers an optimizer on each server that holds a part of its variables."""
        cluster = self.require_cluster("The creation of an optimizer")
        number = cluster.next_number()
        copies = [c for s in shared if isinstance(s, CopiedVariable) for c in s.copies]
        for server in sorted({p.server for update in updates for p in _parts_of(update.variable)}):
            programs: list[bytes] = []
            trained: list[messages.TrainedPart] = []
            for update in updates:
                slots = [_parts_of(slot) for slot in update.slots]
                for i, part in enumerate(_parts_of(update.variable)):
                    if part.server != server:
                        continue
                    if update.program not in programs:
                        programs.append(update.program)
                    index = programs.index(update.program)
                    own = [parts[i].number for parts in slots]
                    trained.append(
                        messages.TrainedPart(part.number, own, index, update.is_row_wise)
                    )
            state = [c.number for c in copies if c.server == server]
            body = messages.RegisterOptimizer(number, state, trained, len(programs))
            cluster.request(server, body, programs)
        return number

    @override
    def colocate_vars_with(
        self, colocate_with_variable: object
    ) -> contextlib.AbstractContextManager[None]:
        if frames.current().strategy is not self.container_strategy:
            # Raises with the required scope.
            return super().colocate_vars_with(colocate_with_variable)
        self._validate_colocate_with_variable(colocate_with_variable)

        def creator(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
            return next_creator(**kwargs, colocate_with=colocate_with_variable)

        return creators.variable_creator_scope(creator)

    @override
    def non_slot_devices(self, var_list: Sequence[Variable]) -> Variable:
        return min(var_list, key=lambda v: v.name)

    @override
    def update_non_slot(
        self,
        colocate_with: object,
        fn: Callable[..., Tree],
        args: Sequence[Tree] = (),
        kwargs: Mapping[str, Tree] | None = None,
        group: bool = True,
    ) -> Tree:
        near = colocate_with
        if isinstance(near, RemoteVariableBase):
            near = [devices.name_of(near.placement[0])]
        return super().update_non_slot(near, fn, args, kwargs, group)


@final
class ParameterServerStrategy(Strategy):
    """Trains with variables on parameter servers and steps on workers that may join and leave.

    This process is the coordinator. Create variables, optimizers and metrics inside `scope()`, and
    run steps with an `rx.coordinator.ClusterCoordinator`.

    Args:
      cluster_resolver: Describes the cluster: jobs "ps" and "worker", and optionally "chief".
      variable_partitioner: Returns into how many parts a variable is partitioned; see
        `rx.experimental.partitioners`. None for no partitioning.
      replicas_per_worker: How many replicas a worker runs; by default one for each of its
        accelerators, and one on a worker without accelerators.
      pull_ahead: Whether workers fetch the values of their next step while they compute the current
        one. That is faster, but a step then does not see the changes of the previous step on the
        same worker, just as it may not see those of other workers.
      consistency: How much of each other's work workers see. "async": each step uses the current
        values, and changes them when it is done. `rx.Staleness(bound)`: the same, but a step waits
        if it would miss too many others. "sync": the gradients of one step of each worker are
        averaged, and applied together.
      backup_workers: With "sync": how many workers a step does not wait for; their late gradients
        are dropped.
      protocol: "tcp" to use TCP also on one machine.
      keys: The directory with the keys of the cluster, which TCP needs; by default that of the
        environment variable REPLICAX_KEYS.
      connect_timeout: How many seconds to wait for parameter servers that are not running yet.
      job: A name for the job, so that it outlives this process: a program that is started again
        with the same name, while the servers run, resumes the job with the values of its variables.
        See `is_resumed`. The job ends with `close`.
      lease: How many seconds the servers keep the variables of a job without a coordinator.
      mirror: Whether each server keeps a copy of another one. A change is then acknowledged when
        both have applied it, and a server that is lost and restarted recovers all changes. Needs
        two servers or more, twice the memory, and time.

    Raises:
      ArgumentTypeError: The resolver or the partitioner is none.
      InvalidArgumentError: Another option is out of its range, or the cluster has no worker or
        server.

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
        variable_partitioner: AnyPartitioner | None = None,
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
        if not isinstance(cluster_resolver, ClusterResolver):
            raise errors.ArgumentTypeError(
                "`cluster_resolver` must be a ClusterResolver",
                f"it is {cluster_resolver!r}",
                "Pass e.g. rx.cluster_resolver.TFConfigClusterResolver().",
            )
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise errors.ArgumentTypeError(
                "`variable_partitioner` must be callable",
                f"it is {variable_partitioner!r}",
                "Pass one of rx.experimental.partitioners, or a function of shape and dtype.",
            )
        spec = cluster_resolver.cluster_spec()
        parameter_servers.check(spec, cluster_resolver.task_type, cluster_resolver.task_id)
        self._resolver = cluster_resolver
        found = _keys(keys)
        layer = protocol or ("tcp" if cluster_resolver.rpc_layer == "tcp" else None)
        servers, workers = (
            [addresses.resolve(str(a), layer, found) for a in spec.job_tasks(job)]
            for job in ("ps", "worker")
        )
        replicas = _checked_replicas(replicas_per_worker)
        settings: dict[str, Any] = {"replicas": replicas, "pull_ahead": bool(pull_ahead)}
        settings["lease"] = _checked_lease(lease)
        if _checked_mirror(mirror, len(servers)):
            settings["mirror"] = True
        settings |= settings_of(consistency, backup_workers, len(workers), bool(pull_ahead))
        name = _checked_job(job)
        cluster = Cluster(servers, workers, settings, found, connect_timeout, name)
        client = ParameterClient(cluster.channels, cluster)
        layout = ReplicaLayout([devices.current()], replicas or 1)
        extended = ParameterServerExtended(self, layout, client, cluster, variable_partitioner)
        super().__init__(extended)
        # A job with a name waits for its next coordinator, unless `close` ends it.
        self._finalizer = weakref.finalize(
            self, _disconnect, cluster, client, keeps=job is not None
        )

    @property
    @override
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver of the cluster; None on a worker."""
        return self._resolver

    @property
    def is_resumed(self) -> bool:
        """Whether the servers held the job already when this process attached them.

        Then the variables that the program creates keep their values, and need not be restored from
        a checkpoint. Waits for the servers if necessary.
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
        """Disconnects from the cluster; the parameter servers drop all variables."""
        finalizer = self._finalizer.detach()
        if finalizer is not None:
            _, disconnect, args, _ = finalizer
            disconnect(*args)

    @classmethod
    def on_worker(cls, client: ParameterClient, replicas: int | None) -> ParameterServerStrategy:
        """Creates the strategy that closures see on a worker."""
        strategy = object.__new__(cls)
        strategy._resolver = None  # type: ignore[assignment]
        layout = _worker_layout(replicas)
        Strategy.__init__(strategy, ParameterServerExtended(strategy, layout, client))
        strategy._finalizer = weakref.finalize(strategy, client.close)
        return strategy


def _disconnect(cluster: Cluster, client: ParameterClient, keeps: bool = False) -> None:
    try:
        cluster.close(keeps=keeps)
    finally:
        client.close()


def _keys(directory: str | os.PathLike[str] | None) -> Keys | None:
    if directory is not None:
        return key_files.load(directory, "coordinator", 0)
    return key_files.from_environment("coordinator", 0)


def _worker_layout(replicas: int | None) -> ReplicaLayout:
    """Returns the devices of this worker's replicas; excess replicas share the first device."""
    local = jax.local_devices()
    if replicas is None:
        return ReplicaLayout(local if local[0].platform != "cpu" else local[:1])
    if replicas <= len(local):
        return ReplicaLayout(local[:replicas])
    return ReplicaLayout(local[:1], replicas)


# Optimizers.


def _parts_of(variable: Variable) -> Sequence[RemoteVariable]:
    return cast(Sequence[RemoteVariable], variable.components)


def _first_slot(
    first: Callable[[jax.Array], jax.Array], part: RemoteVariable, spec: jax.ShapeDtypeStruct
) -> Initial:
    """Returns the first value of a slot: one number, or a program of the variable's value."""
    value = jax.ShapeDtypeStruct(part.shape, part.dtype)
    with jax_compat.eagerly():
        element = uniform_element(jax.make_jaxpr(first)(value))
        if element is not None:
            return Initial(messages.Fill(element.astype(spec.dtype).tobytes()), [])
        program = export.export(jax.jit(first), platforms=("cpu",))(value).serialize()
    return Initial(messages.FromProgram([part.number], 0), [bytes(program)])


def _attributes(name: str, shape: tuple[int, ...], dtype: DTypeLike) -> creators.VariableAttributes:
    return creators.VariableAttributes(
        name=name,
        shape=tuple(shape),
        dtype=jnp.dtype(dtype),
        trainable=False,
        synchronization=VariableSynchronization.AUTO,
        aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
    )


# Arguments.


def _checked_job(name: object) -> str | None:
    if name is None or (isinstance(name, str) and 0 < len(name) <= _LONGEST_JOB):
        return name
    raise errors.InvalidArgumentError(
        f"`job` must be a name of 1 to {_LONGEST_JOB} characters, or None",
        f"it is {name!r}",
        "Choose a name that no other job on these servers has.",
    )


def _checked_lease(seconds: object) -> float:
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if is_number and 0 < (number := float(cast(float, seconds))) < math.inf:
        return number
    raise errors.InvalidArgumentError(
        "`lease` must be a positive number of seconds",
        f"it is {seconds!r}",
        "Choose how long servers wait for a coordinator that was lost.",
    )


def _checked_replicas(count: object) -> int | None:
    if count is None or (isinstance(count, int) and not isinstance(count, bool) and count > 0):
        return count
    raise errors.InvalidArgumentError(
        "`replicas_per_worker` must be a positive int or None",
        f"it is {count!r}",
        "Leave it out to use every accelerator of a worker.",
    )


def _checked_mirror(mirror: object, num_servers: int) -> bool:
    if isinstance(mirror, bool) and (not mirror or num_servers > 1):
        return mirror
    raise errors.InvalidArgumentError(
        "`mirror` must be True or False, and True needs two parameter servers or more",
        f"it is {mirror!r} in a cluster with {num_servers}",
        "Add a parameter server, or leave it out.",
    )


show_in_package(ParameterServerStrategy)
