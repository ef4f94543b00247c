"""A part of a variable: its memory, its version, and how it is read while it is changed."""

from __future__ import annotations

import threading

import numpy as np

from replicax.protocol import messages
from replicax.ps.store import memory
from replicax.ps.store.frozen import Frozen, OldRows

# Smaller parts are copied when they are read: cheaper than to keep track of who reads them.
LENT_FROM_BYTES = 64 << 10
# A second block of memory is kept for the next swap up to this size.
_SPARE_UP_TO_BYTES = 64 << 20


class Part:
    """One array on a server.

    Everything but the attributes that never change needs the lock. Who needs several parts
    takes their locks in the order of their numbers.

    Attributes:
      spec: The request that made it.
      label: What errors call it.
      shape: Its shape.
      dtype: Its type.
      lock: Protects the value and the version.
      version: Grows with each change.
      num_missing: How many rows of its first value are still to come: a long one is sent in
        several messages.
    """

    __slots__ = (
        "_block",
        "_frozen",
        "_old_rows",
        "_spare",
        "dtype",
        "label",
        "lock",
        "num_bytes",
        "num_missing",
        "num_rows",
        "row_bytes",
        "shape",
        "spec",
        "version",
    )

    def __init__(self, spec: messages.CreatePart, dtype: np.dtype, task: str) -> None:
        self.spec = spec
        self.label = f"part {spec.part} ({spec.name!r}) on {task}"
        self.shape = spec.shape
        self.dtype = dtype
        self.lock = threading.Lock()
        self.version = 1
        self.num_missing = 0
        initial = spec.initial
        is_zero = isinstance(initial, messages.Fill) and not any(initial.element)
        self._block = memory.Block.zeroed(spec.shape, dtype, is_sparse=is_zero)
        self._spare: memory.Block | None = None
        # Set while a snapshot reads the value that the part had; see Note [Frozen parts].
        self._frozen: Frozen | None = None
        # What changed during the last snapshot is about what will during the next.
        self._old_rows: OldRows | None = None
        self.num_bytes = self._block.octets.size
        # Without dimensions there are no rows to speak of.
        self.num_rows = spec.shape[0] if spec.shape else 0
        self.row_bytes = self.num_bytes // self.num_rows if self.num_rows else 0

    @property
    def value(self) -> np.ndarray:
        """The array; it is only to be looked at, and only under the lock."""
        return self._block.array

    def read(self) -> np.ndarray:
        """Returns the bytes of the value, which no later change will touch."""
        if self.num_bytes < LENT_FROM_BYTES:
            return self._block.octets.copy()
        return self._block.lend()

    def read_rows(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the bytes of some rows; their numbers were checked."""
        rows = self._block.rows
        if rows is None or numbers.size == 0:
            return np.empty(0, np.uint8)
        return rows.take(numbers).view(np.uint8)

    def take_rows(self, numbers: np.ndarray) -> np.ndarray:
        """Returns a copy of some rows as an array; their numbers were checked."""
        rows = self.read_rows(numbers)
        return rows.view(self.dtype).reshape(numbers.size, *self.shape[1:])

    def put_rows(self, numbers: np.ndarray, rows: np.ndarray) -> None:
        """Replaces some rows; their numbers were checked, and each comes once."""
        self._own()
        target = self._block.rows
        if target is not None and numbers.size:
            if self._frozen is not None:
                self._frozen.preserve(numbers)
            flat = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
            target[numbers] = flat.view(target.dtype)
        self.version += 1

    def write_rows(self, start: int, rows: np.ndarray) -> None:
        """Replaces the rows from `start` on."""
        self._own()
        if self._frozen is not None:
            self._frozen.preserve(np.arange(start, start + rows.shape[0]))
        self._block.array[start : start + rows.shape[0]] = rows
        self.num_missing = max(0, self.num_missing - rows.shape[0])
        self.version += 1

    def replace(self, value: np.ndarray) -> None:
        """Replaces the whole value."""
        np.copyto(self._swapped(), value)
        self.num_missing = 0
        self.version += 1

    def adopt(self, value: np.ndarray) -> None:
        """Replaces the whole value by an array that nobody will write to, without a copy."""
        if self.num_bytes < LENT_FROM_BYTES or not value.flags.c_contiguous:
            self.replace(value)
            return
        self._leave_block()
        self._block, self._spare = memory.Block.adopted(value), None
        self.num_missing = 0
        self.version += 1

    def combine(self, ufunc: np.ufunc, payload: np.ndarray) -> None:
        """Replaces the value by that of a function of two arrays: the value and another."""
        value = self._block.array
        ufunc(value, payload, out=self._swapped())
        self.version += 1

    def freeze(self) -> Frozen:
        """Returns a view of the value as it is now, which no later change touches.

        It costs changes some time until `thaw`; there is one at a time. Only for parts of
        `LENT_FROM_BYTES` or more.
        """
        assert self._frozen is None and self.num_bytes >= LENT_FROM_BYTES, self.label
        if self._old_rows is None:
            self._old_rows = OldRows(self.num_rows, self.row_bytes)
        self._frozen = Frozen(self._block, self._old_rows, self.num_rows, self.lock)
        return self._frozen

    def thaw(self, frozen: Frozen) -> None:
        """Ends a view, whether it was read or not; again is harmless. Takes the lock itself."""
        with self.lock:
            if self._frozen is not frozen:
                return
            self._frozen = None
            frozen.old_rows.clear()
            if frozen.is_apart and self._spare is None:
                self._spare = frozen.block if self._is_worth_keeping(frozen.block) else None

    def fill(self, start: int, octets: np.ndarray) -> None:
        """Puts bytes into the memory of a part that nobody else knows yet."""
        self._block.octets[start : start + octets.size] = octets

    def _swapped(self) -> np.ndarray:
        """Returns memory for the next value: the present one, or another while that is in use.

        What is in it does not count; the caller fills all of it.
        """
        if self._is_frozen() or (self.num_bytes >= LENT_FROM_BYTES and self._block.is_lent()):
            self._move_on()
        return self._block.array

    def _own(self) -> None:
        """Makes sure that nobody reads the memory that is changed next, which keeps its value.

        A frozen view does not count: rows are preserved for it.
        """
        if self.num_bytes >= LENT_FROM_BYTES and self._block.is_lent():
            value = self._block.array
            self._move_on()
            np.copyto(self._block.array, value)

    def _move_on(self) -> None:
        """Leaves the present block to those who read it, and goes on in another."""
        block = self._spare
        if block is None or block.is_lent():
            block = memory.Block.zeroed(self.shape, self.dtype, is_sparse=False)
        keeps = not self._is_frozen() and self._is_worth_keeping(self._block)
        self._leave_block()
        self._block, self._spare = block, self._block if keeps else None

    def _leave_block(self) -> None:
        if self._frozen is not None:
            self._frozen.is_apart = True

    def _is_frozen(self) -> bool:
        return self._frozen is not None and not self._frozen.is_apart

    def _is_worth_keeping(self, block: memory.Block) -> bool:
        return block.is_own and self.num_bytes <= _SPARE_UP_TO_BYTES
