"""The functions of a worker: the only module that unpickles.

Functions come only from the coordinator that the worker is attached to: the transport rejects
functions of every other role.
"""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from replicax.foundation import errors, runtime
from replicax.protocol import codec
from replicax.protocol.codec import Buffer
from replicax.worker.error_reports import UnknownFunctionError

# Returns the object of this worker that a persistent id in a pickle refers to.
Resolve = Callable[[object], object]

_MAX_FUNCTIONS = 1_000
_MAX_BYTES = 1 << 30
# So many of the last used are kept, whatever their size.
_MIN_FUNCTIONS = 32


class _Entry:
    """A function: its bytes until its first use, the object afterwards."""

    __slots__ = ("buffers", "function", "size")

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.buffers: Sequence[Buffer] | None = buffers
        self.function: Any = None
        self.size = sum(memoryview(b).nbytes for b in buffers)


class Functions:
    """An LRU cache of functions by the SHA-256 of their bytes.

    The socket thread stores them, the compute thread loads them. A function is unpickled once,
    so that all its calls share its compiled programs and its state.
    """

    def __init__(self, max_functions: int = _MAX_FUNCTIONS, max_bytes: int = _MAX_BYTES) -> None:
        self._max_functions, self._max_bytes = max_functions, max_bytes
        # Protects the entries and their size.
        self._lock = runtime.Lock()
        self._entries: collections.OrderedDict[str, _Entry] = collections.OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def store(self, sha: str, buffers: Sequence[Buffer]) -> None:
        """Stores a function. Idempotent."""
        if not buffers:
            raise errors.ProtocolError(f"Function {sha!r} was sent without its pickle.")
        with self._lock:
            if sha in self._entries:
                self._entries.move_to_end(sha)
                return
            entry = self._entries[sha] = _Entry(buffers)
            self._size += entry.size
            while len(self._entries) > self._max_functions or (
                self._size > self._max_bytes and len(self._entries) > _MIN_FUNCTIONS
            ):
                self._size -= self._entries.popitem(last=False)[1].size

    def load(self, sha: str, resolve: Resolve) -> Any:
        """Returns a function; unpickles it the first time.

        Raises:
          UnknownFunctionError: It was not sent, or was evicted.
        """
        with self._lock:
            entry = self._entries.get(sha)
            if entry is None:
                raise UnknownFunctionError(f"This worker does not have the function {sha!r}.")
            self._entries.move_to_end(sha)
        if entry.buffers is not None:
            if codec.fingerprint(entry.buffers) != sha:
                self._evict(sha)
                raise errors.ProtocolError(
                    "A function is identified by the SHA-256 of its bytes",
                    f"other bytes were sent for {sha!r}",
                    "Send it again.",
                )
            entry.function = unpickle(entry.buffers, resolve)
            entry.buffers = None
        return entry.function

    def _evict(self, sha: str) -> None:
        with self._lock:
            entry = self._entries.pop(sha, None)
            self._size -= entry.size if entry is not None else 0


def unpickle(buffers: Sequence[Buffer], resolve: Resolve) -> Any:
    """Unpickles an object from its pickle and copies of its out-of-band arrays."""
    arrays = [bytearray(buffer) for buffer in buffers[1:]]
    return _Unpickler(io.BytesIO(buffers[0]), arrays, resolve).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffers: list[bytearray], resolve: Resolve) -> None:
        super().__init__(file, buffers=buffers)
        self._resolve = resolve

    @override
    def persistent_load(self, pid: object) -> object:
        return self._resolve(pid)
