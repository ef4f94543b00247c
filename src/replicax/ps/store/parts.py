"""A part of a variable: its memory, its version, and consistent reads during updates."""

from __future__ import annotations

import numpy as np

from replicax.foundation import runtime
from replicax.protocol import messages
from replicax.ps.store import memory
from replicax.ps.store.frozen import FrozenView, PreservedRows

# Smaller parts are copied when they are read: cheaper than tracking borrowed memory.
BORROWED_FROM_BYTES = 64 << 10
# Up to this size, a second block of memory is kept for the next swap.
_SPARE_UP_TO_BYTES = 64 << 20


class Part:
    """One array on a server.

    All access needs the lock, except to immutable attributes. Locks of several parts are acquired
    in the order of their numbers.

    Attributes:
      spec: The request that created it.
      label: Its name in errors.
      shape: Its shape.
      dtype: Its type.
      lock: Protects the value and the version.
      version: Grows with each change.
      num_missing: How many rows of its first value have not arrived yet: a long one is sent in
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
        self.lock = runtime.Lock()
        self.version = 1
        self.num_missing = 0
        initial = spec.initial
        is_zero = isinstance(initial, messages.Fill) and not any(initial.element)
        self._block = memory.Block.zeroed(spec.shape, dtype, is_sparse=is_zero)
        self._spare: memory.Block | None = None
        # Set while a snapshot reads the frozen value; see Note [Frozen parts].
        self._frozen: FrozenView | None = None
        # Kept between snapshots, because they preserve about as many rows each.
        self._old_rows: PreservedRows | None = None
        self.num_bytes = self._block.octets.size
        # A scalar has no rows.
        self.num_rows = spec.shape[0] if spec.shape else 0
        self.row_bytes = self.num_bytes // self.num_rows if self.num_rows else 0

    @property
    def value(self) -> np.ndarray:
        """The array; read-only, and only under the lock."""
        return self._block.array

    def read(self) -> np.ndarray:
        """Returns the bytes of the value; later changes do not affect them."""
        if self.num_bytes < BORROWED_FROM_BYTES:
            return self._block.octets.copy()
        return self._block.borrow()

    def read_rows(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the bytes of some rows, by valid numbers."""
        rows = self._block.rows
        if rows is None or numbers.size == 0:
            return np.empty(0, np.uint8)
        return rows.take(numbers).view(np.uint8)

    def take_rows(self, numbers: np.ndarray) -> np.ndarray:
        """Returns a copy of some rows as an array, by valid numbers."""
        rows = self.read_rows(numbers)
        return rows.view(self.dtype).reshape(numbers.size, *self.shape[1:])

    def put_rows(self, numbers: np.ndarray, rows: np.ndarray) -> None:
        """Replaces some rows, by valid and unique numbers."""
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

    def write_octets(self, start: int, octets: np.ndarray) -> None:
        """Replaces bytes of the value; zeros take no memory where there are zeros already."""
        end = start + octets.size
        if not octets.any() and not self._block.octets[start:end].any():
            return
        self._own()
        if self._frozen is not None:
            self._frozen.preserve(np.arange(start // self.row_bytes, -(-end // self.row_bytes)))
        self._block.octets[start:end] = octets
        self.version += 1

    def replace(self, value: np.ndarray) -> None:
        """Replaces the whole value."""
        np.copyto(self._swapped(), value)
        self.num_missing = 0
        self.version += 1

    def adopt(self, value: np.ndarray) -> None:
        """Replaces the whole value by an immutable array, without a copy."""
        if self.num_bytes < BORROWED_FROM_BYTES or not value.flags.c_contiguous:
            self.replace(value)
            return
        self._detach_view()
        self._block, self._spare = memory.Block.adopted(value), None
        self.num_missing = 0
        self.version += 1

    def combine(self, ufunc: np.ufunc, payload: np.ndarray) -> None:
        """Replaces the value by `ufunc(value, payload)`."""
        value = self._block.array
        ufunc(value, payload, out=self._swapped())
        self.version += 1

    def freeze(self) -> FrozenView:
        """Returns a view of the current value; later changes do not affect it.

        Changes are slower until `thaw`. Only one view may exist at a time, and only of parts of
        `BORROWED_FROM_BYTES` or more.
        """
        assert self._frozen is None and self.num_bytes >= BORROWED_FROM_BYTES, self.label
        if self._old_rows is None:
            self._old_rows = PreservedRows(self.num_rows, self.row_bytes)
        self._frozen = FrozenView(self._block, self._old_rows, self.num_rows, self.lock)
        return self._frozen

    def thaw(self, frozen: FrozenView) -> None:
        """Ends a view. Idempotent; acquires the lock itself."""
        with self.lock:
            if self._frozen is not frozen:
                return
            self._frozen = None
            frozen.old_rows.clear()
            if frozen.is_detached and self._spare is None:
                self._spare = frozen.block if self._is_reusable(frozen.block) else None

    def fill(self, start: int, octets: np.ndarray) -> None:
        """Writes bytes into the memory of a part that is not shared between threads yet."""
        self._block.octets[start : start + octets.size] = octets

    def _swapped(self) -> np.ndarray:
        """Returns memory for the next value: the current block, or another if that is in use.

        Its content is undefined; the caller fills all of it.
        """
        if self._is_frozen() or self._is_borrowed():
            self._switch_block()
        return self._block.array

    def _own(self) -> None:
        """Copies the value to another block if the current one is borrowed.

        A frozen view does not count: rows are preserved for it.
        """
        if self._is_borrowed():
            value = self._block.array
            self._switch_block()
            np.copyto(self._block.array, value)

    def _switch_block(self) -> None:
        """Leaves the current block to its readers, and continues in another."""
        block = self._spare
        if block is None or block.is_borrowed():
            block = memory.Block.zeroed(self.shape, self.dtype, is_sparse=False)
        keeps = not self._is_frozen() and self._is_reusable(self._block)
        self._detach_view()
        self._block, self._spare = block, self._block if keeps else None

    def _detach_view(self) -> None:
        if self._frozen is not None:
            self._frozen.is_detached = True

    def _is_borrowed(self) -> bool:
        return self.num_bytes >= BORROWED_FROM_BYTES and self._block.is_borrowed()

    def _is_frozen(self) -> bool:
        return self._frozen is not None and not self._frozen.is_detached

    def _is_reusable(self, block: memory.Block) -> bool:
        return block.is_own and self.num_bytes <= _SPARE_UP_TO_BYTES
