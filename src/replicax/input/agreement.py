"""Agreement of all workers about each step of a distributed dataset.

Note [Agreement]
    Workers take the same number of steps, and one program needs the shapes of the parts of all
    of them. So the workers of a layout that spans processes agree, over the control channel:

    - At the first `next` of an iterator, all exchange what they read, and adopt the chief's seeds
      and epoch if they share the data (sharding by data or by file). Otherwise a shuffle without a
      seed would give rows to several workers, or to none.
    - By data, with a known number of batches: nothing more. All workers read the same batches, so
      the shapes of all parts, and the end, follow by arithmetic.
    - By data, from a source of unknown length (a generator, a filter, files, other libraries):
      the rows of each batch and the end are compared. A worker whose data differs or ends early
      is an error: its parts of the batches would be lost.
    - Each worker reads a stream of its own (by file, sharding off, datasets of functions): shapes
      and ends are exchanged. A worker that has ended gives parts without rows until all have
      ended, as in TensorFlow.

    One exchange covers all steps that every worker has read so far. The next one starts when the
    consumer takes the last step but one of those agreed, in a thread, while that step computes.
    The steps that are taken decide when to exchange, not the reading: workers take the same
    steps, so every exchange that one starts is started by all, whenever they close the iterator.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
import logging
import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from replicax.foundation import errors, ordered_trees
from replicax.foundation.peers import Peers
from replicax.foundation.types import Tree
from replicax.input import positions
from replicax.input.dataset import stored_format
from replicax.input.dataset.plan import UNKNOWN_CARDINALITY
from replicax.input.pipelines import LocalPipeline, Pipeline, ReadAhead
from replicax.input.splitting import LocalStep, Shapes, Splitter, no_empty_elements
from replicax.tracing.signature import TensorSpec
from replicax.values.layout import ReplicaLayout

_log = logging.getLogger(__name__)
# The interval of log messages about a consumer that waits for other workers.
_LOG_INTERVAL_S = 30.0
# The number of the next iterator that takes part in exchanges, of each group.
_numbers: weakref.WeakKeyDictionary[Peers, Iterator[int]] = weakref.WeakKeyDictionary()


class Facts(NamedTuple):
    """What the workers compare before they read.

    Attributes:
      kind: How the data is shared: "DATA", "FILE", "OFF" or "FUNCTION".
      dataset: A description that is the same on all workers; "" if it may differ.
      num_batches: Their number, INFINITE_CARDINALITY or UNKNOWN_CARDINALITY.
      is_restored: Whether reading starts at a restored position.
    """

    kind: str
    dataset: str
    num_batches: int
    is_restored: bool

    @property
    def reads_same_batches(self) -> bool:
        """Whether all workers read the same global batches."""
        return self.kind == "DATA"


class Lockstep:
    """A pipeline whose elements all workers take together.

    Args:
      local: Reads the steps of this worker.
      splitter: Places its parts.
      layout: The replicas of all workers.
      facts: What is read.
      depth: The number of steps to read ahead; 0 to read when the consumer asks.
    """

    def __init__(
        self,
        local: LocalPipeline,
        splitter: Splitter,
        layout: ReplicaLayout,
        facts: Facts,
        depth: int,
    ) -> None:
        self._local = local
        self._splitter = splitter
        self._layout = layout
        self._facts = facts
        self._depth = depth
        self._inner: Pipeline = local
        self._is_started = False
        self._is_closed = False

    def __next__(self) -> Tree:
        if self._is_closed:
            raise StopIteration
        if not self._is_started:
            # Before the first element only: reading `get_state` needs no other worker.
            self._inner = self._start()
            self._is_started = True
        return next(self._inner)

    def get_state(self) -> Any:
        facts = self._facts
        if not (self._is_started or facts.is_restored) and facts.kind in ("DATA", "FILE"):
            order = self._local.order
            if order is not None:
                # Not the position: the seeds of the chief are not known here.
                return positions.unread(facts.dataset, order)
        return self._inner.get_state()

    def close(self) -> None:
        self._is_closed = True
        self._inner.close()

    def _start(self) -> Pipeline:
        peers = self._layout.peers
        assert peers is not None
        name = f"data iterator {next(_numbers.setdefault(peers, itertools.count()))}"
        self._compare(peers, name)
        if self._facts.reads_same_batches and self._facts.num_batches != UNKNOWN_CARDINALITY:
            known = KnownSteps(self._local, self._layout)
            return ReadAhead(known, self._depth) if self._depth else known
        window = max(2, self._depth // 2)
        local = ReadAhead(self._local, window) if self._depth else self._local
        rounds = Rounds(local, self._splitter, peers, name, self._facts, window)
        return AgreedSteps(rounds, self._layout)

    def _compare(self, peers: Peers, name: str) -> None:
        """Raises unless all workers read the same dataset; adopts the order of the chief."""
        facts = self._facts
        position = json.dumps(self._local.get_state(), sort_keys=True, default=repr)
        own: dict[str, Any] = {
            "kind": facts.kind,
            "dataset": facts.dataset,
            "count": facts.num_batches if facts.reads_same_batches else None,
            "position": hashlib.sha256(position.encode()).hexdigest()
            if facts.is_restored and facts.reads_same_batches
            else None,
            "order": self._local.order if facts.kind in ("DATA", "FILE") else None,
        }
        found = [json.loads(one) for one in peers.exchange(name, json.dumps(own).encode())]
        for key, what in _COMPARED.items():
            for index, other in enumerate(found):
                if other[key] != found[0][key]:
                    raise errors.InvalidArgumentError(
                        f"All workers must take elements of the same dataset, but {name} differs "
                        f"in {what}",
                        f"{peers.name_of(0)} has {found[0][key]!r}, {peers.name_of(index)} has "
                        f"{other[key]!r}",
                        "Run the same program on all workers, and create and read iterators in "
                        "the same order.",
                    )
        order = found[0]["order"]
        if not facts.is_restored and order is not None and order != own["order"]:
            self._local.restart(order)


_COMPARED = {
    "kind": "how data is shared",
    "dataset": "its steps",
    "count": "its number of batches",
    "position": "the position that was restored (shown as a digest)",
}


class KnownSteps:
    """Makes elements of steps whose shapes on all workers follow from the global batch."""

    def __init__(self, local: Pipeline, layout: ReplicaLayout) -> None:
        self._local = local
        self._layout = layout
        self.close = local.close
        self.get_state = local.get_state

    def __next__(self) -> Tree:
        step: LocalStep = next(self._local)
        assert step.all_shapes is not None
        return step.element(self._layout, step.all_shapes)


class Offer(NamedTuple):
    """What one worker has read for the next steps.

    Attributes:
      shapes: Per step, the shapes of its parts.
      rows: Per step, the rows of the global batch that all workers read.
      is_ended: Whether its data ends after these steps.
      error: The error that ends it instead.
      kinds: Structure and types of its elements, in the first exchange.
      spec: The spec of a part without rows, in the first exchange; None if it cannot be encoded.
    """

    shapes: list[Shapes]
    rows: list[int | None]
    is_ended: bool
    error: str | None = None
    kinds: str | None = None
    spec: dict[str, Any] | None = None

    def encode(self) -> bytes:
        """Returns the offer as JSON; steps of equal shapes are written once."""
        shapes: list[Any] = []
        for i, own in enumerate(self.shapes):
            shapes.append(None if i and own == self.shapes[i - 1] else own)
        return json.dumps(self._replace(shapes=shapes)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Offer:
        """Returns the offer that `encode` encoded."""
        offer = cls(*json.loads(data))
        shapes: list[Shapes] = []
        for own in offer.shapes:
            if own is None:
                shapes.append(shapes[-1])
            else:
                shapes.append([None if leaf is None else list(map(tuple, leaf)) for leaf in own])
        return offer._replace(shapes=shapes)


class Step(NamedTuple):
    """A step that all workers agreed on.

    Attributes:
      parts: What this worker has.
      shapes: The shapes of the parts of all replicas.
      state: The position after it.
    """

    parts: LocalStep
    shapes: Shapes
    state: Any


class Rounds:
    """Exchanges with the other workers what each has read; called from one thread."""

    def __init__(
        self,
        local: Pipeline,
        splitter: Splitter,
        peers: Peers,
        name: str,
        facts: Facts,
        window: int,
    ) -> None:
        self._local = local
        self._splitter = splitter
        self._peers = peers
        self._name = name
        self._facts = facts
        self._window = window
        self._read: collections.deque[tuple[LocalStep, Any]] = collections.deque()
        # The position after the last step of this worker.
        self.state = local.get_state()
        self._is_ended = False
        self._error: Exception | None = None
        self._is_first = True
        self._num_steps = 0
        # A part without rows, when it is known.
        self._empty: Tree = None

    def next_round(self, is_closed: bool = False) -> tuple[list[Step], bool]:
        """Returns the next steps of all workers, at least one, and whether they are the last.

        Args:
          is_closed: Whether no step will be taken; then nothing is read.
        """
        if is_closed:
            self._error = errors.CancelledError("The iterator was closed.")
        self._collect()
        offer = self._offer()
        try:
            sent = self._peers.exchange(self._name, offer.encode())
        except errors.DistributeError as error:
            raise _ExchangeFailed(error) from error
        found = [Offer.decode(one) for one in sent]
        if self._is_first:
            self._compare_kinds(found)
            self._is_first = False
        waiting = [len(o.shapes) for o in found if not o.is_ended]
        count = min(waiting, default=max(len(o.shapes) for o in found))
        self._raise_errors(found, count)
        steps = [self._step(found, i) for i in range(count)]
        self._num_steps += count
        return steps, not waiting

    def close(self) -> None:
        """Closes the pipeline of this worker."""
        self._local.close()

    def _collect(self) -> None:
        """Reads at least one step, and those that are there without waiting."""
        while not self._is_ended and self._error is None and len(self._read) < self._window:
            if self._read and not getattr(self._local, "is_ready", True):
                return
            try:
                step: LocalStep = next(self._local)
            except StopIteration:
                self._is_ended = True
            except Exception as error:
                # Raised after the steps before it, on all workers.
                self._error = error
            else:
                self._read.append((step, self._local.get_state()))

    def _offer(self) -> Offer:
        offer = Offer(
            [step.shapes for step, _ in self._read],
            [step.num_rows for step, _ in self._read],
            self._is_ended,
            None if self._error is None else f"{type(self._error).__name__}: {self._error}"[:2000],
        )
        if not self._is_first or not self._read:
            return offer
        first = self._read[0][0]
        self._empty = first.without_rows()
        return offer._replace(kinds=first.kinds, spec=_encoded_spec(self._empty))

    def _compare_kinds(self, found: list[Offer]) -> None:
        """Raises unless all elements have one structure; gets the spec if there is no data here."""
        given = [(i, o) for i, o in enumerate(found) if o.kinds is not None]
        for index, offer in given:
            first, expected = given[0]
            if offer.kinds != expected.kinds:
                raise errors.StructureError(
                    "The elements of all workers must have one structure and the same types",
                    f"those of {self._peers.name_of(first)} are {expected.kinds}, those of "
                    f"{self._peers.name_of(index)} are {offer.kinds}",
                    "Make every worker's dataset yield the same containers, keys and types.",
                )
        if self._empty is None and given and given[0][1].spec is not None:
            spec = stored_format.decode_spec(given[0][1].spec)
            self._empty = ordered_trees.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), spec)

    def _raise_errors(self, found: list[Offer], count: int) -> None:
        failed = [i for i, o in enumerate(found) if o.error is not None and not o.shapes]
        if failed and self._error is not None and not self._read:
            raise self._error
        for index in failed:
            raise errors.UnavailableError(
                f"Every worker must read its part of step {self._num_steps + 1} of {self._name}",
                f"{self._peers.name_of(index)} could not: {found[index].error}",
                "The log of that task has the traceback.",
            )
        if self._facts.reads_same_batches:
            self._require_same_batches(found, count)

    def _require_same_batches(self, found: list[Offer], count: int) -> None:
        for i in range(count):
            rows = [o.rows[i] if i < len(o.rows) else None for o in found]
            if len(set(rows)) == 1:
                continue
            listed = [
                f"{self._peers.name_of(index)} has "
                + ("no batch left" if own is None else f"{own} rows")
                for index, own in enumerate(rows)
            ]
            raise errors.InvalidArgumentError(
                "All workers must read the same batches, of which each keeps its part "
                "(AutoShardPolicy.DATA)",
                f"for step {self._num_steps + i + 1}, {', '.join(listed)}",
                "Make the source deterministic. If each worker has data of its own, set "
                "AutoShardPolicy.OFF or use distribute_datasets_from_function.",
            )

    def _step(self, found: list[Offer], i: int) -> Step:
        """Joins what all workers have for one step; workers that have ended give no rows."""
        example = next(o.shapes[i] for o in found if i < len(o.shapes))
        shapes: list[Any] = [None if leaf is None else [] for leaf in example]
        for index, offer in enumerate(found):
            is_missing = i >= len(offer.shapes)
            if not is_missing and len(offer.shapes[i]) != len(example):
                raise errors.StructureError(
                    "The elements of all workers must have one structure",
                    f"for step {self._num_steps + i + 1}, {self._peers.name_of(index)} has "
                    f"{len(offer.shapes[i])} arrays instead of {len(example)}",
                    "Make every worker's dataset yield the same containers and keys.",
                )
            for leaf, own in enumerate(example if is_missing else offer.shapes[i]):
                if own is None:
                    continue
                if is_missing and () in own:
                    given = sum(i < len(o.shapes) for o in found)
                    raise no_empty_elements(len(found) * len(own), given * len(own))
                shapes[leaf] += [(0, *own[0][1:])] * len(own) if is_missing else own
        if self._read:
            parts, self.state = self._read.popleft()
        else:
            parts = self._without_rows([None if o is None else o[0] for o in example])
        return Step(parts, shapes, self.state)

    def _without_rows(self, shapes: list[tuple[int, ...] | None]) -> LocalStep:
        """Returns the step of a worker whose data has ended."""
        if self._empty is None:
            raise errors.InvalidArgumentError(
                "A worker without any data needs elements of arrays, text and numbers in tuples, "
                "lists and dicts with text keys, to have empty ones",
                f"{self._peers.name_of(self._peers.index)} has read no element of {self._name}",
                "Give every worker at least one batch.",
            )
        leaves, treedef = ordered_trees.flatten(
            self._empty, is_leaf=lambda leaf: hasattr(leaf, "todense")
        )
        empty = [
            leaf if shape is None else np.zeros((0, *shape[1:]), leaf.dtype)
            for leaf, shape in zip(leaves, shapes, strict=True)
        ]
        part = ordered_trees.unflatten(treedef, empty)
        return self._splitter.join([part] * self._splitter.num_parts)


def _encoded_spec(empty: Tree) -> dict[str, Any] | None:
    """Returns the spec of a part without rows as JSON; None for other classes of structure."""
    leaves = ordered_trees.leaves(empty, is_leaf=lambda leaf: hasattr(leaf, "todense"))
    if not leaves or any(hasattr(leaf, "todense") for leaf in leaves):
        return None
    try:
        return stored_format.encode_spec(
            ordered_trees.map(lambda leaf: TensorSpec(leaf.shape, leaf.dtype), empty)
        )
    except errors.ArgumentTypeError:
        return None


class AgreedSteps:
    """Gives the steps of `Rounds`, which run in a thread; see Note [Agreement]."""

    def __init__(self, rounds: Rounds, layout: ReplicaLayout) -> None:
        self._layout = layout
        self._state = rounds.state
        self._steps: collections.deque[Step] = collections.deque()
        self._is_requested = False
        self._is_last = False
        self._exchange = _Exchange()
        self._thread = threading.Thread(
            target=_serve, args=(self._exchange, rounds), name="replicax-agreement", daemon=True
        )
        # The thread refers to the queues only: it ends when this object is collected.
        self.close = weakref.finalize(self, _stop, self._exchange, self._thread)
        self._thread.start()

    def __next__(self) -> Tree:
        if not self._steps and not self._is_last:
            self._request()
            self._steps.extend(self._take())
        if not self._steps:
            raise StopIteration
        step = self._steps.popleft()
        self._state = step.state
        if len(self._steps) <= 1 and not self._is_last:
            self._request()
        return step.parts.element(self._layout, step.shapes)

    def _take(self) -> list[Step]:
        assert self._layout.peers is not None
        try:
            steps, self._is_last = self._exchange.take()
        except _ExchangeFailed as failed:
            # The group must know that the program has got its failure, which a thread met.
            with self._layout.peers.guarded():
                raise failed.error from None
        self._is_requested = False
        return steps

    def _request(self) -> None:
        if not self._is_requested:
            self._is_requested = True
            self._exchange.requests.put(True)

    def get_state(self) -> Any:
        return self._state


class _ExchangeFailed(Exception):
    """Raised in the thread if the group has failed, with its error."""

    def __init__(self, error: errors.DistributeError) -> None:
        super().__init__(error)
        self.error = error


class _Exchange:
    """The queues between a consumer and the thread that exchanges with other workers."""

    def __init__(self) -> None:
        self.requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[tuple[list[Step], bool] | BaseException] = (
            queue.SimpleQueue()
        )
        self.is_stopped = False

    def take(self) -> tuple[list[Step], bool]:
        """Returns the result of a request, or raises its error, also in later calls."""
        waited = 0.0
        while not self.is_stopped:
            try:
                result = self.results.get(timeout=_LOG_INTERVAL_S)
            except queue.Empty:
                waited += _LOG_INTERVAL_S
                _log.warning("Waiting for the data of all workers for %.0f s", waited)
                continue
            if isinstance(result, BaseException):
                self.results.put(result)
                raise result
            return result
        raise StopIteration


def _serve(exchange: _Exchange, rounds: Rounds) -> None:
    try:
        # Also when stopped: the other workers have started the exchange that was requested.
        is_last = False
        while not is_last and exchange.requests.get():
            steps, is_last = rounds.next_round(exchange.is_stopped)
            exchange.results.put((steps, is_last))
    except BaseException as error:
        # Raised again in the consumer.
        exchange.results.put(error)
    finally:
        rounds.close()


def _stop(exchange: _Exchange, thread: threading.Thread) -> None:
    exchange.is_stopped = True
    exchange.requests.put(False)
    if thread is not threading.current_thread():
        # An exchange ends by itself: all workers have started it, or its deadline passes.
        thread.join(timeout=5.0)
