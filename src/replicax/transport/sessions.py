"""Who calls a listener."""

from __future__ import annotations

from replicax.protocol.tasks import Role, Task
from replicax.transport.shared_memory import SharedMemoryReader, SharedMemoryWriter


class Session:
    """A task at the other end of a connection.

    Attributes:
      identity: The connection.
      role: The session's role; with keys it is proven, without them believed.
      task: The session's index.
      incarnation: Which life of the session it is.
      job: The job of its last message.
      epoch: The epoch of its last message.
      expected: The number of its next question; 0 if it does not count them.
      connection: The descriptor of the connection and its inode; None inside a process.
    """

    __slots__ = (
        "connection",
        "epoch",
        "expected",
        "identity",
        "incarnation",
        "job",
        "reader",
        "role",
        "task",
        "writer",
    )

    def __init__(self, identity: bytes, role: Role, task: int, incarnation: int) -> None:
        self.identity = identity
        self.role: Role = role
        self.task = task
        self.incarnation = incarnation
        self.job = ""
        self.epoch = 0
        self.expected = 0
        self.connection: tuple[int, int] | None = None
        # Memory that the session shares: what it writes, and what it reads.
        self.reader: SharedMemoryReader | None = None
        self.writer: SharedMemoryWriter | None = None

    def has_gap_before(self, number: int) -> bool:
        """Tells whether a question before this one has not arrived; else takes note of it.

        Example:
          >>> session = Session(b"", "worker", 0, 1)
          >>> session.expected = 7
          >>> [session.has_gap_before(number) for number in (7, 8, 7, 10, 9)]
          [False, False, False, True, False]
        """
        if self.expected and number == self.expected:
            self.expected += 1
        return 0 < self.expected < number

    def __str__(self) -> str:
        return str(Task(self.role, self.task))

    def __repr__(self) -> str:
        return f"<Session {self} {self.incarnation:x}>"
