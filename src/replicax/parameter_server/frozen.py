"""The value that a part had at one moment, read piece by piece while the part is changed.

Note [Frozen parts]
    A table of gigabytes cannot be copied at one moment. It is frozen instead: the view keeps the
    block of memory that the part had. Whoever changes some rows of that block first preserves
    those that were not read yet, and only those. Whoever replaces the whole value leaves the
    block to the view, and goes on in another one. So a change costs a copy of the rows that it
    touches, once, and waits at most until one piece is copied.
"""

from __future__ import annotations

import threading

import numpy as np

from replicax.parameter_server.memory import Block

# What is copied at a time, under the lock of the part: about a millisecond.
PIECE_BYTES = 4 << 20


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
      is_apart: Whether the part goes on in another block: nobody changes this one any more. It
        is set under the lock of the part.
    """

    __slots__ = (
        "_buffer",
        "_found",
        "_is_safe",
        "_lock",
        "_preserved",
        "_row_bytes",
        "_size",
        "block",
        "is_apart",
    )

    def __init__(self, block: Block, num_rows: int, lock: threading.Lock) -> None:
        self.block = block
        self.is_apart = False
        self._lock = lock
        self._row_bytes = block.octets.size // num_rows
        self._size = piece_bytes(block.octets.size, num_rows)
        # Rows that were read or preserved: they may be changed.
        self._is_safe = np.zeros(num_rows, np.bool_)
        # Preserved since a piece was last read.
        self._preserved: list[tuple[np.ndarray, np.ndarray]] = []
        # Preserved before, by piece; used by the reader alone.
        self._found: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        self._buffer: np.ndarray | None = None

    def preserve(self, numbers: np.ndarray) -> None:
        """Keeps what some rows hold, before they are changed; the part's lock is held."""
        rows = self.block.rows
        if self.is_apart or rows is None:
            return
        fresh = numbers[~self._is_safe[numbers]]
        if fresh.size:
            self._preserved.append((fresh, rows.take(fresh)))
            self._is_safe[fresh] = True

    def pieces(self) -> range:
        """Returns where the pieces begin, in bytes."""
        return range(0, self.block.octets.size, self._size)

    def read(self, start: int) -> np.ndarray:
        """Returns the bytes of a piece, until the next is read; each once, and in order."""
        end = min(start + self._size, self.block.octets.size)
        piece: np.ndarray | None = None
        with self._lock:
            if not self.is_apart:
                piece = self._copied(start, end)
                # A row that goes on in the next piece is only safe with its last byte.
                self._is_safe[start // self._row_bytes : end // self._row_bytes] = True
            taken, self._preserved = self._preserved, []
        self._sort(taken)
        found = self._found.pop(start // self._size, [])
        if piece is None:
            # Nobody changes the block any more: it needs neither lock nor copy.
            piece = self._copied(start, end) if found else self.block.octets[start:end]
        for numbers, rows in found:
            self._lay_over(piece, start, numbers, rows)
        return piece

    def _copied(self, start: int, end: int) -> np.ndarray:
        if self._buffer is None:
            self._buffer = np.empty(min(self._size, self.block.octets.size), np.uint8)
        piece = self._buffer[: end - start]
        np.copyto(piece, self.block.octets[start:end])
        return piece

    def _sort(self, preserved: list[tuple[np.ndarray, np.ndarray]]) -> None:
        """Puts preserved rows where the pieces that they are part of will find them."""
        for numbers, rows in preserved:
            first = numbers * self._row_bytes // self._size
            last = ((numbers + 1) * self._row_bytes - 1) // self._size
            if self._row_bytes > self._size:
                for i in range(numbers.size):
                    one = numbers[i : i + 1], rows[i : i + 1]
                    for piece in range(int(first[i]), int(last[i]) + 1):
                        self._found.setdefault(piece, []).append(one)
                continue
            # The numbers are sorted: those of a piece lie together.
            cuts = np.flatnonzero(np.diff(first)) + 1
            pieces = first[np.concatenate(([0], cuts))]
            parts = zip(np.split(numbers, cuts), np.split(rows, cuts), strict=True)
            for piece, part in zip(pieces.tolist(), parts, strict=True):
                self._found.setdefault(piece, []).append(part)

    def _lay_over(
        self, piece: np.ndarray, start: int, numbers: np.ndarray, rows: np.ndarray
    ) -> None:
        if self._row_bytes <= self._size:
            target = piece.view(rows.dtype)
            target[numbers - start // self._row_bytes] = rows
            return
        # One row, longer than the piece: what they share.
        row = rows.view(np.uint8).reshape(-1)
        begin = int(numbers[0]) * self._row_bytes - start
        low, high = max(begin, 0), min(begin + row.size, piece.size)
        piece[low:high] = row[low - begin : high - begin]
