"""One pass over distributed data: batches are read, split and placed, ahead of the consumer."""

from __future__ import annotations

import collections
import logging
import queue
import threading
import weakref
from typing import Any, Protocol

from replicax.foundation import errors
from replicax.foundation.types import Tree
from replicax.input import splitting
from replicax.input.sources import Source, Stream, close_stream
from replicax.values.layout import ReplicaLayout

_log = logging.getLogger(__name__)
# The interval of log messages about a consumer that waits for data.
_LOG_INTERVAL_S = 30.0


class Pipeline(Protocol):
    """Gives elements of all replicas, and the position after the last one."""

    def __next__(self) -> Tree: ...

    def get_state(self) -> Any: ...

    def close(self) -> None: ...


class GlobalBatches:
    """Splits each global batch of one stream into parts for the replicas."""

    def __init__(self, source: Source, splitter: splitting.Splitter) -> None:
        self._stream: Stream = source.open()
        self._splitter = splitter
        self._steps: collections.deque[Tree] = collections.deque()
        # The state of the stream before the current batch, and the number of its steps that
        # were given.
        self._before: Any = None
        self._given = 0

    def __next__(self) -> Tree:
        while not self._steps:
            # Needed only for batches that last for several steps.
            before = self._stream.get_state() if self._splitter.has_many_steps else None
            batch = next(self._stream)
            self._steps.extend(self._splitter.steps(batch))
            self._before, self._given = before, 0
        self._given += 1
        return self._steps.popleft()

    def get_state(self) -> dict[str, Any]:
        if self._steps:
            return {"stream": self._before, "steps": self._given}
        return {"stream": self._stream.get_state(), "steps": 0}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a position that `get_state` returned."""
        self._stream.set_state(state["stream"])
        self._steps.clear()
        for _ in range(state["steps"]):
            next(self)

    def close(self) -> None:
        close_stream(self._stream)


class ReplicaBatches:
    """Gives each replica a whole batch: from one stream in turn, or from its own stream."""

    def __init__(
        self, sources: list[Source], layout: ReplicaLayout, splitter: splitting.Splitter
    ) -> None:
        self._streams = [source.open() for source in sources]
        self._layout = layout
        self._splitter = splitter
        self._ended = [False] * len(self._streams)

    def __next__(self) -> Tree:
        batches = [self._batch_for(i) for i in range(self._layout.num_replicas)]
        given = [b for b in batches if b is not None]
        if not given:
            raise StopIteration
        if len(given) < len(batches):
            batches = self._filled(batches, given[0])
        placed = [self._splitter.place(batch, i) for i, batch in enumerate(batches)]
        return splitting.joined(placed, self._layout)

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
        if empty is None and self._layout.num_replicas > 1:
            raise errors.InvalidArgumentError(
                f"The last step needs an element for each of the {len(batches)} replicas, or "
                "elements that can be empty",
                f"there are {sum(b is not None for b in batches)}, without a batch dimension",
                "Batch the dataset, or make its length a multiple of the replicas.",
            )
        return [empty if b is None else b for b in batches]

    def get_state(self) -> dict[str, Any]:
        return {"streams": [s.get_state() for s in self._streams], "ended": list(self._ended)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a position that `get_state` returned."""
        if len(state["streams"]) != len(self._streams):
            raise errors.InvalidArgumentError(
                f"The position must be from {len(self._streams)} input pipelines",
                f"it is from {len(state['streams'])}",
                "Restore it with the number of replicas that it was saved with, or save without "
                "PER_REPLICA.",
            )
        for stream, own in zip(self._streams, state["streams"], strict=True):
            stream.set_state(own)
        self._ended = list(state["ended"])

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
