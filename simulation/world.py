"""The virtual time of a simulation, and the threads that run in it, one at a time.

Note [One thread at a time]
    A simulated thread is a thread of Python that runs only while it has the turn. It passes the
    turn on when it waits, in one of the calls of `threads.py` and `network.py`; nothing else can
    happen meanwhile, and no time passes. The thread that waits runs the planned events until one
    of them gives the turn to a thread, perhaps to itself: then no thread is switched. So the same
    seed gives the same order of everything, and the code that runs needs no knowledge of it.
"""

from __future__ import annotations

import collections
import heapq
import random
import threading
from collections.abc import Callable, Iterable

from typing_extensions import override

from simulation.faults import Faults
from simulation.process import Process

Action = Callable[[], None]

# The shortest wait.
_SHORTEST_S = 1e-6
# The real seconds in which a thread must end when the history is over.
_END_S = 20.0


class EndedError(BaseException):
    """Ends the threads of a history that is over. No code of a task handles it for long."""


class BrokenRuleError(Exception):
    """An invariant was violated."""


class SimulatedThread(threading.Thread):
    """A thread of a simulated process; see Note [One thread at a time].

    Attributes:
      process: The process that it belongs to; None for the thread that simulates.
      is_woken: Whether its last wait was ended by `World.wake`.
    """

    def __init__(
        self,
        world: World,
        process: Process | None,
        target: Callable[..., object],
        name: str,
        args: tuple[object, ...] = (),
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.process = process
        self.is_woken = False
        self.turn = threading.Lock()
        self.turn.acquire()
        # Counts waits: what ends an earlier one comes too late.
        self.num_waits = 0
        self.is_waiting = False
        self.is_over = False
        self._world = world
        self._call = target, args
        self._joining: list[SimulatedThread] = []

    @override
    def start(self) -> None:
        super().start()
        self._world.begin(self)

    @override
    def run(self) -> None:
        self.turn.acquire()
        target, args = self._call
        try:
            if not self._world.is_over:
                target(*args)
        except EndedError:
            pass
        except BaseException as error:
            self._world.fail(error, f"{self.name} of {self.process} ended with {error!r}")
        self.is_over = True
        for thread in self._joining:
            self._world.wake(thread)
        self._world.exit(self)

    @override
    def join(self, timeout: float | None = None) -> None:
        world = self._world
        deadline = None if timeout is None else world.now + timeout
        while not self.is_over and (deadline is None or world.now < deadline):
            self._joining.append(world.current)
            world.block(deadline)

    @override
    def is_alive(self) -> bool:
        return self.ident is not None and not self.is_over

    def end(self) -> None:
        """Ends the thread, in real time, when the history is over."""
        self.turn.release()
        super().join(_END_S)
        assert not super().is_alive(), f"{self.name} of {self.process} does not end"


class World:
    """A virtual clock with planned events, and a scheduler of threads.

    Attributes:
      now: The virtual time, in seconds.
      random: The random numbers.
      fault_random: Separate random numbers for faults that have no effect where the safeguards
        work: histories do not depend on them.
      faults: The faults that may happen.
      events: All events, with their times.
      landed: The number of faults of each kind that have hit running work, and of recoveries.
      num_events: The number of messages, steps of work, faults and calls of the user.
      current: The thread that has the turn.
      is_over: Whether the history is over.
    """

    def __init__(self, seed: int, faults: Faults) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.fault_random = random.Random(f"mischief {seed}")
        self.faults = faults.drawn(self.random, random.Random(f"modes {seed}"))
        self.events: list[tuple[float, object]] = []
        self.landed: collections.Counter[str] = collections.Counter()
        self.num_events = 0
        self.is_over = False
        # Events of the same time happen in the order in which they were planned.
        self._plan: list[tuple[float, int, Callable[..., SimulatedThread | None], object]] = []
        self._num_planned = 0
        self._failure: BaseException | None = None
        self._threads: list[SimulatedThread] = []
        # The thread that simulates; it is not started.
        self._director = SimulatedThread(self, None, self.end, "simulation")
        self.current = self._director

    # Events.

    def at(self, when: float, action: Action) -> None:
        """Plans an event."""
        self._push(when, _run, action)

    def note(self, event: object) -> None:
        """Counts an event, and adds it to the trace."""
        self.num_events += 1
        self.events.append((self.now, event))

    @property
    def trace(self) -> list[str]:
        """All events, line by line."""
        return written(self.events)

    def random_bits(self, count: int) -> int:
        """Returns a random number."""
        return self.random.getrandbits(count)

    def fail(self, error: BaseException, rule: str = "") -> None:
        """Ends the history with an error; the calling thread does not go on."""
        if self._failure is None and not self.is_over:
            if not isinstance(error, BrokenRuleError | AssertionError):
                broken = BrokenRuleError(rule or f"there was {error!r}")
                broken.__cause__ = error
                error = broken
            self._failure = error
            self.wake(self._director)

    def checked(self, check: Action) -> None:
        """Checks an invariant; the code of the task that violates it does not go on."""
        try:
            check()
        except BrokenRuleError as error:
            self.fail(error)
            self.block()

    def _push(
        self, when: float, function: Callable[..., SimulatedThread | None], argument: object
    ) -> None:
        self._num_planned += 1
        when = max(when, self.now)
        heapq.heappush(self._plan, (when, self._num_planned, function, argument))

    # Threads.

    def spawn(self, process: Process, target: Callable[[], object]) -> None:
        """Starts the first thread of a process."""
        SimulatedThread(self, process, target, "main").start()

    def thread(
        self,
        *,
        target: Callable[..., object],
        name: str,
        args: tuple[object, ...] = (),
        daemon: bool = False,
    ) -> SimulatedThread:
        """Returns a new thread of the current process; it ends with the history at the latest."""
        del daemon
        return SimulatedThread(self, self.current.process, target, name, args)

    def begin(self, thread: SimulatedThread) -> None:
        """Plans the first turn of a thread."""
        self._threads.append(thread)
        thread.is_waiting = True
        self._push(self.now, self._resume, (thread, thread.num_waits))

    def exit(self, thread: SimulatedThread) -> None:
        """Passes the turn on from a thread that has ended."""
        if not self.is_over:
            self._give_turn(self._next())

    def block(self, deadline: float | None = None) -> bool:
        """Makes the current thread wait; returns whether it was woken before the deadline."""
        me = self.current
        if self.is_over:
            raise EndedError
        me.num_waits += 1
        me.is_woken, me.is_waiting = False, True
        if deadline is not None:
            # A loop that waits for a rounding error must end.
            deadline = max(deadline, self.now + _SHORTEST_S)
            self._push(deadline, self._resume, (me, me.num_waits))
        found = self._next()
        if found is not me:
            self._give_turn(found)
            me.turn.acquire()
            if self.is_over and me is not self._director:
                raise EndedError
        me.is_waiting = False
        return me.is_woken

    def wake(self, thread: SimulatedThread) -> None:
        """Ends the wait of a thread."""
        if thread.is_waiting and not thread.is_woken:
            thread.is_woken = True
            thread.num_waits += 1
            self._push(self.now, self._resume, (thread, thread.num_waits))

    def sleep(self, seconds: float) -> None:
        """Makes the current thread wait for some seconds."""
        deadline = self.now + max(seconds, 0.0)
        while self.block(deadline) and self.now < deadline:
            pass

    def resume(self, process: Process) -> None:
        """Lets the threads of a process go on that was stopped, in a random order."""
        held, process.held = process.held, []
        self.random.shuffle(held)
        for wait in held:
            self._push(self.now, self._resume, wait)

    def _resume(self, wait: tuple[SimulatedThread, int]) -> SimulatedThread | None:
        thread, number = wait
        if thread.num_waits != number or thread.is_over:
            return None
        process = thread.process
        if process is not None:
            if not process.is_up:
                return None
            if process.is_paused:
                process.held.append(wait)
                return None
        return thread

    def _next(self) -> SimulatedThread:
        """Runs events until a thread can go on."""
        while self._failure is None:
            if not self._plan:
                self.fail(BrokenRuleError("every thread waits, and nothing is planned"))
                break
            self.now, _, function, argument = heapq.heappop(self._plan)
            try:
                found = function(argument)
            except Exception as error:
                self.fail(error)
                break
            if found is not None:
                return found
        return self._director

    def _give_turn(self, thread: SimulatedThread) -> None:
        self.current = thread
        thread.turn.release()

    # The thread that simulates.

    def run_until(self, is_reached: Callable[[], bool], most_s: float) -> bool:
        """Simulates until a condition holds, or for some seconds; returns whether it holds."""
        end = self.now + most_s
        while not is_reached() and self.now < end:
            self.block(min(self.now + 0.1, end))
            if self._failure is not None:
                raise self._failure
        return is_reached()

    def end(self) -> None:
        """Ends all threads."""
        self.is_over = True
        for thread in self._threads:
            if not thread.is_over:
                self.current = thread
                thread.end()
        self.current = self._director


def written(events: Iterable[tuple[float, object]]) -> list[str]:
    """Returns events as the lines of a trace."""
    return [f"{when:9.4f}  {event}" for when, event in events]


def _run(action: object) -> None:
    assert callable(action)
    action()
