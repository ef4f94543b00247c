"""The simulated network: links deliver messages in order, until they are cut.

It implements the seam of the transport, `replicax/transport/base.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from replicax.foundation import errors
from replicax.protocol import codec, messages
from replicax.protocol.codec import Part
from replicax.protocol.tasks import Task
from replicax.transport import addresses, base
from replicax.transport.addresses import Location
from replicax.transport.keys import Identity, Keys
from simulation.labels import Label
from simulation.process import Process
from simulation.world import BrokenRuleError, SimulatedThread, World

JOB = "simulation"

_LATENCY_S = (0.0005, 0.008)
_DELAY_S = (0.05, 1.2)
# Short enough that the coordinator does not declare a server dead.
_SHORT_DELAY_S = (0.05, 0.3)
# The delay of a request that its peer reads after the link was cut.
_LATE_S = (0.01, 2.5)
_NOTICE_S = (0.0, 0.02)
# The interval at which a host that cannot be reached is tried.
_KNOCK_S = 0.2

OnMessage = Callable[[Process, Process, messages.Envelope], None]


class _Certified:
    """A connection whose peer has a certificate; nothing is encrypted here."""

    def __init__(self, name: str) -> None:
        self._name = name

    def getpeercert(self) -> dict[str, Any]:
        """Returns the certificate as `ssl` does."""
        return {"subjectAltName": (("URI", self._name),)}


class _Pollable:
    """What a thread can wait for: a descriptor."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.fd = network.add(self)
        self._pollers: list[Poller] = []
        self._waiting: list[SimulatedThread] = []

    @property
    def is_ready(self) -> bool:
        """Whether it has events."""
        raise NotImplementedError

    def watch(self, poller: Poller, *, is_on: bool) -> None:
        """Makes a poller hear of events, or not."""
        if is_on:
            self._pollers.append(poller)
        else:
            self._pollers.remove(poller)

    def add_waiting(self, thread: SimulatedThread) -> None:
        """Wakes a thread at the next event."""
        self._waiting.append(thread)

    def remove_waiting(self, thread: SimulatedThread) -> None:
        """Ends the wait of a thread."""
        if thread in self._waiting:
            self._waiting.remove(thread)

    def poke(self) -> None:
        """Wakes who waits for events."""
        for poller in self._pollers:
            poller.heard(self.fd)
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for thread in waiting:
                self._network.world.wake(thread)


class Poller:
    """Waits for the events of many descriptors."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._watched: dict[int, _Pollable] = {}
        # Those that may have events.
        self._heard: dict[int, None] = {}
        self._waiting: SimulatedThread | None = None

    def set(self, fd: int, events: int) -> None:
        if fd not in self._watched:
            found = self._watched[fd] = self._network.found(fd)
            found.watch(self, is_on=True)
            if found.is_ready:
                self.heard(fd)

    def remove(self, fd: int) -> None:
        found = self._watched.pop(fd, None)
        self._heard.pop(fd, None)
        if found is not None:
            found.watch(self, is_on=False)

    def heard(self, fd: int) -> None:
        """Records an event."""
        self._heard[fd] = None
        if self._waiting is not None:
            self._network.world.wake(self._waiting)

    def wait(self, timeout: float) -> list[int]:
        found = self._ready()
        world = self._network.world
        if not found:
            self._waiting = world.current
            world.block(world.now + timeout)
            self._waiting = None
            found = self._ready()
        return found

    def _ready(self) -> list[int]:
        found = [fd for fd in self._heard if self._watched[fd].is_ready]
        self._heard = dict.fromkeys(found)
        return found

    def close(self) -> None:
        for fd in list(self._watched):
            self.remove(fd)


class Wakeup(_Pollable):
    """Wakes a thread that polls."""

    _is_set = False

    @property
    def is_ready(self) -> bool:
        return self._is_set

    def set(self) -> None:
        if not self._is_set:
            self._is_set = True
            self.poke()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, seconds: float) -> bool:
        world = self._network.world
        deadline = world.now + seconds
        while not self._is_set and world.now < deadline:
            self.add_waiting(world.current)
            world.block(deadline)
            self.remove_waiting(world.current)
        return self._is_set

    def close(self) -> None:
        self._network.remove(self.fd)


class Wire(_Pollable):
    """One end of a link; see `base.Wire` for the attributes."""

    def __init__(self, network: Network, process: Process) -> None:
        super().__init__(network)
        self.process = process
        self.name = "a simulated process"
        process.on_exit[self.fd] = self.abandon
        self.link: Link | None = None
        self.is_reached = self.is_open = False
        self.failure: str | None = None
        self.error: errors.DistributeError | None = None
        self.identity: Identity | None = None
        self.backlog = 0
        self.on_change: Callable[[], None] | None = None
        self._most = sys.maxsize
        # What the kernel has, and what was read.
        self._unread: collections.deque[list[memoryview]] = collections.deque()
        self._arrived: collections.deque[list[memoryview]] = collections.deque()
        # Whether the kernel knows that nothing more comes, and whether that was read.
        self._is_ended = self._is_read = False

    def fileno(self) -> int:
        return self.fd

    @property
    def events(self) -> int:
        return base.READ

    @property
    def is_ready(self) -> bool:
        return bool(self._unread) or (self._is_ended and not self._is_read)

    def limit(self, most: int) -> None:
        self._most = most

    def handle(self) -> None:
        self._arrived += self._unread
        self._unread.clear()
        self._is_read = self._is_ended
        if self._is_read and not self._arrived:
            self.close(base.CLOSED)

    def receive(self) -> list[memoryview] | None:
        if self._arrived:
            message = self._arrived.popleft()
            if sum(map(len, message)) > self._most:
                self.close("a message is oversized")
                raise errors.ProtocolError("A message inside the simulation is oversized.")
            return message
        if self._is_read:
            self.close(base.CLOSED)
        return None

    def send(
        self, parts: Sequence[Part], is_urgent: bool = False, descriptors: Sequence[int] = ()
    ) -> None:
        del is_urgent, descriptors  # No message waits for another, and there is no shared memory.
        if self.failure is None and self.link is not None:
            self.link.send(self, parts)

    def take_descriptors(self) -> list[int]:
        return []

    def is_connected(self) -> bool:
        return self.failure is None and not self._is_ended

    def close(self, reason: str = "this side has closed the connection") -> None:
        if self.failure is not None:
            return
        self.failure = reason
        self.abandon()
        if self.on_change is not None:
            self.on_change()
            self.on_change = None

    def abandon(self) -> None:
        """Closes it as the kernel does when its process ends."""
        self.is_open = False
        if self.link is not None:
            self.link.closed(self)
        self.process.on_exit.pop(self.fd, None)
        self._network.remove(self.fd)

    # Events of the link.

    def reached(self) -> None:
        """The other side has accepted the connection."""
        self.is_reached = self.is_open = True
        self.poke()

    def arrived(self, message: list[memoryview]) -> None:
        """A message has arrived."""
        if self.failure is None:
            self._unread.append(message)
            self.poke()

    def ended(self) -> None:
        """The other side sends nothing more."""
        if self.failure is None and not self._is_ended:
            self._is_ended = True
            self.poke()

    def refused(self, reason: str) -> None:
        """The connection was not accepted."""
        self.close(reason)
        self.poke()


class Listener(_Pollable):
    """A bound name."""

    def __init__(self, network: Network, url: str, process: Process) -> None:
        super().__init__(network)
        self.url = self.address = url
        self.process = process
        self.keys = _keys_of(process.task)
        self._waiting_wires: collections.deque[Wire] = collections.deque()

    def fileno(self) -> int:
        return self.fd

    @property
    def is_ready(self) -> bool:
        return bool(self._waiting_wires)

    def connected(self, wire: Wire) -> None:
        """The kernel has accepted a connection."""
        self._waiting_wires.append(wire)
        self.poke()

    def accept(self) -> Wire | None:
        return self._waiting_wires.popleft() if self._waiting_wires else None

    def close(self) -> None:
        self._network.unbind(self)
        self.process.on_exit.pop(self.fd, None)
        while self._waiting_wires:
            self._waiting_wires.popleft().close()
        self._network.remove(self.fd)


@dataclasses.dataclass(frozen=True)
class Costs:
    """What messages cost; without it, latencies are random and messages cost nothing.

    Attributes:
      latency_s: The time from one process to another.
      handling_s: The time that a process takes to send or to handle a message.
      second_per_byte: The time that a process takes for a byte that it sends or receives.
    """

    latency_s: float
    handling_s: float
    second_per_byte: float


@dataclasses.dataclass(slots=True, eq=False)
class _Message:
    parts: list[memoryview]
    label: Label
    is_lost: bool = False


class Link:
    """A connection between two processes; `ends` are the caller's and the listening side's."""

    def __init__(self, network: Network, caller: Wire) -> None:
        self._network = network
        self._world = network.world
        self.caller = caller
        self.called: Wire | None = None
        self.is_cut = False
        # What the caller has sent before the connection was accepted.
        self._early: list[Sequence[Part]] = []
        # Messages in flight to the listening side (up), and from it (down); and when the last one
        # of each direction arrives.
        self.up: collections.deque[_Message] = collections.deque()
        self.down: collections.deque[_Message] = collections.deque()
        self._arrivals = {True: 0.0, False: 0.0}
        # Until when nothing arrives.
        self.stalled_s = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether a message is in flight."""
        return bool(self.up or self.down)

    @property
    def ends(self) -> tuple[Process, Process]:
        """The two processes; the same twice until the connection is accepted."""
        called = self.caller if self.called is None else self.called
        return self.caller.process, called.process

    def __str__(self) -> str:
        return f"{self.ends[0]} - {self.ends[1]}"

    def established(self, called: Wire) -> None:
        """Connects the two sides."""
        self.called = called
        called.link = self
        called.reached()
        self.caller.reached()
        early, self._early = self._early, []
        for parts in early:
            self.send(self.caller, parts)

    def closed(self, end: Wire) -> None:
        """One end is closed: the other end sees it after all messages before."""
        other = self.called if end is self.caller else self.caller
        self._network.dropped(self)
        if other is None:
            return
        is_up = end is self.caller
        when = max(self._arrivals[is_up], self._world.now + self._network.latency())
        self._world.at(max(when, self.stalled_s), other.ended)

    def cut(self) -> None:
        """Breaks the connection: the first requests in flight may still be read, late."""
        if self.is_cut or self.called is None:
            return
        self.is_cut = True
        self._network.dropped(self)
        world, chance = self._world, self._world.random
        is_late = self.called.process.is_up and chance.random() < 0.5
        num_late = chance.randint(0, len(self.up)) if is_late else 0
        when = world.now
        for position, message in enumerate(self.up):
            message.is_lost = True
            if position < num_late:
                when += chance.uniform(*_LATE_S)
                world.landed["reordered"] += 1
                self._deliver_late(message, when)
            elif message.label.is_exchange:
                world.landed["request_lost"] += 1
        for message in self.down:
            message.is_lost = True
            if message.label.is_exchange:
                world.landed["reply_lost"] += 1
        world.at(when + chance.uniform(*_NOTICE_S), self.called.ended)
        world.at(world.now + chance.uniform(*_NOTICE_S), self.caller.ended)

    # Messages.

    def send(self, end: Wire, parts: Sequence[Part]) -> None:
        """Sends a copy of a message."""
        if self.is_cut:
            return
        if self.called is None:
            self._early.append(parts)
            return
        network, world = self._network, self._world
        chance, faults = world.random, world.faults
        is_up = end is self.caller
        copied = [memoryview(bytes(parts[0]))]
        if len(parts) > 1:
            copied.append(memoryview(b"".join(parts[1:])))
        envelope, _ = codec.decode(copied)
        ends = self.ends
        sender, receiver = ends if is_up else ends[::-1]
        network.on_message(sender, receiver, envelope)
        network.num_messages[type(envelope.body).__name__] += 1
        network.num_bytes += sum(map(len, copied))
        label = Label(*ends, is_up, envelope.body, envelope.request)
        message = _Message(copied, label)
        if faults.loss and chance.random() < faults.loss:
            world.note(label.ending("LOST, connection cut"))
            world.landed["loss"] += 1
            (self.up if is_up else self.down).append(message)
            self.cut()
            return
        is_exchange = label.is_exchange
        if faults.drop and is_exchange and chance.random() < faults.drop:
            world.note(label.ending("DROPPED"))
            world.landed["request_dropped" if is_up else "reply_dropped"] += 1
            return
        delay = network.latency()
        if faults.delay and chance.random() < faults.delay:
            is_brief = ends[0].task.role == "coordinator" and ends[1].task.role == "ps"
            delay += chance.uniform(*(_SHORT_DELAY_S if is_brief else _DELAY_S))
            world.landed["delay"] += 1
        self._put(message, delay, is_up)
        if faults.duplicate and chance.random() < faults.duplicate:
            world.landed["duplicate"] += 1
            twin = _Message(copied, label.ending("AGAIN"))
            if is_up and is_exchange:
                # As if sent on an earlier connection: it may arrive at any time.
                self._deliver_late(twin, world.now + chance.uniform(*_LATE_S))
            else:
                self._put(twin, delay, is_up)

    def _put(self, message: _Message, delay: float, is_up: bool) -> None:
        assert self.called is not None
        queue = self.up if is_up else self.down
        when = max(self._arrivals[is_up], self._world.now + delay, self.stalled_s)
        self._arrivals[is_up] = when
        queue.append(message)
        receiver = self.called if is_up else self.caller
        when = self._network.handled(self.ends, message.parts, when, is_up=is_up)

        def arrive() -> None:
            if message.is_lost:
                return
            queue.popleft()
            if self._world.now < self.stalled_s:
                # The network has failed since.
                self._put(message, 0.0, is_up)
            elif receiver.failure is None:
                self._world.note(message.label)
                receiver.arrived(message.parts)

        self._world.at(when, arrive)

    def _deliver_late(self, message: _Message, when: float) -> None:
        called = self.called
        assert called is not None

        def arrive() -> None:
            if called.failure is None:
                self._world.note(message.label.ending("LATE"))
                called.arrived(message.parts)

        self._world.at(when, arrive)


def _ignore(sender: Process, receiver: Process, envelope: messages.Envelope) -> None:
    """Observes no message."""


class Network:
    """All connections.

    Args:
      world: The simulated world.
      costs: What messages cost.

    Attributes:
      world: The simulated world.
      links: Those that are open, in the order in which they were made.
      on_message: Called with sender, receiver and envelope of each message that is sent.
      num_messages: How many of each kind were sent.
      num_bytes: Their size.
    """

    def __init__(self, world: World, costs: Costs | None = None) -> None:
        self.world = world
        self._costs = costs
        # Until when the processes are busy with the messages so far.
        self._busy_s: dict[Process, float] = {}
        self.links: dict[Link, None] = {}
        self.on_message: OnMessage = _ignore
        self.num_messages: collections.Counter[str] = collections.Counter()
        self.num_bytes = 0
        self._pollables: dict[int, _Pollable] = {}
        self._next_fd = 1_000
        self._bound: dict[str, Listener] = {}
        self._apart: dict[tuple[Task, Task], float] = {}

    # Descriptors.

    def add(self, pollable: _Pollable) -> int:
        """Returns a new descriptor."""
        self._next_fd += 1
        self._pollables[self._next_fd] = pollable
        return self._next_fd

    def found(self, fd: int) -> _Pollable:
        """Returns what has a descriptor."""
        return self._pollables[fd]

    def remove(self, fd: int) -> None:
        """Closes a descriptor."""
        self._pollables.pop(fd, None)

    # The network of a process; see `base.Network`.

    def dial(self, location: Location, keys: Keys | None) -> Wire:
        process = self.world.current.process
        assert process is not None
        wire = Wire(self, process)
        link = wire.link = Link(self, wire)

        def attempt() -> None:
            if wire.failure is not None or not process.is_up:
                return
            listener = self._bound.get(location.url)
            other = None if listener is None else listener.process
            if other is not None and self._are_apart(process.task, other.task):
                self.world.at(self.world.now + _KNOCK_S, attempt)
            elif listener is None or other is None:
                wire.refused(base.NOTHING_LISTENS)
            else:
                self._connect(link, listener)

        self.world.at(self.world.now + self.latency(), attempt)
        return wire

    def _connect(self, link: Link, listener: Listener) -> None:
        caller = link.caller.process
        end = Wire(self, listener.process)
        end.identity = self.identified(listener, f"replicax://{JOB}/{caller.task.role}/*")
        self.links[link] = None
        listener.connected(end)
        link.established(end)

    def identified(self, listener: Listener, name: str) -> Identity | None:
        """Returns what a certificate proves to a task."""
        return listener.keys.identify(cast("Any", _Certified(name)))

    def listen(self, location: Location, keys: Keys | None) -> Listener:
        process = self.world.current.process
        assert process is not None
        if location.url in self._bound:
            raise addresses.in_use(location.address)
        listener = self._bound[location.url] = Listener(self, location.url, process)
        process.on_exit[listener.fd] = listener.close
        return listener

    def unbind(self, listener: Listener) -> None:
        """Releases a name."""
        if self._bound.get(listener.url) is listener:
            del self._bound[listener.url]

    def poller(self) -> Poller:
        return Poller(self)

    def wakeup(self) -> Wakeup:
        return Wakeup(self)

    def now(self) -> float:
        return self.world.now

    def wait(self, wire: base.Wire, wakeup: int | None, timeout: float) -> bool:
        waker = None if wakeup is None else self._pollables.get(wakeup)
        found = [self._pollables[wire.fileno()]] if wire.failure is None else []
        found += [] if waker is None else [waker]
        if not any(one.is_ready for one in found):
            thread = self.world.current
            for one in found:
                one.add_waiting(thread)
            self.world.block(self.world.now + timeout)
            for one in found:
                one.remove_waiting(thread)
        return waker is not None and waker.is_ready

    # Faults.

    def latency(self) -> float:
        """Returns the time that a message takes."""
        if self._costs is not None:
            return self._costs.latency_s
        return self.world.random.uniform(*_LATENCY_S)

    def handled(
        self, ends: tuple[Process, Process], parts: list[memoryview], when: float, *, is_up: bool
    ) -> float:
        """Returns when a message is handled: each process handles one after the other."""
        costs = self._costs
        if costs is None:
            return when
        seconds = costs.handling_s + costs.second_per_byte * sum(map(len, parts))
        sender, receiver = ends if is_up else ends[::-1]
        left = self._busy_s[sender] = max(self.world.now, self._busy_s.get(sender, 0.0)) + seconds
        arrived = max(when, left + costs.latency_s)
        done = self._busy_s[receiver] = max(arrived, self._busy_s.get(receiver, 0.0)) + seconds
        return done

    def dropped(self, link: Link) -> None:
        """Records that a connection is closed or cut."""
        self.links.pop(link, None)

    def separate(self, one: Task, other: Task, seconds: float, *, is_cut: bool) -> None:
        """Partitions two tasks for a while; their connections break, or wait for the end of it."""
        until = self.world.now + seconds
        for pair in ((one, other), (other, one)):
            self._apart[pair] = max(until, self._apart.get(pair, 0.0))
        for link in list(self.links):
            if {process.task for process in link.ends} != {one, other}:
                continue
            if is_cut:
                link.cut()
            else:
                link.stalled_s = until

    def reunite(self) -> None:
        """Ends all partitions."""
        self._apart.clear()

    def require_rejected(self, url: str) -> bool:
        """Connects with a certificate of another job, which no task may accept.

        Returns:
          Whether a process listens there.
        """
        listener = self._bound.get(url)
        if listener is None or listener.process.is_paused:
            return False
        try:
            self.identified(listener, "replicax://other/coordinator/0")
        except errors.PermissionDeniedError:
            return True
        raise BrokenRuleError(f"{listener.process} accepts a certificate of another job")

    def _are_apart(self, one: Task, other: Task) -> bool:
        return self._apart.get((one, other), 0.0) > self.world.now


def _keys_of(task: Task) -> Keys:
    nowhere = Path()
    return Keys(Identity(JOB, task.role, task.index), nowhere, nowhere, nowhere)
