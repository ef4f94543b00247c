"""Copy-on-write views: the value of a part at one moment, read piece by piece while it changes.

Note [Frozen parts]
    A table of gigabytes cannot be copied at once. It is frozen instead: the view keeps the block of
    memory that the part had. A change of some rows first preserves those of them that were not read
    yet. A change of the whole value leaves the block to the view and continues in another block. So
    a change copies the rows that it touches, once, and never waits for the reader: rows that change
    while a piece is copied were preserved before, and the reader patches them afterwards.

    The part keeps the memory of preserved rows, as much as its last view needed: new pages cost
    much more than the copy, particularly on virtual machines.
"""

from __future__ import annotations

import mmap

import numpy as np

from replicax.foundation import errors, runtime
from replicax.ps.store import memory

# How much is read at a time.
PIECE_BYTES = 4 << 20
# Available memory is checked for this many preserved bytes at a time.
_GRANT_BYTES = 64 << 20
_MOST_ROWS_OF_32_BITS = (1 << 31) - 1


def piece_bytes(num_bytes: int, num_rows: int) -> int:
    """Returns the size of the pieces of a value: whole rows, unless a row is longer."""
    row_bytes = num_bytes // num_rows if num_rows else 0
    return (
        max(PIECE_BYTES // row_bytes, 1) * row_bytes
        if 0 < row_bytes <= PIECE_BYTES
        else PIECE_BYTES
    )


class FrozenView:
    """The value of a part when it was frozen; not for scalars and empty parts.

    Attributes:
      block: The memory with the rows that were not preserved.
      old_rows: The rows that were.
      is_detached: Whether the part continues in another block, so that this one does not change
        any more. Set under the lock of the part.
    """

    __slots__ = (
        "_buffer",
        "_indices",
        "_is_safe",
        "_lock",
        "_octets",
        "_row_bytes",
        "_size",
        "block",
        "is_detached",
        "old_rows",
    )

    def __init__(
        self, block: memory.Block, old_rows: PreservedRows, num_rows: int, lock: runtime.Lock
    ) -> None:
        self.block = block
        self.old_rows = old_rows
        self.is_detached = False
        self._lock = lock
        # Not a NumPy view: while one exists, the block counts as borrowed.
        self._octets = block.octets.data
        self._row_bytes = block.octets.size // num_rows
        self._size = piece_bytes(block.octets.size, num_rows)
        # Rows that were read or preserved: they may be changed.
        self._is_safe = np.zeros(num_rows, np.bool_)
        # The index of each row in `old_rows`, counted from 1; 0 if it was not preserved.
        kind = np.int32 if num_rows <= _MOST_ROWS_OF_32_BITS else np.int64
        self._indices = np.zeros(num_rows, kind)
        self._buffer = np.empty(0, np.uint8)

    @property
    def num_preserved_bytes(self) -> int:
        """The size of the preserved rows."""
        return self.old_rows.num_added * self._row_bytes

    def preserve(self, numbers: np.ndarray) -> None:
        """Preserves some rows before they change; the part's lock is held."""
        rows = self.block.rows
        if self.is_detached or rows is None:
            return
        is_safe = self._is_safe.take(numbers)
        if is_safe.all():
            return
        fresh = numbers[~is_safe]
        self._indices[fresh] = self.old_rows.add(rows, fresh)
        self._is_safe[fresh] = True

    def pieces(self) -> range:
        """Returns the offsets of the pieces in bytes."""
        return range(0, self.block.octets.size, self._size)

    def read(self, start: int) -> np.ndarray:
        """Returns the bytes of a piece, valid until the next call; each once, and in order.

        Raises:
          ResourceExhaustedError: There was no memory to preserve changed rows.
        """
        end = min(start + self._size, self.block.octets.size)
        first, last = start // self._row_bytes, -(-end // self._row_bytes)
        piece = self._copied(start, end)
        with self._lock:
            # A row that continues in the next piece is not safe yet.
            self._is_safe[first : end // self._row_bytes] = True
            indices = self._indices[first:last].copy()
        self.old_rows.require_all()
        found = np.flatnonzero(indices)
        if not found.size:
            return piece
        if self._row_bytes <= self._size:
            piece.view(self.old_rows.dtype)[found] = self.old_rows.at(indices[found])
            return piece
        # Rows are longer than a piece: copy their intersections.
        for row in (found + first).tolist():
            kept = self.old_rows.at(indices[row - first : row - first + 1]).view(np.uint8)
            begin = row * self._row_bytes - start
            low, high = max(begin, 0), min(begin + kept.size, piece.size)
            piece[low:high] = kept[low - begin : high - begin]
        return piece

    def _copied(self, start: int, end: int) -> np.ndarray:
        if not self._buffer.size:
            self._buffer = np.empty(min(self._size, self.block.octets.size), np.uint8)
        piece = self._buffer[: end - start]
        np.copyto(piece, np.frombuffer(self._octets[start:end], np.uint8))
        return piece


class PreservedRows:
    """Copies of rows of one part, each at most once.

    One thread adds rows while another reads those added before. The memory is mapped in advance,
    and takes none until it is written.

    Attributes:
      dtype: The type of a row as one element.
      num_added: The number of rows.

    Args:
      most: The maximum number of rows.
      row_bytes: The size of a row.
    """

    def __init__(self, most: int, row_bytes: int) -> None:
        self.dtype = np.dtype((np.void, row_bytes))
        self.num_added = 0
        self._most = most
        self._area: mmap.mmap | None = None
        self._rows = np.empty(0, self.dtype)
        self._num_granted = 0
        self._shortage = ""

    def add(self, rows: np.ndarray, numbers: np.ndarray) -> np.ndarray | int:
        """Copies some of the rows of an array; returns their indices, counted from 1.

        If there is no memory, no more rows are added, and `require_all` raises; the change itself
        must not fail.
        """
        end = self.num_added + numbers.size
        if self._shortage or not self._has_room(end):
            return 0
        # The numbers are valid; any other mode would copy twice.
        rows.take(numbers, out=self._rows[self.num_added : end], mode="clip")
        self.num_added = end
        return np.arange(end - numbers.size + 1, end + 1)

    def at(self, indices: np.ndarray) -> np.ndarray:
        """Returns rows by index."""
        return self._rows.take(indices - 1)

    def clear(self) -> None:
        """Removes all rows; keeps the memory that they used, and releases the rest."""
        if self._area is not None:
            memory.release(self._area, self.num_added * self.dtype.itemsize)
        self._num_granted = self.num_added
        self.num_added = 0
        self._shortage = ""

    def require_all(self) -> None:
        """Raises if rows could not be added."""
        if self._shortage:
            raise errors.ResourceExhaustedError(
                f"A snapshot preserved {self.num_added * self.dtype.itemsize} bytes of rows that "
                f"changed while it was saved, and {self._shortage}. Give the server more memory, "
                "or partition the variable over more servers."
            )

    def _has_room(self, num_rows: int) -> bool:
        if num_rows <= self._num_granted:
            return True
        more = max(num_rows - self._num_granted, _GRANT_BYTES // self.dtype.itemsize)
        granted = min(self._num_granted + more, self._most)
        needed = (granted - self._num_granted) * self.dtype.itemsize
        available = memory.available_bytes()
        if available is not None and needed > available:
            self._shortage = f"needs {needed} more, with {available} bytes available"
            return False
        if self._area is None:
            try:
                self._area = memory.mapped(self._most * self.dtype.itemsize, is_sparse=False)
            except MemoryError as error:
                self._shortage = f"cannot allocate more: {error}"
                return False
            self._rows = np.frombuffer(self._area, self.dtype)
        self._num_granted = granted
        return True
