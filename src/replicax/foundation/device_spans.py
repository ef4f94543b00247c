"""When programs that were dispatched to devices have run, for traces.

A call of a compiled function returns before its program has run. While a trace is recorded, one
thread waits for an output of each program in turn. A program starts when it was dispatched, or
when the one before it has ended.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from replicax.foundation import spans

_TRACK = "devices"
# Programs that are dispatched while so many wait are left out of the trace.
_MOST_WAITING = 1_024
# The thread ends after so many seconds without a program.
_IDLE_S = 0.5


class _Watcher:
    """Waits for the outputs of programs, in the order of their dispatch."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[tuple[jax.Array, int, str, str]] = queue.Queue(_MOST_WAITING)
        self._lock = threading.Lock()
        self._is_running = False

    def watch(self, token: jax.Array, began: int, kind: str, label: str) -> None:
        """Records a program when its output is there."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait((token, began, kind, label))
        with self._lock:
            if not self._is_running:
                self._is_running = True
                threading.Thread(
                    target=self._run, name="replicax-device-spans", daemon=True
                ).start()

    def _run(self) -> None:
        previous = 0
        while True:
            try:
                token, began, kind, label = self._waiting.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._waiting.empty():
                        self._is_running = False
                        return
                continue
            # A program that fails raises its error in the thread of the user.
            with contextlib.suppress(Exception):
                token.block_until_ready()
            del token
            ended = time.monotonic_ns()
            recorder = spans.recorder()
            if recorder is not None:
                recorder.add_on_track(_TRACK, kind, max(began, previous), ended, label)
            previous = ended
            self._waiting.task_done()

    def wait(self, timeout: float) -> None:
        """Waits until all programs are recorded, or for a time."""
        with self._waiting.all_tasks_done:
            self._waiting.all_tasks_done.wait_for(
                lambda: not self._waiting.unfinished_tasks, timeout
            )


_watcher = _Watcher()


def watch(output: jax.Array | None, began: int, kind: str, label: str) -> None:
    """Records the span of a program on the devices, once it has ended.

    Args:
      output: An output of the program that no other program takes over; None if it has none.
      began: The result of `spans.now` when it was dispatched.
      kind: What it does: "compute" or "all-reduce".
      label: The name of the program.
    """
    if output is not None:
        _watcher.watch(output, began, kind, label)


def output_to_watch(
    token: jax.Array | None, results: Sequence[jax.Array], state: Sequence[jax.Array]
) -> jax.Array | None:
    """Returns an output of a program that tells when it has ended; None if it has none.

    Args:
      token: The output for the gate, if there is one.
      results: Outputs that are handed to the user.
      state: Outputs that the next run may take over: another reference would make it copy them.
    """
    if token is not None:
        return token
    if results:
        return results[0]
    return _after(state[0]) if state else None


@functools.partial(jax.jit, keep_unused=True)
def _after(array: jax.Array) -> jax.Array:
    """Returns an array that is there when the given one is."""
    del array
    return jnp.zeros((), jnp.int8)


def wait(timeout: float) -> None:
    """Waits until all programs that were dispatched are recorded, or for a time in seconds."""
    _watcher.wait(timeout)
