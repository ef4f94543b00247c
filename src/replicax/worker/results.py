"""How closures ended: results as trees of arrays, reported to the coordinator in batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from replicax.foundation import errors
from replicax.protocol import trees
from replicax.protocol.messages import Finished, RemoteError, Result
from replicax.values.distributed_values import PerReplica
from replicax.values.indexed_slices import IndexedSlices
from replicax.worker import error_reports

# The coordinator fills a window of eight when half of it is free.
_BATCH = 4
# Results do not wait for each other for longer than this.
_PATIENCE_S = 0.002
_MOST_BUFFER_BYTES = 64 * 1024**2
_MOST_RESULTS = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How a closure ended: with a value, or with an error; and whether an optimizer made a step."""

    closure: int
    value: trees.Encoded | None = None
    error: RemoteError | None = None
    has_stepped: bool = False

    @property
    def header_bytes(self) -> int:
        """What it takes in the header of a message, at most."""
        size = 32
        size += self.value.header_bytes if self.value is not None else 0
        return size + (error_reports.size_of(self.error) if self.error is not None else 0)

    @property
    def buffers(self) -> Sequence[Any]:
        """The arrays of the value."""
        return () if self.value is None else self.value.buffers

    def message(self) -> Result:
        """Returns what is said about it."""
        tree = None if self.value is None else self.value.tree
        return Result(self.closure, tree, self.error, len(self.buffers), self.has_stepped)


def encode(value: Any) -> trees.Encoded:
    """Takes a snapshot of what a closure returned."""
    return trees.encode(value, _encode_other)


def _encode_other(value: Any) -> tuple[str, Sequence[object]] | None:
    if isinstance(value, PerReplica):
        return "per_replica", value.values
    if isinstance(value, IndexedSlices):
        return "slices", (value.values, value.indices, value.dense_shape)
    if hasattr(type(value), "shipping_key"):
        return "variable", value.shipping_key()
    return None


class Reports:
    """Collects outcomes and sends them, several in one message.

    Args:
      send: Sends a message with its buffers.
      note_sent: Called with the results that were sent.
      take_warnings: Returns warnings that were not sent yet.
    """

    def __init__(
        self,
        send: Callable[[Finished, list[Any]], None],
        note_sent: Callable[[Sequence[tuple[Result, Sequence[Any]]]], None],
        take_warnings: Callable[[], list[str]],
    ) -> None:
        self._send, self._note_sent, self._take_warnings = send, note_sent, take_warnings
        self._outcomes: list[Outcome] = []
        self._since_s = 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether there are outcomes that were not sent."""
        return bool(self._outcomes)

    def add(self, outcome: Outcome, now: float) -> None:
        """Adds an outcome that can be reported."""
        if not self._outcomes:
            self._since_s = now
        self._outcomes.append(outcome)

    def send_if_due(self, now: float) -> None:
        """Sends if there are enough, or if one has waited long enough."""
        if len(self._outcomes) >= _BATCH or now - self._since_s >= _PATIENCE_S:
            self.send_all()

    def send_all(self) -> None:
        """Sends everything, in messages of moderate size."""
        batch: list[Outcome] = []
        header_bytes = buffer_bytes = 0
        for outcome in self._outcomes:
            size = sum(memoryview(buffer).nbytes for buffer in outcome.buffers)
            is_full = (
                len(batch) == _MOST_RESULTS
                or header_bytes + outcome.header_bytes > trees.MOST_HEADER_BYTES
                or buffer_bytes + size > _MOST_BUFFER_BYTES
            )
            if batch and is_full:
                self._send_batch(batch)
                batch, header_bytes, buffer_bytes = [], 0, 0
            batch.append(outcome)
            header_bytes += outcome.header_bytes
            buffer_bytes += size
        if batch:
            self._send_batch(batch)
        self._outcomes = []

    def _send_batch(self, batch: list[Outcome]) -> None:
        sent = [(outcome.message(), outcome.buffers) for outcome in batch]
        buffers = [buffer for outcome in batch for buffer in outcome.buffers]
        # First: the answer may be another order for the same closure, which must not meet the
        # note that it still runs.
        self._note_sent(sent)
        try:
            self._send(Finished([result for result, _ in sent], self._take_warnings()), buffers)
        except errors.DistributeError as error:
            # One of them is no message; the others, and the worker, do not suffer for it.
            if len(batch) > 1:
                for outcome in batch:
                    self._send_batch([outcome])
                return
            if batch[0].error is not None:
                raise
            self._send_batch([Outcome(batch[0].closure, error=error_reports.describe(error))])
