"""The eager executor: replica code runs as ordinary Python, replica after replica.

Note [Order of replicas]
    Replica 0 runs up to its next `merge_call`, or to its end; then replica 1, and so on.
    All replicas but the last have a thread each; the last one runs in the caller's
    thread. When it reaches `merge_call`, all others are parked at theirs, so it calls
    `merge_fn` at once, lets the others go on one after the other, and continues. Only
    one thread runs at any time.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

from replicax.contexts import frames
from replicax.contexts.frames import Frame, Mode
from replicax.contexts.overlay import EagerReads
from replicax.contexts.replica_context import ReplicaContext
from replicax.execution import eager_collectives
from replicax.execution.local_arguments import LocalArguments, explained_devices, localized
from replicax.execution.replica_threads import replica_threads
from replicax.foundation import devices, errors, jax_compat
from replicax.values.layout import ReplicaLayout
from replicax.values.regroup import map_structure, regroup, select

_CHECK_S = 5.0


class _Aborted(BaseException):
    """Unwinds a parked replica after another one failed."""


class _Replica:
    """What one replica waits for and what it has come to."""

    def __init__(self) -> None:
        self.may_go = threading.Lock()
        self.may_go.acquire()
        self.parked = threading.Lock()
        self.parked.acquire()
        self.is_done = False
        self.result: Any = None
        self.error: BaseException | None = None
        # Set while the replica waits in merge_call.
        self.call: tuple[Any, Any, Any] | None = None
        self.answer: Any = None


class ThreadedRun:
    """One eager `run`: the executor that its replica code talks to."""

    def __init__(self, strategy: Any, layout: ReplicaLayout, fn: Any, args: Any, kwargs: Any):
        self._strategy = strategy
        self._layout = layout
        self._fn = fn
        self._args = args
        self._kwargs = kwargs
        self.num_replicas = self._count = layout.num_replicas
        self._others = [_Replica() for _ in range(self._count - 1)]
        self._is_aborted = False
        # What went wrong while replicas met. It reaches the caller even if the code of the
        # replica in whose thread it happened would have caught it.
        self._failure: BaseException | None = None
        self._opened_at = frames.current().opened_at
        self._given = LocalArguments()
        # Variables created in this run, by canonical name, and how many of each a replica
        # has asked for.
        self._created: dict[str, list[Any]] = {}
        self._asked: list[dict[str, int]] = [{} for _ in range(self._count)]

    def run(self) -> Any:
        """Runs all replicas and merges what they return."""
        if frames.current().overlay is None and not jax_compat.is_eager():
            raise errors.TracingError(
                "`Strategy.run` inside a JAX transformation needs `rx.function`",
                "the code runs under a bare jax.jit, jax.grad, jax.vmap or the like",
                "Use `rx.function` in the place of jax.jit, and `rx.value_and_grad` in the "
                "function that `run` calls.",
            )
        caller_settings = jax_compat.caller_settings()
        last = None
        try:
            for i, replica in enumerate(self._others):
                context = contextvars.copy_context()
                job = _bind(context.run, self._thread_body, i, replica, caller_settings)
                replica_threads.start(job)
                self._wait_parked(replica)
            last = self._call(self._count - 1)
            for i, replica in enumerate(self._others):
                if not replica.is_done and self._failure is None:
                    raise _different_numbers(i)
        except BaseException as error:
            self._abort()
            if self._failure is None or self._failure is error:
                raise
        if self._failure is not None:
            self._abort()
            raise self._failure
        results = [replica.result for replica in self._others] + [last]
        return self._regrouped(results)

    def _thread_body(self, i: int, replica: _Replica, caller_settings: Any) -> None:
        try:
            with jax_compat.settings(caller_settings):
                replica.result = self._call(i)
            replica.is_done = True
        except BaseException as error:
            replica.error = error
        finally:
            replica.parked.release()

    def _call(self, i: int) -> Any:
        with EagerReads() as reads, self._replica_frame(i, reads):
            args, kwargs = map_structure(
                lambda leaf: self._localize(i, leaf), select(i, (self._args, self._kwargs))
            )
            with explained_devices():
                return self._fn(*args, **kwargs)

    @contextlib.contextmanager
    def _replica_frame(self, i: int, reads: EagerReads) -> Iterator[None]:
        context = ReplicaContext(self._strategy, self._layout.replica_ids[i])
        frame = Frame(
            Mode.REPLICA,
            self._strategy,
            self._layout,
            replica_id=i,
            replica_context=context,
            executor=self,
            eager_reads=reads,
            opened_at=self._opened_at,
        )
        with devices.device(self._layout.devices[i]), frames.pushed(frame):
            yield

    def _localize(self, i: int, leaf: Any) -> Any:
        """Makes an array that is bound to devices usable on this replica's device."""
        return self._given.localize(leaf, self._layout.devices[i])

    def _regrouped(self, values: list[Any]) -> Any:
        """Merges one structure per replica; what all were given and hand back stays one."""
        values = [self._given.originals(value) for value in values]
        return regroup(values, self._layout, own=self._own)

    def _own(self, i: int, leaf: Any) -> Any:
        """Brings what one replica computed on another device to its own."""
        return localized(leaf, self._layout.devices[i])

    # The part that replica code talks to.

    def merge_call(self, merge_fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        frame = frames.current()
        self._require_meeting(frame)
        replica_id = frame.replica_id
        assert replica_id is not None
        if frame.eager_reads is not None:
            # What this replica traced for itself is not for the replicas that run meanwhile.
            frame.eager_reads.renew()
        if replica_id < self._count - 1:
            answer = self._park(self._others[replica_id], (merge_fn, args, kwargs))
        else:
            answer = self._meet(merge_fn, args, kwargs)
        answer = map_structure(lambda leaf: self._localize(replica_id, leaf), answer)
        if frame.eager_reads is not None:
            frame.eager_reads.renew()
        return answer

    def _require_meeting(self, frame: Frame) -> None:
        """Raises where replicas cannot meet."""
        if frame.overlay is not None and not frame.overlay.meets_other_replicas:
            raise errors.ContextError(
                "`merge_call` needs values of its own, not values that are being differentiated",
                "it is called inside `rx.value_and_grad` in eager replica code",
                "Call it after the gradient, use `all_reduce`, or compile the step with "
                "`rx.function`.",
            )
        if frames.current().overlay is None and not jax_compat.is_eager():
            raise errors.TracingError(
                "Replicas that run eagerly can meet only outside of JAX transformations",
                "`merge_call` is called inside a jax.jit, scan, vmap or grad",
                "Compile the whole step with `rx.function` instead.",
            )

    def all_reduce(self, op: Any, value: Any, options: Any) -> Any:
        return eager_collectives.all_reduce(self, op, value, options)

    def all_gather(self, value: Any, axis: int) -> Any:
        return eager_collectives.all_gather(self, value, axis)

    def shared_variable(self, name: str, create: Callable[[], Any]) -> Any:
        """Creates a variable in replica 0 and hands it to the other replicas."""
        canonical = re.sub(r"(_\d+)+$", "", name)
        replica_id = frames.current().replica_id
        assert replica_id is not None
        asked = self._asked[replica_id]
        index = asked.get(canonical, 0)
        asked[canonical] = index + 1
        made = self._created.setdefault(canonical, [])
        if replica_id == 0:
            made.append(create())
        if index >= len(made):
            raise errors.ContextError(
                "All replicas must create the same variables",
                f"replica {replica_id} creates {name!r} and replica 0 did not (it made "
                f"{sorted(v.name for vs in self._created.values() for v in vs)})",
                "Give a variable one name on all replicas, up to a number at its end.",
            )
        return made[index]

    def _park(self, replica: _Replica, call: tuple[Any, Any, Any]) -> Any:
        if self._is_aborted:
            raise _Aborted
        replica.call = call
        replica.parked.release()
        while not replica.may_go.acquire(timeout=_CHECK_S):
            pass
        if self._is_aborted:
            raise _Aborted
        answer, replica.answer = replica.answer, None
        return answer

    def _meet(self, merge_fn: Any, args: Any, kwargs: Any) -> Any:
        try:
            return self._merge(merge_fn, args, kwargs)
        except BaseException as error:
            self._failure = error
            raise _Aborted from error

    def _merge(self, merge_fn: Any, args: Any, kwargs: Any) -> Any:
        calls: list[tuple[Any, Any, Any]] = []
        for i, replica in enumerate(self._others):
            if replica.call is None:
                raise _different_numbers(i)
            calls.append(replica.call)
        calls.append((merge_fn, args, kwargs))
        for i, call in enumerate(calls):
            if not _is_same_function(call[0], calls[0][0]):
                raise errors.ContextError(
                    "All replicas must pass the same function to `merge_call`",
                    f"replica 0 passed {calls[0][0]} and replica {i} passed {call[0]}",
                    "Choose the function outside of replica code.",
                )
        merged_args, merged_kwargs = self._regrouped([(call[1], call[2]) for call in calls])
        with self._merge_frame():
            result = calls[0][0](self._strategy, *merged_args, **merged_kwargs)
        for i, replica in enumerate(self._others):
            replica.call = None
            replica.answer = select(i, result)
            replica.may_go.release()
            self._wait_parked(replica)
        return select(self._count - 1, result)

    @contextlib.contextmanager
    def _merge_frame(self) -> Iterator[None]:
        frame = Frame(Mode.CROSS_REPLICA, self._strategy, self._layout, opened_at=self._opened_at)
        with frames.pushed(frame), devices.device(self._layout.devices[0]):
            yield

    def _wait_parked(self, replica: _Replica) -> None:
        while not replica.parked.acquire(timeout=_CHECK_S):
            pass
        if replica.error is not None:
            raise replica.error

    def _abort(self) -> None:
        """Lets every parked replica unwind, and waits until it has."""
        self._is_aborted = True
        for replica in self._others:
            if replica.call is not None and replica.error is None and not replica.is_done:
                replica.call = None
                replica.may_go.release()
                replica.parked.acquire(timeout=_CHECK_S)


def _bind(fn: Callable[..., Any], *args: Any) -> Callable[[], None]:
    return lambda: fn(*args)


def _is_same_function(one: Any, other: Any) -> bool:
    """Tells whether two functions are one definition, made anew by each replica perhaps."""
    if one is other or one == other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, functools.partial):
        return _is_same_function(one.func, other.func)
    inner = getattr(one, "python_function", None)
    if inner is not None:
        return _is_same_function(inner, other.python_function)
    return getattr(one, "__code__", one) is getattr(other, "__code__", other)


def _different_numbers(replica_id: int) -> errors.ContextError:
    return errors.ContextError(
        "All replicas must call `merge_call` (all_reduce, all_gather, assign of an "
        "aggregated variable) equally often",
        f"replica {replica_id} made another number of calls than the last one",
        "Do not let such calls depend on the replica id.",
    )
