"""The steps of datasets, as functions from a plan to the plan with one more step."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from replicax.foundation import lazy
from replicax.foundation.ordered_trees import Structure
from replicax.foundation.types import Tree
from replicax.input.dataset import elements
from replicax.input.dataset.elements import UserFunction
from replicax.input.dataset.options import Options
from replicax.input.dataset.plan import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Epoch,
    Plan,
    Seed,
    follow,
)
from replicax.input.nodes import combined, indexed, streams

if TYPE_CHECKING:
    import grain

    from replicax.input.dataset.plan import IterNode, MapNode, StreamIterator
else:
    grain = lazy.module("grain")

# A random order takes four bytes per element; larger datasets are shuffled by a buffer.
_MAX_ORDER = 1 << 28
_END = sys.maxsize


def in_memory(
    name: str,
    make: Callable[[], MapNode],
    length: int,
    *,
    has_examples: bool = True,
    details: tuple[object, ...] = (),
) -> Plan:
    """Returns a plan that starts from data in memory."""
    return Plan(
        name,
        lambda epoch: make(),
        True,
        length,
        is_quick=True,
        has_examples=has_examples,
        details=details,
    )


def map_elements(parent: Plan, function: Callable[..., Tree], num_parallel_calls: int) -> Plan:
    """Applies a function to each element."""
    fn = UserFunction(function, "map", f"{parent.name} > map")
    threads = num_parallel_calls
    if threads == AUTOTUNE:
        threads = min(4, os.cpu_count() or 1)
    return parent.then(
        "map",
        lambda node, epoch: node.map(fn.element),
        lambda iterator, epoch: streams.Mapped(iterator, fn.element),
        is_quick=False,
        # A single call at a time runs in the reading thread.
        num_threads=max(parent.num_threads, threads if threads > 1 else 0),
    )


def filter_elements(parent: Plan, predicate: Callable[..., Tree]) -> Plan:
    """Keeps the elements that satisfy a predicate."""
    fn = UserFunction(predicate, "filter", f"{parent.name} > filter")
    return parent.then(
        "filter",
        None,
        lambda iterator, epoch: streams.Filtered(iterator, fn.keeps),
        is_quick=False,
        cardinality=infinite_or_unknown(parent),
    )


def infinite_or_unknown(parent: Plan) -> int:
    """Returns the cardinality of a step that keeps an unknown part of the elements."""
    is_infinite = parent.cardinality == INFINITE_CARDINALITY
    return INFINITE_CARDINALITY if is_infinite else UNKNOWN_CARDINALITY


def take_while(parent: Plan, predicate: Callable[..., Tree]) -> Plan:
    """Keeps the elements before the first one that does not satisfy a predicate."""
    fn = UserFunction(predicate, "take_while", f"{parent.name} > take_while")
    return parent.then(
        "take_while",
        None,
        lambda iterator, epoch: streams.TakenWhile(iterator, fn.keeps),
        is_quick=False,
        cardinality=UNKNOWN_CARDINALITY,
    )


def unique(parent: Plan) -> Plan:
    """Removes duplicates."""
    return parent.then(
        "unique",
        None,
        lambda iterator, epoch: streams.Unique(iterator, elements.unique_key),
        cardinality=UNKNOWN_CARDINALITY,
    )


def scan(parent: Plan, initial_state: Tree, function: Callable[..., Tree]) -> Plan:
    """Applies a function that carries a state from element to element."""
    fn = UserFunction(function, "scan", f"{parent.name} > scan")
    initial = elements.as_element(initial_state)
    return parent.then(
        "scan",
        None,
        lambda iterator, epoch: streams.Scanned(iterator, elements.copied(initial), fn.carried),
        is_quick=False,
    )


def random_numbers(seed: int | Seed, is_new_each_pass: bool) -> Plan:
    """Returns a plan of endless random numbers of 32 bits."""

    def build(epoch: Epoch) -> IterNode:
        return streams.Stream(lambda: streams.RandomNumbers(_key(seed, epoch, is_new_each_pass)))

    return Plan(
        "random",
        build,
        False,
        INFINITE_CARDINALITY,
        has_examples=True,
        is_quick=True,
        seeds=(seed,) if isinstance(seed, Seed) else (),
    )


def _key(seed: int | Seed, epoch: Epoch, is_new_each_pass: bool) -> list[int]:
    value = seed.value if isinstance(seed, Seed) else seed
    return [value, *(epoch if is_new_each_pass else ())]


def shuffle(parent: Plan, buffer_size: int, seed: int | Seed, is_new_each_pass: bool) -> Plan:
    """Shuffles all elements if they have random access, otherwise within a buffer."""

    def key(epoch: Epoch) -> list[int]:
        return _key(seed, epoch, is_new_each_pass)

    is_small = 0 <= parent.cardinality <= _MAX_ORDER
    return parent.then(
        "shuffle",
        (lambda node, epoch: indexed.Shuffled(node, key(epoch), is_new_each_pass))
        if is_small
        else None,
        lambda iterator, epoch: streams.Shuffled(iterator, buffer_size, key(epoch)),
        seeds=(*parent.seeds, seed) if isinstance(seed, Seed) else parent.seeds,
    )


def repeat(parent: Plan, count: int) -> Plan:
    """Repeats the elements, endlessly if the count is negative."""
    known = parent.cardinality
    if count < 0 and known != 0:
        cardinality = INFINITE_CARDINALITY
    else:
        cardinality = known * count if known >= 0 else known if count else 0
    if parent.is_indexed:
        return parent.then(
            "repeat",
            lambda node, epoch: indexed.Repeated(node, count),
            lambda iterator, epoch: iterator,
            cardinality=cardinality,
        )

    def build(epoch: Epoch) -> IterNode:
        # Each pass is an epoch of the shuffles before.
        def open_pass(number: int) -> StreamIterator:
            return parent.open((*epoch, number))

        return streams.Stream(lambda: combined.Chained(open_pass, count, stops_at_empty=True))

    return parent.then_stream("repeat", build, cardinality=cardinality)


def take_slice(parent: Plan, name: str, start: int, stop: int, step: int = 1) -> Plan:
    """Keeps every `step`-th element from `start` to `stop`."""
    known = parent.cardinality
    if known >= 0:
        cardinality = len(range(start, min(stop, known), step))
    elif known == INFINITE_CARDINALITY and stop < _END:
        cardinality = len(range(start, stop, step))
    else:
        cardinality = 0 if start >= stop else known
    return parent.then(
        name,
        lambda node, epoch: indexed.Sliced(node, start, stop, step),
        lambda iterator, epoch: streams.Sliced(iterator, start, stop, step),
        cardinality=cardinality,
        details=(*parent.details, start, stop, step),
    )


def take(parent: Plan, count: int) -> Plan:
    """Keeps the first elements; all if the count is negative."""
    return take_slice(parent, "take", 0, _END if count < 0 else count)


def skip(parent: Plan, count: int) -> Plan:
    """Removes the first elements; all if the count is negative."""
    return take_slice(parent, "skip", 0 if count < 0 else count, 0 if count < 0 else _END)


def shard(parent: Plan, num_shards: int, index: int) -> Plan:
    """Keeps one of every `num_shards` elements."""
    return take_slice(parent, "shard", index, _END, num_shards)


def batch(
    parent: Plan,
    size: int,
    drops_remainder: bool,
    join: Callable[[Sequence[Tree]], Tree] | None = None,
) -> Plan:
    """Batches consecutive elements: stacks them, or combines them with `join`."""
    known = parent.cardinality
    if known >= 0:
        known = known // size if drops_remainder else -(-known // size)
    return parent.then(
        "batch" if join is None else "padded_batch",
        (lambda node, epoch: indexed.Batched(node, size, drops_remainder))
        if join is None
        else None,
        lambda iterator, epoch: streams.Batched(
            iterator, size, drops_remainder, join or elements.stack
        ),
        cardinality=known,
        batch_size=size,
        details=(*parent.details, size, drops_remainder),
        has_examples=False,
        drops_remainder=drops_remainder,
        is_padded=join is not None,
    )


def unbatch(parent: Plan) -> Plan:
    """Makes an element of each row."""

    def open_rows(element: Tree) -> StreamIterator:
        return streams.FromIndex(indexed.Rows(element))

    return parent.then(
        "unbatch",
        None,
        lambda iterator, epoch: combined.Interleaved(iterator, open_rows, 1, 1),
        cardinality=UNKNOWN_CARDINALITY,
        batch_size=None,
        has_examples=True,
        drops_remainder=False,
        is_padded=False,
    )


def interleave(
    parent: Plan,
    name: str,
    open_element: Callable[[Tree, Epoch], StreamIterator],
    cycle_length: int,
    block_length: int,
    shard_records: Callable[[Plan, int, int], Plan],
    spec_of_element: Callable[[Tree], Tree],
) -> Plan:
    """Interleaves the datasets that elements are mapped to."""
    plan = parent.then(
        name,
        None,
        lambda iterator, epoch: combined.Interleaved(
            iterator, lambda element: open_element(element, epoch), cycle_length, block_length
        ),
        cardinality=UNKNOWN_CARDINALITY,
        batch_size=None,
        has_examples=False,
        drops_remainder=False,
        is_padded=False,
        is_quick=False,
        find_spec=lambda: spec_of_element(parent.first_element()),
    )
    if parent.files is None:
        return plan
    # Elements are file names: sharding the inner datasets shards each file.
    return dataclasses.replace(
        plan,
        shard_records=lambda num, index: follow(lambda p: shard_records(p, num, index), parent),
    )


def cache(parent: Plan) -> Plan:
    """Keeps the elements of the first pass in memory."""
    filled = elements.Cache()

    def build(epoch: Epoch) -> IterNode:
        return streams.Stream(lambda: combined.Cached(lambda: parent.open((0,)), filled))

    return parent.then_stream("cache", build)


def prefetch(parent: Plan, buffer_size: int) -> Plan:
    """Reads ahead in a thread, unless elements come from memory anyway."""
    size = 2 if buffer_size == AUTOTUNE else buffer_size
    if parent.is_quick or size == 0:
        return parent.then(
            "prefetch",
            lambda node, epoch: node,
            lambda iterator, epoch: iterator,
            is_prefetch=True,
        )

    def build(epoch: Epoch) -> IterNode:
        return grain.experimental.ThreadPrefetchIterDataset(
            parent.stream(epoch), prefetch_buffer_size=size
        )

    return parent.then_stream("prefetch", build, is_prefetch=True)


def number(parent: Plan, start: int) -> Plan:
    """Pairs each element with its number."""
    return parent.then(
        "enumerate",
        lambda node, epoch: indexed.Numbered(node, start),
        lambda iterator, epoch: streams.Numbered(iterator, start),
    )


def concatenate(plans: Sequence[Plan]) -> Plan:
    """Concatenates two datasets."""
    first, second = plans
    known = [p.cardinality for p in plans]
    if INFINITE_CARDINALITY in known:
        cardinality = INFINITE_CARDINALITY
    else:
        cardinality = UNKNOWN_CARDINALITY if min(known) < 0 else sum(known)
    is_indexed = first.is_indexed and second.is_indexed and cardinality >= 0

    def build(epoch: Epoch) -> MapNode | IterNode:
        if is_indexed:
            nodes: list[Any] = [p.build(epoch) for p in plans]
            return indexed.Concatenated(nodes)
        return streams.Stream(lambda: combined.Chained(lambda i: plans[i].open(epoch), 2))

    return _joined("concatenate", plans, build, is_indexed, cardinality)


def zip_plans(plans: Sequence[Plan], structure: Structure) -> Plan:
    """Combines elements of several datasets in a structure."""
    known = [p.cardinality for p in plans]
    finite = [count for count in known if count >= 0]
    if UNKNOWN_CARDINALITY in known:
        cardinality = UNKNOWN_CARDINALITY
    else:
        cardinality = min(finite, default=INFINITE_CARDINALITY)
    is_indexed = all(p.is_indexed for p in plans)

    def build(epoch: Epoch) -> MapNode | IterNode:
        if is_indexed:
            nodes: list[Any] = [p.build(epoch) for p in plans]
            return indexed.Zipped(nodes, structure)
        return streams.Stream(lambda: streams.Zipped([p.open(epoch) for p in plans], structure))

    return _joined("zip", plans, build, is_indexed, cardinality)


def choose(selector: Plan, plans: Sequence[Plan], stops_at_empty: bool) -> Plan:
    """Takes each element from the dataset whose index the selector gives."""
    is_endless = INFINITE_CARDINALITY in [p.cardinality for p in plans]

    def build(epoch: Epoch) -> IterNode:
        return streams.Stream(
            lambda: combined.Chosen(
                selector.open(epoch), [p.open(epoch) for p in plans], stops_at_empty
            )
        )

    cardinality = INFINITE_CARDINALITY if is_endless else UNKNOWN_CARDINALITY
    return _joined("choose", plans, build, False, cardinality, selector)


def _joined(
    name: str,
    plans: Sequence[Plan],
    build: Callable[[Epoch], MapNode | IterNode],
    is_indexed: bool,
    cardinality: int,
    *others: Plan,
) -> Plan:
    """Returns the plan of several datasets.

    Args:
      name: The name of the step.
      plans: The datasets whose elements it gives.
      build: Makes its Grain dataset.
      is_indexed: Whether that is a MapDataset.
      cardinality: The number of elements.
      *others: Datasets that it reads, but whose elements it does not give.
    """
    is_one_size = len({p.batch_size for p in plans}) == 1
    everything = [*others, *plans]
    return Plan(
        f"{name}({', '.join(p.name for p in everything)})",
        build,
        is_indexed,
        cardinality,
        batch_size=plans[0].batch_size if is_one_size else None,
        drops_remainder=is_one_size and all(p.drops_remainder for p in plans),
        is_padded=any(p.is_padded for p in plans),
        has_examples=any(p.has_examples for p in plans),
        is_quick=all(p.is_quick for p in everything),
        num_threads=max(p.num_threads for p in everything),
        seeds=tuple(seed for p in everything for seed in p.seeds),
        details=tuple((p.files, p.details) for p in everything),
        options=functools.reduce(Options.merge, [p.options for p in everything]),
    )
