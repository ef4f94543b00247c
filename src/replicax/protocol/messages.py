"""Every message that tasks exchange, as typed structures; arrays travel in buffers beside them.

A message is an `Envelope` and a list of buffers. The docstring of a body defines the order of its
buffers; their dtypes and shapes are known to both sides, or are fields of the body.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from replicax.protocol.tasks import Role

# Increased whenever a message changes; both sides must have the same version.
VERSION = 6


class Body(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Base of the contents of a message."""


class ErrorReply(Body, frozen=True):
    """The reply to a request that failed.

    Attributes:
      code: The name of the class in `replicax.foundation.errors` to raise.
      text: The text of the error.
      parts: The required, found and advice parts; empty for an error of one text, or a cut one.
    """

    code: str
    text: str
    parts: tuple[str, ...] = ()


# Connections and jobs.


class Hello(Body, frozen=True):
    """The handshake: the first message on a connection, with the versions of the sender.

    Attributes:
      shares_memory: Whether the descriptors of the memory that the sender shares come with it.
      first: The number of the next request, if requests are numbered consecutively; else 0.
    """

    version: int
    library: str
    python: str
    role: Role
    task: int
    incarnation: int
    shares_memory: bool = False
    first: int = 0


class Welcome(Body, frozen=True):
    """The reply to an accepted `Hello`.

    Attributes:
      has_shared_memory: Whether buffers may go through the memory that the peer shares.
    """

    library: str
    role: Role
    task: int
    incarnation: int
    has_shared_memory: bool = False


class Done(Body, frozen=True):
    """The reply to a request that returns nothing."""


class Attach(Body, frozen=True):
    """The coordinator takes a task into its job, in the epoch of the envelope.

    Attributes:
      servers: The addresses of the parameter servers, for workers.
      settings: Plain options of the job, by name.
      parts: For a parameter server that was attached before: the parts that it must hold; if
        any is missing, the reply is an error. None at the first attach.
      fenced: The incarnations from which the server accepts nothing, from the first request on.
    """

    servers: list[str]
    settings: dict[str, int | float | str | bool | None]
    parts: list[int] | None = None
    fenced: list[int] = []


class Detach(Body, frozen=True):
    """The coordinator releases a task, which drops the state of the job.

    Attributes:
      is_dead: Whether the task was declared dead: its process must exit.
    """

    is_dead: bool = False


class Ping(Body, frozen=True):
    """A heartbeat of the coordinator, which renews its lease on a task.

    Attributes:
      settled: No update of a closure with a smaller id can arrive any more.
    """

    settled: int


class Pong(Body, frozen=True):
    """The reply to `Ping`.

    Attributes:
      progress: Grows with each request or closure that the task has finished.
      counters: Counters and sizes by name, such as "bytes" or "requests".
    """

    progress: int
    counters: dict[str, int | float]


class GetStacks(Body, frozen=True):
    """Requests the stacks of the threads of a task."""


class Stacks(Body, frozen=True):
    """The reply to `GetStacks`: the stack of each thread as text, the newest call last."""

    text: str


class RecordSpans(Body, frozen=True):
    """Makes a task start or stop to record what it does; see `foundation/spans.py`.

    Attributes:
      trace: The id of the trace.
      is_on: Whether to start.
    """

    trace: str
    is_on: bool


class RecordedSpans(Body, frozen=True):
    """The reply to `RecordSpans`; when recording stops, the spans are in its buffer."""


# Mirrors: each parameter server keeps a copy of another.


class Replicate(Body, frozen=True):
    """A server sends changes to its mirror, or queries its position.

    Attributes:
      position: The position of the first change in the log of the server.
      count: The number of changes; 0 for a query.
      is_slow: Whether applying one of them may take long.

    Buffers: if there are changes, their encoding (see `ps/store/journal.py`), then the buffers
    of each.
    """

    position: int
    count: int
    is_slow: bool = False


class Replicated(Body, frozen=True):
    """The reply to `Replicate`: the position of the change that the mirror expects next."""

    position: int


class Seed(Body, frozen=True):
    """A server sends its mirror one piece of a snapshot of its state.

    Attributes:
      position: The position of the first change that is not in the snapshot.
      offset: The offset of the piece, in bytes.
      total: The size of the snapshot, in bytes.
      is_first: Whether the server has never reached its mirror before.
      attach: The request with which the coordinator attached the server.

    Buffers: the piece.
    """

    position: int
    offset: int
    total: int
    is_first: bool
    attach: Attach


class FetchReplica(Body, frozen=True):
    """A server that restarted empty requests one piece of its state from its mirror.

    Attributes:
      offset: The offset of the piece. From offset 0 on, the mirror accepts no earlier incarnation.
    """

    offset: int


class ReplicaPiece(Body, frozen=True):
    """The reply to `FetchReplica`.

    Attributes:
      position: The position of the first change that is not in the snapshot.
      total: The size of the snapshot, in bytes. Buffers: the piece.
    """

    position: int
    total: int


# Parameter servers.


class QueryJob(Body, frozen=True):
    """A coordinator queries the job of a server, before it starts or resumes one."""


class JobInfo(Body, frozen=True):
    """The reply to `QueryJob`.

    Attributes:
      job: The job that the server is attached to, or has restored; empty without.
      epoch: The epoch of that job; -1 without.
      newest: The largest id of a closure that changed a part; -1 without.
      settled: Closures with smaller ids are settled.
      parts: The parts on the server.
    """

    job: str
    epoch: int
    newest: int
    settled: int
    parts: list[int]


class Attached(Body, frozen=True):
    """The reply of a parameter server to `Attach`.

    Attributes:
      is_saved: Whether the state outlives the process.
      is_restored: Whether the state was restored from that of another process.
    """

    is_saved: bool = False
    is_restored: bool = False


class Fill(Body, frozen=True):
    """An initial value with one number everywhere: the bytes of one element."""

    element: bytes


class FromBuffer(Body, frozen=True):
    """An initial value in the next buffer; of a long part, its first rows."""


class FromProgram(Body, frozen=True):
    """An initial value that an exported program, the next buffer, computes.

    Attributes:
      arguments: The parts whose values are the arguments of the program.
      result: The index of the result.
    """

    arguments: list[int]
    result: int


class CreatePart(Body, frozen=True):
    """The coordinator creates a part of a variable on a server.

    Attributes:
      part: The id of the part, unique in the job.
      name: The name of the variable, for error messages.
      shape: The shape of the part.
      dtype: The name of its NumPy or ml_dtypes dtype.
      initial: Its initial value.
    """

    part: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    initial: Fill | FromBuffer | FromProgram


class DropParts(Body, frozen=True):
    """The coordinator deletes parts; unknown ones are ignored."""

    parts: list[int]


class TrainedPart(Body, frozen=True):
    """A part that an optimizer updates.

    Attributes:
      part: The id of the part.
      slots: The parts that hold its slots, in the order of the arguments of the program.
      program: The index of the program that updates it.
      is_row_wise: Whether rows without a gradient may be skipped.
    """

    part: int
    slots: list[int]
    program: int
    is_row_wise: bool


class RegisterOptimizer(Body, frozen=True):
    """The coordinator registers an optimizer for the parts on a server.

    Each buffer is a program made by `jax.export`: it takes (gradient, value, slots..., shared...)
    and returns (value, slots..., shared...). The first dimension of gradient, value and slots is
    symbolic, unless the part has no dimensions.

    Attributes:
      optimizer: The id of the optimizer, unique in the job.
      shared: The parts that hold state of no single variable.
      trained: The parts that it updates.
      num_programs: The number of buffers.
    """

    optimizer: int
    shared: list[int]
    trained: list[TrainedPart]
    num_programs: int


class Fence(Body, frozen=True):
    """The coordinator fences incarnations: the server accepts no further update from them."""

    incarnations: list[int]


class Update(Body, frozen=True):
    """One update of a part.

    Attributes:
      call: The index of the update in its closure.
      kind: "assign", "assign_add", "assign_sub", or one of the scatter family; "write_rows"
        replaces the rows from `start` on.
      part: The part.
      start: The first row of "write_rows".

    Buffers: the payload; for the scatter family the row numbers (int32, or int64 where the
    part has 2**31 rows or more), sorted and unique, then the rows.
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
    """One step of an optimizer, on the parts of one server."""

    call: int
    optimizer: int
    gradients: list[Gradient]


class Push(Body, frozen=True):
    """The changes of one closure on one server.

    Attributes:
      closure: The id of the closure.
      changes: The changes.
      clock: The clock of the server when the closure read from it; -1 if it has read nothing.
    """

    closure: int
    changes: list[Update | Apply]
    clock: int = -1


class Read(Body, frozen=True):
    """A read of a part, or of some of its rows.

    Attributes:
      part: The part.
      known: The version that the reader has cached; -1 without.
      is_rows: Whether a buffer with row numbers (int64) selects the rows.
    """

    part: int
    known: int = -1
    is_rows: bool = False


class Exchange(Body, frozen=True):
    """The request of training: pushes changes, then reads parts.

    Buffers: those of the pushes in order, then those of the reads in order.
    """

    pushes: list[Push]
    reads: list[Read]


class ReadResult(Body, frozen=True):
    """The version that was read, and whether it is the version that the reader has cached."""

    version: int
    is_known: bool


class PushFailure(Body, frozen=True):
    """A closure whose changes failed."""

    closure: int
    error: ErrorReply


class Exchanged(Body, frozen=True):
    """The reply to `Exchange`.

    Attributes:
      reads: The results of the reads.
      failures: The closures whose changes failed.
      clock: The number of training steps that the values include.

    Buffers: one per read that is not known, in order.
    """

    reads: list[ReadResult]
    failures: list[PushFailure]
    clock: int = 0


class FlushGradients(Body, frozen=True):
    """The coordinator lets optimizers apply accumulated gradients without waiting for more."""


# Checkpoints that parameter servers write and read themselves.


class StoredRows(Body, frozen=True):
    """The rows of an array of a checkpoint that a part holds.

    Attributes:
      part: The number of the part.
      name: The name of the array.
      shape: The shape of the array.
      start: The row of the array that is the first of the part.
    """

    part: int
    name: str
    shape: tuple[int, ...]
    start: int


class SaveParts(Body, frozen=True):
    """Writes parts into a checkpoint directory that the server shares; answered by `PartsSaved`."""

    directory: str
    rows: list[StoredRows]


class PartsSaved(Body, frozen=True):
    """The reply to `SaveParts`: what the manifest must contain about the parts, as JSON."""

    manifest: bytes


class LoadParts(Body, frozen=True):
    """Reads parts from a checkpoint that the server shares; answered by `Done`.

    Attributes:
      path: The checkpoint.
      rows: What to read.
      is_check: Whether to compare checksums only, and change nothing.
    """

    path: str
    rows: list[StoredRows]
    is_check: bool


# Workers.


class ShipFunction(Body, frozen=True):
    """The coordinator sends a function.

    Attributes:
      function: The SHA-256 of the buffers: the pickle and its out-of-band buffers.
    """

    function: str


class ClosureCall(Body, frozen=True):
    """One closure to run.

    Attributes:
      closure: Its id, increasing, unique in the job.
      attempt: The number of earlier attempts.
      function: The SHA-256 of the function.
      resources: The arguments, if all of them are resources of the worker.
      num_buffers: Otherwise, the number of buffers that hold the pickled arguments.
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
    """Creates an object that stays on the worker: a dataset, an iterator or any value.

    Attributes:
      resource: Its id, unique in the job.
      kind: "dataset" and "value" call a function and keep the result; "iterator" iterates over
        another resource.
      function: The SHA-256 of the function.
      source: The resource to iterate over.
      num_buffers: The number of buffers that hold the pickled arguments of the function.
    """

    resource: int
    kind: Literal["value", "dataset", "iterator"]
    function: str
    source: int
    num_buffers: int


class DropResources(Body, frozen=True):
    """Deletes resources of the worker."""

    resources: list[int]


class Cancel(Body, frozen=True):
    """Closures that must not be started."""

    closures: list[int]


class RemoteError(Body, frozen=True):
    """An error on a worker.

    Attributes:
      cause: "closure" for an error of the user's code; "input" for a resource that could not be
        created; "server" for a parameter server that did not reply; "fenced";
        "unknown_function"; "cancelled" for a closure that was cancelled before it started.
      kind: The qualified name of its type.
      text: Its text.
      traceback: Its traceback.
      task: The index of the parameter server, with cause "server".
      parts: The required, found and advice parts of an error of replicax that has them.
    """

    cause: Literal["closure", "input", "server", "fenced", "unknown_function", "cancelled"]
    kind: str
    text: str
    traceback: str
    task: int = -1
    parts: tuple[str, ...] = ()


class Result(Body, frozen=True):
    """The result of a closure. Buffers: the arrays of `value`, in order.

    Attributes:
      closure: The id of the closure.
      value: The value that it returned, encoded by `trees.encode`; None after an error.
      error: The error that it raised.
      num_buffers: The number of buffers.
      has_stepped: Whether an optimizer made a step in it.
      attempt: The attempt that was cancelled, if it was; the coordinator may have made another.
    """

    closure: int
    value: bytes | None
    error: RemoteError | None
    num_buffers: int
    has_stepped: bool = False
    attempt: int = -1


class Finished(Body, frozen=True):
    """Results of closures whose updates the servers have acknowledged.

    Attributes:
      results: The results.
      warnings: The warnings of the worker since the last such message, such as a function that
        is traced for nearly every closure.
    """

    results: list[Result]
    warnings: list[str] = []


class ResourceCreated(Body, frozen=True):
    """A resource was created, or failed to be."""

    resource: int
    error: RemoteError | None


# Groups: workers that run one program in lock step. Index 0 hosts the service of the group.


class JoinGroup(Body, frozen=True):
    """A worker reports for the roll call; the reply, `GroupFormed`, comes when all have.

    Attributes:
      index: Its index in the group.
      cluster: A digest of the tasks of the group and of their addresses.
      versions: The versions of its packages, by name.
      process: Its host and process id, for messages.
    """

    index: int
    cluster: str
    versions: dict[str, str]
    process: str


class GroupFormed(Body, frozen=True):
    """The reply to `JoinGroup`: all tasks of the group have reported, or cannot form a group.

    Attributes:
      error: Why they cannot; None if they have.
      may_retry: Whether the task may report again: the host has not started a new group yet.
    """

    error: ErrorReply | None = None
    may_retry: bool = False


class Contribute(Body, frozen=True):
    """A worker makes a call that all workers make. Buffers: its value.

    Attributes:
      name: The name of the call.
      number: The number of earlier calls of this name.
      is_main: Whether the main thread waits for the reply.
      position: The number of programs that the worker has dispatched before.
      detail: What the call is about, for messages.
    """

    name: str
    number: int
    is_main: bool = False
    position: int = 0
    detail: str = ""


class Contributions(Body, frozen=True):
    """The reply to `Contribute`. Buffers: the values of all workers, by index.

    Attributes:
      number: A number of the call, the same for all workers.
      error: Why the call has failed, without values; None if it has not.
    """

    number: int
    error: ErrorReply | None = None


class GroupBeat(Body, frozen=True):
    """A heartbeat of a worker; the reply is `Done`.

    Attributes:
      activity: What its main thread does, for messages.
      position: The number of programs that it dispatched before `programs`.
      programs: The numbers of the programs that it has dispatched since.
    """

    activity: str
    position: int
    programs: list[int]


class GroupNotice(Body, frozen=True):
    """The host informs a worker, or a worker its host.

    Attributes:
      kind: "waiting" for tasks that have not reported, "lost" for a task of the group that has
        ended or does not answer, "differs" for workers that run different programs, and "leaving"
        for a worker that ends.
      index: The index of the task in question; -1 without.
      error: The error to raise.
    """

    kind: Literal["waiting", "lost", "differs", "leaving"]
    index: int
    error: ErrorReply


class CoordinationBytes(Body, frozen=True):
    """Bytes of a connection to the coordination service of JAX, in one buffer; none at its end.

    Attributes:
      connection: The number of the connection, of one worker.
      number: The number of earlier messages of the connection in this direction.
    """

    connection: int
    number: int


_OfConnections = (
    Hello | Welcome | ErrorReply | Done | Attach | Detach | Ping | Pong | GetStacks | Stacks
)
_OfTraces = RecordSpans | RecordedSpans
_OfMirrors = Replicate | Replicated | Seed | FetchReplica | ReplicaPiece
_OfServers = QueryJob | JobInfo | Attached | CreatePart | DropParts | RegisterOptimizer | Fence
_OfCheckpoints = SaveParts | PartsSaved | LoadParts
_OfTraining = Exchange | Exchanged | FlushGradients
_OfWorkers = (
    ShipFunction | Run | CreateResource | DropResources | Cancel | Finished | ResourceCreated
)
_OfGroups = (
    JoinGroup
    | GroupFormed
    | Contribute
    | Contributions
    | GroupBeat
    | GroupNotice
    | CoordinationBytes
)
AnyBody = (
    _OfConnections
    | _OfTraces
    | _OfMirrors
    | _OfServers
    | _OfCheckpoints
    | _OfTraining
    | _OfWorkers
    | _OfGroups
)


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """The header of every message.

    Attributes:
      job: The job; empty until a coordinator has attached the task to one.
      epoch: The epoch of the job: grows each time a coordinator resumes it.
      incarnation: The incarnation of the sender: a random id of its process.
      request: The number of a request, and of its reply; 0 for a notification.
      sizes: The sizes of the buffers, in bytes.
      body: The contents.
      offsets: The position of each buffer in shared memory, -1 for those in the message itself;
        empty if all are.
    """

    job: str
    epoch: int
    incarnation: int
    request: int
    sizes: list[int]
    body: AnyBody
    offsets: list[int] = []
