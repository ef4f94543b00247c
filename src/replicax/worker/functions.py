"""The functions that a worker was sent: the only place where anything is unpickled.

What comes here was sent by the coordinator that the worker is attached to, and by no one
else: the transport refuses functions from every other role.
"""

from __future__ import annotations

import collections
import io
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from replicax.foundation import errors
from replicax.protocol import codec
from replicax.worker.error_reports import UnknownFunctionError

# Returns what a name in a pickle stands for on this worker.
Resolve = Callable[[Any], Any]

_MOST = 1_000
_MOST_BYTES = 1 << 30
# So many of the last used are kept, however large: those that the next closures need.
_LEAST = 32


class _Entry:
    """A function: its bytes until it is used first, the object afterwards."""

    __slots__ = ("buffers", "function", "size")

    def __init__(self, buffers: Sequence[Any]) -> None:
        self.buffers: Sequence[Any] | None = buffers
        self.function: Any = None
        self.size = sum(memoryview(b).nbytes for b in buffers)


class Functions:
    """Functions by the SHA-256 of their bytes; those not used for long are forgotten.

    The thread of the socket stores them, the thread that computes loads them. A function
    is made once, so what it compiles, and what it keeps, serves all its calls.
    """

    def __init__(self, most: int = _MOST, most_bytes: int = _MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        # Protects the entries and their size, not what happens inside a function.
        self._lock = threading.Lock()
        self._entries: collections.OrderedDict[str, _Entry] = collections.OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def store(self, sha: str, buffers: Sequence[Any]) -> None:
        """Keeps a function that was sent; again is harmless."""
        if not buffers:
            raise errors.ProtocolError("A function has bytes", "none came", "Send its pickle.")
        with self._lock:
            if sha in self._entries:
                self._entries.move_to_end(sha)
                return
            entry = self._entries[sha] = _Entry(buffers)
            self._size += entry.size
            while len(self._entries) > self._most or (
                self._size > self._most_bytes and len(self._entries) > _LEAST
            ):
                self._size -= self._entries.popitem(last=False)[1].size

    def load(self, sha: str, resolve: Resolve) -> Any:
        """Returns a function, made from its bytes if this is the first time.

        Raises:
          UnknownFunctionError: It was not sent, or was forgotten.
        """
        with self._lock:
            entry = self._entries.get(sha)
            if entry is None:
                raise UnknownFunctionError(f"There is no function {sha!r} on this worker.")
            self._entries.move_to_end(sha)
        if entry.buffers is not None:
            if codec.fingerprint(entry.buffers) != sha:
                self._forget(sha)
                raise errors.ProtocolError(
                    "A function is named by the SHA-256 of its bytes",
                    f"other bytes came under {sha!r}",
                    "Send it again.",
                )
            entry.function = unpickle(entry.buffers, resolve)
            entry.buffers = None
        return entry.function

    def _forget(self, sha: str) -> None:
        with self._lock:
            entry = self._entries.pop(sha, None)
            self._size -= entry.size if entry is not None else 0


def unpickle(buffers: Sequence[Any], resolve: Resolve) -> Any:
    """Makes an object from its pickle and the arrays beside it; the arrays are its own."""
    beside = [bytearray(buffer) for buffer in buffers[1:]]
    return _Unpickler(io.BytesIO(buffers[0]), beside, resolve).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffers: list[bytearray], resolve: Resolve) -> None:
        super().__init__(file, buffers=buffers)
        self._resolve = resolve

    @override
    def persistent_load(self, pid: Any) -> Any:
        return self._resolve(pid)
