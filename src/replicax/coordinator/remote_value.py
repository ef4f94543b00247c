"""`RemoteValue`: the result of a closure, available now or later."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, Self

import jax
import numpy as np
from typing_extensions import override

from replicax.coordinator.scheduling.closures import Closure
from replicax.coordinator.shipping.unshippable import too_deep
from replicax.foundation import errors, tracebacks
from replicax.foundation.types import Tree
from replicax.values.regroup import mapping_like, sequence_like


class ClosureRunner(Protocol):
    """Runs closures; implemented by the engine."""

    def wait_for(self, closure: Closure, timeout: float | None) -> None:
        """Waits until a closure is settled."""
        ...

    def unpack(self, closure: Closure) -> Tree:
        """Returns the result of a finished closure, with NumPy arrays."""
        ...

    def run_pinned(
        self, worker: int, fn: Callable[..., object], resource: int, keep_alive: object
    ) -> Closure:
        """Runs a function of a resource on one worker."""
        ...


class RemoteValue:
    """The future result of a scheduled function; made by `ClusterCoordinator.schedule`.

    The worker sends the result to the coordinator as soon as the function has ended, so that it
    can be fetched after the worker is gone.

    >>> import replicax as rx
    >>> with rx.testing.LocalCluster(workers=1, ps=1) as cluster:
    ...     strategy = rx.ParameterServerStrategy(cluster.resolver)
    ...     with rx.coordinator.ClusterCoordinator(strategy) as coordinator:
    ...         squares = [coordinator.schedule(lambda x: x * x, args=(x,)) for x in range(3)]
    ...         [value.fetch() for value in squares]
    [0, 1, 4]
    """

    __slots__ = ("__weakref__", "_closure", "_runner", "_value")

    def __init__(self, runner: ClosureRunner, closure: Closure | None) -> None:
        self._runner = runner
        self._closure = closure
        # In a tuple, once it is fetched; it may be None itself.
        self._value: tuple[Tree] | None = None

    def __repr__(self) -> str:
        assert self._closure is not None
        return f"<RemoteValue of closure {self._closure.id}, {self._closure.state.value}>"

    @property
    def is_settled(self) -> bool:
        """Whether the function has ended, so that `fetch` does not wait."""
        return self._value is not None or self._require_closure().is_settled

    def fetch(self, timeout: float | None = None) -> Tree:
        """Waits for the result and returns it, with NumPy arrays.

        Args:
          timeout: The maximum number of seconds.

        Raises:
          DeadlineExceededError: The function has not ended in time.
          CancelledError: It never runs, because an earlier one failed.
          Exception: The error that the function raised.
        """
        if self._value is None:
            closure = self._require_closure()
            try:
                if not closure.is_settled:
                    self._runner.wait_for(closure, timeout)
                if closure.error is not None:
                    raise closure.error.with_traceback(None)
            except Exception as error:
                tracebacks.hide_own_frames(error, is_expected=True)
                raise
            self._value = (self._runner.unpack(closure),)
        return self._value[0]

    def get(self, timeout: float | None = None) -> Tree:
        """Waits for the result and returns it, with JAX arrays. See `fetch`."""
        return map_structure(_to_jax, self.fetch(timeout))

    def _require_closure(self) -> Closure:
        assert self._closure is not None
        return self._closure


class ResourceReference:
    """Keeps a resource of the workers alive as long as it is referenced."""

    def __init__(self, resource: int, released: deque[int]) -> None:
        self.resource = resource
        weakref.finalize(self, released.append, resource).atexit = False


class WorkerValue(RemoteValue):
    """One worker's part of a per-worker value. The worker keeps it, and sends it on request."""

    __slots__ = ("_reference", "_worker")

    def __init__(self, runner: ClosureRunner, worker: int, reference: ResourceReference) -> None:
        super().__init__(runner, None)
        self._worker = worker
        self._reference = reference

    @override
    def __repr__(self) -> str:
        return f"<RemoteValue kept by /job:worker/task:{self._worker}>"

    def request(self) -> None:
        """Requests the value, without waiting for it. Idempotent."""
        self._require_closure()

    @override
    def _require_closure(self) -> Closure:
        closure = self._closure
        # After an error the next request may succeed: the worker may have recovered.
        if closure is None or closure.error is not None:
            reference = self._reference
            closure = self._closure = self._runner.run_pinned(
                self._worker, return_argument, reference.resource, reference
            )
        return closure


def return_argument(value: object) -> object:
    """Returns its argument; runs on a worker whose resource is fetched."""
    return value


class PerWorkerValues:
    """One `RemoteValue` per worker; a function that gets it sees the value of its own worker.

    Raises:
      ArgumentTypeError: A value is not a RemoteValue.

    >>> PerWorkerValues([1, 2])
    Traceback (most recent call last):
      ...
    replicax.errors.ArgumentTypeError: `PerWorkerValues` holds RemoteValues, but ...
    """

    is_per_worker = True

    def __init__(self, values: Sequence[RemoteValue]) -> None:
        for value in values:
            if not isinstance(value, RemoteValue):
                raise errors.ArgumentTypeError(
                    "`PerWorkerValues` holds RemoteValues",
                    f"{value!r} is a {type(value).__name__}",
                    "Make one with `ClusterCoordinator.create_per_worker_value`.",
                )
        self._values = tuple(values)
        self._reference: ResourceReference | None = None

    @classmethod
    def kept_by_workers(
        cls, runner: ClosureRunner, num_workers: int, reference: ResourceReference
    ) -> Self:
        """Returns the values of a resource."""
        self = cls([WorkerValue(runner, i, reference) for i in range(num_workers)])
        self._reference = reference
        return self

    def __repr__(self) -> str:
        if self._reference is None:
            return f"<PerWorkerValues of {list(self._values)}>"
        return f"<PerWorkerValues kept by {len(self._values)} workers>"

    @property
    def values(self) -> tuple[RemoteValue, ...]:
        """The values, in the order of the workers."""
        return self._values

    @property
    def resource(self) -> int:
        """The id of the resource.

        Raises:
          InvalidArgumentError: The values are results of closures, which workers do not keep.
        """
        if self._reference is None:
            raise errors.InvalidArgumentError(
                "A function gets per-worker values that the workers keep",
                "these consist of results of closures",
                "Make them with `ClusterCoordinator.create_per_worker_value`.",
            )
        return self._reference.resource


class WorkerCopies:
    """A mutable object on each worker, fetched in its current state.

    Attributes:
      resource: The id of the resource.
    """

    def __init__(
        self, runner: ClosureRunner, num_workers: int, reference: ResourceReference
    ) -> None:
        self.resource = reference.resource
        self._runner = runner
        self._num_workers = num_workers
        self._reference = reference

    def fetch_all(self) -> list[Tree]:
        """Returns the current objects of all workers, in their order."""
        workers = range(self._num_workers)
        values = [WorkerValue(self._runner, i, self._reference) for i in workers]
        for value in values:
            # Before the first is waited for.
            value.request()
        return [value.fetch() for value in values]


def map_structure(change: Callable[[object], object], value: Tree) -> Tree:
    """Applies a function to all leaves of nested lists, tuples and dicts.

    >>> map_structure(str, {"a": [1, (2,)]})
    {'a': ['1', ('2',)]}
    """
    if isinstance(value, dict):
        return mapping_like(value, {k: map_structure(change, v) for k, v in value.items()})
    if isinstance(value, list | tuple):
        return sequence_like(value, [map_structure(change, v) for v in value])
    return change(value)


def require_no_remote_value(args: object, kwargs: object) -> None:
    """Raises if the result of another closure is among the arguments.

    Raises:
      InvalidArgumentError: There is one, or the arguments contain themselves.
    """

    def check(leaf: object) -> object:
        if isinstance(leaf, RemoteValue):
            raise errors.InvalidArgumentError(
                "The arguments of a scheduled function are values, or per-worker objects",
                "a RemoteValue is among them",
                "Pass `value.fetch()`, or do both steps in one function.",
            )
        return leaf

    try:
        map_structure(check, (args, kwargs))
    except RecursionError:
        for value, name in ((args, "args"), (kwargs, "kwargs")):
            try:
                map_structure(check, value)
            except RecursionError:
                raise too_deep(value, name) from None
        raise


def _to_jax(leaf: object) -> object:
    return jax.numpy.asarray(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf
