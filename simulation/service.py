"""A model of `transport/service.py`: a process that listens, with authenticated sessions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from replicax.foundation import errors
from replicax.protocol import admission, codec, error_replies, messages
from replicax.protocol.tasks import Task, library_version
from replicax.transport.keys import Identity, Keys
from replicax.transport.service import Session
from simulation.labels import label_of
from simulation.network import Network, Wire
from simulation.process import Process
from simulation.world import World

Reply = tuple[messages.Body, Sequence[Any]]

_JOB = "simulation"


class _Certified:
    """A connection whose peer has a certificate; nothing is encrypted here."""

    def __init__(self, name: str) -> None:
        self._name = name

    def getpeercert(self) -> dict[str, Any]:
        """Returns the certificate as `ssl` does."""
        return {"subjectAltName": (("URI", self._name),)}


class ListeningProcess(Process):
    """A process that listens.

    Attributes:
      incarnation: Its incarnation.
    """

    def __init__(self, world: World, network: Network, task: Task) -> None:
        super().__init__(world, task)
        self._network = network
        self.incarnation = world.new_incarnation()
        nowhere = Path()
        self._keys = Keys(Identity(_JOB, task.role, task.index), nowhere, nowhere, nowhere)
        self._sessions: dict[int, tuple[Wire, Session]] = {}

    def accepts(self, name: str) -> bool:
        """Returns whether it accepts a peer with a certificate of this name."""
        try:
            self._keys.identify(cast("Any", _Certified(name)))
        except errors.PermissionDeniedError:
            return False
        return True

    def handle(
        self, session: Session, envelope: messages.Envelope, buffers: list[memoryview]
    ) -> Reply | None:
        """Handles a message: returns the reply, or raises an error."""
        raise NotImplementedError

    def crash(self) -> None:
        """Ends the process; its sessions notice."""
        super().crash()
        self._sessions.clear()
        self._network.cut_off(self)

    def start(self) -> None:
        """Starts a new process, with a new incarnation."""
        super().start()
        self.incarnation = self.world.new_incarnation()

    def send(
        self, session: Session, body: messages.Body, buffers: Sequence[Any] = (), request: int = 0
    ) -> None:
        """Sends a message to a session, if it still exists."""
        found = self._sessions.get(int.from_bytes(session.identity))
        if found is not None:
            frames = codec.encode(
                session.job, session.epoch, self.incarnation, request, body, buffers
            )
            self._network.send(found[0], frames, label_of(body, request), is_up=False)

    def received(self, wire: Wire, frames: list[bytes]) -> None:
        """Handles a message from the network."""
        envelope, buffers = codec.decode(frames)
        body = envelope.body
        if isinstance(body, messages.Hello):
            identity = wire.number.to_bytes(8)
            if not self.accepts(f"replicax://{_JOB}/{body.role}/{body.task}"):
                raise AssertionError(f"{self} does not accept {wire.ends[0]}")
            session = Session(identity, body.role, body.task, body.incarnation)
            session.next_request = body.first
            self._sessions[wire.number] = wire, session
            me = self.task
            self.send(
                session, messages.Welcome(library_version(), me.role, me.index, self.incarnation)
            )
            return
        found = self._sessions.get(wire.number)
        if found is None:
            return
        session = found[1]
        if envelope.incarnation != session.incarnation or session.has_gap_before(envelope.request):
            self.send(session, error_replies.hello_first(), (), envelope.request)
            return
        session.job, session.epoch = envelope.job, envelope.epoch
        if type(body) not in admission.ALLOWED[session.role, self.task.role]:
            raise AssertionError(f"{session} may not send {type(body).__name__} to {self}")
        try:
            reply = self.handle(session, envelope, buffers)
        except errors.DistributeError as error:
            reply = error_replies.from_error(error), ()
        if reply is not None:
            self.send(session, reply[0], reply[1], envelope.request)
