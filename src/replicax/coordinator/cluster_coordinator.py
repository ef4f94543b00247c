"""`ClusterCoordinator`: runs functions on the workers of a parameter-server cluster."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Self, cast

from replicax.coordinator import observed
from replicax.coordinator.engine import Engine
from replicax.coordinator.per_worker import PerWorkerDataset
from replicax.coordinator.progress import Progress
from replicax.coordinator.remote_value import (
    PerWorkerValues,
    RemoteValue,
    ResourceReference,
    WorkerCopies,
    map_structure,
    require_no_remote_value,
)
from replicax.coordinator.scheduling.closures import LIMIT
from replicax.coordinator.scheduling.status import Status
from replicax.coordinator.scheduling.timing import Timing
from replicax.coordinator.shipping import serialization
from replicax.coordinator.shipping.unshippable import too_deep
from replicax.foundation import errors, tracebacks
from replicax.foundation.types import Tree
from replicax.protocol.codec import Buffer
from replicax.strategies.base import Strategy
from replicax.strategies.parameter_server import ParameterServerExtended
from replicax.tracing.signature import require_arguments

# The interval at which the progress is shown.
_PROGRESS_S = 0.1

# The coordinator of each strategy, and the lock that is held while one is created.
_coordinators: weakref.WeakKeyDictionary[Strategy, weakref.ref[ClusterCoordinator]]
_coordinators = weakref.WeakKeyDictionary()
_making = threading.RLock()


class ClusterCoordinator:
    """Schedules functions on workers, and makes each take effect exactly once.

    There is one per strategy: the constructor returns the existing one. It ends with `close`,
    with the end of a `with` block, or when it is no longer referenced.

    Args:
      strategy: A `ParameterServerStrategy`.
      timing: The timeouts.
      queue_limit: The maximum number of queued closures; `schedule` waits while the queue is full.
      speculate: Whether an idle worker runs closures a second time that another worker takes
        unusually long for. Their updates take effect once.

    Raises:
      InvalidArgumentError: The strategy has no cluster of parameter servers.
      PSUnavailableError: A parameter server cannot be reached.

    A program schedules its steps, and waits for all of them::

        coordinator = rx.coordinator.ClusterCoordinator(strategy)
        dataset = coordinator.create_per_worker_dataset(make_dataset)
        for _ in range(num_epochs):
            iterator = iter(dataset)
            for _ in range(steps_per_epoch):
                coordinator.schedule(train_step, args=(iterator,))
            coordinator.join()

    >>> import replicax as rx
    >>> with rx.testing.LocalCluster(workers=1, ps=1) as cluster:
    ...     strategy = rx.ParameterServerStrategy(cluster.resolver)
    ...     with strategy.scope():
    ...         total = rx.Variable(0)
    ...     with rx.coordinator.ClusterCoordinator(strategy) as coordinator:
    ...         for _ in range(3):
    ...             result = coordinator.schedule(lambda: total.assign_add(2, read_value=False))
    ...         coordinator.join()
    ...     total.numpy().item()
    6
    """

    _engine: Engine
    _strategy: Strategy
    _finalizer: weakref.finalize[..., ClusterCoordinator]

    def __new__(
        cls,
        strategy: Strategy,
        *,
        timing: Timing | None = None,
        queue_limit: int = LIMIT,
        speculate: bool = False,
    ) -> ClusterCoordinator:
        """Returns the coordinator of the strategy, a new one if there is none."""
        cluster = getattr(getattr(strategy, "extended", None), "cluster", None)
        if cluster is None:
            raise errors.InvalidArgumentError(
                "A ClusterCoordinator works with a ParameterServerStrategy",
                f"a {type(strategy).__name__} was given",
                "Make a ParameterServerStrategy; others run their steps with `strategy.run`.",
            )
        with _making:
            known = _coordinators.get(strategy)
            found = None if known is None else known()
            if found is not None and not found.is_closed:
                return found
            # Servers reply only to the coordinator of the job that they are attached to.
            cluster.attach()
            self = super().__new__(cls)
            self._strategy = strategy
            used = timing or Timing.from_environment()
            self._engine = Engine(cluster, used, queue_limit, speculates=speculate)
            # Reads of variables wait for servers too, and must end when those are lost.
            cluster.follow(self._engine.loss_of)
            self._engine.add_close_callback(functools.partial(cluster.follow, None))
            observed.open_endpoint(self._engine, cluster)
            self._finalizer = weakref.finalize(self, _close, self._engine)
            _coordinators[strategy] = weakref.ref(self)
        cast(ParameterServerExtended, strategy.extended).per_worker.attach(self)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.is_closed:
            return "<ClusterCoordinator, closed>"
        return f"<ClusterCoordinator: {self.status().summary}>"

    def _repr_html_(self) -> str:
        return self.status()._repr_html_()

    @property
    def engine(self) -> Engine:
        """Its engine, for other modules of this package.

        :meta private:
        """
        return self._engine

    @property
    def strategy(self) -> Strategy:
        """The strategy whose cluster it uses."""
        return self._strategy

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return not self._finalizer.alive

    def schedule(
        self,
        fn: Callable[..., object],
        args: Sequence[object] | None = None,
        kwargs: Mapping[str, object] | None = None,
        *,
        deadline: float | None = None,
    ) -> RemoteValue:
        """Queues a call of a function, to be run by some worker, and returns at once.

        If the worker is lost, another one runs the function again. Each update of a variable
        still takes effect once; other side effects may happen twice.

        Args:
          fn: An `rx.function`, which workers compile once, or any other callable.
          args: Its positional arguments. A per-worker object is replaced by the object of the
            worker that runs the function.
          kwargs: Its keyword arguments.
          deadline: The seconds that a worker may take for it. A worker that takes longer is
            restarted, and another one tries; after three of them the function fails.

        Returns:
          The future result.

        Raises:
          Exception: The first error of an earlier function. All queued ones are cancelled.
          InvalidArgumentError: `args` is not a tuple or list, or an argument is a RemoteValue.
          ArgumentTypeError: `kwargs` is not a mapping, or the function cannot be pickled.
        """
        if not callable(fn):
            raise errors.ArgumentTypeError(
                "`schedule` takes a function",
                f"{type(fn).__name__} was given",
                "Pass the function itself, and its arguments in `args` and `kwargs`.",
            )
        require_arguments(() if args is None else args, kwargs)
        if deadline is not None and not deadline > 0:
            raise errors.InvalidArgumentError(
                "`deadline` must be a positive number of seconds, or None",
                f"it is {deadline!r}",
                "Give the function more time.",
            )
        function = serialization.ship(fn, self._strategy)
        resources, buffers = self._pack(args, kwargs)
        keep_alive = (fn, args, kwargs)
        closure = self._engine.schedule(function, resources, buffers, keep_alive, deadline)
        return RemoteValue(self._engine, closure)

    def join(self, timeout: float | None = None, progress: bool = False) -> None:
        """Waits until all scheduled functions have ended.

        Args:
          timeout: The maximum number of seconds.
          progress: Whether to show a progress bar.

        Raises:
          Exception: The first error of a function. All queued ones are cancelled, and the
            coordinator can be used again.
          DeadlineExceededError: They have not ended in time; they keep running.
        """
        try:
            self._join(timeout, progress)
        except Exception as error:
            tracebacks.hide_own_frames(error, is_expected=True)
            raise

    def _join(self, timeout: float | None, progress: bool) -> None:
        if not progress:
            self._engine.join(timeout)
            return
        with Progress(self._engine.counts) as shown:

            def poll() -> float:
                shown.update()
                return _PROGRESS_S

            self._engine.join(timeout, poll)

    def done(self) -> bool:
        """Returns, without waiting, whether all scheduled functions have ended.

        Raises:
          Exception: The first error of a function, once none runs any more.
        """
        return self._engine.is_done()

    def fetch(self, val: Tree) -> Tree:
        """Waits for results and returns them as NumPy arrays.

        Args:
          val: A RemoteValue, or nested lists, tuples and dicts of them. Other leaves are
            returned unchanged.

        Raises:
          InvalidArgumentError: The structure is nested too deeply.
          CancelledError: A function never runs, because an earlier one failed.
          Exception: The error that a function raised.
        """
        try:
            return map_structure(_fetched, val)
        except RecursionError:
            raise too_deep(val, "val") from None

    def create_per_worker_dataset(self, dataset_fn: object) -> PerWorkerDataset:
        """Creates a dataset on each worker, now and whenever a worker recovers.

        Args:
          dataset_fn: A function without arguments that returns a dataset, or a dataset, which
            is sent to the workers.

        Returns:
          The dataset. `iter` of it starts an iterator on each worker, an argument for
          scheduled functions.
        """
        function = serialization.ship(dataset_fn, self._strategy)
        resource = self._engine.create_resource("dataset", function, 0, dataset_fn)
        return PerWorkerDataset(self._engine, resource)

    def create_per_worker_value(
        self,
        fn: Callable[..., object],
        args: Sequence[object] | None = None,
        kwargs: Mapping[str, object] | None = None,
    ) -> PerWorkerValues:
        """Calls a function on each worker, which keeps the result.

        Args:
          fn: The function; it is called again whenever a worker recovers.
          args: Its positional arguments.
          kwargs: Its keyword arguments.

        Returns:
          The values: an argument for scheduled functions, which get the one of their worker.

        Raises:
          ArgumentTypeError: `fn` is not a function, or `kwargs` is not a mapping.
          InvalidArgumentError: `args` is not a tuple or list, or an argument is a RemoteValue.
        """
        if not callable(fn):
            raise errors.ArgumentTypeError(
                "`create_per_worker_value` takes a function",
                f"{type(fn).__name__} was given",
                "Pass the function itself.",
            )
        require_arguments(() if args is None else args, kwargs)
        require_no_remote_value(args, kwargs)
        # A resource has no arguments of its own.
        call = functools.partial(fn, *(args or ()), **(kwargs or {})) if args or kwargs else fn
        reference = self._create_value(call)
        return PerWorkerValues.kept_by_workers(self._engine, self._engine.num_workers, reference)

    def make_copies(self, make: Callable[[], object]) -> WorkerCopies:
        """Creates a copy of a variable on each worker; see `CopiesHost`."""
        return WorkerCopies(self._engine, self._engine.num_workers, self._create_value(make))

    def _create_value(self, create: Callable[[], object]) -> ResourceReference:
        function = serialization.ship(create, self._strategy)
        resource = self._engine.create_resource("value", function, 0, create)
        return ResourceReference(resource, self._engine.released)

    def status(self) -> Status:
        """Returns a snapshot of workers, servers and queue; `print` it."""
        return self._engine.status()

    def close(self) -> None:
        """Cancels all closures that have not ended, and releases the workers. Idempotent."""
        self._finalizer.detach()
        with _making:
            known = _coordinators.get(self._strategy)
            if known is not None and known() is self:
                del _coordinators[self._strategy]
        self._engine.close()

    def _pack(
        self, args: Sequence[object] | None, kwargs: Mapping[str, object] | None
    ) -> tuple[list[int], list[Buffer]]:
        if not args and not kwargs:
            return [], []
        require_no_remote_value(args, kwargs)
        return serialization.pack_arguments(args, dict(kwargs or {}), self._strategy)


def _fetched(leaf: object) -> object:
    if isinstance(leaf, RemoteValue):
        return leaf.fetch()
    if isinstance(leaf, PerWorkerValues):
        return tuple(value.fetch() for value in leaf.values)
    return leaf


def _close(engine: Engine) -> None:
    """Closes the engine of a coordinator that is no longer referenced.

    A finalizer may run in any thread, with any lock held: another thread closes the engine,
    except at the end of the program, when no thread can be started.
    """
    if not threading.main_thread().is_alive():
        engine.close()
        return
    threading.Thread(target=engine.close, name="replicax-coordinator-end").start()
