"""Peers in the threads of one process: the protocol of a group, without processes or sockets."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent import futures
from typing import Any

from replicax.foundation import errors

TIMEOUT_S = 20.0


class _Table:
    """The values that all members have sent, by the name and the number of the call."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.changed = threading.Condition()
        self.sent: dict[tuple[str, int], dict[int, bytes]] = defaultdict(dict)


class PeersInThreads:
    """One member; implements `replicax.foundation.peers.Peers`."""

    def __init__(self, table: _Table, index: int) -> None:
        self._table = table
        self.index = index
        self.calls: dict[str, int] = defaultdict(int)

    @property
    def count(self) -> int:
        return self._table.count

    def name_of(self, index: int) -> str:
        return f"/job:worker/task:{index}"

    def exchange(self, name: str, value: bytes, detail: str = "") -> list[bytes]:
        assert isinstance(value, bytes)
        table, key = self._table, (name, self.calls[name])
        self.calls[name] += 1
        with table.changed:
            table.sent[key][self.index] = value
            table.changed.notify_all()
            if not table.changed.wait_for(
                lambda: len(table.sent[key]) == table.count, timeout=TIMEOUT_S
            ):
                missing = sorted(set(range(table.count)) - table.sent[key].keys())
                raise errors.DeadlineExceededError(f"tasks {missing} did not call {name!r}")
            return [table.sent[key][i] for i in range(table.count)]

    def barrier(self, name: str) -> None:
        self.exchange(f"barrier {name}", b"")

    def confirm(self, name: str, fingerprint: str) -> int:
        assert len(set(self.exchange(f"confirm {name}", fingerprint.encode()))) == 1
        return 0

    def record(self, program: int) -> None: ...

    def guarded(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def run_workers(count: int, fn: Callable[[PeersInThreads], Any]) -> list[Any]:
    """Calls `fn(peers)` in one thread per member; returns each result, or the error of each."""
    table = _Table(count)

    def call(index: int) -> Any:
        try:
            return fn(PeersInThreads(table, index))
        except Exception as error:
            return error

    with futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(call, range(count)))


class Member:
    """An object in a Checkpoint whose state may differ on each worker."""

    def __init__(self, peers: PeersInThreads, state: Any = 0) -> None:
        self.peers = peers
        self.state = state

    def get_state(self) -> Any:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state
