"""Datasets that are written to the disk and read again: save, load and snapshot."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from replicax.foundation import errors, exclusive_files, lazy
from replicax.input import builder_steps, stored_datasets
from replicax.input.builder_checks import UserFunction
from replicax.input.builder_plan import Epoch, Plan
from replicax.input.builder_reading import ReadableDataset, require_dataset

if TYPE_CHECKING:
    from replicax.input import grain_nodes as nodes
    from replicax.input import grain_nodes_files as files_of
    from replicax.input import grain_nodes_streams as streams
    from replicax.input.builder import Dataset
else:
    nodes = lazy.module("replicax.input.grain_nodes")
    files_of = lazy.module("replicax.input.grain_nodes_files")
    streams = lazy.module("replicax.input.grain_nodes_streams")

# What a saved dataset remembers about its elements.
_FACTS = ("batch_size", "drops_remainder", "has_examples", "is_padded")
PathLike = str | os.PathLike[str]


class StoringSteps(ReadableDataset):
    """The steps of `Dataset` that write elements to the disk."""

    if TYPE_CHECKING:

        def _then(self, step: Callable[[Plan], Plan]) -> Dataset: ...
        def _of(self, plan: Plan) -> Dataset: ...

    def save(
        self,
        path: PathLike,
        compression: str | None = None,
        shard_func: Callable[..., Any] | None = None,
    ) -> None:
        """Writes all elements into a directory, from which `Dataset.load` reads them.

        The directory changes in one step, when everything is written: one that holds a dataset
        keeps it until then. Files are checked when they are read, and contain no pickles.

        Args:
          path: The directory.
          compression: None; "SNAPPY" or "AUTO"; "GZIP" or "ZSTD" for a stronger one.
          shard_func: Returns the number of the file that an element is for; one file if None.

        >>> import tempfile
        >>> from replicax.input.builder import Dataset
        >>> folder = tempfile.TemporaryDirectory()
        >>> Dataset.range(3).save(folder.name)
        >>> [int(x) for x in Dataset.load(folder.name)]
        [0, 1, 2]
        >>> folder.cleanup()
        """
        directory = Path(path)
        try:
            writer = _ElementWriter(self, directory, compression, shard_func)
        except exclusive_files.HeldError as error:
            raise errors.UnavailableError(
                f"`save` needs {directory} for itself",
                f"process {error.holder} writes to it",
                "Wait until it is done, or choose another directory.",
            ) from None
        iterator = iter(self)
        try:
            for element in iterator:
                writer.write(element)
            writer.commit()
        finally:
            iterator.close()
            writer.abort()

    def snapshot(
        self,
        path: PathLike,
        compression: str | None = "AUTO",
        reader_func: Callable[[Dataset], Dataset] | None = None,
        shard_func: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Writes elements to the disk in the first whole pass, and reads them from there later.

        Later passes, also of other processes, do not run the steps before this one again: put
        it after expensive steps, and before those that should differ, such as `shuffle`. Other
        steps, files or shards before it have a snapshot of their own in the directory; after
        changing what a function computes, use another directory. A pass that is left early
        writes nothing; while one process writes, others only read their own.

        Args:
          path: The directory.
          compression: As of `save`.
          reader_func: Makes a dataset of a dataset of the shards, for later passes.
          shard_func: As of `save`.
          name: Accepted for portability.
        """
        del name
        stored_datasets.writer_options(compression)

        def step(parent: Plan) -> Plan:
            source = self._of(parent)
            # Arrays are hashed when the first pass begins, not here.
            find = functools.cache(lambda: Path(path) / _fingerprint(parent))

            def make_writer() -> Any:
                try:
                    return _ElementWriter(source, find(), compression, shard_func)
                except exclusive_files.HeldError:
                    return None

            def open_stored(epoch: Epoch) -> Any:
                found = stored_datasets.read_manifest(find())
                if found is None:
                    return None
                return loaded(self._of, find(), found, reader_func)._plan.open(epoch)

            def build(epoch: Epoch) -> Any:
                return streams.Stream(
                    lambda: files_of.Snapshotted(
                        lambda: parent.open((0,)), lambda: open_stored(epoch), make_writer
                    )
                )

            plan = parent.then(
                "snapshot",
                None,
                lambda iterator, epoch: iterator,
                is_quick=False,
                find_spec=lambda: source.element_spec,
            )
            return dataclasses.replace(plan, build=build)

        return self._then(step)


class _ElementWriter:
    """Writes the elements of a dataset, each to the shard that a function chooses."""

    def __init__(
        self, dataset: ReadableDataset, directory: Path, compression: str | None, shard_func: Any
    ) -> None:
        self._dataset = dataset
        self._shard_of = None
        if shard_func is not None:
            self._shard_of = UserFunction(shard_func, "shard_func", f"{dataset!r}").number
        self._writer = stored_datasets.Writer(directory, compression)
        self._is_described = False

    def write(self, element: Any) -> None:
        if not self._is_described:
            self._writer.describe(self._dataset.element_spec)
            self._is_described = True
        self._writer.write(element, 0 if self._shard_of is None else self._shard_of(element))

    def commit(self) -> None:
        plan = self._dataset._plan
        self._writer.commit({fact: getattr(plan, fact) for fact in _FACTS})

    def abort(self) -> None:
        self._writer.abort()


def loaded(
    of: Callable[[Plan], Any],
    directory: Path,
    found: stored_datasets.Manifest,
    reader_func: Callable[[Any], Any] | None,
) -> Any:
    """Returns a dataset of what a directory holds."""
    facts = {fact: found.facts[fact] for fact in _FACTS}
    structure = jax.tree.structure(found.spec)

    def plan_of(file: str, count: int) -> Plan:
        def make() -> Any:
            return files_of.StoredElements(str(directory / file), count, structure)

        plan = builder_steps.in_memory("load", make, count)
        return dataclasses.replace(plan, **facts, is_quick=False, spec=found.spec)

    shards = [of(plan_of(file, count)) for file, count in found.shards]
    if reader_func is None and len(shards) == 1:
        return shards[0]
    if not shards:
        empty = builder_steps.in_memory("load", lambda: nodes.Listed([]), 0)
        return of(dataclasses.replace(empty, **facts, spec=found.spec))
    parts = of(builder_steps.in_memory("load", lambda: nodes.Listed(shards), len(shards)))
    if reader_func is None:
        return parts.interleave(lambda shard: shard, cycle_length=len(shards))
    return require_dataset("reader_func", reader_func(parts))


def load(
    of: Callable[[Plan], Any], path: PathLike, element_spec: Any, reader_func: Any
) -> ReadableDataset:
    """Returns the dataset that was saved to a directory, or raises."""
    directory = Path(path)
    found = stored_datasets.read_manifest(directory)
    if found is None:
        raise errors.NotFoundError(
            f"{directory} must hold a dataset",
            "it holds none",
            "Write one with `Dataset.save`; a save that did not finish leaves none.",
        )
    if element_spec is not None and found.spec is not None and element_spec != found.spec:
        raise errors.InvalidArgumentError(
            f"The elements in {directory} must be like {element_spec}",
            f"they are like {found.spec}",
            "Leave `element_spec` out: the directory knows it.",
        )
    return loaded(of, directory, found, reader_func)


def _fingerprint(plan: Plan) -> str:
    """Returns a name for the steps, files, arrays and parts that a plan is made of."""
    text = repr((plan.name, plan.files, _computed(plan.details)))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def _computed(details: Any) -> Any:
    """Asks for those details that cost something."""
    if isinstance(details, tuple):
        return tuple(map(_computed, details))
    return details() if isinstance(details, functools.partial) else details
