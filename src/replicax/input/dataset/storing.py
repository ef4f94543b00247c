"""Datasets on disk: save, load and snapshot."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from replicax.foundation import errors, exclusive_files, ordered_trees
from replicax.foundation.types import Tree
from replicax.input.dataset import steps, stored_format
from replicax.input.dataset.elements import UserFunction
from replicax.input.dataset.plan import Epoch, Plan
from replicax.input.dataset.reading import ReadableDataset, require_dataset
from replicax.input.nodes import files as file_nodes
from replicax.input.nodes import indexed, streams

if TYPE_CHECKING:
    from replicax.input.dataset.dataset import Dataset
    from replicax.input.dataset.plan import IterNode, MapNode, StreamIterator

# Attributes of a plan that are saved with its elements.
_FACTS = ("batch_size", "drops_remainder", "has_examples", "is_padded")
PathLike = str | os.PathLike[str]


class StoringSteps(ReadableDataset):
    """The steps of `Dataset` that write elements to disk."""

    def save(
        self,
        path: PathLike,
        compression: str | None = None,
        shard_func: Callable[..., Tree] | None = None,
    ) -> None:
        """Writes all elements into a directory, from which `Dataset.load` reads them.

        The directory is replaced atomically when all elements are written, and keeps its earlier
        dataset until then. Files have checksums, and contain no pickles.

        Args:
          path: The directory.
          compression: None; "SNAPPY" or "AUTO"; "GZIP" or "ZSTD" for a stronger one.
          shard_func: Returns the number of the file for an element; one file if None.

        >>> import tempfile
        >>> from replicax.input.dataset.dataset import Dataset
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
                f"`save` needs exclusive access to {directory}",
                f"process {error.holder} is writing to it",
                "Wait until it has finished, or choose another directory.",
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
        shard_func: Callable[..., Tree] | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Writes elements to disk in the first complete pass, and reads them from there later.

        Later passes, also of other processes, do not run the steps before this one: use it after
        expensive steps, and before random ones such as `shuffle`. Each sequence of steps, files
        and shards has its own snapshot in the directory; after a change of a function, use
        another directory. An incomplete pass writes nothing; while one process writes, others
        compute their elements.

        Args:
          path: The directory.
          compression: As in `save`.
          reader_func: Maps a dataset of the shards to a dataset, for later passes.
          shard_func: As in `save`.
          name: Accepted for portability.
        """
        del name
        stored_format.writer_options(compression)

        def step(parent: Plan) -> Plan:
            source = self._of(parent)
            # Arrays are hashed when the first pass begins.
            find = functools.cache(lambda: Path(path) / _fingerprint(parent))

            def make_writer() -> _ElementWriter | None:
                try:
                    return _ElementWriter(source, find(), compression, shard_func)
                except exclusive_files.HeldError:
                    return None

            def open_stored(epoch: Epoch) -> StreamIterator | None:
                found = stored_format.read_manifest(find())
                if found is None:
                    return None
                return _loaded(self._of, find(), found, reader_func)._plan.open(epoch)

            def build(epoch: Epoch) -> IterNode:
                return streams.Stream(
                    lambda: file_nodes.Snapshotted(
                        lambda: parent.open((0,)), lambda: open_stored(epoch), make_writer
                    )
                )

            return parent.then_stream(
                "snapshot", build, is_quick=False, find_spec=lambda: source.element_spec
            )

        return self._then(step)


class _ElementWriter:
    """Writes the elements of a dataset to shards."""

    def __init__(
        self,
        dataset: ReadableDataset,
        directory: Path,
        compression: str | None,
        shard_func: Callable[..., Tree] | None,
    ) -> None:
        self._dataset = dataset
        self._shard_of = None
        if shard_func is not None:
            self._shard_of = UserFunction(shard_func, "shard_func", f"{dataset!r}").number
        self._writer = stored_format.Writer(directory, compression)
        self._has_spec = False

    def write(self, element: Tree) -> None:
        if not self._has_spec:
            self._writer.set_spec(self._dataset.element_spec)
            self._has_spec = True
        self._writer.write(element, 0 if self._shard_of is None else self._shard_of(element))

    def commit(self) -> None:
        plan = self._dataset._plan
        self._writer.commit({fact: getattr(plan, fact) for fact in _FACTS})

    def abort(self) -> None:
        self._writer.abort()


def _loaded(
    of: Callable[[Plan], Dataset],
    directory: Path,
    found: stored_format.Manifest,
    reader_func: Callable[[Dataset], Dataset] | None,
) -> Dataset:
    """Returns the dataset that a manifest describes."""
    facts = {fact: found.facts[fact] for fact in _FACTS}
    structure = ordered_trees.structure(found.spec)

    def plan_of(file: str, count: int) -> Plan:
        def make() -> MapNode:
            return file_nodes.StoredElements(str(directory / file), count, structure)

        plan = steps.in_memory("load", make, count)
        return dataclasses.replace(plan, **facts, is_quick=False, spec=found.spec)

    shards = [of(plan_of(file, count)) for file, count in found.shards]
    if reader_func is None and len(shards) == 1:
        return shards[0]
    if not shards:
        empty = steps.in_memory("load", lambda: indexed.Listed([]), 0)
        return of(dataclasses.replace(empty, **facts, spec=found.spec))
    parts = of(steps.in_memory("load", lambda: indexed.Listed(shards), len(shards)))
    if reader_func is None:
        return parts.interleave(lambda shard: shard, cycle_length=len(shards))
    return require_dataset("reader_func", reader_func(parts))


def load(
    of: Callable[[Plan], Dataset],
    path: PathLike,
    element_spec: Tree,
    reader_func: Callable[[Dataset], Dataset] | None,
) -> Dataset:
    """Returns the dataset that was saved to a directory, or raises."""
    directory = Path(path)
    found = stored_format.read_manifest(directory)
    if found is None:
        raise errors.NotFoundError(
            f"{directory} must hold a dataset",
            "it holds none",
            "Write one with `Dataset.save`; an interrupted save leaves none.",
        )
    if element_spec is not None and found.spec is not None and element_spec != found.spec:
        raise errors.InvalidArgumentError(
            f"The elements in {directory} must be like {element_spec}",
            f"they are like {found.spec}",
            "Omit `element_spec`: it is stored in the directory.",
        )
    return _loaded(of, directory, found, reader_func)


def _fingerprint(plan: Plan) -> str:
    """Returns a digest of the steps, files, arrays and shards of a plan."""
    text = repr((plan.name, plan.files, _computed(plan.details)))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def _computed(details: object) -> object:
    """Calls the partial functions among details."""
    if isinstance(details, tuple):
        return tuple(map(_computed, details))
    return details() if isinstance(details, functools.partial) else details
