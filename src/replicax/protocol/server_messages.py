"""What parameter servers are asked, and what they answer."""

from __future__ import annotations

from replicax.protocol.body import Body, ErrorReply


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
