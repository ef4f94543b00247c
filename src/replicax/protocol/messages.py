"""Every message that tasks exchange, as typed structures; arrays travel beside them.

A message is an `Envelope` and a list of buffers. The envelope says which job it belongs to,
in which epoch of that job, which life of which process sent it, and which question it asks
or answers. What a body says about its buffers fixes their order; their types and shapes are
known to both sides, or said in the body.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from replicax.protocol.tasks import Role

# Raised whenever a message changes its meaning; both sides must have the same.
VERSION = 3


class Body(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Base of everything that can be said."""


class ErrorReply(Body, frozen=True):
    """The answer to a question that cannot be answered.

    Attributes:
      code: The name of the class in `replicax.foundation.errors` that the caller raises.
      text: The message of that error.
      parts: What was required, found and advised; empty for an error of one text, or a cut one.
    """

    code: str
    text: str
    parts: tuple[str, ...] = ()


# Connections and jobs.


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


# Parameter servers.


class QueryJob(Body, frozen=True):
    """A coordinator asks who holds a server, before it joins or takes over a job."""


class JobInfo(Body, frozen=True):
    """The answer to `QueryJob`.

    Attributes:
      job: The job that holds the server, or that it has restored; empty if there is none.
      epoch: The epoch of that job; -1 if there is none.
      newest: The largest number of a closure that changed something; -1 if there is none.
      settled: Closures with smaller numbers are settled.
      parts: The parts that there are.
    """

    job: str
    epoch: int
    newest: int
    settled: int
    parts: list[int]


class Attached(Body, frozen=True):
    """The answer of a parameter server to `Attach`.

    Attributes:
      is_saved: Whether what it holds outlives its process.
      is_restored: Whether it holds what another process has left.
    """

    is_saved: bool = False
    is_restored: bool = False


class Fill(Body, frozen=True):
    """A part starts with one number everywhere: the bytes of one element."""

    element: bytes


class FromBuffer(Body, frozen=True):
    """A part starts with the next buffer; of a long one, with its first rows."""


class FromProgram(Body, frozen=True):
    """A part starts with a result of an exported program: the next buffer.

    Attributes:
      arguments: The parts whose values the program takes.
      result: Which of its results it is.
    """

    arguments: list[int]
    result: int


class CreatePart(Body, frozen=True):
    """The coordinator makes a part of a variable on a server.

    Attributes:
      part: Its number, unique in the job.
      name: The name of the variable, for people.
      shape: The shape of the part.
      dtype: The name of its NumPy or ml_dtypes type.
      initial: Its first value.
    """

    part: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    initial: Fill | FromBuffer | FromProgram


class DropParts(Body, frozen=True):
    """The coordinator needs some parts no more; unknown ones are passed over."""

    parts: list[int]


class TrainedPart(Body, frozen=True):
    """A part that an optimizer changes.

    Attributes:
      part: Its number.
      slots: The parts that hold its slots, in the order that the program takes them.
      program: Which of the programs updates it.
      is_row_wise: Whether rows without a gradient may stay as they are.
    """

    part: int
    slots: list[int]
    program: int
    is_row_wise: bool


class RegisterOptimizer(Body, frozen=True):
    """The coordinator tells a server how an optimizer changes the parts that live there.

    Each of the buffers is a program made by `jax.export`: it takes (gradient, value,
    slots..., shared...) and returns (value, slots..., shared...). The first dimension of
    gradient, value and slots is open, unless the part has no dimensions.

    Attributes:
      optimizer: Its number, unique in the job.
      shared: The parts that hold state which belongs to no single variable.
      trained: The parts that it changes.
      num_programs: How many buffers there are.
    """

    optimizer: int
    shared: list[int]
    trained: list[TrainedPart]
    num_programs: int


class Fence(Body, frozen=True):
    """The coordinator forbids some processes, by incarnation, every further update."""

    incarnations: list[int]


class Update(Body, frozen=True):
    """One change of a part.

    Attributes:
      call: Which update of its closure it is.
      kind: "assign", "assign_add", "assign_sub", or one of the scatter family; "write_rows"
        replaces the rows from `start` on.
      part: The part.
      start: The first row of "write_rows".

    Buffers: the payload; for the scatter family the row numbers (int32, or int64 where the
    part has 2**31 rows or more), sorted and each once, then the rows.
    """

    call: int
    kind: str
    part: int
    start: int = 0


class Gradient(Body, frozen=True):
    """A gradient of a part: dense, or of some rows.

    Buffers: the gradient; for rows their numbers, as in `Update`, then the gradients.
    """

    part: int
    is_rows: bool


class Apply(Body, frozen=True):
    """One step of an optimizer, on the parts that one server holds."""

    call: int
    optimizer: int
    gradients: list[Gradient]


class Push(Body, frozen=True):
    """What one closure changes on one server.

    Attributes:
      closure: The closure.
      changes: What it changes.
      clock: The clock of the server when the closure read from it; -1 if it has read nothing.
    """

    closure: int
    changes: list[Update | Apply]
    clock: int = -1


class Read(Body, frozen=True):
    """Asks for a part, or for some of its rows.

    Attributes:
      part: The part.
      known: The version that the caller has already; -1 for none.
      is_rows: Whether a buffer with row numbers (int64) says which rows to read.
    """

    part: int
    known: int = -1
    is_rows: bool = False


class Exchange(Body, frozen=True):
    """Changes parts, then reads parts: the one question of training.

    Buffers: those of the pushes in order, then those of the reads in order.
    """

    pushes: list[Push]
    reads: list[Read]


class ReadResult(Body, frozen=True):
    """What was read: its version, and whether it is the version that the caller has."""

    version: int
    is_known: bool


class PushFailure(Body, frozen=True):
    """A closure whose changes could not be made; see `ErrorReply`."""

    closure: int
    error: ErrorReply


class Exchanged(Body, frozen=True):
    """The answer to `Exchange`.

    Attributes:
      reads: What was read.
      failures: The closures whose changes could not be made.
      clock: How many steps of training the values have seen.

    Buffers: one per read that is not known, in order.
    """

    reads: list[ReadResult]
    failures: list[PushFailure]
    clock: int = 0


class FlushGradients(Body, frozen=True):
    """The coordinator lets optimizers apply gradients that still wait for others."""


# Workers.


class ShipFunction(Body, frozen=True):
    """The coordinator sends a function: the buffers are its pickle and what lies beside it.

    Attributes:
      function: The SHA-256 of the buffers, in hexadecimal.
    """

    function: str


class ClosureCall(Body, frozen=True):
    """One closure to run.

    Attributes:
      closure: Its id, growing, unique in the job.
      attempt: How often it was handed out before.
      function: What to call.
      resources: The arguments, if they are nothing but objects of the worker.
      num_buffers: Else: how many buffers hold the pickled arguments.
    """

    closure: int
    attempt: int
    function: str
    resources: list[int]
    num_buffers: int


class Run(Body, frozen=True):
    """Closures to run in order. Buffers: those of the closures, in order."""

    closures: list[ClosureCall]


class CreateResource(Body, frozen=True):
    """Makes an object that stays on the worker: a dataset, an iterator or any value.

    Attributes:
      resource: Its number, unique in the job.
      kind: "dataset" calls a function and keeps what it returns; "iterator" starts one over
        another resource.
      function: The function to call.
      source: The resource to start from.
      num_buffers: How many buffers hold the pickled arguments of the function.
    """

    resource: int
    kind: Literal["value", "dataset", "iterator"]
    function: str
    source: int
    num_buffers: int


class DropResources(Body, frozen=True):
    """Objects of the worker that the coordinator needs no more."""

    resources: list[int]


class Cancel(Body, frozen=True):
    """Closures that are not to be started."""

    closures: list[int]


class RemoteError(Body, frozen=True):
    """An error that happened on a worker.

    Attributes:
      cause: "closure" for an error of the user's code; "input" for a resource that could
        not be made; "server" for a parameter server that did not answer; "fenced";
        "cancelled" for a closure that was taken back before it was started.
      kind: The qualified name of its type.
      text: Its text.
      traceback: Where it happened.
      task: The index of the parameter server, with cause "server".
      parts: What was required, found and advised, if it is an error of replicax that says so.
    """

    cause: Literal["closure", "input", "server", "fenced", "unknown_function", "cancelled"]
    kind: str
    text: str
    traceback: str
    task: int = -1
    parts: tuple[str, ...] = ()


class Result(Body, frozen=True):
    """How a closure ended. Its buffers are the arrays of `value`, in order.

    Attributes:
      closure: The closure.
      value: The value that it returned, encoded by `trees.encode`; None after an error.
      error: The error that it raised.
      num_buffers: How many buffers it takes.
      has_stepped: Whether an optimizer made a step in it.
      attempt: Which attempt was taken back, if it was; the coordinator may have made another.
    """

    closure: int
    value: bytes | None
    error: RemoteError | None
    num_buffers: int
    has_stepped: bool = False
    attempt: int = -1


class Finished(Body, frozen=True):
    """Closures that are finished and whose updates the servers have acknowledged.

    Attributes:
      results: How each of them ended.
      warnings: What the worker warned of since the last such message, such as a function that
        is traced for nearly every closure.
    """

    results: list[Result]
    warnings: list[str] = []


class ResourceCreated(Body, frozen=True):
    """A resource is there, or could not be made."""

    resource: int
    error: RemoteError | None


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
