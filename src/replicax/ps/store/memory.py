"""Memory of parameter servers: allocation of arrays, and the amount available.

Arrays are aligned for vector instructions, so JAX uses them without a copy. Large zeroed memory is
mapped, not filled: a page takes no memory until it is written.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import sys
from pathlib import Path
from typing import Self

import numpy as np

ALIGNMENT = 64
# From this size on memory is mapped. Below, the C library is faster.
_MAPPED_FROM_BYTES = 4 << 20
# Reserved for everything that is not a part.
_MARGIN_BYTES = 64 << 20
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def zeroed(num_bytes: int, *, is_sparse: bool) -> np.ndarray:
    """Returns zeroed bytes with room for alignment; views have the array as `base`.

    Args:
      num_bytes: The number of bytes.
      is_sparse: Whether many of them may never be written. Then pages are small, so that writing
        one row does not make 2 MiB around it resident; otherwise they are large and faster.

    Raises:
      MemoryError: The system has not enough memory.
    """
    if num_bytes < _MAPPED_FROM_BYTES:
        return np.zeros(num_bytes + ALIGNMENT, np.uint8)
    return np.frombuffer(mapped(num_bytes, is_sparse=is_sparse), np.uint8)


def mapped(num_bytes: int, *, is_sparse: bool) -> mmap.mmap:
    """Returns zeroed mapped memory; a page takes no memory until it is written.

    Raises:
      MemoryError: The system has not enough memory.
    """
    try:
        found = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(str(error)) from None
    _advise(found, "MADV_NOHUGEPAGE" if is_sparse else "MADV_HUGEPAGE")
    return found


def release(area: mmap.mmap, start: int) -> None:
    """Releases the pages of mapped memory from a byte on; their content is lost."""
    start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    if start < len(area):
        _advise(area, "MADV_DONTNEED", start, len(area) - start)


def _advise(area: mmap.mmap, advice: str, *where: int) -> None:
    # Advice only: a kernel without large pages rejects it.
    with contextlib.suppress(OSError, AttributeError):
        area.madvise(getattr(mmap, advice), *where)


class Block:
    """The memory of one array, with a check whether views of it are still referenced.

    Note [Borrowed memory]: every NumPy view refers to the object that owns the memory, here
    `_owner`, also through views of views. So the reference count of the owner tells whether a view
    is still alive, for example in a message that is being sent. The count can be too high for a
    moment, never too low.

    Attributes:
      array: The array.
      octets: Its bytes, in one dimension.
      rows: Its rows, each as one element; None for a scalar or an empty array.
    """

    __slots__ = ("_baseline", "_owner", "array", "octets", "rows")

    def __init__(self, octets: np.ndarray, owner: np.ndarray, array: np.ndarray) -> None:
        self._owner = owner
        self.octets = octets
        self.array = array
        self.rows = self._row_view()
        self._baseline = -1

    @classmethod
    def zeroed(cls, shape: tuple[int, ...], dtype: np.dtype, *, is_sparse: bool) -> Self:
        """Allocates zeroed memory; see the function `zeroed`."""
        num_bytes = math.prod(shape) * dtype.itemsize
        owner = zeroed(num_bytes, is_sparse=is_sparse)
        start = -owner.ctypes.data % ALIGNMENT
        octets = owner[start : start + num_bytes]
        block = cls(octets, owner, octets.view(dtype).reshape(shape))
        del octets, owner
        block._baseline = block._num_references()
        return block

    @classmethod
    def adopted(cls, array: np.ndarray) -> Self:
        """Wraps an existing array: it counts as borrowed and is never written."""
        return cls(array.reshape(-1).view(np.uint8), array, array)

    def _row_view(self) -> np.ndarray | None:
        if self.array.ndim == 0 or self.octets.size == 0:
            return None
        row_bytes = self.octets.size // self.array.shape[0]
        # One element of many bytes is copied at once: twice as fast as an array of numbers.
        return self.octets.view(np.dtype((np.void, row_bytes)))

    def _num_references(self) -> int:
        return sys.getrefcount(self._owner)

    @property
    def is_own(self) -> bool:
        """Whether the memory may be written when it is not borrowed."""
        return self._baseline >= 0

    def is_borrowed(self) -> bool:
        """Returns whether a result of `borrow` is still referenced."""
        return self._num_references() > self._baseline

    def borrow(self) -> np.ndarray:
        """Returns a read-only view of the bytes, borrowed until it is no longer referenced."""
        view = self.octets[:]
        view.flags.writeable = False
        return view


def resident_bytes() -> int:
    """Returns the resident memory of this process; 0 where it is unknown."""
    try:
        pages = int((_PROC / "self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def available_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Returns how much memory is available; None where it is unknown."""
    found = [
        size for size in (_machine_bytes(proc), _group_bytes(proc, cgroups)) if size is not None
    ]
    return max(0, min(found) - _MARGIN_BYTES) if found else None


def _machine_bytes(proc: Path) -> int | None:
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return None


def _group_bytes(proc: Path, cgroups: Path) -> int | None:
    """Returns the memory left in the control groups (v1 or v2) of this process."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return None
    left: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            left += _left_in(cgroups, path, ("memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            left += _left_in(cgroups / "memory", path, names)
    return min(left, default=None)


def _left_in(root: Path, path: str, names: tuple[str, str, str]) -> list[int]:
    """Returns the memory left in a group and its parents; a container may see its own as root."""
    limit, usage, cache = names
    group = root / path.strip("/")
    left: list[int] = []
    while True:
        try:
            most = int((group / limit).read_text())
            used = int((group / usage).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            left.append(most - used + int(stat.get(cache, 0)))
        except (OSError, ValueError):
            pass  # The group is not visible, or has no limit ("max").
        if group == root:
            return left
        group = group.parent
