"""The eager executor: replica code runs as ordinary Python, replica after replica.

See Note [Order of replicas] in contexts/rendezvous.py.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import queue
import re
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import jax

from replicax.contexts import frames
from replicax.contexts.frames import Frame, Mode
from replicax.contexts.overlay import EagerReads
from replicax.contexts.rendezvous import Rendezvous, different_calls, require_meeting
from replicax.contexts.replica_context import ReplicaContext
from replicax.execution import eager_collectives
from replicax.execution.local_arguments import LocalArguments, explained_devices, localized
from replicax.foundation import devices, errors, jax_compat, thread_states
from replicax.foundation.options import CommunicationOptions, ReduceOp
from replicax.foundation.types import Tree
from replicax.values.regroup import map_structure, regroup, select

_T = TypeVar("_T")
_IDLE_S = 1.0


class _MergeCall(NamedTuple):
    """The arguments of `merge_call` on one replica."""

    merge_fn: Callable[..., Tree]
    args: tuple[Tree, ...]
    kwargs: dict[str, Tree]


class ThreadedRun:
    """One eager `run`; serves the calls across replicas of its replica code.

    Args:
      frame: The frame of the scope that `run` is called in.
      fn: The replica code.
      args: Its arguments on all replicas.
      kwargs: Its keyword arguments on all replicas.
    """

    def __init__(
        self,
        frame: Frame,
        fn: Callable[..., Tree],
        args: tuple[Tree, ...],
        kwargs: dict[str, Tree],
    ) -> None:
        assert frame.layout is not None
        self._frame = frame
        self._layout = frame.layout
        self._fn = fn
        self._args = args
        self._kwargs = kwargs
        self.num_replicas = self._layout.num_replicas
        self._rendezvous = Rendezvous(self.num_running)
        self._given = LocalArguments()
        # Variables created in this run, by canonical name, and how many of each a replica
        # has requested.
        self._created: dict[str, list[object]] = {}
        self._requested: list[dict[str, int]] = [{} for _ in range(self.num_running)]

    @property
    def num_running(self) -> int:
        """The number of replicas that this process runs; frames number them from 0."""
        return self._layout.num_local

    def run(self) -> Tree:
        """Runs all replicas and merges their results."""
        if self._frame.overlay is None and not jax_compat.is_eager():
            raise errors.TracingError(
                "`Strategy.run` inside a JAX transformation needs `rx.function`",
                "the code runs under a bare jax.jit, jax.grad, jax.vmap or the like",
                "Use `rx.function` in the place of jax.jit, and `rx.value_and_grad` in the "
                "function that `run` calls.",
            )
        settings, states = jax_compat.thread_settings(), thread_states.captured()
        rendezvous = self._rendezvous
        results: list[Tree] = [None] * self.num_running
        try:
            for i in range(self.num_running - 1):
                context = contextvars.copy_context()

                def body(i: int = i) -> None:
                    with jax_compat.settings(settings), thread_states.entered(states):
                        results[i] = self._call(i)

                start = functools.partial(_start_in, context)
                rendezvous.follow(i, start, body)
            results[-1] = self._call(self.num_running - 1)
            rendezvous.finish()
        except BaseException as error:
            rendezvous.abort()
            if rendezvous.failure is None or rendezvous.failure is error:
                raise
        if rendezvous.failure is not None:
            rendezvous.abort()
            raise rendezvous.failure
        return self._regrouped(results)

    def _call(self, i: int) -> Tree:
        with EagerReads() as reads, self._replica_frame(i, reads):
            args, kwargs = map_structure(
                lambda leaf: self._localize(i, leaf), select(i, (self._args, self._kwargs))
            )
            with explained_devices():
                return self._fn(*args, **kwargs)

    @contextlib.contextmanager
    def _replica_frame(self, i: int, reads: EagerReads) -> Iterator[None]:
        frame = self._frame.entered(
            Mode.REPLICA,
            replica_id=i,
            replica_context=ReplicaContext(self._frame.strategy, self._layout.replica_ids[i]),
            executor=self,
            rendezvous=self._rendezvous,
            eager_reads=reads,
        )
        with devices.device(self._layout.local_devices[i]), frames.pushed(frame):
            yield

    def _localize(self, i: int, leaf: Tree) -> Tree:
        """Makes an array that is committed to devices usable on this replica's device."""
        return self._given.localize(leaf, self._layout.local_devices[i])

    def _regrouped(self, values: list[Tree]) -> Tree:
        """Merges one structure per replica; arguments that all replicas return stay one object."""
        values = [self._given.originals(value) for value in values]
        return regroup(values, self._layout, own=self._own)

    def _own(self, i: int, leaf: Tree) -> Tree:
        """Copies what one replica computed on another device to its own."""
        return localized(leaf, self._layout.local_devices[i])

    # Calls of replica code.

    def merge_call(
        self, merge_fn: Callable[..., Tree], args: tuple[Tree, ...], kwargs: dict[str, Tree]
    ) -> Tree:
        frame = frames.current()
        replica_id = self._require_meeting(frame)
        reads = frame.eager_reads
        if reads is not None:
            # What this replica traced for itself is not for the replicas that run meanwhile.
            reads.renew()
        meeting = self._rendezvous.arrive(replica_id, _MergeCall(merge_fn, args, kwargs))
        if meeting is None:
            result = self._rendezvous.result_of(replica_id)
        else:
            with self._rendezvous.acting(meeting):
                merged = self._merge(meeting.calls)
                meeting.results = [select(i, merged) for i in range(self.num_running)]
            result = meeting.results[replica_id]
        result = map_structure(lambda leaf: self._localize(replica_id, leaf), result)
        if reads is not None:
            reads.renew()
        return result

    def _require_meeting(self, frame: Frame) -> int:
        """Returns the running replica, or raises where replicas cannot meet."""
        return require_meeting(frame)

    def _merge(self, calls: list[_MergeCall]) -> Tree:
        first = calls[0]
        for i, call in enumerate(calls):
            if not isinstance(call, _MergeCall) or not _is_same_function(
                call.merge_fn, first.merge_fn
            ):
                raise different_calls(i, _shown(first), _shown(call))
        args, kwargs = self._regrouped([(call.args, call.kwargs) for call in calls])
        with self._merge_frame():
            return first.merge_fn(self._frame.strategy, *args, **kwargs)

    @contextlib.contextmanager
    def _merge_frame(self) -> Iterator[None]:
        frame = self._frame.entered(Mode.CROSS_REPLICA)
        with frames.pushed(frame), devices.device(self._layout.local_devices[0]):
            yield

    def all_reduce(self, op: ReduceOp, value: Tree, options: CommunicationOptions | None) -> Tree:
        return eager_collectives.all_reduce(self, op, value, options)

    def all_gather(self, value: object, axis: int) -> jax.Array:
        return eager_collectives.all_gather(self, value, axis)

    def shared_variable(self, name: str, create: Callable[[], _T]) -> _T:
        """Creates a variable in replica 0; the other replicas get the same one."""
        canonical = re.sub(r"(_\d+)+$", "", name)
        replica_id = frames.current().replica_id
        assert replica_id is not None
        requested = self._requested[replica_id]
        index = requested.get(canonical, 0)
        requested[canonical] = index + 1
        made = self._created.setdefault(canonical, [])
        if replica_id == 0:
            made.append(create())
        if index >= len(made):
            names = sorted(getattr(v, "name", "") for vs in self._created.values() for v in vs)
            raise errors.ContextError(
                "All replicas must create the same variables",
                f"replica {replica_id} creates {name!r} and replica 0 did not (it made {names})",
                "Give a variable one name on all replicas, up to a number at its end.",
            )
        return made[index]  # type: ignore[return-value]


class ReplicaThreads:
    """Keeps a few idle threads for a moment, so that a training loop does not start new ones."""

    def __init__(self) -> None:
        # Protects `_idle`. No other lock is taken while it is held.
        self._lock = threading.Lock()
        self._idle: list[_ReplicaThread] = []

    def start(self, job: Callable[[], None]) -> None:
        """Runs a job on an idle thread, or on a new one."""
        with self._lock:
            thread = self._idle.pop() if self._idle else None
        if thread is None:
            thread = _ReplicaThread(self)
            thread.start()
        thread.jobs.put(job)

    def take_back(self, thread: _ReplicaThread) -> None:
        """Adds a thread to the idle ones."""
        with self._lock:
            self._idle.append(thread)

    def retire(self, thread: _ReplicaThread) -> bool:
        """Removes an idle thread, which then ends; returns False if it has got a job."""
        with self._lock:
            if thread in self._idle:
                self._idle.remove(thread)
                return True
            return False


class _ReplicaThread(threading.Thread):
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


def _start_in(context: contextvars.Context, job: Callable[[], None]) -> None:
    replica_threads.start(functools.partial(context.run, job))


def _shown(call: object) -> object:
    return call.merge_fn if isinstance(call, _MergeCall) else call


def _is_same_function(one: object, other: object) -> bool:
    """Tells whether two functions have one definition, perhaps evaluated by each replica."""
    if one is other or one == other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, functools.partial) and isinstance(other, functools.partial):
        return _is_same_function(one.func, other.func)
    inner = getattr(one, "python_function", None)
    if inner is not None:
        return _is_same_function(inner, getattr(other, "python_function", None))
    return getattr(one, "__code__", one) is getattr(other, "__code__", other)
