"""`ClusterCoordinator`: runs functions on the workers of a parameter-server cluster."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from replicax.coordinator.engine import Engine
from replicax.coordinator.per_worker import PerWorkerDataset
from replicax.coordinator.progress import Progress
from replicax.coordinator.remote_value import (
    PerWorkerValues,
    RemoteValue,
    ResourceHolder,
    WorkerCopies,
    map_structure,
    require_no_remote_value,
)
from replicax.coordinator.scheduling.queue import LIMIT
from replicax.coordinator.scheduling.status import Status
from replicax.coordinator.scheduling.timing import Timing
from replicax.coordinator.shipping import nesting, serialization
from replicax.foundation import errors, tracebacks

# How often progress is looked at.
_PROGRESS_S = 0.1

# The coordinator of each strategy, as long as both live. Held while one is made.
_coordinators: weakref.WeakKeyDictionary[Any, weakref.ref[ClusterCoordinator]]
_coordinators = weakref.WeakKeyDictionary()
_making = threading.RLock()


class ClusterCoordinator:
    """Schedules functions on workers, and sees to it that each takes effect once.

    There is one per strategy: making it again returns the same one. It ends with `close`,
    with the end of a `with` block, or when it is dropped.

    Args:
      strategy: A `ParameterServerStrategy`.
      timing: How long to wait for tasks that do not answer.
      queue_limit: How many closures may wait; then `schedule` does.
      speculate: Whether a worker that has nothing to do runs closures again that another
        worker takes unusually long for. Their updates count once, whoever is first.

    Raises:
      InvalidArgumentError: The strategy has no cluster of parameter servers.
      PSUnavailableError: A parameter server cannot be reached.

    A program schedules its steps, and waits for all of them:

        coordinator = rx.coordinator.ClusterCoordinator(strategy)
        dataset = coordinator.create_per_worker_dataset(make_dataset)
        for _ in range(num_epochs):
            iterator = iter(dataset)
            for _ in range(steps_per_epoch):
                coordinator.schedule(train_step, args=(iterator,))
            coordinator.join()
    """

    _engine: Engine
    _strategy: Any
    _ending: weakref.finalize[Any, Any]

    def __new__(
        cls,
        strategy: Any,
        *,
        timing: Timing | None = None,
        queue_limit: int = LIMIT,
        speculate: bool = False,
    ) -> ClusterCoordinator:
        """Returns the coordinator of the strategy; makes it the first time."""
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
            # Servers answer only those whose job they are in.
            cluster.attach()
            self = super().__new__(cls)
            self._strategy = strategy
            used = timing or Timing.from_environment()
            self._engine = Engine(cluster, used, queue_limit, speculates=speculate)
            # Reads of variables wait for servers too, and end when those are given up.
            cluster.follow(self._engine.loss_of)
            self._engine.add_ending(functools.partial(cluster.follow, None))
            self._ending = weakref.finalize(self, _end, self._engine)
            _coordinators[strategy] = weakref.ref(self)
        strategy.extended.per_worker.attach(self)
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
        """What does its work; for the other parts of this package."""
        return self._engine

    @property
    def strategy(self) -> Any:
        """The strategy whose cluster it uses."""
        return self._strategy

    @property
    def is_closed(self) -> bool:
        """Whether it runs nothing any more."""
        return not self._ending.alive

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        deadline: float | None = None,
    ) -> RemoteValue:
        """Queues a call of a function, to be run by some worker, and returns at once.

        If the worker is lost, another one runs the function again. Each update of a variable
        takes effect once all the same; what the function does elsewhere may happen twice.

        Args:
          fn: An `rx.function`, which workers compile once, or any other callable.
          args: Its positional arguments. Of per-worker objects, the function gets that of
            the worker that runs it.
          kwargs: Its keyword arguments.
          deadline: How many seconds a worker may take for it. One that takes longer is ended,
            and another one tries; after three of them the function is given up.

        Returns:
          What will be the result.

        Raises:
          Exception: The first error of an earlier function. All that wait are cancelled.
          InvalidArgumentError: A RemoteValue is among the arguments.
          ArgumentTypeError: The function cannot travel.
        """
        if not callable(fn):
            raise errors.ArgumentTypeError(
                "`schedule` takes a function",
                f"a {type(fn).__name__} was given",
                "Pass the function itself, and its arguments in `args` and `kwargs`.",
            )
        if deadline is not None and not deadline > 0:
            raise errors.InvalidArgumentError(
                "`deadline` must be a positive number of seconds, or None",
                f"it is {deadline!r}",
                "Give the function more time.",
            )
        function = serialization.ship(fn, self._strategy)
        resources, buffers = self._pack(args, kwargs)
        kept = (fn, args, kwargs)
        closure = self._engine.schedule(function, resources, buffers, kept, deadline)
        return RemoteValue(self._engine, closure)

    def join(self, timeout: float | None = None, progress: bool = False) -> None:
        """Waits until all scheduled functions have ended.

        Args:
          timeout: The seconds to wait at most.
          progress: Whether to show how many have ended.

        Raises:
          Exception: The first error of a function. All that waited are cancelled then, and
            the coordinator can be used again.
          DeadlineExceededError: They have not ended in time; they go on.
        """
        try:
            self._join(timeout, progress)
        except Exception as error:
            tracebacks.hide_own_frames(error, is_meant=True)
            raise

    def _join(self, timeout: float | None, progress: bool) -> None:
        if not progress:
            self._engine.join(timeout)
            return
        with Progress(self._engine.counts) as shown:

            def look() -> float:
                shown.update()
                return _PROGRESS_S

            self._engine.join(timeout, look)

    def done(self) -> bool:
        """Tells, without waiting, whether all scheduled functions have ended.

        Raises:
          Exception: The first error of a function, when none runs any more.
        """
        return self._engine.is_done()

    def fetch(self, val: Any) -> Any:
        """Waits for results and returns them as NumPy arrays.

        Args:
          val: A RemoteValue, or nested lists, tuples and dicts of them. Other leaves are
            returned as they are.
        """
        try:
            return map_structure(_fetched, val)
        except RecursionError:
            raise nesting.too_deep(val, "val") from None

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Makes a dataset on each worker, now and whenever a worker comes back.

        Args:
          dataset_fn: A function without arguments that returns a dataset, or a dataset,
            which then travels to the workers.

        Returns:
          The dataset. `iter` of it starts an iterator on each worker, an argument for
          scheduled functions.
        """
        function = serialization.ship(dataset_fn, self._strategy)
        resource = self._engine.make_resource("dataset", function, (), dataset_fn)
        return PerWorkerDataset(self._engine, resource)

    def create_per_worker_value(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> PerWorkerValues:
        """Calls a function on each worker, which keeps the result.

        Args:
          fn: The function; it is called again whenever a worker comes back.
          args: Its positional arguments.
          kwargs: Its keyword arguments.

        Returns:
          The values: an argument for scheduled functions, which get that of their worker.
        """
        if not callable(fn):
            raise errors.ArgumentTypeError(
                "`create_per_worker_value` takes a function",
                f"a {type(fn).__name__} was given",
                "Pass the function itself.",
            )
        require_no_remote_value(args, kwargs)
        # One object with everything in it: a resource has no arguments of its own.
        call = functools.partial(fn, *(args or ()), **(kwargs or {})) if args or kwargs else fn
        function = serialization.ship(call, self._strategy)
        engine = self._engine
        resource = engine.make_resource("value", function, (), call)
        holder = ResourceHolder(resource.id, engine.released)
        return PerWorkerValues.kept_by_workers(engine, engine.num_workers, holder)

    def make_copies(self, make: Callable[[], Any]) -> WorkerCopies:
        """Has each worker make a copy of a variable; see `CopiesHost`."""
        function = serialization.ship(make, self._strategy)
        resource = self._engine.make_resource("value", function, (), make)
        holder = ResourceHolder(resource.id, self._engine.released)
        return WorkerCopies(self._engine, self._engine.num_workers, holder)

    def status(self) -> Status:
        """Returns a snapshot of workers, servers and queue; `print` it."""
        return self._engine.status()

    def close(self) -> None:
        """Cancels what has not ended, and lets the workers go. Again is harmless."""
        self._ending.detach()
        with _making:
            known = _coordinators.get(self._strategy)
            if known is not None and known() is self:
                del _coordinators[self._strategy]
        self._engine.close()

    def _pack(self, args: Any, kwargs: Any) -> tuple[list[int], list[Any]]:
        if not args and not kwargs:
            return [], []
        require_no_remote_value(args, kwargs)
        return serialization.pack_arguments(args, dict(kwargs or {}), self._strategy)


def _fetched(leaf: Any) -> Any:
    if isinstance(leaf, RemoteValue):
        return leaf.fetch()
    if isinstance(leaf, PerWorkerValues):
        return tuple(value.fetch() for value in leaf.values)
    return leaf


def _end(engine: Engine) -> None:
    """Ends the threads of a coordinator that nobody holds any more.

    This may run in any thread, with any lock held: the work is done in another one, except at
    the end of the program, when no thread can be started.
    """
    if not threading.main_thread().is_alive():
        engine.close()
        return
    threading.Thread(target=engine.close, name="replicax-coordinator-end").start()
