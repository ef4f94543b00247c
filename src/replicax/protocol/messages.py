"""Every message that tasks exchange, as typed structures; arrays travel beside them.

A message is an `Envelope` and a list of buffers. The envelope says which job it belongs to,
in which epoch of that job, which life of which process sent it, and which question it asks
or answers. What a body says about its buffers fixes their order; their types and shapes are
known to both sides, or said in the body.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from replicax.protocol.body import Body as Body
from replicax.protocol.body import ErrorReply as ErrorReply
from replicax.protocol.server_messages import Apply as Apply
from replicax.protocol.server_messages import Attached as Attached
from replicax.protocol.server_messages import CreatePart as CreatePart
from replicax.protocol.server_messages import DropParts as DropParts
from replicax.protocol.server_messages import Exchange as Exchange
from replicax.protocol.server_messages import Exchanged as Exchanged
from replicax.protocol.server_messages import Fence as Fence
from replicax.protocol.server_messages import Fill as Fill
from replicax.protocol.server_messages import FlushGradients as FlushGradients
from replicax.protocol.server_messages import FromBuffer as FromBuffer
from replicax.protocol.server_messages import FromProgram as FromProgram
from replicax.protocol.server_messages import Gradient as Gradient
from replicax.protocol.server_messages import JobInfo as JobInfo
from replicax.protocol.server_messages import Push as Push
from replicax.protocol.server_messages import PushFailure as PushFailure
from replicax.protocol.server_messages import QueryJob as QueryJob
from replicax.protocol.server_messages import Read as Read
from replicax.protocol.server_messages import ReadResult as ReadResult
from replicax.protocol.server_messages import RegisterOptimizer as RegisterOptimizer
from replicax.protocol.server_messages import TrainedPart as TrainedPart
from replicax.protocol.server_messages import Update as Update
from replicax.protocol.worker_messages import Cancel as Cancel
from replicax.protocol.worker_messages import ClosureCall as ClosureCall
from replicax.protocol.worker_messages import CreateResource as CreateResource
from replicax.protocol.worker_messages import DropResources as DropResources
from replicax.protocol.worker_messages import Finished as Finished
from replicax.protocol.worker_messages import Node as Node
from replicax.protocol.worker_messages import RemoteError as RemoteError
from replicax.protocol.worker_messages import ResourceCreated as ResourceCreated
from replicax.protocol.worker_messages import Result as Result
from replicax.protocol.worker_messages import Run as Run
from replicax.protocol.worker_messages import ShipFunction as ShipFunction

# Raised whenever a message changes its meaning; both sides must have the same.
VERSION = 3

Role = Literal["coordinator", "worker", "ps"]


# Who speaks.


class Hello(Body, frozen=True):
    """The first message on a connection: who calls, and with which versions."""

    version: int
    library: str
    python: str
    role: Role
    task: int
    incarnation: int
    # The name of the memory that the caller shares; empty if it shares none.
    lane: str = ""
    # The number of the first question that follows, if each has the number after the last one.
    first: int = 0


class Welcome(Body, frozen=True):
    """The answer to `Hello`: who was reached."""

    library: str
    role: Role
    task: int
    incarnation: int
    # Whether buffers may go through the memory that the caller shares.
    has_shared_memory: bool = False


class Done(Body, frozen=True):
    """The answer to an order that was carried out, when there is nothing else to say."""


class Attach(Body, frozen=True):
    """The coordinator takes a task into its job; the epoch is that of the envelope.

    Attributes:
      servers: Where the parameter servers listen, for workers.
      settings: Plain options of the job, by name.
      parts: For a parameter server that was attached before: the parts that it must hold. One
        that lacks any of them refuses. None at the beginning.
      fenced: Lives that were given up: from the first request on, nothing is taken from them.
    """

    servers: list[str]
    settings: dict[str, int | float | str | bool | None]
    parts: list[int] | None = None
    fenced: list[int] = []


class Detach(Body, frozen=True):
    """The coordinator lets a task go; what it held for the job is dropped.

    Attributes:
      is_dead: Whether the task was declared dead: its process is to end.
    """

    is_dead: bool = False


class Ping(Body, frozen=True):
    """Keeps the coordinator's lease on a task alive.

    Attributes:
      settled: All closures with smaller ids are settled: no update of theirs may come.
    """

    settled: int


class Pong(Body, frozen=True):
    """How a task is doing.

    Attributes:
      progress: Grows with each request or closure that the task has finished.
      figures: Counters and sizes by name, such as "bytes" or "requests".
    """

    progress: int
    figures: dict[str, int | float]


class GetStacks(Body, frozen=True):
    """Asks a task what its threads are doing, for people."""


class Stacks(Body, frozen=True):
    """What the threads of a task are doing.

    Attributes:
      text: The stack of each, the newest call last.
    """

    text: str


# What parameter servers say to each other: each keeps a copy of another.


class Replicate(Body, frozen=True):
    """A server tells its mirror what was changed, or asks how far it is.

    Attributes:
      position: The place of the first change among all that the server has told.
      count: How many there are; with none, it is only asked.
      is_slow: Whether one of them may take long.

    Buffers: if there are changes, their descriptions (see `ps/store/journal.py`), then
    the buffers of each.
    """

    position: int
    count: int
    is_slow: bool = False


class Replicated(Body, frozen=True):
    """The answer to `Replicate`: the place of the change that the mirror expects next."""

    position: int


class Seed(Body, frozen=True):
    """A server gives its mirror all that it holds: a snapshot, piece by piece.

    Attributes:
      position: The place of the first change that is not in it.
      offset: Where the piece begins.
      total: How long the snapshot is.
      is_first: Whether the server has never reached its mirror before.
      attach: What the coordinator said to the server.

    Buffers: the piece.
    """

    position: int
    offset: int
    total: int
    is_first: bool
    attach: Attach


class FetchReplica(Body, frozen=True):
    """A server that came back empty asks its mirror for a piece of what it held.

    Attributes:
      offset: Where the piece begins. At 0, no process before this one is listened to any more.
    """

    offset: int


class ReplicaPiece(Body, frozen=True):
    """The answer to `FetchReplica`.

    Attributes:
      position: The place of the first change that is not in the snapshot.
      total: How long the snapshot is.

    Buffers: the piece.
    """

    position: int
    total: int


AnyBody = (
    Hello
    | Welcome
    | ErrorReply
    | Done
    | Attach
    | Detach
    | Ping
    | Pong
    | GetStacks
    | Stacks
    | QueryJob
    | JobInfo
    | Attached
    | CreatePart
    | DropParts
    | RegisterOptimizer
    | Fence
    | Exchange
    | Exchanged
    | FlushGradients
    | Replicate
    | Replicated
    | Seed
    | FetchReplica
    | ReplicaPiece
    | ShipFunction
    | Run
    | CreateResource
    | DropResources
    | Cancel
    | Finished
    | ResourceCreated
)


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """What surrounds every body.

    Attributes:
      job: The job; empty until a coordinator has taken the task into one.
      epoch: Grows each time a coordinator takes the job over.
      incarnation: A random number of the sending process, new in each of its lives.
      request: The number of a question, and of its answer; 0 for a notice.
      sizes: The sizes of the buffers, in bytes.
      body: What is said.
      places: Where each buffer lies in shared memory, -1 for those that travel as frames;
        empty if all do.
    """

    job: str
    epoch: int
    incarnation: int
    request: int
    sizes: list[int]
    body: AnyBody
    places: list[int] = []


# Who may say what to whom; everything else is refused.
ALLOWED: dict[tuple[Role, Role], tuple[type[Body], ...]] = {
    ("coordinator", "ps"): (
        Hello,
        Attach,
        Detach,
        Ping,
        GetStacks,
        QueryJob,
        CreatePart,
        DropParts,
        RegisterOptimizer,
        Fence,
        Exchange,
        FlushGradients,
    ),
    ("worker", "ps"): (Hello, Exchange),
    ("ps", "ps"): (Hello, Replicate, Seed, FetchReplica),
    ("coordinator", "worker"): (
        Hello,
        Attach,
        Detach,
        Ping,
        GetStacks,
        ShipFunction,
        Run,
        CreateResource,
        DropResources,
        Cancel,
    ),
}
