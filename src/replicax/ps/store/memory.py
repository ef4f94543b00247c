"""What memory there is, and how a parameter server takes some of it for an array.

Arrays are aligned for vector instructions, and JAX can use them without a copy.
Large zeroed memory is mapped, not filled: a page costs nothing until somebody writes to it.
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
# From here on a page is only taken when it is written. Below, the C library is quicker.
_MAPPED_FROM_BYTES = 4 << 20
# Left to the process for everything that is not a part.
_MARGIN_BYTES = 64 << 20
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def zeroed(num_bytes: int, *, is_sparse: bool) -> np.ndarray:
    """Returns bytes that are all zero, and some more to align them; views have them as `base`.

    Args:
      num_bytes: How many.
      is_sparse: Whether many of them may never be written. Then pages are small, and one row
        that is written does not make 2 MiB around it resident; else they are large, and quick.

    Raises:
      MemoryError: There is no room for them.
    """
    if num_bytes < _MAPPED_FROM_BYTES:
        return np.zeros(num_bytes + ALIGNMENT, np.uint8)
    return np.frombuffer(mapped(num_bytes, is_sparse=is_sparse), np.uint8)


def mapped(num_bytes: int, *, is_sparse: bool) -> mmap.mmap:
    """Returns memory that is all zero, and of which a page is only taken when it is written.

    Raises:
      MemoryError: There is no room for it.
    """
    try:
        found = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(str(error)) from None
    _advise(found, "MADV_NOHUGEPAGE" if is_sparse else "MADV_HUGEPAGE")
    return found


def release(area: mmap.mmap, start: int) -> None:
    """Gives the pages of mapped memory back, from a byte on; what was in them is lost."""
    start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    if start < len(area):
        _advise(area, "MADV_DONTNEED", start, len(area) - start)


def _advise(area: mmap.mmap, advice: str, *where: int) -> None:
    # Advice only: a kernel without large pages refuses it.
    with contextlib.suppress(OSError, AttributeError):
        area.madvise(getattr(mmap, advice), *where)


class Block:
    """The memory of one array, which knows whether somebody else still looks at it.

    Note [Lent memory]: every view of NumPy refers to the object that owns the memory, here
    `_owner`, whatever was made from the view in between. So the number of references to the
    owner tells whether anything that was handed out is still alive, for example in a message
    that is being sent. The count can be too high for a moment, never too low.

    Attributes:
      array: The array.
      octets: Its bytes, in one dimension.
      rows: Its rows, each as one element; None if rows have no bytes or it has no dimensions.
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
        """Takes new memory, all zero; see the function `zeroed`."""
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
        """Takes an array of somebody else, as it is: it counts as lent and is never written."""
        return cls(array.reshape(-1).view(np.uint8), array, array)

    def _row_view(self) -> np.ndarray | None:
        if self.array.ndim == 0 or self.octets.size == 0:
            return None
        row_bytes = self.octets.size // self.array.shape[0]
        # One element of many bytes is copied at once: twice as quick as an array of numbers.
        return self.octets.view(np.dtype((np.void, row_bytes)))

    def _num_references(self) -> int:
        return sys.getrefcount(self._owner)

    @property
    def is_own(self) -> bool:
        """Whether the memory may be written when it is not lent."""
        return self._baseline >= 0

    def is_lent(self) -> bool:
        """Tells whether something that `lend` returned is still in use."""
        return self._num_references() > self._baseline

    def lend(self) -> np.ndarray:
        """Returns the bytes themselves, read-only; they are lent until nobody refers to them."""
        lent = self.octets[:]
        lent.flags.writeable = False
        return lent


def resident_bytes() -> int:
    """Returns how much memory this process has in use; 0 where the system does not say."""
    try:
        pages = int((_PROC / "self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def available_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Returns how much memory may still be taken; None where the system does not say."""
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
    """Returns what the control groups of this process leave, in either version of them."""
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
    """Returns what a group and those around it leave; a container may see its own as root."""
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
            pass  # No such group from here, or "max": it sets no limit.
        if group == root:
            return left
        group = group.parent
