"""The simulated network: connections deliver messages in order, until they are cut."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, Protocol

from replicax.protocol.tasks import Task
from simulation.process import Process
from simulation.world import World

_LATENCY_S = (0.0005, 0.008)
_DELAY_S = (0.05, 1.2)
# Short enough that the coordinator does not declare a server dead.
_SHORT_DELAY_S = (0.05, 0.3)
# The delay of a request that its peer reads after the connection was cut.
_LATE_S = (0.01, 2.5)
_NOTICE_S = (0.0, 0.02)


class Service(Protocol):
    """The listening side of a connection."""

    def received(self, wire: Wire, frames: list[bytes]) -> None: ...


class Client(Protocol):
    """The connecting side of a connection."""

    def opened(self, wire: Wire) -> None: ...

    def refused(self) -> None: ...

    def closed(self, wire: Wire) -> None: ...

    def received(self, wire: Wire, frames: list[bytes]) -> None: ...


class _Message:
    __slots__ = ("frames", "is_lost", "label")

    def __init__(self, frames: list[bytes], label: str) -> None:
        self.frames, self.label = frames, label
        self.is_lost = False


class Wire:
    """One connection."""

    def __init__(
        self, number: int, caller: Process, called: Process, client: Client, service: Service
    ) -> None:
        self.number = number
        self.ends = caller, called
        self.client, self.service = client, service
        self.is_open = True
        # Messages in flight to the listening side (up), and from it (down).
        self.up: collections.deque[_Message] = collections.deque()
        self.down: collections.deque[_Message] = collections.deque()
        self.arrivals = {True: 0.0, False: 0.0}

    @property
    def is_busy(self) -> bool:
        """Whether a message is in flight."""
        return bool(self.up or self.down)

    def __str__(self) -> str:
        return f"{self.ends[0]} - {self.ends[1]}"


class Network:
    """All connections.

    Attributes:
      wires: Those that are open, by number.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._num_wires = 0
        self.wires: dict[int, Wire] = {}
        self._apart: dict[tuple[Task, Task], float] = {}

    # Connections.

    def connect(self, caller: Process, called: Process, client: Client, service: Service) -> None:
        """Opens a connection, or reports that no process listens."""

        def attempt() -> None:
            if not called.is_up or self._are_apart(caller, called):
                caller.run(client.refused)
                return
            self._num_wires += 1
            wire = Wire(self._num_wires, caller, called, client, service)
            self.wires[wire.number] = wire
            client.opened(wire)

        caller.later(self._world.random.uniform(*_LATENCY_S), attempt)

    def separate(self, one: Process, other: Process, seconds: float) -> None:
        """Partitions two tasks for a while."""
        until = self._world.now + seconds
        for pair in ((one.task, other.task), (other.task, one.task)):
            self._apart[pair] = max(until, self._apart.get(pair, 0.0))
        for wire in [w for w in self.wires.values() if set(w.ends) == {one, other}]:
            self.cut(wire)

    def reunite(self) -> None:
        """Ends all partitions."""
        self._apart.clear()

    def cut_off(self, process: Process) -> None:
        """Cuts all connections of a process that has crashed."""
        for wire in [w for w in self.wires.values() if process in w.ends]:
            self.cut(wire)

    def cut(self, wire: Wire, *, is_noticed: bool = True) -> None:
        """Cuts a connection: the first requests in flight may still be read, late."""
        if not wire.is_open:
            return
        wire.is_open = False
        del self.wires[wire.number]
        chance = self._world.random
        late = wire.ends[1].is_up and chance.random() < 0.5
        num_late = chance.randint(0, len(wire.up)) if late else 0
        when = self._world.now
        for position, message in enumerate(wire.up):
            message.is_lost = True
            if position < num_late:
                when += chance.uniform(*_LATE_S)
                self._world.landed["reordered"] += 1
                self._deliver_late(wire, message, when)
            elif message.label.startswith("Exchange"):
                self._world.landed["request_lost"] += 1
        for message in wire.down:
            message.is_lost = True
            if message.label.startswith("Exchanged"):
                self._world.landed["reply_lost"] += 1
        if is_noticed:
            caller = wire.ends[0]
            caller.later(chance.uniform(*_NOTICE_S), lambda: wire.client.closed(wire))

    # Messages.

    def send(self, wire: Wire, frames: Sequence[Any], label: str, *, is_up: bool) -> None:
        """Sends a copy of a message."""
        world, chance, faults = self._world, self._world.random, self._world.faults
        if not wire.is_open:
            return
        arrow = "→" if is_up else "←"
        way = f"{wire.ends[0]} {arrow} {wire.ends[1]}"
        copied = [bytes(frame) for frame in frames]
        if faults.loss and chance.random() < faults.loss and label != "Hello":
            world.note(f"{way}  {label}  LOST, connection cut")
            world.landed["loss"] += 1
            message = _Message(copied, label)
            (wire.up if is_up else wire.down).append(message)
            self.cut(wire)
            return
        if faults.drop and label.startswith("Exchange") and chance.random() < faults.drop:
            world.note(f"{way}  {label}  DROPPED")
            world.landed["request_dropped" if is_up else "reply_dropped"] += 1
            return
        delay = chance.uniform(*_LATENCY_S)
        if faults.delay and chance.random() < faults.delay:
            is_brief = wire.ends[0].task.role == "coordinator" and wire.ends[1].task.role == "ps"
            delay += chance.uniform(*(_SHORT_DELAY_S if is_brief else _DELAY_S))
            world.landed["delay"] += 1
        self._put(wire, _Message(copied, label), delay, way, is_up)
        if faults.duplicate and chance.random() < faults.duplicate:
            world.landed["duplicate"] += 1
            twin = _Message(copied, f"{label} AGAIN")
            if is_up and label.startswith("Exchange"):
                # As if sent on an earlier connection: it may arrive at any time.
                self._deliver_late(wire, twin, world.now + chance.uniform(*_LATE_S))
            else:
                self._put(wire, twin, delay, way, is_up)

    def _put(self, wire: Wire, message: _Message, delay: float, way: str, is_up: bool) -> None:
        queue = wire.up if is_up else wire.down
        when = max(wire.arrivals[is_up], self._world.now + delay)
        wire.arrivals[is_up] = when
        queue.append(message)
        receiver = wire.ends[1] if is_up else wire.ends[0]
        receive = wire.service.received if is_up else wire.client.received

        def arrive() -> None:
            if message.is_lost:
                return
            queue.popleft()
            if wire.is_open:
                self._world.note(f"{way}  {message.label}")
                receiver.run(lambda: receive(wire, message.frames))

        self._world.at(when, arrive)

    def _deliver_late(self, wire: Wire, message: _Message, when: float) -> None:
        receiver = wire.ends[1]
        way = f"{wire.ends[0]} → {receiver}"

        def arrive() -> None:
            self._world.note(f"{way}  {message.label}  LATE")
            receiver.run(lambda: wire.service.received(wire, message.frames))

        receiver.later(when - self._world.now, arrive)

    def _are_apart(self, caller: Process, called: Process) -> bool:
        return self._apart.get((caller.task, called.task), 0.0) > self._world.now
