"""Positions of the iterators of all workers, and how other numbers of workers resume them.

Note [Positions]
    `get_state` of an iterator is the position of its own process. What it holds depends on who
    read the data:

    - All workers read the same global batches (one process, or sharding by data): the state of
      that stream. Any number of workers can resume it.
    - Each worker reads a stream of its own (by file, or with sharding off): the state of its
      stream, the rows of the current batch that were given, and which of how many workers it
      is. A checkpoint holds those of all workers; `merged` makes one of them.
    - Workers that share the data have taken no element: the seeds and the epoch of this worker,
      since those of the chief are adopted with the first element (`unread`).
    - Each worker has datasets made by a function: the states of its streams, and which of how
      many they are.

    Merged positions of shards by file resume on any number of workers. The same number continues
    with its own shards. Otherwise all workers read all shards, a batch of each in turn, and cut
    each batch: nothing is lost or read twice, until the next iteration shards by file again.
    Positions with sharding off, of which every stream holds all data, resume on another number
    if they are equal; datasets of functions on the same number only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from replicax.foundation import errors
from replicax.foundation.types import Tree
from replicax.input import splitting
from replicax.input.dataset.options import AutoShardPolicy
from replicax.input.rebatching import Share
from replicax.input.sharding import Sharding
from replicax.input.sources import Stream, close_stream

# The position of a worker, as JSON can hold it.
Position = Mapping[str, Any]


def labels_of(sharding: Sharding) -> dict[str, Any]:
    """Returns what a position must say about the worker whose stream it is of."""
    share = sharding.share
    if share.cuts_each_batch:
        return {}
    return {
        "policy": sharding.policy.name,
        "workers": share.num_workers,
        "replicas": share.num_replicas,
        "worker": share.worker,
    }


def unread(dataset: str, order: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the position of a worker that has taken no element."""
    return {"unread": {"dataset": dataset, **order}}


def order_of(state: Position | None, dataset: str) -> dict[str, Any] | None:
    """Returns the order of a position that `unread` returned; None for any other position."""
    if state is None or "unread" not in state:
        return None
    if state["unread"]["dataset"] != dataset:
        raise errors.InvalidArgumentError(
            f"The position must be from a dataset with the steps {dataset!r}",
            f"it is from {state['unread']['dataset']!r}",
            "Build the dataset with the same steps as when the position was saved.",
        )
    return state["unread"]


def merged(states: Sequence[Position]) -> Position:
    """Joins the positions of all workers, in their order, into one that all can resume."""
    first = states[0]
    if "streams" in first:
        return {key: [own for s in states for own in s[key]] for key in ("streams", "ended")}
    if "worker" not in first:
        # All workers read the same batches.
        return first
    shards = [{key: state[key] for key in ("stream", "rows", "phase")} for state in states]
    labels = {key: first[key] for key in ("policy", "workers", "replicas")}
    return {"stream": {"shards": shards, "next": 0}, "rows": 0, **labels}


class Resumption(NamedTuple):
    """How a worker continues from a position.

    Attributes:
      position: The position in the worker's own stream, or in the `ShardStreams`.
      share: The part of each batch for this worker.
      labels: What positions from here on must say; see `labels_of`.
      num_shards: The number of shards that each worker reads; 0 if it reads its own stream, 1
        if it reads the dataset before it was sharded.
    """

    position: dict[str, Any]
    share: Share
    labels: dict[str, Any]
    num_shards: int = 0


def resumption(state: Position, sharding: Sharding) -> Resumption:
    """Returns how a worker resumes a position of global batches, or raises."""
    share, labels = sharding.share, labels_of(sharding)
    by_data = share._replace(cuts_each_batch=True)
    if "policy" not in state:
        if sharding.policy is AutoShardPolicy.FILE:
            return Resumption(_in_stream(state), by_data, {}, num_shards=1)
        return Resumption(_in_stream(state), share, labels)
    is_same = (state["policy"], state["workers"]) == (sharding.policy.name, share.num_workers)
    if "worker" in state:
        if not is_same or state["worker"] != share.worker:
            raise _position_of_one(state, share)
        own: Position = state
    elif is_same:
        own = state["stream"]["shards"][share.worker]
    elif state["policy"] == AutoShardPolicy.OFF.name:
        return resumption(_common(state["stream"]["shards"], share), sharding)
    else:
        shards = state["stream"]["shards"]
        _require_one_order(shards)
        found = {key: state[key] for key in ("policy", "workers", "replicas")}
        return Resumption(_in_stream(state), by_data, found, num_shards=len(shards))
    has_same_parts = state["replicas"] == share.num_replicas
    return Resumption(_in_stream(own, own["phase"] if has_same_parts else 0), share, labels)


def _in_stream(state: Position, phase: int = 0) -> dict[str, Any]:
    # Positions that older versions saved are at the start of a batch.
    return {"stream": state["stream"], "rows": state.get("rows", 0), "phase": phase}


def streams_of(state: Position, first: int, count: int, total: int) -> Position:
    """Returns the positions of some of the datasets of a function, or raises."""
    found = len(state["streams"])
    if "total" in state:
        if (state["total"], state["first"], found) == (total, first, count):
            return state
        raise errors.InvalidArgumentError(
            f"The position must be from input pipeline {first} of {total}, or of all of them",
            f"it is from input pipeline {state['first']} of {state['total']} only",
            "Restore it on the worker that saved it, or save a checkpoint on all workers.",
        )
    if found != total:
        raise errors.InvalidArgumentError(
            f"The position must be from {total} input pipelines",
            f"it is from {found}",
            "Restore it with the number of workers (with PER_REPLICA: of replicas) that it was "
            "saved with, since `dataset_fn` makes other datasets for another number.",
        )
    return {key: state[key][first : first + count] for key in ("streams", "ended")}


class ShardStreams:
    """Reads a batch of each shard in turn: shards by file of a number of workers before."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = streams
        # Per shard, the rows of its next batch that were given.
        self._given = [0] * len(streams)
        self._next = 0

    def __next__(self) -> Tree:
        for _ in self._streams:
            index = self._next
            self._next = (index + 1) % len(self._streams)
            batch = self._rest_of_batch(index)
            if batch is not None:
                return batch
        raise StopIteration

    def _rest_of_batch(self, index: int) -> Tree:
        """Returns the next batch of a shard without rows that were given; None at its end."""
        rest = None
        while rest is None:
            try:
                batch = next(self._streams[index])
            except StopIteration:
                return None
            rest = splitting.remaining_rows(batch, self._given[index])
            self._given[index] = 0
        return rest

    def get_state(self) -> dict[str, Any]:
        shards = [
            {"stream": stream.get_state(), "rows": given, "phase": 0}
            for stream, given in zip(self._streams, self._given, strict=True)
        ]
        return {"shards": shards, "next": self._next}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a position that `get_state` returned."""
        for stream, shard in zip(self._streams, state["shards"], strict=True):
            stream.set_state(shard["stream"])
        self._given = [shard["rows"] for shard in state["shards"]]
        self._next = state["next"]

    def close(self) -> None:
        """Closes all shards."""
        for stream in self._streams:
            close_stream(stream)


def _common(shards: Sequence[Position], share: Share) -> Position:
    """Returns the position of streams that are all at the same row, or raises."""
    first = {key: shards[0][key] for key in ("stream", "rows")}
    if any({key: shard[key] for key in first} != first for shard in shards):
        is_row = all(shard["stream"] == first["stream"] for shard in shards)
        raise errors.InvalidArgumentError(
            f"Positions of {len(shards)} workers with AutoShardPolicy.OFF can be resumed by "
            f"{share.num_workers} if all workers are at the same row of the same stream",
            "they are at different rows of a batch" if is_row else "they read in different orders",
            f"Restore on {len(shards)} workers; or save after a multiple of {len(shards)} steps, "
            "give `shuffle` a seed, or use AutoShardPolicy.DATA.",
        )
    return first


def _require_one_order(shards: Sequence[Position]) -> None:
    """Raises unless one process can read all shards: they share the seeds of their steps."""
    orders = {
        json.dumps([shard["stream"]["seeds"], shard["stream"]["epoch"]], sort_keys=True)
        for shard in shards
    }
    if len(orders) > 1:
        raise errors.InvalidArgumentError(
            f"Shards by file of {len(shards)} workers can be resumed by another number of workers "
            "if all have one order",
            "these were shuffled with different seeds",
            f"Restore on {len(shards)} workers, or give `shuffle` a seed.",
        )


def _position_of_one(state: Position, share: Share) -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError(
        f"Worker {share.worker} of {share.num_workers} needs its own position, or those of all "
        "workers",
        f"this is the position of worker {state['worker']} of {state['workers']} with "
        f"AutoShardPolicy.{state['policy']}",
        "Restore it on the worker that saved it, or save a checkpoint on all workers.",
    )
