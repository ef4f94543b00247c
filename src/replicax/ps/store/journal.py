"""What changes a parameter server, in order, so that another can follow.

The same changes, made in the same order, lead to the same values, tables and gradients that
wait. So whoever is told every change at the moment when it is made, under the lock that all
changes need, can keep a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from replicax.foundation import errors
from replicax.protocol import messages
from replicax.protocol.tasks import Role

AnyChange = (
    messages.Attach
    | messages.Ping
    | messages.CreatePart
    | messages.DropParts
    | messages.RegisterOptimizer
    | messages.Fence
    | messages.Exchange
    | messages.FlushGradients
)


class Change(msgspec.Struct, array_like=True, frozen=True):
    """A request that has changed something.

    Attributes:
      role: Who asked.
      incarnation: The life of the process that asked.
      epoch: The epoch of the job.
      body: What it asked; of an exchange, without what was read.
      num_buffers: How many buffers belong to it.
      num_failures: How many closures of an exchange could not change what they wanted.
    """

    role: Role
    incarnation: int
    epoch: int
    body: AnyChange
    num_buffers: int = 0
    num_failures: int = 0


class Journal(Protocol):
    """Is told what happens to a store, while the lock `changing` is held; must not wait."""

    def attached(self, job: str, attach: messages.Attach, change: Change) -> None:
        """A coordinator has taken the server into its job, for the first time or again."""
        ...

    def note(self, change: Change, buffers: Sequence[Any]) -> None:
        """Something was changed; the buffers stay as they are for as long as they are held."""
        ...

    def doubt(self) -> None:
        """Something was changed that cannot be repeated exactly."""
        ...

    def ended(self) -> None:
        """The job is over; all that it had here is gone."""
        ...


class Unwatched:
    """The journal of a store that nobody follows."""

    def attached(self, job: str, attach: messages.Attach, change: Change) -> None:
        """Does nothing."""

    def note(self, change: Change, buffers: Sequence[Any]) -> None:
        """Does nothing."""

    def doubt(self) -> None:
        """Does nothing."""

    def ended(self) -> None:
        """Does nothing."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Change])


def encode(changes: Sequence[Change]) -> bytes:
    """Returns changes as bytes, without their buffers.

    Example:
      >>> change = Change("coordinator", 7, 1, messages.Fence([3]))
      >>> decode(encode([change])) == [change]
      True
    """
    return _encoder.encode(changes)


def decode(octets: Any) -> list[Change]:
    """Returns what `encode` was given.

    Raises:
      ProtocolError: It is something else.
    """
    try:
        return _decoder.decode(octets)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise errors.ProtocolError(
            "Changes that one parameter server tells another must be such",
            f"they are not: {error}",
            "Check that all tasks have the same version of replicax.",
        ) from error
