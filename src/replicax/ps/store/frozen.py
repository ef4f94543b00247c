"""The value that a part had at one moment, read piece by piece while the part is changed.

Note [Frozen parts]
    A table of gigabytes cannot be copied at one moment. It is frozen instead: the view keeps the
    block of memory that the part had. Whoever changes some rows of that block first preserves
    those that were not read yet, and only those. Whoever replaces the whole value leaves the
    block to the view, and goes on in another one. So a change costs a copy of the rows that it
    touches, once, and never waits for a piece to be copied: whatever was changed under the hands
    of whoever copies it was preserved before, and is put right afterwards.

    Memory for preserved rows stays with the part, as much as its last view needed: fresh pages
    cost much more than the copy, and most of all on virtual machines.
"""

from __future__ import annotations

import mmap
import threading

import numpy as np

from replicax.foundation import errors
from replicax.ps.store import memory

# What is read at a time.
PIECE_BYTES = 4 << 20
# The system is asked for room for so many preserved bytes at a time.
_GRANT_BYTES = 64 << 20
_MOST_ROWS_OF_32_BITS = (1 << 31) - 1


def piece_bytes(num_bytes: int, num_rows: int) -> int:
    """Returns the size of the pieces of a value: whole rows, unless a row is longer than that."""
    row_bytes = num_bytes // num_rows if num_rows else 0
    return (
        max(PIECE_BYTES // row_bytes, 1) * row_bytes
        if 0 < row_bytes <= PIECE_BYTES
        else PIECE_BYTES
    )


class Frozen:
    """What a part looked like when it was frozen; it has rows, and they have bytes.

    Attributes:
      block: The memory that holds what was not preserved.
      old_rows: The rows that were.
      is_apart: Whether the part goes on in another block: nobody changes this one any more. It
        is set under the lock of the part.
    """

    __slots__ = (
        "_buffer",
        "_is_safe",
        "_lock",
        "_octets",
        "_places",
        "_row_bytes",
        "_size",
        "block",
        "is_apart",
        "old_rows",
    )

    def __init__(
        self, block: memory.Block, old_rows: OldRows, num_rows: int, lock: threading.Lock
    ) -> None:
        self.block = block
        self.old_rows = old_rows
        self.is_apart = False
        self._lock = lock
        # Not a view of NumPy: while one exists, the block counts as lent and is left alone.
        self._octets = block.octets.data
        self._row_bytes = block.octets.size // num_rows
        self._size = piece_bytes(block.octets.size, num_rows)
        # Rows that were read or preserved: they may be changed.
        self._is_safe = np.zeros(num_rows, np.bool_)
        # Where in those a row is, counted from 1; 0 if it was not preserved.
        kind = np.int32 if num_rows <= _MOST_ROWS_OF_32_BITS else np.int64
        self._places = np.zeros(num_rows, kind)
        self._buffer = np.empty(0, np.uint8)

    @property
    def num_preserved_bytes(self) -> int:
        """How much is preserved."""
        return self.old_rows.num_added * self._row_bytes

    def preserve(self, numbers: np.ndarray) -> None:
        """Keeps what some rows hold, before they are changed; the part's lock is held."""
        rows = self.block.rows
        if self.is_apart or rows is None:
            return
        is_safe = self._is_safe.take(numbers)
        if is_safe.all():
            return
        fresh = numbers[~is_safe]
        self._places[fresh] = self.old_rows.add(rows, fresh)
        self._is_safe[fresh] = True

    def pieces(self) -> range:
        """Returns where the pieces begin, in bytes."""
        return range(0, self.block.octets.size, self._size)

    def read(self, start: int) -> np.ndarray:
        """Returns the bytes of a piece, until the next is read; each once, and in order.

        Raises:
          ResourceExhaustedError: There was no memory for rows that were changed.
        """
        end = min(start + self._size, self.block.octets.size)
        first, last = start // self._row_bytes, -(-end // self._row_bytes)
        piece = self._copied(start, end)
        with self._lock:
            # A row that goes on in the next piece is only safe with its last byte.
            self._is_safe[first : end // self._row_bytes] = True
            places = self._places[first:last].copy()
        self.old_rows.require_all()
        found = np.flatnonzero(places)
        if not found.size:
            return piece
        if self._row_bytes <= self._size:
            piece.view(self.old_rows.dtype)[found] = self.old_rows.at(places[found])
            return piece
        # Rows are longer than a piece: what they share.
        for row in (found + first).tolist():
            kept = self.old_rows.at(places[row - first : row - first + 1]).view(np.uint8)
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


class OldRows:
    """Rows of one part that are put down one after the other, each at most once.

    One thread adds them while another reads those that were added before. Their memory is
    mapped at once, and costs nothing until it is written.

    Attributes:
      dtype: That of a row as one element.
      num_added: How many there are.

    Args:
      most: How many there can be.
      row_bytes: The size of each.
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
        """Copies some of the rows of an array; returns their places, which count from 1.

        Without memory for them nothing is added any more: whoever changes them must not suffer.
        """
        end = self.num_added + numbers.size
        if self._shortage or not self._has_room(end):
            return 0
        # The numbers were checked; any other mode would copy twice.
        rows.take(numbers, out=self._rows[self.num_added : end], mode="clip")
        self.num_added = end
        return np.arange(end - numbers.size + 1, end + 1)

    def at(self, places: np.ndarray) -> np.ndarray:
        """Returns the rows at some places."""
        return self._rows.take(places - 1)

    def clear(self) -> None:
        """Forgets all rows; their memory stays, and what was not needed for them goes."""
        if self._area is not None:
            memory.release(self._area, self.num_added * self.dtype.itemsize)
        self._num_granted = self.num_added
        self.num_added = 0
        self._shortage = ""

    def require_all(self) -> None:
        """Raises if something could not be added."""
        if self._shortage:
            raise errors.ResourceExhaustedError(
                "Rows that change while they are saved must be kept until they are",
                f"{self.num_added * self.dtype.itemsize} bytes of them are, and {self._shortage}",
                "Give the server more memory, or partition the variable over more servers.",
            )

    def _has_room(self, num_rows: int) -> bool:
        if num_rows <= self._num_granted:
            return True
        more = max(num_rows - self._num_granted, _GRANT_BYTES // self.dtype.itemsize)
        granted = min(self._num_granted + more, self._most)
        needed = (granted - self._num_granted) * self.dtype.itemsize
        available = memory.available_bytes()
        if available is not None and needed > available:
            self._shortage = f"{needed} more need memory, of which {available} bytes are left"
            return False
        if self._area is None:
            try:
                self._area = memory.mapped(self._most * self.dtype.itemsize, is_sparse=False)
            except MemoryError as error:
                self._shortage = f"the system refuses memory for all of them: {error}"
                return False
            self._rows = np.frombuffer(self._area, self.dtype)
        self._num_granted = granted
        return True
