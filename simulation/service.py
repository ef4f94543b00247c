"""A model of `transport/service.py`: a process that listens, and knows who calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from replicax.foundation import errors
from replicax.protocol import admission, codec, error_replies, messages
from replicax.protocol.tasks import ROLES, Role, Task, library_version
from replicax.transport.keys import Keys
from replicax.transport.sessions import Session
from replicax.transport.zmq.authenticator import KnownKeys
from simulation.labels import label_of
from simulation.network import Network, Wire
from simulation.process import Process
from simulation.world import World

Answer = tuple[messages.Body, Sequence[Any]]

# The public keys of this cluster, by role, and one that is not among them; in the alphabet of
# keys. Nothing is ciphered here.
KEYS: dict[Role, bytes] = {role: role[:1].encode() * 40 for role in ROLES}
STRANGER = b"x" * 40


class ListeningProcess(Process):
    """A process that answers.

    Attributes:
      incarnation: Its life.
    """

    def __init__(self, world: World, network: Network, task: Task) -> None:
        super().__init__(world, task)
        self._network = network
        self.incarnation = world.life()
        self._known = KnownKeys(Keys(task.role, KEYS[task.role], b"", KEYS))
        self._sessions: dict[int, tuple[Wire, Session]] = {}

    def role_of(self, key: bytes) -> str | None:
        """Returns for whom it takes the owner of a public key; None if it does not know it."""
        return self._known.role_of(key)

    def handle(
        self, session: Session, envelope: messages.Envelope, buffers: list[memoryview]
    ) -> Answer | None:
        """Answers a message, or raises why not."""
        raise NotImplementedError

    def crash(self) -> None:
        """Ends the process; its sessions notice."""
        super().crash()
        self._sessions.clear()
        self._network.cut_off(self)

    def start(self) -> None:
        """Begins a new process, with a new life."""
        super().start()
        self.incarnation = self.world.life()

    def send(
        self, session: Session, body: messages.Body, buffers: Sequence[Any] = (), request: int = 0
    ) -> None:
        """Says something to a session, if it is still there."""
        found = self._sessions.get(int.from_bytes(session.identity))
        if found is not None:
            frames = codec.encode(
                session.job, session.epoch, self.incarnation, request, body, buffers
            )
            self._network.send(found[0], frames, label_of(body, request), is_up=False)

    def received(self, wire: Wire, frames: list[bytes]) -> None:
        """Takes a message from the network."""
        envelope, buffers = codec.decode(frames)
        body = envelope.body
        if isinstance(body, messages.Hello):
            identity = wire.number.to_bytes(8)
            role = self.role_of(KEYS[wire.ends[0].task.role])
            if role != body.role:
                raise AssertionError(f"{self} takes {wire.ends[0]} for a {role}")
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
            answer = self.handle(session, envelope, buffers)
        except errors.DistributeError as error:
            answer = error_replies.from_error(error), ()
        if answer is not None:
            self.send(session, answer[0], answer[1], envelope.request)
