"""The r1.9 names of algorithms that combine values of several devices."""

from __future__ import annotations

from replicax.collectives.cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
)
from replicax.foundation import errors

_ALGORITHMS = {"nccl": NcclAllReduce, "hierarchical_copy": HierarchicalCopyAllReduce}


def AllReduceCrossTowerOps(
    all_reduce_alg: str = "nccl",
    num_packs: int = 1,
    agg_small_grads_max_bytes: int = 0,
    agg_small_grads_max_group: int = 10,
) -> CrossDeviceOps:
    """Returns `rx.NcclAllReduce` or `rx.HierarchicalCopyAllReduce`.

    Args:
      all_reduce_alg: "nccl" or "hierarchical_copy".
      num_packs: Values are joined to so many packs.
      agg_small_grads_max_bytes: Accepted for portability; small values are always joined.
      agg_small_grads_max_group: Likewise.

    >>> type(AllReduceCrossTowerOps("hierarchical_copy")).__name__
    'HierarchicalCopyAllReduce'
    """
    del agg_small_grads_max_bytes, agg_small_grads_max_group
    if all_reduce_alg not in _ALGORITHMS:
        raise errors.InvalidArgumentError(
            '`all_reduce_alg` must be "nccl" or "hierarchical_copy"',
            f"it is {all_reduce_alg!r}",
            "Pass one of them.",
        )
    return _ALGORITHMS[all_reduce_alg](num_packs)
