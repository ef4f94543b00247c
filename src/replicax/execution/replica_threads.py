"""Threads that run replica code, lent out one run at a time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_IDLE_S = 1.0


class ReplicaThreads:
    """Keeps a few idle threads for a moment, so that a training loop does not start new ones."""

    def __init__(self) -> None:
        # Protects `_idle`. No other lock is taken while it is held.
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []

    def start(self, job: Callable[[], None]) -> None:
        """Runs a job on an idle thread, or on a new one."""
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None:
            worker = _Worker(self)
            worker.start()
        worker.jobs.put(job)

    def take_back(self, worker: _Worker) -> None:
        """Notes that a thread is idle."""
        with self._lock:
            self._idle.append(worker)

    def retire(self, worker: _Worker) -> bool:
        """Lets an idle thread end, unless it was just lent out."""
        with self._lock:
            if worker in self._idle:
                self._idle.remove(worker)
                return True
            return False


class _Worker(threading.Thread):
    def __init__(self, owner: ReplicaThreads) -> None:
        super().__init__(name="replicax-replica", daemon=True)
        self.jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._owner = owner

    def run(self) -> None:
        while True:
            try:
                job = self.jobs.get(timeout=_IDLE_S)
            except queue.Empty:
                if self._owner.retire(self):
                    return
                continue
            job()
            del job
            self._owner.take_back(self)


replica_threads = ReplicaThreads()
