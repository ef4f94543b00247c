"""One pass over distributed data: batches are read, cut and placed, ahead of the consumer."""

from __future__ import annotations

import collections
import logging
import queue
import threading
import weakref
from typing import Any, Protocol

from replicax.foundation import errors
from replicax.input import splitting
from replicax.input.sources import Source, Stream, close_stream
from replicax.values.layout import ReplicaLayout

_log = logging.getLogger(__name__)
# How long a consumer waits for data before the log says so, again and again.
_PATIENCE_S = 30.0


class Pipeline(Protocol):
    """Gives elements of all replicas, and the position behind the last one given."""

    def __next__(self) -> Any: ...

    def get_state(self) -> Any: ...

    def close(self) -> None: ...


class GlobalBatches:
    """Cuts each global batch of one stream into the parts of the replicas."""

    def __init__(self, source: Source, splitter: splitting.Splitter) -> None:
        self._stream: Stream = source.open()
        self._splitter = splitter
        self._steps: collections.deque[Any] = collections.deque()
        # Where the stream was before the batch that is being handed out, and how many of
        # its steps were.
        self._before: Any = None
        self._given = 0

    def __next__(self) -> Any:
        while not self._steps:
            # Only a batch that lasts for several steps is ever returned to.
            before = self._stream.get_state() if self._splitter.has_many_steps else None
            batch = next(self._stream)
            self._steps.extend(self._splitter.steps(batch))
            self._before, self._given = before, 0
        self._given += 1
        return self._steps.popleft()

    def get_state(self) -> Any:
        if self._steps:
            return {"stream": self._before, "steps": self._given}
        return {"stream": self._stream.get_state(), "steps": 0}

    def set_state(self, state: Any) -> None:
        """Goes to a position that `get_state` returned."""
        self._stream.set_state(state["stream"])
        self._steps.clear()
        for _ in range(state["steps"]):
            next(self)

    def close(self) -> None:
        close_stream(self._stream)


class ReplicaBatches:
    """Gives each replica a batch of its own: from one stream in turn, or from its own stream."""

    def __init__(
        self, sources: list[Source], layout: ReplicaLayout, splitter: splitting.Splitter
    ) -> None:
        self._streams = [source.open() for source in sources]
        self._layout = layout
        self._splitter = splitter
        self._ended = [False] * len(self._streams)

    def __next__(self) -> Any:
        batches = [self._batch_for(i) for i in range(self._layout.num_replicas)]
        given = [b for b in batches if b is not None]
        if not given:
            raise StopIteration
        if len(given) < len(batches):
            batches = self._filled(batches, given[0])
        placed = [self._splitter.place(batch, i) for i, batch in enumerate(batches)]
        return splitting.joined(placed, self._layout)

    def _batch_for(self, replica_id: int) -> Any:
        i = replica_id % len(self._streams)
        if self._ended[i]:
            return None
        try:
            return next(self._streams[i])
        except StopIteration:
            self._ended[i] = True
            return None

    def _filled(self, batches: list[Any], example: Any) -> list[Any]:
        """Gives replicas without data a batch without rows."""
        empty = splitting.empty_like(example)
        if empty is None and self._layout.num_replicas > 1:
            raise errors.InvalidArgumentError(
                f"The last step needs an element for each of the {len(batches)} replicas, or "
                "elements that can be empty",
                f"there are {sum(b is not None for b in batches)}, without a batch dimension",
                "Batch the dataset, or make its length a multiple of the replicas.",
            )
        return [empty if b is None else b for b in batches]

    def get_state(self) -> Any:
        return {"streams": [s.get_state() for s in self._streams], "ended": list(self._ended)}

    def set_state(self, state: Any) -> None:
        """Goes to a position that `get_state` returned."""
        if len(state["streams"]) != len(self._streams):
            raise errors.InvalidArgumentError(
                f"A position of {len(self._streams)} input pipelines was required",
                f"the saved one has {len(state['streams'])}",
                "Restore it under as many replicas as it was saved with, or save without "
                "PER_REPLICA.",
            )
        for stream, own in zip(self._streams, state["streams"], strict=True):
            stream.set_state(own)
        self._ended = list(state["ended"])

    def close(self) -> None:
        for stream in self._streams:
            close_stream(stream)


class ReadAhead:
    """Runs a pipeline in a thread of its own, a few elements ahead of the consumer."""

    def __init__(self, pipeline: Any, depth: int) -> None:
        self._state = pipeline.get_state()
        self._buffer = _Buffer(depth)
        self._thread = threading.Thread(
            target=_fill, args=(self._buffer, pipeline), name="replicax-input", daemon=True
        )
        # The thread knows the buffer only: it ends when nobody is left to read from it.
        self.close = weakref.finalize(self, _stop, self._buffer, self._thread)
        self._thread.start()

    def __next__(self) -> Any:
        element, self._state = self._buffer.take()
        return element

    def get_state(self) -> Any:
        return self._state


class _Buffer:
    """A bounded queue between a producer and a consumer, either of which may stop."""

    def __init__(self, depth: int) -> None:
        self._room = threading.Semaphore(depth)
        # Written in C: a condition in Python would cost each element several switches of
        # threads. Holds (item, None), and at last (None, what ended the production).
        self._items: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._is_stopped = False

    def put(self, item: Any) -> bool:
        """Adds an item when there is room; False if nobody wants it any more."""
        self._room.acquire()
        self._items.put((item, None))
        return not self._is_stopped

    def finish(self, end: BaseException) -> None:
        """Notes why no more items will come: StopIteration, or an error to be raised."""
        self._items.put((None, end))

    def take(self) -> Any:
        """Returns the oldest item; raises what ended the production once all are taken."""
        waited = 0.0
        while not self._is_stopped:
            try:
                item, end = self._items.get(timeout=_PATIENCE_S)
            except queue.Empty:
                waited += _PATIENCE_S
                _log.warning("Waiting for the next batch of a dataset since %.0f s", waited)
                continue
            if end is not None:
                # For whoever asks again.
                self._items.put((None, end))
                raise end
            self._room.release()
            return item
        raise StopIteration

    def stop(self) -> None:
        """Tells the producer that nobody will read any more."""
        self._is_stopped = True
        self._room.release()


def _fill(buffer: _Buffer, pipeline: Any) -> None:
    try:
        while buffer.put((next(pipeline), pipeline.get_state())):
            pass
    except BaseException as error:
        # Whatever it is, it belongs to the consumer.
        buffer.finish(error)
    finally:
        pipeline.close()


def _stop(buffer: _Buffer, thread: threading.Thread) -> None:
    buffer.stop()
    if thread is not threading.current_thread():
        # A source that is stuck in user code is left behind: the thread is a daemon.
        thread.join(timeout=5.0)
