"""One pass over distributed data: batches are read, split and placed, ahead of the consumer."""

from __future__ import annotations

import collections
import logging
import queue
import threading
import types
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

from replicax.foundation.types import Tree
from replicax.input import positions, splitting
from replicax.input.dataset.reading import DatasetIterator
from replicax.input.rebatching import Share, sizes_of_step
from replicax.input.sources import Source, Stream, close_stream

_log = logging.getLogger(__name__)
# The interval of log messages about a consumer that waits for data.
_LOG_INTERVAL_S = 30.0
_NO_LABELS: Mapping[str, Any] = types.MappingProxyType({})


class Pipeline(Protocol):
    """Gives elements of all replicas, and the position after the last one."""

    def __next__(self) -> Tree: ...

    def get_state(self) -> Any: ...

    def close(self) -> None: ...


class LocalPipeline(Pipeline, Protocol):
    """Reads data in the thread of its caller."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a position that `get_state` returned."""
        ...

    @property
    def order(self) -> dict[str, Any] | None:
        """What decides the order of elements, for `restart`; None if it is not known."""
        ...

    def restart(self, order: dict[str, Any]) -> None:
        """Starts at the first element again, in the order of another process."""
        ...


class _OneStream:
    """Reads the batches of one stream."""

    def __init__(self, stream: Stream, splitter: splitting.Splitter) -> None:
        self._stream = stream
        self._splitter = splitter

    @property
    def order(self) -> dict[str, Any] | None:
        """What decides the order of batches; None for streams of other libraries."""
        return self._stream.order if isinstance(self._stream, DatasetIterator) else None

    def restart(self, order: dict[str, Any]) -> None:
        """Starts at the first batch again, in the order of another process."""
        assert isinstance(self._stream, DatasetIterator)
        self._stream.restart(order)

    def close(self) -> None:
        close_stream(self._stream)


class GlobalBatches(_OneStream):
    """Splits each global batch of one stream, which all workers read, into parts for the replicas.

    Args:
      stream: The global batches.
      splitter: Splits them.
      labels: What the position says about the stream, next to its state.
    """

    def __init__(
        self, stream: Stream, splitter: splitting.Splitter, labels: Mapping[str, Any] = _NO_LABELS
    ) -> None:
        super().__init__(stream, splitter)
        self._labels = labels
        # The rows of the next batch that were given before the position was restored.
        self._given = 0

    def __next__(self) -> Tree:
        batch = next(self._stream)
        while self._given:
            rest = splitting.remaining_rows(batch, self._given)
            self._given = 0
            batch = next(self._stream) if rest is None else rest
        return self._splitter.split(batch)

    def get_state(self) -> dict[str, Any]:
        return {"stream": self._stream.get_state(), "rows": self._given, **self._labels}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a position that `get_state` returned."""
        self._stream.set_state(state["stream"])
        # Positions that older versions saved are at the start of a batch.
        self._given = state.get("rows", 0)


class OwnBatches(_OneStream):
    """Cuts the rows of a stream that only this worker reads into its parts of global batches.

    All workers together take one global batch in each step. Rows of a smaller batch at the end of
    a pass are joined with those of the next pass.

    Args:
      stream: The batches.
      splitter: Places the parts.
      share: The share of this worker.
      batch_size: The rows of a global batch; None if batches have no common size: then each batch
        lasts for as many steps as there are workers.
      labels: What the position says about the stream.
    """

    def __init__(
        self,
        stream: Stream,
        splitter: splitting.Splitter,
        share: Share,
        batch_size: int | None,
        labels: Mapping[str, Any],
    ) -> None:
        super().__init__(stream, splitter)
        self._share = share
        self._batch_size = batch_size
        self._labels = labels
        # The batches with rows that were not given, each with the state of the stream before it.
        self._batches: collections.deque[tuple[Tree, int, Any]] = collections.deque()
        # The rows of the first of them that were given.
        self._given = 0
        # How many of those were given by another number of workers or replicas.
        self._skipped = 0
        self._phase = 0

    def __next__(self) -> Tree:
        is_new = self._phase == 0 or bool(self._batch_size)
        if not self._batches and (not is_new or not self._read()):
            raise StopIteration
        size = self._batch_size or self._batches[0][1] - self._skipped
        sizes = sizes_of_step(size, self._share, self._phase)
        while self._batch_size and self._num_rows < sum(sizes) and self._read():
            pass
        parts = [self._take(rows) for rows in sizes]
        self._phase = (self._phase + 1) % self._share.num_workers
        is_used = not self._num_rows if self._batch_size else self._phase == 0
        if is_used:
            self._forget()
        return self._splitter.join(parts)

    def _forget(self) -> None:
        self._batches.clear()
        self._given = self._skipped = 0

    @property
    def _num_rows(self) -> int:
        return sum(rows for _, rows, _ in self._batches) - self._given

    def _read(self) -> bool:
        """Reads one more batch; returns False at the end of the data."""
        num_rows = 0
        while not num_rows:
            before = self._stream.get_state()
            try:
                batch = next(self._stream)
            except StopIteration:
                return False
            num_rows = splitting.rows_of(batch)
            self._batches.append((batch, num_rows, before))
        return True

    def _take(self, count: int) -> Tree:
        """Returns the next rows, fewer if the data ends."""
        pieces: list[Tree] = []
        while True:
            batch, rows, _ = self._batches[0]
            start = self._given
            stop = min(rows, start + count)
            count -= stop - start
            self._given = stop
            if stop > start or (not pieces and (not count or len(self._batches) == 1)):
                pieces.append(splitting.rows_between(batch, start, stop))
            if not count or len(self._batches) == 1:
                return splitting.concatenated(pieces)
            self._batches.popleft()
            self._given = 0

    def get_state(self) -> dict[str, Any]:
        state = self._batches[0][2] if self._batches else self._stream.get_state()
        return {"stream": state, "rows": self._given, "phase": self._phase, **self._labels}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a position that `get_state` returned."""
        self._stream.set_state(state["stream"])
        self._forget()
        self._phase = state["phase"]
        if (state["rows"] or self._phase) and self._read():
            self._given = state["rows"]
            self._skipped = 0 if self._phase else self._given
            if not self._num_rows and (self._batch_size or not self._phase):
                self._forget()


class ReplicaBatches:
    """Gives each local replica a whole batch: from one stream in turn, or from its own stream.

    Args:
      sources: The datasets of this process.
      splitter: Places batches.
      num_replicas: The number of local replicas.
      first: The number of the first dataset, among those of all processes.
      total: The number of datasets of all processes.
    """

    def __init__(
        self,
        sources: list[Source],
        splitter: splitting.Splitter,
        num_replicas: int,
        first: int = 0,
        total: int | None = None,
    ) -> None:
        self._streams = [source.open() for source in sources]
        self._splitter = splitter
        self._num_replicas = num_replicas
        self._first = first
        self._total = len(sources) if total is None else total
        self._ended = [False] * len(self._streams)

    def __next__(self) -> Tree:
        batches = [self._batch_for(i) for i in range(self._num_replicas)]
        given = [b for b in batches if b is not None]
        if not given:
            raise StopIteration
        if len(given) < len(batches):
            batches = self._filled(batches, given[0])
        return self._splitter.join(batches)

    def _batch_for(self, replica_id: int) -> Tree:
        i = replica_id % len(self._streams)
        if self._ended[i]:
            return None
        try:
            return next(self._streams[i])
        except StopIteration:
            self._ended[i] = True
            return None

    def _filled(self, batches: list[Tree], example: Tree) -> list[Tree]:
        """Replaces missing batches by batches without rows."""
        empty = splitting.empty_like(example)
        if empty is None:
            raise splitting.no_empty_elements(len(batches), sum(b is not None for b in batches))
        return [empty if b is None else b for b in batches]

    def get_state(self) -> dict[str, Any]:
        streams = [stream.get_state() for stream in self._streams]
        state: dict[str, Any] = {"streams": streams, "ended": list(self._ended)}
        if self._total > len(streams):
            state |= {"first": self._first, "total": self._total}
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a position that `get_state` returned, or those of all processes merged."""
        own = positions.streams_of(state, self._first, len(self._streams), self._total)
        for stream, position in zip(self._streams, own["streams"], strict=True):
            stream.set_state(position)
        self._ended = list(own["ended"])

    @property
    def order(self) -> None:
        """None: each process may read its datasets in an order of its own."""
        return None

    def restart(self, order: dict[str, Any]) -> None:
        """Is not called: there is no common order."""
        raise NotImplementedError(order)

    def close(self) -> None:
        for stream in self._streams:
            close_stream(stream)


class ReadAhead:
    """Runs a pipeline in a thread, a few elements ahead of the consumer."""

    def __init__(self, pipeline: Pipeline, depth: int) -> None:
        self._state = pipeline.get_state()
        self._buffer = _Buffer(depth)
        self._thread = threading.Thread(
            target=_fill, args=(self._buffer, pipeline), name="replicax-input", daemon=True
        )
        # The thread refers to the buffer only: it ends when this object is collected.
        self.close = weakref.finalize(self, _stop, self._buffer, self._thread)
        self._thread.start()

    def __next__(self) -> Tree:
        element, self._state = self._buffer.take()
        return element

    def get_state(self) -> Any:
        return self._state

    @property
    def is_ready(self) -> bool:
        """Whether the next element, or the end, is there without waiting."""
        return self._buffer.is_filled


class _Buffer:
    """A bounded queue between a producer and a consumer, either of which may stop."""

    def __init__(self, depth: int) -> None:
        self._room = threading.Semaphore(depth)
        # Implemented in C: a condition in Python would switch threads several times per element.
        # Holds (item, None), and finally (None, the exception that ended the production).
        self._items: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._is_stopped = False

    def put(self, item: tuple[Tree, Any]) -> bool:
        """Adds an item when there is room; returns False if the consumer has stopped."""
        self._room.acquire()
        self._items.put((item, None))
        return not self._is_stopped

    def finish(self, end: BaseException) -> None:
        """Adds the exception that ended the production: StopIteration, or an error."""
        self._items.put((None, end))

    def take(self) -> tuple[Tree, Any]:
        """Returns the oldest item; after the last one, raises what ended the production."""
        waited = 0.0
        while not self._is_stopped:
            try:
                item, end = self._items.get(timeout=_LOG_INTERVAL_S)
            except queue.Empty:
                waited += _LOG_INTERVAL_S
                _log.warning("Waiting for the next batch of a dataset for %.0f s", waited)
                continue
            if end is not None:
                # For the next call.
                self._items.put((None, end))
                raise end
            self._room.release()
            return item
        raise StopIteration

    @property
    def is_filled(self) -> bool:
        """Whether `take` would not wait."""
        return not self._items.empty()

    def stop(self) -> None:
        """Makes the producer stop."""
        self._is_stopped = True
        self._room.release()


def _fill(buffer: _Buffer, pipeline: Pipeline) -> None:
    try:
        while buffer.put((next(pipeline), pipeline.get_state())):
            pass
    except BaseException as error:
        # Raised again in the consumer.
        buffer.finish(error)
    finally:
        pipeline.close()


def _stop(buffer: _Buffer, thread: threading.Thread) -> None:
    buffer.stop()
    if thread is not threading.current_thread():
        # A source that hangs in user code is abandoned: the thread is a daemon.
        thread.join(timeout=5.0)
