"""Sizes of the parts of global batches for workers and replicas. Pure arithmetic."""

from __future__ import annotations

import itertools
from typing import NamedTuple

# A part of a global batch: rows from start up to stop.
Rows = tuple[int, int]


class Share(NamedTuple):
    """The part of every global batch for this process.

    Attributes:
      num_replicas: The number of replicas of this process.
      num_workers: The number of processes that read the data.
      worker: The index of this process.
      cuts_each_batch: Whether all workers read the same batches and each keeps its part
        (auto-sharding by data). Otherwise each reads its own, and a batch lasts for as many
        steps as there are workers.
    """

    num_replicas: int
    num_workers: int = 1
    worker: int = 0
    cuts_each_batch: bool = True


def part_sizes(size: int, num_parts: int) -> list[int]:
    """Returns the sizes of parts that differ by at most one, the larger ones first.

    >>> part_sizes(7, 4)
    [2, 2, 2, 1]
    """
    small, extra = divmod(size, num_parts)
    return [small + 1] * extra + [small] * (num_parts - extra)


def batch_sizes_for_worker(
    global_batch_size: int, num_workers: int, num_replicas_per_worker: int, worker: int
) -> list[int]:
    """Returns the sizes of consecutive parts for a worker with its own stream of global batches.

    In each step all workers together take one global batch.

    >>> batch_sizes_for_worker(7, 2, 2, worker=1)
    [2, 1, 2, 2]
    """
    sizes = part_sizes(global_batch_size, num_workers * num_replicas_per_worker)
    turn = worker * num_replicas_per_worker
    return sizes[turn:] + sizes[:turn]


def steps_of_batch(size: int, share: Share) -> list[list[Rows]]:
    """Returns the rows of each local replica, for each step that a batch lasts for.

    >>> steps_of_batch(5, Share(num_replicas=2))
    [[(0, 3), (3, 5)]]
    """
    workers, replicas = share.num_workers, share.num_replicas
    if share.cuts_each_batch:
        rows = _bounds(part_sizes(size, workers * replicas))
        # Part j goes to worker j mod W, replica j div W.
        return [rows[share.worker :: workers]]
    rows = _bounds(batch_sizes_for_worker(size, workers, replicas, share.worker))
    return [rows[i : i + replicas] for i in range(0, len(rows), replicas)]


def rows_of_all_replicas(size: int, share: Share) -> list[int]:
    """Returns the number of rows of each replica of all workers, if they cut the same batch.

    >>> rows_of_all_replicas(5, Share(num_replicas=2, num_workers=2))
    [2, 1, 1, 1]
    """
    workers = [share._replace(worker=worker) for worker in range(share.num_workers)]
    parts = [part for own in workers for part in steps_of_batch(size, own)[0]]
    return [stop - start for start, stop in parts]


def sizes_of_step(size: int, share: Share, phase: int) -> list[int]:
    """Returns the rows of each local replica, in a worker's own stream of batches.

    Args:
      size: The rows of a batch.
      share: The share of the worker.
      phase: The number of steps that the batch was used for.

    >>> share = Share(num_replicas=2, num_workers=2, worker=1, cuts_each_batch=False)
    >>> sizes_of_step(7, share, 0), sizes_of_step(7, share, 1)
    ([2, 1], [2, 2])
    """
    return [stop - start for start, stop in steps_of_batch(size, share)[phase]]


def _bounds(sizes: list[int]) -> list[Rows]:
    ends = list(itertools.accumulate(sizes))
    return [(end - size, end) for size, end in zip(sizes, ends, strict=True)]
