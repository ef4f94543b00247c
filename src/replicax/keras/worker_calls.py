"""A call of Keras that all workers make together: it returns on all of them, or raises on all.

The workers meet at the start, in hooks of callbacks and at the end. An error of one of them, in a
callback, in its data or by Ctrl-C, is what it brings to the next meeting.
"""

from __future__ import annotations

import contextlib

import msgspec

from replicax.foundation import errors
from replicax.foundation.peers import Peers

# The last meeting of a call.
_END = "the end"


class _Part(msgspec.Struct):
    """What one worker brings to a meeting."""

    place: str
    error: str = ""
    value: bytes = b""


class WorkerCall:
    """One call that all workers make.

    Args:
      name: The call, for messages.
      peers: The workers.

    Attributes:
      is_chief: Whether this worker is the one whose values count.
    """

    def __init__(self, name: str, peers: Peers) -> None:
        self._name, self._peers = name, peers
        self._has_failed = False
        self.is_chief = peers.index == 0

    def meet(self, place: str, value: bytes = b"", error: BaseException | None = None) -> bytes:
        """Meets the other workers, and returns the value of the chief.

        Args:
          place: Where in the call the workers meet.
          value: The value of this worker.
          error: What this worker has failed with, and raises.

        Raises:
          CancelledError: Another worker has failed.
        """
        if error is not None:
            self.tell(place, error)
            raise error
        parts = self._exchange(_Part(place, value=value if self.is_chief else b""))
        for index, part in enumerate(parts):
            if part.error:
                self._has_failed = True
                raise errors.CancelledError(
                    f"{self._name} was ended on all workers: {part.error} on "
                    f"{self._peers.name_of(index)}, at {part.place}."
                )
        self._require_same_place(parts)
        return parts[0].value

    def end(self) -> None:
        """Returns when all workers have ended their call without an error."""
        self.meet(_END)

    def tell(self, place: str, error: BaseException) -> None:
        """Tells the others, once, that this worker has failed."""
        if self._has_failed:
            return
        self._has_failed = True
        text = f"{type(error).__name__}: {error}"[:2000]
        # The group may have failed: then all know.
        with contextlib.suppress(errors.DistributeError):
            self._exchange(_Part(place, text))

    def tell_of(self, error: BaseException) -> None:
        """Tells the others that this worker has left the call with an error."""
        self.tell("a step or its data", error)

    def _exchange(self, part: _Part) -> list[_Part]:
        try:
            # Others that are in a step cannot come: their error has the detail.
            detail = f"after {part.error}" if part.error else ""
            found = self._peers.exchange(self._name, msgspec.msgpack.encode(part), detail)
        except errors.DistributeError:
            self._has_failed = True
            raise
        return [msgspec.msgpack.decode(value, type=_Part) for value in found]

    def _require_same_place(self, parts: list[_Part]) -> None:
        for index, part in enumerate(parts):
            if part.place != parts[0].place:
                self._has_failed = True
                raise errors.InvalidArgumentError(
                    f"All workers must run {self._name} with the same data",
                    f"{self._peers.name_of(0)} is at {parts[0].place}, and "
                    f"{self._peers.name_of(index)} at {part.place}",
                    "Give all workers the same data, epochs and steps.",
                )
