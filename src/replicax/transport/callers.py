"""Who calls a listener."""

from __future__ import annotations

from replicax.transport import messages
from replicax.transport.lane import LaneReader, LaneWriter
from replicax.transport.tasks import Task


class Caller:
    """A task at the other end of a connection.

    Attributes:
      identity: The connection.
      role: The caller's role; with keys it is proven, without them believed.
      task: The caller's index.
      incarnation: Which life of the caller it is.
      job: The job of its last message.
      epoch: The epoch of its last message.
    """

    __slots__ = ("epoch", "identity", "incarnation", "job", "reader", "role", "task", "writer")

    def __init__(self, identity: bytes, role: messages.Role, task: int, incarnation: int) -> None:
        self.identity = identity
        self.role: messages.Role = role
        self.task = task
        self.incarnation = incarnation
        self.job = ""
        self.epoch = 0
        # Memory that the caller shares: what it writes, and what it reads.
        self.reader: LaneReader | None = None
        self.writer: LaneWriter | None = None

    def __str__(self) -> str:
        return str(Task(self.role, self.task))

    def __repr__(self) -> str:
        return f"<Caller {self} {self.incarnation:x}>"
