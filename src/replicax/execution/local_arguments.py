"""Arrays of any device as arguments and results of eager replica code."""

from __future__ import annotations

from types import TracebackType

import jax

from replicax.foundation import jax_compat, placement
from replicax.foundation.jax_compat import Device
from replicax.foundation.types import Tree
from replicax.values.indexed_slices import IndexedSlices
from replicax.values.regroup import map_structure


class LocalArguments:
    """The arguments of one eager run on the devices of its replicas, and their sources."""

    def __init__(self) -> None:
        # Copy and argument, by the id of the copy that a replica got.
        self._originals: dict[int, tuple[Tree, Tree]] = {}

    def localize(self, leaf: Tree, device: Device) -> Tree:
        """Copies an argument as `localized` does, and keeps the argument for `original`."""
        local = localized(leaf, device)
        if local is not leaf:
            self._originals[id(local)] = (local, leaf)
        return local

    def originals(self, structure: Tree) -> Tree:
        """Replaces copies in results of replica code by the arguments that they are copies of."""
        return map_structure(self.original, structure) if self._originals else structure

    def original(self, leaf: Tree) -> Tree:
        """Returns the argument that replica code got as `leaf`; anything else as it is."""
        return self._originals.get(id(leaf), (leaf, leaf))[1]


def localized(leaf: Tree, device: Device) -> Tree:
    """Copies an array that is committed to any device to one device, uncommitted."""
    if isinstance(leaf, IndexedSlices):
        moved = leaf.map_arrays(lambda array: localized(array, device))
        is_same = moved.values is leaf.values and moved.indices is leaf.indices
        return leaf if is_same else moved
    if not isinstance(leaf, jax.Array) or jax_compat.is_traced(leaf) or not leaf.committed:
        return leaf
    return placement.put(leaf, device)


class explained_devices:
    """Adds advice to errors about captured arrays of different devices."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, ValueError) and "incompatible devices" in str(error):
            error.add_note(
                "replicax: replica code captured arrays that `jax.device_put` bound to different "
                "devices. Pass them to `strategy.run(fn, args=(array,))`, which copies them to "
                "each replica, or compile the function with `rx.function`."
            )
