"""The mutations of a parameter server, in order, so that a mirror can replay them.

Replaying the same requests in the same order gives the same values, tables and accumulated
gradients. The store reports each mutation when it applies it, under the write lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from replicax.foundation import errors
from replicax.protocol import messages
from replicax.protocol.codec import Buffer
from replicax.protocol.tasks import Role

Mutation = (
    messages.Attach
    | messages.Ping
    | messages.CreatePart
    | messages.DropParts
    | messages.RegisterOptimizer
    | messages.Fence
    | messages.Exchange
    | messages.FlushGradients
)


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """A request that changed the store.

    Attributes:
      role: The role of the sender.
      incarnation: The incarnation of the sender.
      epoch: The epoch of the job.
      body: The request; an exchange without its reads.
      num_buffers: The number of buffers of the request.
      num_failures: The number of closures of an exchange whose changes were rejected.
    """

    role: Role
    incarnation: int
    epoch: int
    body: Mutation
    num_buffers: int = 0
    num_failures: int = 0


class Journal(Protocol):
    """Receives the mutations of a store. Called under the write lock; must not block.

    Attributes:
      target: The mirror that needs the mutations; None if there is none.
    """

    @property
    def target(self) -> object: ...

    def attached(self, job: str, attach: messages.Attach, entry: Entry) -> None:
        """Records that a coordinator attached the server, for the first time or again."""
        ...

    def record(self, entry: Entry, buffers: Sequence[Buffer]) -> None:
        """Records a mutation; the buffers are immutable while they are referenced."""
        ...

    def mark_unrepeatable(self) -> None:
        """Records a mutation that cannot be replayed exactly."""
        ...

    def job_ended(self) -> None:
        """Records that the job ended and its state was dropped."""
        ...


class NullJournal:
    """The journal of a store without a mirror."""

    target = None

    def attached(self, job: str, attach: messages.Attach, entry: Entry) -> None: ...

    def record(self, entry: Entry, buffers: Sequence[Buffer]) -> None: ...

    def mark_unrepeatable(self) -> None: ...

    def job_ended(self) -> None: ...


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Entry])


def encode(entries: Sequence[Entry]) -> bytes:
    """Encodes entries without their buffers.

    Example:
      >>> entry = Entry("coordinator", 7, 1, messages.Fence([3]))
      >>> decode(encode([entry])) == [entry]
      True
    """
    return _encoder.encode(entries)


def decode(data: Buffer) -> list[Entry]:
    """Decodes the result of `encode`.

    Raises:
      ProtocolError: `data` is not a list of journal entries.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise errors.ProtocolError(
            "A replication message must contain journal entries",
            f"decoding failed: {error}",
            "Check that all tasks have the same version of replicax.",
        ) from error
