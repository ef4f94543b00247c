"""`DistributedDataset` and its iterator."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from typing_extensions import override

from replicax.contexts import frames
from replicax.contexts.frames import Mode
from replicax.foundation import errors, ordered_trees, spans
from replicax.foundation.peers import Peers
from replicax.foundation.types import Tree
from replicax.input import agreement, pipelines, positions, splitting
from replicax.input.dataset.plan import UNKNOWN_CARDINALITY
from replicax.input.input_context import InputContext, InputOptions
from replicax.input.iterators import DataIterator
from replicax.input.rebatching import Share
from replicax.input.sharding import Sharding
from replicax.input.sources import Source, Stream, unbatched
from replicax.tracing.control_flow import reduce_elements
from replicax.tracing.iterators import open_loop
from replicax.tracing.signature import PerReplicaSpec, TensorSpec
from replicax.values import printing
from replicax.values.layout import ReplicaLayout

_log = logging.getLogger(__name__)
# The minimum size of the buffer. Python switches threads every 5 ms, in which a quick reader
# fills several elements.
_LEAST_AHEAD = 4


class DistributedDataset:
    """A dataset whose elements are values of all replicas; made by a strategy.

    It can be iterated any number of times, each time from the start, also inside an
    `rx.function`. It has no transformations: apply them before distributing.

    Raises:
      InvalidArgumentError: The dataset has no `batch` step.

    >>> import numpy as np
    >>> import replicax as rx
    >>> strategy = rx.MirroredStrategy(["CPU:0"], virtual_replicas=2)
    >>> dataset = rx.data.Dataset.range(4).batch(2)
    >>> for batch in strategy.experimental_distribute_dataset(dataset):
    ...     print([part.tolist() for part in strategy.experimental_local_results(batch)])
    [[0], [1]]
    [[2], [3]]
    """

    def __init__(
        self,
        layout: ReplicaLayout,
        sources: list[Source],
        options: InputOptions,
        sharing: Sharding | InputContext,
    ) -> None:
        self._layout = layout
        self._sources = sources
        self._options = options
        # How global batches are shared; or the first input pipeline of this process, if every
        # replica gets whole batches.
        self._sharing = sharing
        self._spec: Tree = None
        if isinstance(sharing, Sharding):
            is_cut = sharing.share.num_replicas * sharing.share.num_workers > 1
            if is_cut and not sources[0].is_batched:
                raise unbatched("this dataset has no `batch` step")

    def __iter__(self) -> DistributedIterator:
        feed = open_loop(self)
        assert isinstance(feed, DistributedIterator)
        return feed

    def open_feed(self) -> DistributedIterator:
        """Returns a new iterator, at the first element."""
        return DistributedIterator(self)

    @property
    def element_spec(self) -> Tree:
        """The spec of elements; can be used as an entry of an `input_signature`.

        The number of rows is known only if the dataset drops remainders.
        """
        if self._spec is None:
            self._spec = self._find_spec()
        return self._spec

    def _find_spec(self) -> Tree:
        count, total = self._layout.num_local, 1
        if isinstance(self._sharing, Sharding):
            total = count * self._sharing.share.num_workers
        is_plain = count == 1 and not self._layout.spans_processes

        def spec(leaf: TensorSpec) -> TensorSpec | PerReplicaSpec:
            shape = leaf.shape
            if shape and shape[0] is not None:
                # Parts of different sizes have no size in common.
                size = None if shape[0] % total else shape[0] // total
                shape = (size, *shape[1:])
            own = TensorSpec(shape, _device_dtype(leaf.dtype))
            return own if is_plain else PerReplicaSpec((own,) * count)

        return ordered_trees.map(spec, self._sources[0].batch_spec())

    def cardinality(self) -> int:
        """Returns the number of elements, INFINITE_CARDINALITY or UNKNOWN_CARDINALITY.

        >>> import replicax as rx
        >>> strategy = rx.OneDeviceStrategy("CPU:0")
        >>> data = strategy.experimental_distribute_dataset(rx.data.Dataset.range(5).batch(2))
        >>> data.cardinality()
        3
        """
        sharing = self._sharing
        is_whole = isinstance(sharing, Sharding) and sharing.share.cuts_each_batch
        return self._sources[0].num_batches if is_whole else UNKNOWN_CARDINALITY

    def reduce(self, initial_state: Tree, reduce_func: Callable[[Any, Any], Any]) -> Tree:
        """Calls `state = reduce_func(state, element)` for all elements.

        >>> import replicax as rx
        >>> strategy = rx.OneDeviceStrategy("CPU:0")
        >>> data = strategy.experimental_distribute_dataset(rx.data.Dataset.range(4).batch(2))
        >>> int(data.reduce(0, lambda total, batch: total + batch.sum()))
        6
        """
        return reduce_elements(self, initial_state, reduce_func)

    def make_one_shot_iterator(self) -> DistributedIterator:
        """Returns an iterator (TensorFlow 1 API)."""
        return DistributedIterator(self)

    def make_initializable_iterator(self) -> DistributedIterator:
        """Returns an iterator that needs `initialize` first (TensorFlow 1 API)."""
        return DistributedIterator(self, is_initialized=False)

    def open_pipeline(self, state: dict[str, Any] | None = None) -> pipelines.Pipeline:
        """Starts reading, at the first element or at a saved position."""
        options, layout = self._options, self._layout
        is_quick = all(source.is_quick for source in self._sources)
        buffer_size = options.experimental_per_replica_buffer_size
        depth = 0 if is_quick else max(layout.num_local, buffer_size, _LEAST_AHEAD)
        to_device = options.fetches_to_device and not self.places_late
        if isinstance(self._sharing, Sharding):
            opened = self._open_batches(self._sharing, state, to_device)
        else:
            opened = self._open_streams(self._sharing, state, to_device)
        if layout.spans_processes:
            return agreement.Lockstep(opened.pipeline, opened.splitter, layout, opened.facts, depth)
        return pipelines.ReadAhead(opened.pipeline, depth) if depth else opened.pipeline

    def _open_streams(
        self, context: InputContext, state: dict[str, Any] | None, to_device: bool
    ) -> _Opened:
        """Opens the datasets of a function."""
        splitter = self.splitter(to_device)
        pipeline = pipelines.ReplicaBatches(
            self._sources,
            splitter,
            self._layout.num_local,
            context.input_pipeline_id,
            context.num_input_pipelines,
        )
        if state is not None:
            pipeline.set_state(state)
        # The function may make another dataset for each worker.
        facts = agreement.Facts("FUNCTION", "", UNKNOWN_CARDINALITY, state is not None)
        return _Opened(pipeline, splitter, facts)

    def _open_batches(
        self, sharding: Sharding, state: dict[str, Any] | None, to_device: bool
    ) -> _Opened:
        """Opens a dataset of global batches."""
        source = self._sources[0]
        order = positions.order_of(state, source.name)
        if order is not None:
            opened = self._open_batches(sharding, None, to_device)
            opened.pipeline.restart(order)
            return opened
        kind, count = sharding.policy.name, source.num_batches
        share, labels, num_shards = sharding.share, positions.labels_of(sharding), 0
        position: dict[str, Any] = {}
        if state is not None:
            position, share, labels, num_shards = positions.resumption(state, sharding)
        if num_shards == 1:
            stream: Stream = sharding.whole.open()
        elif num_shards > 1:
            _log.info("Resuming %d shards of files, all on each worker", num_shards)
            shards = [sharding.shard(i, num_shards) for i in range(num_shards)]
            stream = positions.ShardStreams([shard.open() for shard in shards])
            count = UNKNOWN_CARDINALITY
        else:
            stream = source.open()
        splitter = self.splitter(to_device, share)
        if share.cuts_each_batch:
            kind = "DATA"
            pipeline: pipelines.LocalPipeline = pipelines.GlobalBatches(stream, splitter, labels)
        else:
            size = source.batch_size
            pipeline = pipelines.OwnBatches(stream, splitter, share, size, labels)
        if state is not None:
            pipeline.set_state(position)
            source.continue_after(position["stream"])
        name = "" if kind == "OFF" else source.name
        facts = agreement.Facts(kind, name, count, is_restored=state is not None)
        return _Opened(pipeline, splitter, facts)

    @property
    def places_late(self) -> bool:
        """Whether elements are placed on the device only for uncompiled code.

        A program on one CPU device takes host arrays without a copy.
        """
        layout = self._layout
        is_one_cpu = layout.num_replicas == 1 and layout.devices[0].platform == "cpu"
        is_quick = all(source.is_quick and source.is_fresh for source in self._sources)
        return is_one_cpu and is_quick and self._options.fetches_to_device

    def splitter(self, to_device: bool, share: Share | None = None) -> splitting.Splitter:
        """Returns a splitter that places parts on devices, or keeps them on the host."""
        copies = not all(source.is_fresh for source in self._sources)
        if share is None and isinstance(self._sharing, Sharding):
            share = self._sharing.share
        own = share or Share(self._layout.num_local)
        kind = splitting.LocalSplitter if self._layout.spans_processes else splitting.Splitter
        return kind(self._layout, own, to_device, copies)

    @property
    def peers(self) -> Peers | None:
        """The workers that share the data; None if this process reads all of it."""
        return self._layout.peers

    def __repr__(self) -> str:
        return f"<rx.DistributedDataset over {self.describe()}>"

    def describe(self) -> str:
        """Returns the number of replicas, and the spec of elements if it is known."""
        shown = printing.count(self._layout.num_replicas, "replica")
        return shown if self._spec is None else f"{shown}, elements of {self._spec}"


class _Opened(NamedTuple):
    """What this process reads, and what it tells other workers about it."""

    pipeline: pipelines.LocalPipeline
    splitter: splitting.Splitter
    facts: agreement.Facts


class DistributedIterator(DataIterator):
    """An iterator over a `DistributedDataset`.

    `get_state` and `set_state` save and restore its position, also in a checkpoint; elements
    that were read ahead are not part of it.

    >>> import replicax as rx
    >>> strategy = rx.MirroredStrategy(["CPU:0"], virtual_replicas=2)
    >>> dataset = rx.data.Dataset.range(4).batch(2)
    >>> iterator = iter(strategy.experimental_distribute_dataset(dataset))
    >>> [int(part[0]) for part in strategy.experimental_local_results(next(iterator))]
    [0, 1]
    >>> iterator.close()
    """

    def __init__(self, dataset: DistributedDataset, is_initialized: bool = True) -> None:
        super().__init__()
        self._dataset = dataset
        self._pipeline: pipelines.Pipeline | None = None
        self._is_initialized = is_initialized

    def __repr__(self) -> str:
        return f"<rx.DistributedIterator over {self._dataset.describe()}>"

    @property
    def element_spec(self) -> Tree:
        """The spec of elements."""
        return self._dataset.element_spec

    @override
    def __next__(self) -> Tree:
        frame = frames.current()
        if frame.mode is Mode.REPLICA and not frame.is_default:
            raise errors.InvalidArgumentError(
                "The next element is taken for all replicas at once",
                f"this is {frame.describe()}",
                "Call next(iterator) outside of `strategy.run` and pass the element in `args`.",
            )
        return super().__next__()

    @override
    def _read(self) -> Tree:
        began = spans.now()
        element = next(self._open())
        if began:
            spans.record("wait", began, label="input")
        return element

    @override
    def _position(self) -> Any:
        return self._open().get_state()

    @override
    def placed(self, element: Tree) -> Tree:
        if not self._dataset.places_late:
            return element
        return self._dataset.splitter(to_device=True).place(element, 0)

    def initialize(self) -> None:
        """Starts at the first element. Can be called again."""
        with self._lock:
            self.close()
            self._returned = []
            self._pipeline = None
            self._is_initialized = True

    @property
    def initializer(self) -> Callable[[], None]:
        """The method `initialize`."""
        return self.initialize

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a position that `get_state` returned, in this process or another."""
        with self._lock:
            self.close()
            self._returned = []
            self._pipeline = self._dataset.open_pipeline(state)
            self._is_initialized = True

    @property
    def peers(self) -> Peers | None:
        """The workers that save and restore the position together; None if this one does alone."""
        return self._dataset.peers

    def set_worker_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Restores the positions of all workers, in their order, on any number of workers.

        A checkpoint calls this if the number of workers has changed. See "Positions" in
        docs/guides/datasets.md for what can be resumed; anything else raises.
        """
        self.set_state(dict(positions.merged(states)))

    @override
    def close(self) -> None:
        """Stops reading ahead. `set_state` opens the iterator again."""
        with self._lock:
            if self._pipeline is not None:
                self._pipeline.close()

    def _open(self) -> pipelines.Pipeline:
        if not self._is_initialized:
            raise errors.ContextError(
                "An initializable iterator must be initialized before it gives elements",
                "`initialize` was not called",
                "Call iterator.initialize() once, and again for each epoch.",
            )
        if self._pipeline is None:
            self._pipeline = self._dataset.open_pipeline()
        return self._pipeline


def _device_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the type of elements of a host type on devices."""
    return jax.dtypes.canonicalize_dtype(dtype) if dtype.kind in "biufc" else dtype
