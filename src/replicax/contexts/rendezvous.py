"""`Rendezvous`: replicas of an eager run wait until all have made the same call.

Note [Order of replicas]
    Replica 0 runs up to its next meeting, or to its end; then replica 1, and so on. All replicas
    but the last have a thread each; the last one runs in the caller's thread. When it arrives,
    all others are waiting, so it acts for all of them at once, releases the others one after
    the other, and continues. Only one thread runs at any time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import jax

from replicax.contexts import frames
from replicax.contexts.frames import Frame, Mode
from replicax.foundation import errors, jax_compat

_Call = TypeVar("_Call")

_CHECK_S = 5.0


class Aborted(BaseException):
    """Unwinds a waiting replica after another one failed."""


class Meeting(Generic[_Call]):
    """A meeting of all replicas, as the replica that acts for all of them sees it.

    Attributes:
      calls: What each replica passed to `Rendezvous.arrive`, in replica order.
      results: The result of each replica, which `result_of` returns; set by the acting one.
    """

    __slots__ = ("calls", "results")

    def __init__(self, calls: list[_Call]) -> None:
        self.calls = calls
        self.results: Sequence[object] | None = None


class _Waiting:
    """The state of a replica that has a thread of its own."""

    __slots__ = ("call", "error", "is_done", "may_go", "parked", "result")

    def __init__(self) -> None:
        self.may_go = threading.Lock()
        self.may_go.acquire()
        self.parked = threading.Lock()
        self.parked.acquire()
        self.is_done = False
        self.error: BaseException | None = None
        # Set while the replica waits for the others.
        self.call: object = None
        self.result: object = None


class Rendezvous:
    """Synchronizes the replicas of one eager run; see Note [Order of replicas]."""

    def __init__(self, num_replicas: int) -> None:
        self._last = num_replicas - 1
        self._others = [_Waiting() for _ in range(self._last)]
        self._is_aborted = False
        # The error of a meeting. It reaches the caller even if the code of the replica in whose
        # thread it happened catches it.
        self.failure: BaseException | None = None

    # Called by replica code.

    def arrive(self, replica_id: int, call: _Call) -> Meeting[_Call] | None:
        """Waits until all replicas have arrived.

        Returns:
          In the last replica the meeting, which it must enter `acting` for; None in the others,
          once the last one has acted. `result_of` then returns their results.
        """
        if replica_id < self._last:
            self._park(self._others[replica_id], call)
            return None
        calls: list[_Call] = []
        for i, other in enumerate(self._others):
            if other.call is None:
                self.failure = different_numbers(i)
                raise Aborted from self.failure
            calls.append(other.call)  # type: ignore[arg-type]
        calls.append(call)
        return Meeting(calls)

    @contextlib.contextmanager
    def acting(self, meeting: Meeting[_Call]) -> Iterator[None]:
        """Runs code for all replicas, then releases the others, one after the other."""
        try:
            yield
            for i, other in enumerate(self._others):
                other.call = None
                other.result = None if meeting.results is None else meeting.results[i]
                other.may_go.release()
                self._wait_parked(other)
        except BaseException as error:
            self.failure = error
            raise Aborted from error

    def result_of(self, replica_id: int) -> object:
        """Returns what the acting replica computed for another one; once."""
        other = self._others[replica_id]
        result, other.result = other.result, None
        return result

    def _park(self, replica: _Waiting, call: object) -> None:
        if self._is_aborted:
            raise Aborted
        replica.call = call
        replica.parked.release()
        while not replica.may_go.acquire(timeout=_CHECK_S):
            pass
        if self._is_aborted:
            raise Aborted

    # Called by the executor.

    def follow(
        self, replica_id: int, start: Callable[[Callable[[], None]], None], body: Callable[[], None]
    ) -> None:
        """Starts the thread of a replica, and waits until it meets the others or ends."""
        replica = self._others[replica_id]

        def run() -> None:
            try:
                body()
                replica.is_done = True
            except BaseException as error:
                replica.error = error
            finally:
                replica.parked.release()

        start(run)
        self._wait_parked(replica)

    def finish(self) -> None:
        """Raises unless all replicas have ended; called when the last one has."""
        for i, replica in enumerate(self._others):
            if not replica.is_done and self.failure is None:
                raise different_numbers(i)

    def abort(self) -> None:
        """Unwinds every waiting replica, and waits until it has ended."""
        self._is_aborted = True
        for replica in self._others:
            if replica.call is not None and replica.error is None and not replica.is_done:
                replica.call = None
                replica.may_go.release()
                replica.parked.acquire(timeout=_CHECK_S)

    def _wait_parked(self, replica: _Waiting) -> None:
        while not replica.parked.acquire(timeout=_CHECK_S):
            pass
        if replica.error is not None:
            raise replica.error


@contextlib.contextmanager
def acting_for_all(frame: Frame, rendezvous: Rendezvous, meeting: Meeting[_Call]) -> Iterator[None]:
    """Runs code of this library for all replicas that met, in cross-replica mode."""
    layout = frame.layout
    assert layout is not None
    with (
        rendezvous.acting(meeting),
        frames.pushed(frame.entered(Mode.CROSS_REPLICA)),
        jax.default_device(layout.local_devices[0]),
    ):
        yield


def require_meeting(frame: Frame) -> int:
    """Returns the running replica of an eager run; raises where replicas cannot meet."""
    if frame.overlay is not None and not frame.overlay.meets_other_replicas:
        raise errors.ContextError(
            "`merge_call` needs values of its own, not values that are being differentiated",
            "it is called inside `rx.value_and_grad` in eager replica code",
            "Call it after the gradient, use `all_reduce`, or compile the step with `rx.function`.",
        )
    if frame.overlay is None and not jax_compat.is_eager():
        raise errors.TracingError(
            "Replicas that run eagerly can meet only outside of JAX transformations",
            "`merge_call` is called inside a jax.jit, scan, vmap or grad",
            "Compile the whole step with `rx.function` instead.",
        )
    assert frame.replica_id is not None
    return frame.replica_id


def different_calls(replica_id: int, first: object, other: object) -> errors.ContextError:
    """Returns the error of replicas that make different calls where they meet."""
    return errors.ContextError(
        "All replicas must pass the same function to `merge_call`",
        f"replica 0 passed {first} and replica {replica_id} passed {other}",
        "Choose the function outside of replica code.",
    )


def different_numbers(replica_id: int) -> errors.ContextError:
    """Returns the error of replicas that meet different numbers of times."""
    return errors.ContextError(
        "All replicas must call `merge_call` (all_reduce, all_gather, assign of an "
        "aggregated variable) equally often",
        f"replica {replica_id} made another number of calls than the last one",
        "Do not let such calls depend on the replica id.",
    )
