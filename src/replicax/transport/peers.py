"""What the hub remembers about each task that it talks to."""

from __future__ import annotations

import collections
import threading
from typing import Any

from replicax.foundation import errors
from replicax.protocol import limits, messages
from replicax.protocol.tasks import Task
from replicax.transport.zmq.connection import Connection


class Waiter:
    """One question that a thread waits for.

    Attributes:
      message: Its frames, to be sent again after a break.
      event: Set when there is an answer or an error.
      answer: What the task said.
      error: Why it cannot say anything.
    """

    def __init__(self, message: list[Any]) -> None:
        self.message = message
        self.event = threading.Event()
        self.answer: tuple[messages.Body, list[memoryview]] | None = None
        self.error: errors.DistributeError | None = None


class Peer:
    """What the hub knows about one task; only its thread touches it.

    Attributes:
      task: Who it is.
      connection: The way there.
      life: The incarnation that was reported as connected, until it is reported as lost.
      is_lost: Whether it was reported as lost, and not yet as connected again.
      retry_at: When to ask a task again that has refused to talk.
      held: What waits for the connection, in order.
      waiters: The questions of other threads, by number.
    """

    def __init__(self, task: Task, connection: Connection) -> None:
        self.task = task
        self.connection = connection
        self.life: int | None = None
        self.is_lost = False
        self.retry_at: float | None = None
        self.held: collections.deque[list[Any]] = collections.deque(maxlen=limits.QUEUE)
        self.waiters: dict[int, Waiter] = {}
