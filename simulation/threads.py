"""What waits, on the virtual clock: the simulated parts of `replicax.foundation.runtime`."""

from __future__ import annotations

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Self

from replicax.coordinator.engine import open_engines
from replicax.foundation import runtime
from replicax.transport.streams import network as streams
from simulation.network import Network
from simulation.world import SimulatedThread, World


class Lock:
    """A lock of one holder, who may be another thread when it is released."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_locked = False
        self._waiting: collections.deque[SimulatedThread] = collections.deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not self._is_locked:
            self._is_locked = True
            return True
        if not blocking:
            return False
        world = self._world
        deadline = None if timeout < 0 else world.now + timeout
        while self._is_locked:
            if deadline is not None and world.now >= deadline:
                return False
            self._waiting.append(world.current)
            world.block(deadline)
        self._is_locked = True
        return True

    def release(self) -> None:
        self._is_locked = False
        while self._waiting:
            self._world.wake(self._waiting.popleft())

    def locked(self) -> bool:
        return self._is_locked

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock:
    """A lock that its holder may take again."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._lock = Lock(world)
        self._holder: SimulatedThread | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        current = self._world.current
        if self._holder is current:
            self._depth += 1
            return True
        if not self._lock.acquire(blocking, timeout):
            return False
        self._holder, self._depth = current, 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._holder = None
            self._lock.release()

    def release_all(self) -> int:
        """Releases it for a wait; returns how often it was taken."""
        depth, self._depth, self._holder = self._depth, 0, None
        self._lock.release()
        return depth

    def take_again(self, depth: int) -> None:
        """Takes it again after a wait."""
        self._lock.acquire()
        self._holder, self._depth = self._world.current, depth

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """A condition variable."""

    def __init__(self, world: World, lock: RLock | None = None) -> None:
        self._world = world
        self._lock = lock or RLock(world)
        self._waiting: list[SimulatedThread] = []

    def wait(self, timeout: float | None = None) -> bool:
        world, me = self._world, self._world.current
        self._waiting.append(me)
        depth = self._lock.release_all()
        is_woken = world.block(None if timeout is None else world.now + timeout)
        self._lock.take_again(depth)
        if me in self._waiting:
            self._waiting.remove(me)
        return is_woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        deadline = None if timeout is None else self._world.now + timeout
        while not (found := predicate()):
            left = None if deadline is None else deadline - self._world.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return found

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for thread in waiting:
            self._world.wake(thread)

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Event:
    """A flag to wait for."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_set = False
        self._waiting: list[SimulatedThread] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for thread in waiting:
            self._world.wake(thread)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        deadline = None if timeout is None else self._world.now + timeout
        while not self._is_set and (deadline is None or self._world.now < deadline):
            self._waiting.append(self._world.current)
            self._world.block(deadline)
        return self._is_set


class SimpleQueue:
    """A queue."""

    def __init__(self, world: World) -> None:
        self._items: collections.deque[Any] = collections.deque()
        self._has_items = Event(world)

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._has_items.set()

    def get(self) -> Any:
        while not self._items:
            self._has_items.clear()
            self._has_items.wait()
        return self._items.popleft()

    @classmethod
    def __class_getitem__(cls, _: object) -> type[Self]:
        return cls


@contextlib.contextmanager
def installed(world: World, network: Network) -> Iterator[None]:
    """Makes new tasks of this process run in a simulation.

    See Note [What a simulation replaces] in `replicax/foundation/runtime.py`.
    """
    parts: dict[str, Any] = {
        name: functools.partial(kind, world)
        for name, kind in (
            ("Lock", Lock),
            ("RLock", RLock),
            ("Condition", Condition),
            ("Event", Event),
            ("SimpleQueue", SimpleQueue),
        )
    }
    parts |= {
        "Thread": world.thread,
        "now": lambda: world.now,
        "sleep": world.sleep,
        "random_bits": world.random_bits,
    }
    before = {name: getattr(runtime, name) for name in parts}
    sockets, engines, finalizers = streams.NETWORK, set(open_engines), _finalizers()
    try:
        for name, part in parts.items():
            setattr(runtime, name, part)
        streams.NETWORK = network
        yield
    finally:
        for name, part in before.items():
            setattr(runtime, name, part)
        streams.NETWORK = sockets
        # Simulated processes that were killed have closed nothing; and nothing is to be closed when
        # their memory is freed, which waits for that.
        for engine in set(open_engines) - engines:
            open_engines.discard(engine)
        for finalizer in _finalizers() - finalizers:
            finalizer.detach()


def _finalizers() -> set[weakref.finalize[..., Any]]:
    """Returns the finalizers of strategies and variables."""
    registry: Any = weakref.finalize._registry  # type: ignore[attr-defined]
    found: list[weakref.finalize[..., Any]] = list(registry)
    alive = ((finalizer, finalizer.peek()) for finalizer in found)
    return {f for f, about in alive if about and type(about[0]).__module__.startswith("replicax")}
