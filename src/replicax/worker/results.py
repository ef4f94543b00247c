"""Encodes the results of closures, and reports them to the coordinator in batches."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence

from replicax.foundation import errors
from replicax.foundation.types import Tree
from replicax.protocol import trees
from replicax.protocol.codec import Buffer
from replicax.protocol.messages import Finished, RemoteError, Result
from replicax.values.distributed_values import PerReplica
from replicax.values.indexed_slices import IndexedSlices
from replicax.worker import error_reports

# The coordinator assigns eight closures, and refills when half of them have ended.
_BATCH = 4
# The maximum time that a result waits for others.
_MAX_DELAY_S = 0.002
_MAX_BUFFER_BYTES = 64 * 1024**2
_MAX_RESULTS = 256
# Limits of the warnings in one message.
_MAX_WARNINGS = 8
_MAX_CHARACTERS = 1_000
# The logger whose warnings concern the author of a closure.
_LOGGER = logging.getLogger("replicax.tracing")


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The value or the error of a closure, and whether an optimizer made a step."""

    closure: int
    value: trees.Encoded | None = None
    error: RemoteError | None = None
    has_stepped: bool = False

    @property
    def header_bytes(self) -> int:
        """The maximum size of its entry in the header of a message."""
        size = 32
        size += self.value.header_bytes if self.value is not None else 0
        return size + (error_reports.size_of(self.error) if self.error is not None else 0)

    @property
    def buffers(self) -> Sequence[Buffer]:
        """The arrays of the value."""
        return () if self.value is None else self.value.buffers

    def message(self) -> Result:
        """Returns the message that reports it."""
        tree = None if self.value is None else self.value.tree
        return Result(self.closure, tree, self.error, len(self.buffers), self.has_stepped)


def encode(value: Tree) -> trees.Encoded:
    """Encodes a snapshot of the value that a closure returned."""
    return trees.encode(value, _encode_other)


def _encode_other(value: object) -> tuple[str, Sequence[object]] | None:
    if isinstance(value, PerReplica):
        return "per_replica", value.values
    if isinstance(value, IndexedSlices):
        return "slices", (value.values, value.indices, value.dense_shape)
    shipping_key = getattr(type(value), "shipping_key", None)
    if shipping_key is not None:
        return "variable", shipping_key(value)
    return None


class Reports:
    """Collects outcomes and reports several in one message.

    Args:
      send: Sends a message with its buffers.
      record_sent: Called with the results before they are sent.
      take_warnings: Returns warnings that were not sent yet.
    """

    def __init__(
        self,
        send: Callable[[Finished, list[Buffer]], None],
        record_sent: Callable[[Sequence[tuple[Result, Sequence[Buffer]]]], None],
        take_warnings: Callable[[], list[str]],
    ) -> None:
        self._send, self._record_sent, self._take_warnings = send, record_sent, take_warnings
        self._outcomes: list[Outcome] = []
        self._since_s = 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether outcomes wait to be sent."""
        return bool(self._outcomes)

    def add(self, outcome: Outcome, now: float) -> None:
        """Adds an outcome."""
        if not self._outcomes:
            self._since_s = now
        self._outcomes.append(outcome)

    def send_if_due(self, now: float) -> None:
        """Sends all outcomes if a batch is complete, or if one has waited long enough."""
        if len(self._outcomes) >= _BATCH or now - self._since_s >= _MAX_DELAY_S:
            self.send_all()

    def send_all(self) -> None:
        """Sends all outcomes, in messages of moderate size."""
        batch: list[Outcome] = []
        header_bytes = buffer_bytes = 0
        for outcome in self._outcomes:
            size = sum(memoryview(buffer).nbytes for buffer in outcome.buffers)
            is_full = (
                len(batch) == _MAX_RESULTS
                or header_bytes + outcome.header_bytes > trees.MOST_HEADER_BYTES
                or buffer_bytes + size > _MAX_BUFFER_BYTES
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
        # Before the message: the coordinator may assign the same closure again at once.
        self._record_sent(sent)
        try:
            self._send(Finished([result for result, _ in sent], self._take_warnings()), buffers)
        except errors.DistributeError as error:
            # One of them cannot be encoded; the others are sent separately.
            if len(batch) > 1:
                for outcome in batch:
                    self._send_batch([outcome])
                return
            if batch[0].error is not None:
                raise
            self._send_batch([Outcome(batch[0].closure, error=error_reports.describe(error))])


class WarningRelay(logging.Handler):
    """Collects warnings of the thread that creates it, for the coordinator.

    These are warnings about closures that compile repeatedly. The worker's own log has them too.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._thread = threading.get_ident()
        self._texts: list[str] = []
        _LOGGER.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the text of a warning."""
        if record.thread == self._thread and len(self._texts) < _MAX_WARNINGS:
            self._texts.append(record.getMessage()[:_MAX_CHARACTERS])

    def take(self) -> list[str]:
        """Returns the warnings since the last call."""
        texts, self._texts = self._texts, []
        return texts

    def close(self) -> None:
        """Stops collecting."""
        _LOGGER.removeHandler(self)
        super().close()
