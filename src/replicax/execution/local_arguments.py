"""Arrays of any device as arguments and results of eager replica code."""

from __future__ import annotations

from typing import Any

import jax

from replicax.foundation import jax_compat, placement
from replicax.foundation.jax_compat import Device
from replicax.values.indexed_slices import IndexedSlices
from replicax.values.regroup import map_structure


class LocalArguments:
    """The arguments of one eager run on the devices of its replicas, and what they came from."""

    def __init__(self) -> None:
        # By the id of the array that a replica got in the place of its argument: both.
        self._originals: dict[int, tuple[Any, Any]] = {}

    def localize(self, leaf: Any, device: Device) -> Any:
        """Copies an argument as `localized` does, and remembers what it was."""
        local = localized(leaf, device)
        if local is not leaf:
            self._originals[id(local)] = (local, leaf)
        return local

    def originals(self, structure: Any) -> Any:
        """Puts the arguments in the place of what replica code got for them."""
        return map_structure(self.original, structure) if self._originals else structure

    def original(self, leaf: Any) -> Any:
        """Returns the argument that replica code got as `leaf`; anything else as it is."""
        return self._originals.get(id(leaf), (leaf, leaf))[1]


def localized(leaf: Any, device: Device) -> Any:
    """Copies an array that is committed to any device to one device, uncommitted."""
    if isinstance(leaf, IndexedSlices):
        moved = leaf.map_arrays(lambda array: localized(array, device))
        is_same = moved.values is leaf.values and moved.indices is leaf.indices
        return leaf if is_same else moved
    if not isinstance(leaf, jax.Array) or jax_compat.is_traced(leaf) or not leaf.committed:
        return leaf
    return placement.put(leaf, device)


class explained_devices:
    """Says what to do about arrays that replica code captured and JAX cannot combine."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if isinstance(error, ValueError) and "incompatible devices" in str(error):
            error.add_note(
                "replicax: replica code captured arrays that `jax.device_put` bound to different "
                "devices. Pass them to `strategy.run(fn, args=(array,))`, which copies them to "
                "each replica, or compile the function with `rx.function`."
            )
