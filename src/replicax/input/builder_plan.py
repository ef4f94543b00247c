"""`Plan`: what a dataset is made of, what is known about it, and the Grain dataset for it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from replicax.foundation import errors, lazy
from replicax.input.options import Options

if TYPE_CHECKING:
    import grain

    from replicax.input import grain_nodes_streams as streams
else:
    # Grain takes a second to import: it is, when the first dataset is iterated.
    grain = lazy.module("grain")
    streams = lazy.module("replicax.input.grain_nodes_streams")

# How many elements a dataset has, where no number can be given.
INFINITE_CARDINALITY = -1
UNKNOWN_CARDINALITY = -2
# Leaves a number of threads or elements to the library.
AUTOTUNE = -1

# The number of the iteration, then those of the passes of each repeat around.
Epoch = tuple[int, ...]
Build = Callable[[Epoch], Any]


class Seed:
    """The seed of a shuffle to which none was given; part of the position of an iterator."""

    def __init__(self) -> None:
        self.value = int.from_bytes(os.urandom(4), "little")


@dataclasses.dataclass(frozen=True)
class Plan:
    """One step of a dataset and everything before it. Never changed.

    Attributes:
      name: The steps so far, as "range > shuffle > batch".
      build: Makes the Grain dataset of one epoch.
      is_indexed: Whether that is a MapDataset, with random access.
      cardinality: The number of elements, or one of the constants above.
      batch_size: That of the last batch step, if there is one that still counts.
      has_examples: Whether elements are known to be single examples. What generators yield
        or inner datasets give may be batches without a batch step.
      drops_remainder: Whether every batch has exactly that size.
      is_padded: Whether sizes differ between batches.
      is_quick: Whether elements come from memory, without a function of the user.
      num_threads: How many threads read ahead from random access; 0 for none.
      spec: What elements look like, if the user said it.
      find_spec: Finds out what elements look like, if the first one does not tell.
      files: The files that are read, or None.
      with_files: Makes the same step for other files, in a reader.
      shard_records: Makes the same step for a part of each file, in a reader.
      details: Arguments of steps that decide which elements there are, or functions that find
        them.
      origin: How this plan was made from the plan before, if it has exactly one.
      is_prefetch: Whether the step only reads ahead.
      seeds: The seeds that nobody chose.
      options: The options of the dataset.
    """

    name: str
    build: Build
    is_indexed: bool
    cardinality: int
    batch_size: int | None = None
    has_examples: bool = False
    drops_remainder: bool = False
    is_padded: bool = False
    is_quick: bool = False
    num_threads: int = 0
    spec: Any = None
    find_spec: Callable[[], Any] | None = None
    files: tuple[str, ...] | None = None
    with_files: Callable[[tuple[str, ...]], Plan] | None = None
    shard_records: Callable[[int, int], Plan] | None = None
    details: tuple[Any, ...] = ()
    origin: tuple[Callable[[Plan], Plan], Plan] | None = None
    is_prefetch: bool = False
    seeds: tuple[Seed, ...] = ()
    options: Options = dataclasses.field(default_factory=Options)

    def then(
        self,
        name: str,
        index: Callable[[Any, Epoch], Any] | None,
        stream: Callable[[Any, Epoch], Any],
        **facts: Any,
    ) -> Plan:
        """Returns the plan with one more step.

        Args:
          name: The step's name.
          index: Makes its MapDataset from the one before; None if it has no random access.
          stream: Makes its iterator from the one before.
          **facts: What is different about it.
        """
        if self.is_indexed and index is not None:
            facts["build"] = lambda epoch: index(self.build(epoch), epoch)
        else:
            facts["build"] = lambda epoch: streams.Stream(lambda: stream(self.open(epoch), epoch))
            facts["is_indexed"] = False
        inherited = {"spec": None, "with_files": None, "shard_records": None, "origin": None}
        inherited |= {"is_prefetch": False, "find_spec": None, "name": f"{self.name} > {name}"}
        return dataclasses.replace(self, **{**inherited, **facts})

    def stream(self, epoch: Epoch) -> grain.IterDataset[Any]:
        """Returns the Grain dataset of one epoch as a stream."""
        node = self.build(epoch)
        if not self.is_indexed:
            return node
        if self.num_threads:
            size = 2 * self.num_threads
            return node.to_iter_dataset(grain.ReadOptions(self.num_threads, size))
        return streams.Stream(lambda: streams.FromIndex(node))

    def open(self, epoch: Epoch) -> grain.DatasetIterator[Any]:
        """Starts at the first element of an epoch."""
        return iter(self.stream(epoch))

    def first_element(self) -> Any:
        """Returns the first element of the first epoch, or raises."""
        iterator = self.open((0,))
        try:
            return next(iterator)
        except StopIteration:
            raise errors.InvalidArgumentError(
                "The elements of a dataset are known by its first one",
                "the dataset is empty",
                "Give it at least one element.",
            ) from None
        finally:
            iterator.close()


def follow(step: Callable[[Plan], Plan], plan: Plan) -> Plan:
    """Takes a step, and remembers how, so that it can be taken again from other files."""
    return dataclasses.replace(step(plan), origin=(step, plan))


def over_files(plan: Plan, files: tuple[str, ...]) -> Plan | None:
    """Returns the same steps over other files; None if no reader is below."""
    if plan.with_files is not None:
        return plan.with_files(files)
    if plan.origin is None:
        return None
    step, before = plan.origin
    changed = over_files(before, files)
    return changed and follow(step, changed)


def over_records(plan: Plan, num_shards: int, index: int) -> Plan | None:
    """Returns the same steps over a part of each file; None if no reader is below."""
    if plan.shard_records is not None:
        return plan.shard_records(num_shards, index)
    if plan.origin is None:
        return None
    step, before = plan.origin
    changed = over_records(before, num_shards, index)
    return changed and follow(step, changed)
