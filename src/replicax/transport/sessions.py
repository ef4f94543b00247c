"""The sessions of a service: one per connection that has completed the handshake."""

from __future__ import annotations

from replicax.protocol.tasks import Role, Task
from replicax.transport.shared_memory import SharedMemoryReader, SharedMemoryWriter


class Session:
    """One connection of a peer that has completed the handshake.

    Attributes:
      identity: The ZeroMQ identity of the connection.
      role: The role of the peer; authenticated with keys, claimed without.
      task: The index of the peer.
      incarnation: The incarnation of the peer.
      job: The job of its last message.
      epoch: The epoch of its last message.
      next_request: The number of its next request; 0 if it does not number them consecutively.
      connection: The descriptor of the connection and its inode; None inside a process.
      reader: The shared memory that the peer writes.
      writer: The shared memory that the peer reads.
    """

    __slots__ = (
        "connection",
        "epoch",
        "identity",
        "incarnation",
        "job",
        "next_request",
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
        self.next_request = 0
        self.connection: tuple[int, int] | None = None
        self.reader: SharedMemoryReader | None = None
        self.writer: SharedMemoryWriter | None = None

    def has_gap_before(self, number: int) -> bool:
        """Returns whether a request before this one is missing; otherwise records this one.

        Example:
          >>> session = Session(b"", "worker", 0, 1)
          >>> session.next_request = 7
          >>> [session.has_gap_before(number) for number in (7, 8, 7, 10, 9)]
          [False, False, False, True, False]
        """
        if self.next_request and number == self.next_request:
            self.next_request += 1
        return 0 < self.next_request < number

    def __str__(self) -> str:
        return str(Task(self.role, self.task))

    def __repr__(self) -> str:
        return f"<Session {self} {self.incarnation:x}>"
