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
from collections.abc import Iterator

import numpy as np

from replicax.parameter_server.memory import Block

# What is copied at a time, under the lock of the part: about a millisecond.
PIECE_BYTES = 4 << 20
# Memory for preserved rows is taken, and let go, in chunks of about this size.
_CHUNK_BYTES = 16 << 20


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
        "_is_safe",
        "_lock",
        "_places",
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
        self._preserved = _Rows(self._row_bytes)
        # Where in those a row is, counted from 1; 0 if it was not preserved.
        self._places = np.zeros(num_rows, np.int64)
        self._buffer: np.ndarray | None = None

    @property
    def num_preserved_bytes(self) -> int:
        """How much is preserved and was not read yet."""
        return self._preserved.num_rows * self._row_bytes

    def preserve(self, numbers: np.ndarray) -> None:
        """Keeps what some rows hold, before they are changed; the part's lock is held."""
        rows = self.block.rows
        if self.is_apart or rows is None:
            return
        fresh = numbers[~self._is_safe[numbers]]
        if fresh.size:
            self._places[fresh] = self._preserved.add(rows, fresh)
            self._is_safe[fresh] = True

    def pieces(self) -> range:
        """Returns where the pieces begin, in bytes."""
        return range(0, self.block.octets.size, self._size)

    def read(self, start: int) -> np.ndarray:
        """Returns the bytes of a piece, until the next is read; each once, and in order."""
        end = min(start + self._size, self.block.octets.size)
        first, last = start // self._row_bytes, -(-end // self._row_bytes)
        piece: np.ndarray | None = None
        with self._lock:
            if not self.is_apart:
                piece = self._copied(start, end)
                # A row that goes on in the next piece is only safe with its last byte.
                self._is_safe[first : end // self._row_bytes] = True
            places = self._places[first:last].copy()
        found = np.flatnonzero(places)
        if piece is None:
            # Nobody changes the block any more: it needs neither lock nor copy.
            piece = self._copied(start, end) if found.size else self.block.octets[start:end]
        if not found.size:
            return piece
        if self._row_bytes <= self._size:
            self._preserved.move(places[found], piece.view(self._preserved.dtype), found)
            return piece
        # Longer than a piece: what they share. It is let go with its last byte.
        for row in (found + first).tolist():
            place = int(places[row - first])
            kept = self._preserved.look(place)
            begin = row * self._row_bytes - start
            low, high = max(begin, 0), min(begin + kept.size, piece.size)
            piece[low:high] = kept[low - begin : high - begin]
            if begin + kept.size <= piece.size:
                self._preserved.drop(place)
        return piece

    def _copied(self, start: int, end: int) -> np.ndarray:
        if self._buffer is None:
            self._buffer = np.empty(min(self._size, self.block.octets.size), np.uint8)
        piece = self._buffer[: end - start]
        np.copyto(piece, self.block.octets[start:end])
        return piece


class _Rows:
    """Rows that are put down one after the other, and taken in any order.

    One thread adds them while another takes those that were added before.

    Attributes:
      dtype: That of a row as one element.
    """

    def __init__(self, row_bytes: int) -> None:
        self.dtype = np.dtype((np.void, row_bytes))
        self._per_chunk = max(_CHUNK_BYTES // row_bytes, 1)
        # A chunk of which all rows were added and taken is None.
        self._chunks: list[np.ndarray | None] = []
        self._num_added = 0
        self._num_taken: list[int] = []

    @property
    def num_rows(self) -> int:
        """How many were added and not taken yet."""
        return self._num_added - sum(self._num_taken)

    def add(self, rows: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Copies some of the rows of an array; returns their places, which count from 1."""
        first = self._num_added
        for chunk, (low, high) in self._spans(first, first + numbers.size):
            if chunk == len(self._chunks):
                self._num_taken.append(0)
                self._chunks.append(np.empty(self._per_chunk, self.dtype))
            target, begin = self._chunks[chunk], chunk * self._per_chunk
            assert target is not None
            # The numbers were checked; any other mode would copy twice.
            part = numbers[low - first : high - first]
            rows.take(part, out=target[low - begin : high - begin], mode="clip")
        self._num_added += numbers.size
        return np.arange(first + 1, self._num_added + 1)

    def _spans(self, first: int, end: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yields the chunks of some rows, and which rows are in each."""
        while first < end:
            chunk = first // self._per_chunk
            last = min(end, (chunk + 1) * self._per_chunk)
            yield chunk, (first, last)
            first = last

    def move(self, places: np.ndarray, target: np.ndarray, numbers: np.ndarray) -> None:
        """Puts the rows at some places into rows of an array, and forgets them."""
        chunks, within = np.divmod(places - 1, self._per_chunk)
        for chunk in np.unique(chunks).tolist():
            source = self._chunks[chunk]
            assert source is not None
            chosen = np.flatnonzero(chunks == chunk)
            target[numbers[chosen]] = source[within[chosen]]
            self._forget(chunk, chosen.size)

    def look(self, place: int) -> np.ndarray:
        """Returns the bytes of a row."""
        chunk, within = divmod(place - 1, self._per_chunk)
        rows = self._chunks[chunk]
        assert rows is not None
        return rows[within : within + 1].view(np.uint8)

    def drop(self, place: int) -> None:
        """Forgets a row."""
        self._forget((place - 1) // self._per_chunk, 1)

    def _forget(self, chunk: int, count: int) -> None:
        self._num_taken[chunk] += count
        if self._num_taken[chunk] == self._per_chunk:
            self._chunks[chunk] = None
