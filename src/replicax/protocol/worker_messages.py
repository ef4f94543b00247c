"""What workers are asked, and what they answer."""

from __future__ import annotations

from typing import Literal

from replicax.protocol.body import Body


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


class Node(Body, frozen=True):
    """A value that is no array, or a container; arrays are "array" and take a buffer.

    Attributes:
      kind: "none", "bool", "int", "float", "complex", "str", "bytes", "array", "list",
        "tuple", "dict", "named_tuple", "per_replica", "slices" or "variable".
      text: The type of an array, the text of a "str", the decimal digits of an "int", the
        name of a "named_tuple".
      number: A "float" or "bool"; the real part of a "complex".
      imaginary: The other part.
      data: The bytes of a "bytes".
      shape: The shape of an array.
      keys: The keys of a "dict", the fields of a "named_tuple".
      items: What is inside.
    """

    kind: str
    text: str = ""
    number: float = 0.0
    imaginary: float = 0.0
    data: bytes = b""
    shape: tuple[int, ...] = ()
    keys: list[Node] = []
    items: list[Node] = []


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
      value: What it returned.
      error: Why it returned nothing.
      num_buffers: How many buffers it takes.
      has_stepped: Whether an optimizer made a step in it.
      attempt: Which attempt was taken back, if it was; the coordinator may have made another.
    """

    closure: int
    value: Node | None
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
