"""`Plan`: the steps of a dataset, what is known about its elements, and its Grain dataset."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from replicax.foundation import errors, lazy
from replicax.foundation.types import Tree
from replicax.input.dataset.options import Options
from replicax.input.nodes import streams

if TYPE_CHECKING:
    import grain

    MapNode: TypeAlias = grain.MapDataset[Any]
    IterNode: TypeAlias = grain.IterDataset[Any]
    StreamIterator: TypeAlias = grain.DatasetIterator[Any]
else:
    grain = lazy.module("grain")

# Values of `cardinality` that are not numbers of elements.
INFINITE_CARDINALITY = -1
UNKNOWN_CARDINALITY = -2
# Lets the library choose a number of threads or elements.
AUTOTUNE = -1

# The number of the iteration, then the number of the pass of each enclosing repeat.
Epoch: TypeAlias = tuple[int, ...]


class Seed:
    """The seed of a shuffle that the user gave none; saved with the state of an iterator."""

    def __init__(self) -> None:
        self.value = int.from_bytes(os.urandom(4), "little")


@dataclasses.dataclass(frozen=True)
class Plan:
    """One step of a dataset and everything before it.

    Attributes:
      name: The steps so far, such as "range > shuffle > batch".
      build: Makes the Grain dataset of one epoch: a MapDataset if `is_indexed`, otherwise an
        IterDataset.
      is_indexed: Whether elements have random access.
      cardinality: The number of elements, or one of the constants above.
      batch_size: The size of the last batch step, if elements are its batches.
      has_examples: Whether elements are known to be single examples. Generators and inner
        datasets may give batches without a batch step.
      drops_remainder: Whether every batch has exactly `batch_size` rows.
      is_padded: Whether sizes differ between batches.
      is_quick: Whether elements come from memory, without a user's function.
      num_threads: The number of threads that read ahead with random access; 0 for none.
      spec: The spec of elements, if the user gave one.
      find_spec: Computes the spec, if the first element does not show it.
      files: The files that are read, or None.
      with_files: Makes the same step for other files, in a reader.
      shard_records: Makes the same step for a part of each file, in a reader.
      details: Arguments of steps that determine the elements, or partial functions that
        compute them.
      origin: The step and the plan before it, if there is exactly one.
      is_prefetch: Whether the step only reads ahead.
      seeds: The seeds that the user did not choose.
      options: The options of the dataset.
    """

    name: str
    build: Callable[[Epoch], MapNode | IterNode]
    is_indexed: bool
    cardinality: int
    batch_size: int | None = None
    has_examples: bool = False
    drops_remainder: bool = False
    is_padded: bool = False
    is_quick: bool = False
    num_threads: int = 0
    spec: Tree = None
    find_spec: Callable[[], Tree] | None = None
    files: tuple[str, ...] | None = None
    with_files: Callable[[tuple[str, ...]], Plan] | None = None
    shard_records: Callable[[int, int], Plan] | None = None
    details: tuple[object, ...] = ()
    origin: tuple[Callable[[Plan], Plan], Plan] | None = None
    is_prefetch: bool = False
    seeds: tuple[Seed, ...] = ()
    options: Options = dataclasses.field(default_factory=Options)

    def then(
        self,
        name: str,
        index: Callable[[Any, Epoch], MapNode] | None,
        stream: Callable[[StreamIterator, Epoch], StreamIterator],
        **facts: Any,
    ) -> Plan:
        """Returns the plan with one more step.

        Args:
          name: The step's name.
          index: Makes its MapDataset from the one before; None if it has no random access.
          stream: Makes its iterator from the one before.
          **facts: The attributes that change.
        """
        if self.is_indexed and index is not None:
            facts["build"] = lambda epoch: index(self.build(epoch), epoch)
        else:
            facts["build"] = lambda epoch: streams.Stream(lambda: stream(self.open(epoch), epoch))
            facts["is_indexed"] = False
        return self._followed(name, facts)

    def then_stream(self, name: str, build: Callable[[Epoch], IterNode], **facts: Any) -> Plan:
        """Returns the plan with one more step, whose dataset is an IterDataset."""
        return self._followed(name, {**facts, "build": build, "is_indexed": False})

    def _followed(self, name: str, facts: dict[str, Any]) -> Plan:
        own = {"spec": None, "find_spec": None, "with_files": None, "shard_records": None}
        own |= {"origin": None, "is_prefetch": False, "name": f"{self.name} > {name}"}
        return dataclasses.replace(self, **{**own, **facts})

    def stream(self, epoch: Epoch) -> IterNode:
        """Returns the Grain dataset of one epoch as an IterDataset."""
        node: Any = self.build(epoch)
        if not self.is_indexed:
            return node
        if self.num_threads:
            size = 2 * self.num_threads
            return node.to_iter_dataset(grain.ReadOptions(self.num_threads, size))
        return streams.Stream(lambda: streams.FromIndex(node))

    def open(self, epoch: Epoch) -> StreamIterator:
        """Returns an iterator at the first element of an epoch."""
        return iter(self.stream(epoch))  # type: ignore[return-value]

    def first_element(self) -> Tree:
        """Returns the first element of the first epoch, or raises."""
        iterator = self.open((0,))
        try:
            return next(iterator)
        except StopIteration:
            raise errors.InvalidArgumentError(
                "The spec of elements is derived from the first one",
                "the dataset is empty",
                "Add at least one element.",
            ) from None
        finally:
            iterator.close()


def follow(step: Callable[[Plan], Plan], plan: Plan) -> Plan:
    """Applies a step, and records it, so that it can be applied again over other files."""
    return dataclasses.replace(step(plan), origin=(step, plan))


def over_files(plan: Plan, files: tuple[str, ...]) -> Plan | None:
    """Returns the same steps over other files; None if the plan does not start from files."""
    return _rebuilt(plan, lambda start: start.with_files and start.with_files(files))


def over_records(plan: Plan, num_shards: int, index: int) -> Plan | None:
    """Returns the same steps over a part of each file; None if it does not start from files."""
    return _rebuilt(
        plan, lambda start: start.shard_records and start.shard_records(num_shards, index)
    )


def _rebuilt(plan: Plan, replace: Callable[[Plan], Plan | None]) -> Plan | None:
    """Replaces the plan that `replace` accepts, and applies the steps after it again."""
    replaced = replace(plan)
    if replaced is not None:
        return replaced
    if plan.origin is None:
        return None
    step, before = plan.origin
    changed = _rebuilt(before, replace)
    return changed and follow(step, changed)
