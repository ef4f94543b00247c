"""`DistributedDataset` and its iterator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from typing_extensions import override

from replicax.contexts import frames
from replicax.contexts.frames import Mode
from replicax.foundation import errors
from replicax.foundation.types import Tree
from replicax.input import pipelines, splitting
from replicax.input.input_context import InputOptions
from replicax.input.iterators import DataIterator
from replicax.input.rebatching import Share
from replicax.input.sources import Source, unbatched
from replicax.tracing.control_flow import reduce_elements
from replicax.tracing.iterators import open_loop
from replicax.tracing.signature import PerReplicaSpec, TensorSpec
from replicax.values import printing
from replicax.values.layout import ReplicaLayout

# The minimum size of the buffer. Python switches threads every 5 ms, in which a quick reader
# fills several elements.
_LEAST_AHEAD = 4


class DistributedDataset:
    """A dataset whose elements are values of all replicas; made by a strategy.

    It can be iterated any number of times, each time from the start, also inside an
    `rx.function`. It has no transformations: apply them before distributing.

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
        share: Share | None,
    ) -> None:
        self._layout = layout
        self._sources = sources
        self._options = options
        # How global batches are split; None if every replica gets whole batches.
        self._share = share
        self._spec: Tree = None
        is_cut = share is not None and share.num_replicas * share.num_workers > 1
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
        count = self._layout.num_replicas
        total = 1 if self._share is None else count * self._share.num_workers

        def spec(leaf: TensorSpec) -> TensorSpec | PerReplicaSpec:
            shape = leaf.shape
            if shape and shape[0] is not None:
                # Parts of different sizes have no size in common.
                size = None if shape[0] % total else shape[0] // total
                shape = (size, *shape[1:])
            own = TensorSpec(shape, _device_dtype(leaf.dtype))
            return own if count == 1 else PerReplicaSpec((own,) * count)

        return jax.tree.map(spec, self._sources[0].batch_spec())

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
        splitter = self.splitter(options.fetches_to_device and not self.places_late)
        if self._share is not None:
            pipeline = pipelines.GlobalBatches(self._sources[0], splitter)
        else:
            pipeline = pipelines.ReplicaBatches(self._sources, layout, splitter)
        if state is not None:
            pipeline.set_state(state)
        if all(source.is_quick for source in self._sources):
            return pipeline
        buffer_size = options.experimental_per_replica_buffer_size
        depth = max(layout.num_replicas, buffer_size, _LEAST_AHEAD)
        return pipelines.ReadAhead(pipeline, depth)

    @property
    def places_late(self) -> bool:
        """Whether elements are placed on the device only for uncompiled code.

        A program on one CPU device takes host arrays without a copy.
        """
        layout = self._layout
        is_one_cpu = layout.num_replicas == 1 and layout.devices[0].platform == "cpu"
        is_quick = all(source.is_quick and source.is_fresh for source in self._sources)
        return is_one_cpu and is_quick and self._options.fetches_to_device

    def splitter(self, to_device: bool) -> splitting.Splitter:
        """Returns a splitter that places parts on devices, or keeps them on the host."""
        copies = not all(source.is_fresh for source in self._sources)
        share = self._share or Share(self._layout.num_replicas)
        return splitting.Splitter(self._layout, share, to_device, copies)

    def __repr__(self) -> str:
        return f"<rx.DistributedDataset over {self.describe()}>"

    def describe(self) -> str:
        """Returns the number of replicas, and the spec of elements if it is known."""
        shown = printing.count(self._layout.num_replicas, "replica")
        return shown if self._spec is None else f"{shown}, elements of {self._spec}"


class DistributedIterator(DataIterator):
    """An iterator over a `DistributedDataset`.

    `get_state` and `set_state` save and restore its position, also in a checkpoint; elements
    that were read ahead are not part of it.
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
        return next(self._open())

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
