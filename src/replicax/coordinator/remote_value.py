"""`RemoteValue`: the result of a closure, before and after it is there."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import jax
import numpy as np
from typing_extensions import override

from replicax.coordinator.scheduling.closures import Closure
from replicax.coordinator.shipping import nesting
from replicax.foundation import errors, tracebacks
from replicax.values.regroup import mapping_like, sequence_like


class Home(Protocol):
    """Where closures are run: what a value asks of it."""

    def wait_for(self, closure: Closure, timeout: float | None) -> None:
        """Waits until a closure is settled."""
        ...

    def unpack(self, closure: Closure) -> Any:
        """Returns the result of a closure that ended well, as NumPy arrays."""
        ...

    def run_errand(self, worker: int, resource: int, kept: Any) -> Closure:
        """Has one worker return what it keeps under a number."""
        ...


class RemoteValue:
    """What a scheduled function will return; made by `ClusterCoordinator.schedule`.

    The result comes to the coordinator as soon as the function has ended, so it can be read
    also when the worker is gone.
    """

    __slots__ = ("__weakref__", "_closure", "_home", "_value")

    def __init__(self, home: Home, closure: Closure | None) -> None:
        self._home = home
        self._closure = closure
        # In a tuple once it is known; it may be None itself.
        self._value: tuple[Any] | None = None

    def __repr__(self) -> str:
        assert self._closure is not None
        return f"<RemoteValue of closure {self._closure.id}, {self._closure.state.value}>"

    def fetch(self, timeout: float | None = None) -> Any:
        """Waits for the result and returns it, with arrays of NumPy.

        Args:
          timeout: The seconds to wait at most.

        Raises:
          DeadlineExceededError: The function has not ended in time.
          CancelledError: It will not run, because one before it failed.
          Exception: What the function raised.
        """
        if self._value is None:
            closure = self._require_closure()
            try:
                if not closure.is_settled:
                    self._home.wait_for(closure, timeout)
                if closure.error is not None:
                    raise closure.error.with_traceback(None)
            except Exception as error:
                tracebacks.hide_own_frames(error, is_meant=True)
                raise
            self._value = (self._home.unpack(closure),)
        return self._value[0]

    def get(self, timeout: float | None = None) -> Any:
        """Waits for the result and returns it, with arrays of JAX. See `fetch`."""
        return map_structure(_to_jax, self.fetch(timeout))

    def _require_closure(self) -> Closure:
        assert self._closure is not None
        return self._closure


class ResourceHolder:
    """Keeps an object of the workers from being dropped as long as anything refers to it."""

    def __init__(self, resource: int, released: deque[int]) -> None:
        self.resource = resource
        weakref.finalize(self, released.append, resource).atexit = False


class WorkerValue(RemoteValue):
    """One worker's part of a per-worker value. It stays there, and is sent when asked for."""

    __slots__ = ("_holder", "_worker")

    def __init__(self, home: Home, worker: int, holder: ResourceHolder) -> None:
        super().__init__(home, None)
        self._worker = worker
        self._holder = holder

    @override
    def __repr__(self) -> str:
        return f"<RemoteValue kept by /job:worker/task:{self._worker}>"

    def request(self) -> None:
        """Asks the worker, if it was not asked, without waiting for its answer."""
        self._require_closure()

    @override
    def _require_closure(self) -> Closure:
        closure = self._closure
        # An error may be gone when it is asked for again: the worker may have come back.
        if closure is None or closure.error is not None:
            closure = self._home.run_errand(self._worker, self._holder.resource, self._holder)
            self._closure = closure
        return closure


class PerWorkerValues:
    """One `RemoteValue` per worker; a function that gets it sees the value of its own worker.

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
        self._holder: ResourceHolder | None = None

    @classmethod
    def kept_by_workers(cls, home: Home, num_workers: int, holder: ResourceHolder) -> Self:
        """Returns values that the workers keep under a number."""
        self = cls([WorkerValue(home, i, holder) for i in range(num_workers)])
        self._holder = holder
        return self

    def __repr__(self) -> str:
        if self._holder is None:
            return f"<PerWorkerValues of {list(self._values)}>"
        return f"<PerWorkerValues kept by {len(self._values)} workers>"

    @property
    def values(self) -> tuple[RemoteValue, ...]:
        """The values, in the order of the workers."""
        return self._values

    @property
    def resource(self) -> int:
        """The number under which workers know it."""
        if self._holder is None:
            raise errors.InvalidArgumentError(
                "A function gets per-worker values that the workers keep",
                "these were put together from results of closures",
                "Make them with `ClusterCoordinator.create_per_worker_value`.",
            )
        return self._holder.resource


class WorkerCopies:
    """What workers keep under a number, as it is whenever it is asked for.

    Attributes:
      resource: The number.
    """

    def __init__(self, home: Home, num_workers: int, holder: ResourceHolder) -> None:
        self.resource = holder.resource
        self._home = home
        self._num_workers = num_workers
        self._holder = holder

    def fetch_all(self) -> list[Any]:
        """Returns what all workers have now, in their order."""
        values = [WorkerValue(self._home, i, self._holder) for i in range(self._num_workers)]
        for value in values:
            # All are asked before the first is waited for.
            value.request()
        return [value.fetch() for value in values]


def map_structure(change: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to all leaves of nested lists, tuples and dicts.

    >>> map_structure(str, {"a": [1, (2,)]})
    {'a': ['1', ('2',)]}
    """
    if isinstance(value, dict):
        return mapping_like(value, {k: map_structure(change, v) for k, v in value.items()})
    if isinstance(value, list | tuple):
        return sequence_like(value, [map_structure(change, v) for v in value])
    return change(value)


def require_no_remote_value(args: Any, kwargs: Any) -> None:
    """Raises if a result of another closure is among the arguments of one.

    Raises:
      InvalidArgumentError: There is one, or the arguments are nested without end.
    """

    def check(leaf: Any) -> Any:
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
                raise nesting.too_deep(value, name) from None
        raise


def _to_jax(leaf: Any) -> Any:
    return jax.numpy.asarray(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf
