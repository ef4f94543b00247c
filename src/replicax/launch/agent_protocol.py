"""The messages between a launcher and the agent that starts its tasks on another host."""

from __future__ import annotations

import struct
from typing import IO, Any, TypeAlias

import msgspec

from replicax.foundation import errors
from replicax.launch.host import Start

# What the shell of a host prints before the agent starts is skipped.
BEGINNING = b"\0replicax-agent-1\n"
# The launcher sends a beat this often; an agent that hears nothing for longer kills its tasks.
BEAT_S = 2.0
LEASE_S = 15.0
_LENGTH = struct.Struct(">I")
_LONGEST = 64 << 20


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message of the launcher.

    Attributes:
      address: Where the tasks of other hosts reach those of this one.
      keys: The files of the keys of the cluster, by name.
      version: The versions of the launcher.
      job: The name of the directory in which tasks can be observed; empty if they cannot.
    """

    address: str
    keys: dict[str, bytes]
    version: str
    job: str = ""


class Reserve(msgspec.Struct, frozen=True, tag=True):
    """Asks for ports; 0 for any."""

    ports: list[int]


class Launch(msgspec.Struct, frozen=True, tag=True):
    """Starts a process of a task."""

    start: Start


class Send(msgspec.Struct, frozen=True, tag=True):
    """Sends a signal to a task."""

    job: str
    index: int
    number: int


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Asks the tasks of this host for something that `observe` knows.

    Attributes:
      number: The number of this request.
      request: What is asked.
      arguments: Its arguments.
      task: The task that is asked; None for all.
    """

    number: int
    request: str
    arguments: dict[str, Any]
    task: str | None


class AskTime(msgspec.Struct, frozen=True, tag=True):
    """Asks for the time of day of the host."""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Says that the launcher is there."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The first message of the agent.

    Attributes:
      version: Its versions.
      cores: The cores that tasks may use.
      gpus: The GPUs that tasks may use.
      python: The interpreter.
    """

    version: str
    cores: list[int]
    gpus: list[str]
    python: str


class Reserved(msgspec.Struct, frozen=True, tag=True):
    """The ports that were reserved, or why they were not."""

    ports: list[int]
    error: str = ""


class Printed(msgspec.Struct, frozen=True, tag=True):
    """The output of a task."""

    job: str
    index: int
    data: bytes


class Begun(msgspec.Struct, frozen=True, tag=True):
    """A process of a task was started."""

    job: str
    index: int
    incarnation: int
    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A process of a task has ended."""

    job: str
    index: int
    incarnation: int
    code: int


class TimeIs(msgspec.Struct, frozen=True, tag=True):
    """The time of day of the host, in nanoseconds."""

    nanoseconds: int


class TaskAnswer(msgspec.Struct, frozen=True):
    """What one task has answered.

    Attributes:
      name: The name of its socket, without suffix.
      pid: Its process on its host; None if nothing listens.
      reply: What it replied; None without a reply.
      error: Why it has not replied.
    """

    name: str
    pid: int | None
    reply: Any
    error: str


class Answered(msgspec.Struct, frozen=True, tag=True):
    """What the tasks of a host have answered.

    Attributes:
      number: The number of the request.
      answers: The answer of each task.
      files: Files that the request has finished, by name.
    """

    number: int
    answers: list[TaskAnswer]
    files: dict[str, bytes]


ToAgent: TypeAlias = Hello | Reserve | Launch | Send | Ask | AskTime | Beat
FromAgent: TypeAlias = Ready | Reserved | Printed | Begun | Ended | Answered | TimeIs

_encode = msgspec.msgpack.Encoder().encode
decode_to_agent = msgspec.msgpack.Decoder(ToAgent).decode
decode_from_agent = msgspec.msgpack.Decoder(FromAgent).decode


def write(stream: IO[bytes], message: ToAgent | FromAgent) -> None:
    """Writes one message."""
    body = _encode(message)
    stream.write(_LENGTH.pack(len(body)) + body)
    stream.flush()


def read(stream: IO[bytes]) -> bytes | None:
    """Reads the bytes of one message; None at the end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > _LONGEST:
        raise errors.ProtocolError(f"A message of {length} bytes is longer than {_LONGEST}.")
    body = stream.read(length)
    return body if len(body) == length else None
