"""The steps of datasets, each as a function from a plan to the plan with one step more."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from replicax.foundation import lazy
from replicax.input import builder_elements
from replicax.input.builder_checks import UserFunction, unique_key
from replicax.input.builder_plan import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Epoch,
    Plan,
    Seed,
    follow,
)

if TYPE_CHECKING:
    import grain

    from replicax.input import grain_nodes as nodes
    from replicax.input import grain_nodes_nested as nested
    from replicax.input import grain_nodes_streams as streams
else:
    grain = lazy.module("grain")
    nodes = lazy.module("replicax.input.grain_nodes")
    nested = lazy.module("replicax.input.grain_nodes_nested")
    streams = lazy.module("replicax.input.grain_nodes_streams")

# A plan of random order takes four bytes an element; more elements than this are shuffled
# by a buffer.
_MAX_ORDER = 1 << 28
_END = sys.maxsize


def in_memory(
    name: str,
    make: Callable[[], Any],
    length: int,
    *,
    has_examples: bool = True,
    details: tuple[Any, ...] = (),
) -> Plan:
    """Returns a plan that starts from something in memory."""
    facts = {"is_quick": True, "has_examples": has_examples, "details": details}
    return Plan(name, lambda epoch: make(), True, length, **facts)


def map_elements(parent: Plan, function: Any, num_parallel_calls: int) -> Plan:
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
        # One call at a time needs no thread.
        num_threads=max(parent.num_threads, threads if threads > 1 else 0),
    )


def filter_elements(parent: Plan, predicate: Any) -> Plan:
    """Keeps the elements of which a predicate is true."""
    fn = UserFunction(predicate, "filter", f"{parent.name} > filter")
    endless = parent.cardinality == INFINITE_CARDINALITY
    return parent.then(
        "filter",
        None,
        lambda iterator, epoch: streams.Filtered(iterator, fn.keeps),
        is_quick=False,
        cardinality=INFINITE_CARDINALITY if endless else UNKNOWN_CARDINALITY,
    )


def take_while(parent: Plan, predicate: Any) -> Plan:
    """Keeps the elements before the first of which a predicate is false."""
    fn = UserFunction(predicate, "take_while", f"{parent.name} > take_while")
    return parent.then(
        "take_while",
        None,
        lambda iterator, epoch: streams.Leading(iterator, fn.keeps),
        is_quick=False,
        cardinality=UNKNOWN_CARDINALITY,
    )


def unique(parent: Plan) -> Plan:
    """Leaves out elements that have come before."""
    return parent.then(
        "unique",
        None,
        lambda iterator, epoch: streams.Unique(iterator, unique_key),
        cardinality=UNKNOWN_CARDINALITY,
    )


def scan(parent: Plan, initial_state: Any, function: Any) -> Plan:
    """Applies a function that carries a state from element to element."""
    fn = UserFunction(function, "scan", f"{parent.name} > scan")
    initial = builder_elements.as_element(initial_state)
    return parent.then(
        "scan",
        None,
        lambda iterator, epoch: streams.Scanned(
            iterator, builder_elements.copied(initial), fn.carried
        ),
        is_quick=False,
    )


def random_numbers(seed: int | Seed, is_new_each_pass: bool) -> Plan:
    """Returns a plan of endless random numbers of 32 bits."""

    def build(epoch: Epoch) -> Any:
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
    """Changes the order: of all elements if they can be reached, else within a buffer."""

    def key(epoch: Epoch) -> list[int]:
        return _key(seed, epoch, is_new_each_pass)

    is_small = 0 <= parent.cardinality <= _MAX_ORDER
    return parent.then(
        "shuffle",
        (lambda node, epoch: nodes.Shuffled(node, key(epoch), is_new_each_pass))
        if is_small
        else None,
        lambda iterator, epoch: streams.Shuffled(iterator, buffer_size, key(epoch)),
        seeds=(*parent.seeds, seed) if isinstance(seed, Seed) else parent.seeds,
    )


def repeat(parent: Plan, count: int) -> Plan:
    """Goes through the elements several times, or without end if the count is below 0."""
    known = parent.cardinality
    if count < 0 and known != 0:
        cardinality = INFINITE_CARDINALITY
    else:
        cardinality = known * count if known >= 0 else known if count else 0
    plan = parent.then(
        "repeat",
        lambda node, epoch: nodes.Repeated(node, count),
        lambda iterator, epoch: iterator,
        cardinality=cardinality,
    )
    if parent.is_indexed:
        return plan

    def build(epoch: Epoch) -> Any:
        # Each pass is an epoch of its own for the shuffles before.
        def make(number: int) -> Any:
            return parent.open((*epoch, number))

        return streams.Stream(lambda: nested.Chained(make, count, stops_at_empty=True))

    return dataclasses.replace(plan, build=build)


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
        lambda node, epoch: nodes.Sliced(node, start, stop, step),
        lambda iterator, epoch: streams.Sliced(iterator, start, stop, step),
        cardinality=cardinality,
        details=(*parent.details, start, stop, step),
    )


def take(parent: Plan, count: int) -> Plan:
    """Keeps the first elements; all if the count is below 0."""
    return take_slice(parent, "take", 0, _END if count < 0 else count)


def skip(parent: Plan, count: int) -> Plan:
    """Leaves out the first elements; all if the count is below 0."""
    return take_slice(parent, "skip", 0 if count < 0 else count, 0 if count < 0 else _END)


def shard(parent: Plan, num_shards: int, index: int) -> Plan:
    """Keeps one of `num_shards` elements."""
    return take_slice(parent, "shard", index, _END, num_shards)


def batch(parent: Plan, size: int, drops_remainder: bool, join: Any = None) -> Plan:
    """Groups consecutive elements; `join` makes one of many, unless they are just stacked."""
    known = parent.cardinality
    if known >= 0:
        known = known // size if drops_remainder else -(-known // size)
    return parent.then(
        "batch" if join is None else "padded_batch",
        (lambda node, epoch: nodes.Batched(node, size, drops_remainder)) if join is None else None,
        lambda iterator, epoch: streams.Batched(
            iterator, size, drops_remainder, join or builder_elements.stack
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

    def rows(element: Any) -> Any:
        return streams.FromIndex(nodes.Rows(element))

    return parent.then(
        "unbatch",
        None,
        lambda iterator, epoch: nested.Interleaved(iterator, rows, 1, 1),
        cardinality=UNKNOWN_CARDINALITY,
        batch_size=None,
        has_examples=True,
        drops_remainder=False,
        is_padded=False,
    )


def interleave(
    parent: Plan,
    name: str,
    open_element: Callable[[Any, Epoch], Any],
    cycle_length: int,
    block_length: int,
    shard_records: Callable[[Plan, int, int], Plan],
    spec_of_element: Callable[[Any], Any],
) -> Plan:
    """Takes turns between the datasets that elements stand for."""
    plan = parent.then(
        name,
        None,
        lambda iterator, epoch: nested.Interleaved(
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
    # The elements are names of files, so a part of each is a part of each file.
    return dataclasses.replace(
        plan,
        shard_records=lambda num, index: follow(lambda p: shard_records(p, num, index), parent),
    )


def cache(parent: Plan) -> Plan:
    """Keeps the elements of the first pass in memory."""
    kept = lazy_kept()

    def build(epoch: Epoch) -> Any:
        return streams.Stream(lambda: nested.Cached(lambda: parent.open((0,)), kept()))

    plan = parent.then("cache", None, lambda iterator, epoch: iterator)
    return dataclasses.replace(plan, build=build)


def lazy_kept() -> Callable[[], Any]:
    """Returns a function that makes one store of elements when it is first called."""
    made: list[Any] = []

    def kept() -> Any:
        if not made:
            made.append(nested.Kept())
        return made[0]

    return kept


def prefetch(parent: Plan, buffer_size: int) -> Plan:
    """Reads ahead in a thread, unless elements are there at once anyway."""
    size = 2 if buffer_size == AUTOTUNE else buffer_size
    plan = parent.then(
        "prefetch",
        lambda node, epoch: node,
        lambda iterator, epoch: iterator,
        is_prefetch=True,
    )
    if parent.is_quick or size == 0:
        return plan

    def build(epoch: Epoch) -> Any:
        return grain.experimental.ThreadPrefetchIterDataset(
            parent.stream(epoch), prefetch_buffer_size=size
        )

    return dataclasses.replace(plan, build=build, is_indexed=False)


def number(parent: Plan, start: int) -> Plan:
    """Puts its number before each element."""
    return parent.then(
        "enumerate",
        lambda node, epoch: nodes.Numbered(node, start),
        lambda iterator, epoch: streams.Numbered(iterator, start),
    )


def concatenate(plans: Sequence[Plan]) -> Plan:
    """Appends one dataset to another."""
    first, second = plans
    known = [p.cardinality for p in plans]
    if INFINITE_CARDINALITY in known:
        cardinality = INFINITE_CARDINALITY
    else:
        cardinality = UNKNOWN_CARDINALITY if min(known) < 0 else sum(known)
    is_indexed = first.is_indexed and second.is_indexed and cardinality >= 0

    def build(epoch: Epoch) -> Any:
        if is_indexed:
            return nodes.Concatenated([p.build(epoch) for p in plans])
        return streams.Stream(lambda: nested.Chained(lambda i: plans[i].open(epoch), 2))

    is_alike = first.batch_size == second.batch_size
    return _joined(
        "concatenate",
        plans,
        build=build,
        is_indexed=is_indexed,
        cardinality=cardinality,
        batch_size=first.batch_size if is_alike else None,
        # The first part may end with a whole batch only if it drops the rest.
        drops_remainder=is_alike and first.drops_remainder and second.drops_remainder,
    )


def zip_plans(plans: Sequence[Plan], structure: Any) -> Plan:
    """Puts elements of several datasets side by side."""
    known = [p.cardinality for p in plans]
    finite = [count for count in known if count >= 0]
    if UNKNOWN_CARDINALITY in known:
        cardinality = UNKNOWN_CARDINALITY
    else:
        cardinality = min(finite, default=INFINITE_CARDINALITY)
    is_indexed = all(p.is_indexed for p in plans)

    def build(epoch: Epoch) -> Any:
        if is_indexed:
            return nodes.Zipped([p.build(epoch) for p in plans], structure)
        return streams.Stream(lambda: streams.Zipped([p.open(epoch) for p in plans], structure))

    is_alike = len({p.batch_size for p in plans}) == 1
    return _joined(
        "zip",
        plans,
        build=build,
        is_indexed=is_indexed,
        cardinality=cardinality,
        batch_size=plans[0].batch_size if is_alike else None,
        drops_remainder=is_alike and all(p.drops_remainder for p in plans),
    )


def choose(selector: Plan, plans: Sequence[Plan], stops_at_empty: bool) -> Plan:
    """Takes each element from the dataset whose number the selector gives."""
    is_endless = INFINITE_CARDINALITY in [p.cardinality for p in plans]

    def build(epoch: Epoch) -> Any:
        return streams.Stream(
            lambda: nested.Directed(
                selector.open(epoch), [p.open(epoch) for p in plans], stops_at_empty
            )
        )

    is_alike = len({p.batch_size for p in plans}) == 1
    joined = _joined(
        "choose",
        [selector, *plans],
        build=build,
        is_indexed=False,
        cardinality=INFINITE_CARDINALITY if is_endless else UNKNOWN_CARDINALITY,
        batch_size=plans[0].batch_size if is_alike else None,
        drops_remainder=is_alike and all(p.drops_remainder for p in plans),
    )
    # Numbers of the selector are no part of the elements.
    return dataclasses.replace(
        joined,
        has_examples=any(p.has_examples for p in plans),
        is_padded=any(p.is_padded for p in plans),
    )


def _joined(name: str, plans: Sequence[Plan], **facts: Any) -> Plan:
    options = plans[0].options
    for plan in plans[1:]:
        options = options.merge(plan.options)
    return Plan(
        f"{name}({', '.join(p.name for p in plans)})",
        is_padded=any(p.is_padded for p in plans),
        has_examples=any(p.has_examples for p in plans),
        is_quick=all(p.is_quick for p in plans),
        num_threads=max(p.num_threads for p in plans),
        seeds=tuple(seed for p in plans for seed in p.seeds),
        details=tuple((p.files, p.details) for p in plans),
        options=options,
        **facts,
    )
