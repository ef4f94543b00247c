"""A model of `transport/service.py`: a process that listens, with authenticated sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from replicax.foundation import errors
from replicax.protocol import admission, codec, error_replies, messages
from replicax.protocol.tasks import ROLES, Role, Task, library_version
from replicax.transport.keys import Keys
from replicax.transport.service import Session
from replicax.transport.zmq.authenticator import KnownKeys
from simulation.labels import label_of
from simulation.network import Network, Wire
from simulation.process import Process
from simulation.world import World

Reply = tuple[messages.Body, Sequence[Any]]

# The public keys of this cluster, by role, and an unknown one. Nothing is encrypted here.
KEYS: dict[Role, bytes] = {role: role[:1].encode() * 40 for role in ROLES}
UNKNOWN_KEY = b"x" * 40


class ListeningProcess(Process):
    """A process that listens.

    Attributes:
      incarnation: Its incarnation.
    """

    def __init__(self, world: World, network: Network, task: Task) -> None:
        super().__init__(world, task)
        self._network = network
        self.incarnation = world.new_incarnation()
        self._known = KnownKeys(Keys(task.role, KEYS[task.role], b"", KEYS))
        self._sessions: dict[int, tuple[Wire, Session]] = {}

    def role_of(self, key: bytes) -> str | None:
        """Returns the role of a public key; None if the key is unknown."""
        return self._known.role_of(key)

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
            role = self.role_of(KEYS[wire.ends[0].task.role])
            if role != body.role:
                raise AssertionError(f"{self} authenticates {wire.ends[0]} as {role}")
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
