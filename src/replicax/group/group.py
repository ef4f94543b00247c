"""`Group`: the processes that train in lock step. `join` forms it; `Group` implements `Peers`.

    group = join(cluster_spec, "worker", 0, timeout_seconds=None, keys=None)
    group.devices        the devices of all processes, those of process 0 first
    group.index          the index of this process; the chief, or worker 0, is 0
    group.count          the number of processes

A strategy calls `join` before JAX has started its devices. A second call with the same cluster and
task returns the same group, since `jax.distributed` starts once in the life of a process.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TypeVar

import jax
import msgspec

from replicax.cluster.spec import ClusterSpec
from replicax.foundation import errors, peers, spans
from replicax.foundation.jax_compat import Device
from replicax.group import abort_handler, collective_sockets, exit_codes, hub, start
from replicax.group.endings import Ending
from replicax.group.links import HostLink, Link, MemberLink
from replicax.group.members import Members, this_process, versions
from replicax.group.monitor import Monitor
from replicax.group.rescue import Rescue
from replicax.group.timing import GroupTiming
from replicax.group.tunnel import Tunnel
from replicax.observe import endpoint, job_directory
from replicax.protocol import messages
from replicax.transport import keys as key_files
from replicax.transport.keys import Keys

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

# How errors of XLA begin, which JAX raises as ValueError in some places.
_STATUS = re.compile(r"[A-Z_]{5,}: ")

# The number of programs in one heartbeat, which must fit into a message.
_MOST_RECORDS = 20_000

_CONFIRM = "the first run of a program"
# Shorter waits for other members are part of training, and not shown to observers.
_SHOWN_WAIT_S = 0.5

_lock = threading.Lock()
_joined: Group | None = None


def join(
    cluster_spec: ClusterSpec,
    task_type: str,
    task_id: int,
    *,
    timeout_seconds: float | None = None,
    keys: str | os.PathLike[str] | Keys | None = None,
    timing: GroupTiming | None = None,
) -> Group:
    """Joins the group of a cluster, and starts JAX on all its processes.

    Args:
      cluster_spec: The cluster. The tasks of the jobs "chief" and "worker" are the group.
      task_type: The job of this process.
      task_id: Its index in the job.
      timeout_seconds: The time within which all processes must arrive at a collective or at a call
        of `Group`; half an hour by default.
      keys: The directory of the keys, or keys; by default those of REPLICAX_KEYS. TCP needs keys.
      timing: The timeouts; by default those that REPLICAX_TIMING selects.

    Returns:
      The group; the same one for each call in a process.

    Raises:
      DeadlineExceededError: Some tasks have not reported in time; it names them.
      InvalidArgumentError: A task is two processes, or was given another cluster.
      ProtocolError: The tasks have different versions.
      ContextError: JAX has started already, or the process has joined another group.
      AddressInUseError: Another process listens at the address of the chief.
    """
    global _joined
    members = Members.of(cluster_spec)
    index = members.index_of(task_type, task_id)
    with _lock:
        if _joined is not None:
            _joined.require_same(members, index)
            return _joined
        start.require_not_started()
        if not isinstance(keys, Keys):
            given = keys
            keys = key_files.from_environment("worker", index)
            if given:
                keys = key_files.load(given, "worker", index)
        timing = timing or GroupTiming.from_environment()
        _joined = Group(members, index, timing, timeout_seconds or timing.arrive_s, keys)
        peers.set_of_process(_joined)
        return _joined


def leave(last_words: str | None) -> None:
    """Leaves the group of this process, if it has joined one, before the process ends.

    For processes that do not end with their program, such as the actors of Ray.

    Args:
      last_words: The error that ends the program; None if it has ended as planned.
    """
    if _joined is not None:
        _joined.leave(last_words)


def exit_code_of(error: BaseException) -> int:
    """Returns the exit code for an error that ends the program of this process.

    As for an uncaught error: one of JAX counts as that of the group which caused it.
    """
    explained = None if _joined is None else _joined.explain_uncaught(error)
    return exit_codes.of(error if explained is None else explained)


class Group:
    """The processes of a cluster that train in lock step; implements `foundation.peers.Peers`.

    Made by `join`.

    Attributes:
      index: The index of this process; 0 is the chief.
      count: The number of processes.
      devices: The devices of all processes, in the order of the processes.
    """

    def __init__(
        self,
        members: Members,
        index: int,
        timing: GroupTiming,
        arrive_s: float,
        keys: Keys | None,
    ) -> None:
        self.index = index
        self.count = members.count
        self._members = members
        self._timing = timing
        self._arrive_s = arrive_s
        self._monitor = Monitor(members)
        self._activity = "starting", time.monotonic()
        self._programs: dict[int, str] = {}
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()
        # The thread of the program; another than the main thread in some frameworks.
        self._main = threading.current_thread()
        # Programs that were dispatched since the last heartbeat, and those of that heartbeat.
        self._records: collections.deque[int] = collections.deque()
        self._last_records: list[int] = []
        self._position = 0
        self.record: Callable[[int], None] = self._records.append
        self._link: Link
        if index == 0:
            self._link = HostLink(members, timing, arrive_s, self._monitor, keys)
        else:
            self._link = MemberLink(members, index, timing, arrive_s, self._monitor, keys)
        self._tunnel: Tunnel | None = None
        # Where the collectives of all processes listen.
        self._endpoints: set[collective_sockets.Endpoint] = set()
        self._rescue = Rescue(members.name(index), timing.grace_s, self._interrupt_collectives)
        self._monitor.on_failed = self._rescue.start
        self._is_closed = False
        self._endpoint: endpoint.Endpoint | None = None
        self._guard = _Guard(self)
        Ending(self.explain_uncaught, self.leave, timing.grace_s).install()
        try:
            self._start()
        except BaseException:
            self._close(0.0)
            raise
        self.devices: tuple[Device, ...] = start.devices_of(self.count)
        self._activity = "running its program", time.monotonic()
        self._endpoint = endpoint.open_for(
            self.name_of(index),
            functools.partial(job_directory.of_cluster, members.addresses),
            self._status,
        )

    def _interrupt_collectives(self) -> None:
        collective_sockets.interrupt(self._endpoints)

    def _on_abort(self, is_main: bool) -> None:
        """Explains an abort in native code, in the thread that aborts."""
        self._link.beat_now()
        explained = self._monitor.wait(self._timing.explain_s)
        if explained is None:
            return
        if not is_main:
            # The main thread gets an error, or the rescue ends the process.
            self._rescue.told.wait(2 * self._timing.grace_s)
            time.sleep(self._timing.grace_s)
        self._rescue.end_process(explained, "a collective of JAX has aborted")

    def _start(self) -> None:
        report = messages.JoinGroup(self.index, self._members.digest, versions(), this_process())
        if self.count > 1:
            # First: the chief gets bytes as soon as the roll call is complete.
            self._tunnel = Tunnel(self._link, self.index)
        self._link.join(report, self._timing.join_s)
        self._link.make_beat = self._make_beat
        if self._tunnel is not None:
            abort_handler.install(self._on_abort)
            before = collective_sockets.listening()
            start.start_jax(self._members, self.index, self._tunnel, self._timing, self._arrive_s)
            started = start.Started(
                jax.default_backend(), sorted(collective_sockets.listening() - before)
            )
            found = [
                msgspec.msgpack.decode(value, type=start.Started)
                for value in self.exchange("the start of JAX", msgspec.msgpack.encode(started))
            ]
            start.require_same_platform(self._members, [each.platform for each in found])
            self._endpoints = {endpoint for each in found for endpoint in each.endpoints}
            self._tunnel.hide()

    def require_same(self, members: Members, index: int) -> None:
        """Raises unless this is the group of these members."""
        if (members, index) != (self._members, self.index):
            raise errors.ContextError(
                "A process joins one group: JAX connects processes once",
                f"this one is {self.name_of(self.index)} of another cluster",
                "Use one cluster and one task for all strategies of a program.",
            )

    def __repr__(self) -> str:
        return f"Group({self.name_of(self.index)}, {self.count} processes)"

    def name_of(self, index: int) -> str:
        """Returns the name of a task for messages: `/job:worker/task:1`."""
        return self._members.name(index)

    # Calls that all processes make.

    def exchange(self, name: str, value: bytes, detail: str = "") -> list[bytes]:
        """Sends a value to all processes and returns those of all, by index."""
        return self._call(name, value, detail)[1]

    def barrier(self, name: str) -> None:
        """Waits until all processes have made this call."""
        self._call(name, b"")

    def _call(self, name: str, value: bytes, detail: str = "") -> tuple[int, list[bytes]]:
        with self._lock:
            number = self._counts.get(name, 0)
            self._counts[name] = number + 1
            position = self._position + len(self._records)
        is_main = threading.current_thread() is self._main
        body = messages.Contribute(name, number, is_main, position, detail)
        before = self._activity
        if is_main:
            # What a thread waits for, such as the next batch, does not stop the program.
            self._activity = f"waiting at {name!r}", time.monotonic()
        began = spans.now()
        try:
            return self._link.contribute(body, value)
        except errors.DistributeError:
            if is_main and self._monitor.has_failed:
                self._rescue.told.set()
            raise
        finally:
            if began:
                spans.record("agree", began, amount=number, label=name)
            if is_main:
                self._activity = before

    def confirm(self, name: str, fingerprint: str) -> int:
        """Raises unless all processes have the same fingerprint; called before a first run.

        Returns:
          The number of the program, the same on all processes, for `record`.
        """
        mine = msgspec.msgpack.encode((name, fingerprint))
        number, values = self._call(_CONFIRM, mine, repr(name))
        self._programs[number] = name
        self._link.name_program(number, name)
        for index, value in enumerate(values):
            if value != values[0]:
                raise self._differs(index, values[0], value)
        return number

    def _differs(self, index: int, first: bytes, other: bytes) -> errors.InvalidArgumentError:
        (one, _), (two, _) = (
            msgspec.msgpack.decode(value, type=tuple[str, str]) for value in (first, other)
        )
        found = f"{self.name_of(0)} runs {one!r}, and {self.name_of(index)} runs {two!r}"
        if one == two:
            found = (
                f"{self.name_of(0)} and {self.name_of(index)} compiled {one!r} differently: with "
                "other shapes, dtypes, constants or operations"
            )
        return errors.InvalidArgumentError(
            "All tasks of a group must run the same programs in the same order",
            found,
            "Remove what makes the tasks differ: a condition on the task, data of another shape, "
            "an iteration over a set.",
        )

    # Errors of JAX.

    def guarded(self) -> AbstractContextManager[None]:
        """Replaces an error of JAX that a lost peer caused by an error that names the task."""
        return self._guard

    def require_complete(self) -> None:
        """Raises if the group has failed, or a member has left."""
        if self._monitor.is_complete:
            return
        error = self._monitor.wait(0.0)
        if error is not None:
            self._rescue.told.set()
            raise error

    def explain(self, error: BaseException) -> errors.DistributeError | None:
        """Returns the failure of the group that may have caused an error; None without."""
        if isinstance(error, errors.DistributeError):
            return error
        if not isinstance(error, Exception):
            return None
        found = self._monitor.wait(self._timing.explain_s if _may_be_of_peer(error) else 0.0)
        if found is not None:
            self._rescue.told.set()
        return found

    def explain_uncaught(self, error: BaseException) -> errors.DistributeError | None:
        """As `explain`; an error that JAX did not raise has a cause of its own."""
        is_ours = isinstance(error, errors.DistributeError)
        return self.explain(error) if is_ours or _may_be_of_peer(error) else None

    # Heartbeats.

    def _make_beat(self) -> messages.GroupBeat:
        """Called by the thread of the control channel."""
        with self._lock:
            count = min(len(self._records), _MOST_RECORDS)
            new = [self._records.popleft() for _ in range(count)]
            # The last ones again: a heartbeat may be lost with its connection.
            programs = [*self._last_records, *new]
            position = self._position - len(self._last_records)
            self._position += len(new)
            self._last_records = new
        activity, since = self._activity
        text = f"{activity}, since {time.monotonic() - since:.1f} s"
        if programs:
            text += f"; the last program was {self._programs.get(programs[-1], programs[-1])!r}"
        return messages.GroupBeat(text, position, programs)

    def _status(self) -> dict[str, object]:
        """Returns what this process tells those who observe it; the chief adds the others."""
        activity, since_s = self._activity
        waits = activity.removeprefix("waiting at ")
        waited_s = time.monotonic() - since_s
        is_waiting = waits != activity and waited_s > _SHOWN_WAIT_S
        failure = self._monitor.error()
        return {
            "role": "member",
            "state": "failed" if failure is not None else activity,
            "reason": "" if failure is None else str(failure),
            "waits_for": [f"others at {waits} for {waited_s:.1f} s"] if is_waiting else [],
            "tasks": self._link.describe_members(),
        }

    # The end.

    def leave(self, last_words: str | None) -> None:
        """Leaves the group, in bounded time.

        Args:
          last_words: The error that ends the program; None if it has ended as planned: then the
            process waits for the others first.
        """
        self._rescue.told.set()
        if self._is_closed:
            return
        if last_words is None and not self._monitor.has_failed:
            with contextlib.suppress(errors.DistributeError):
                self._call(hub.END, b"")
        is_planned = last_words is None
        self._link.leave(
            messages.ErrorReply("" if is_planned else "Error", last_words or "as planned")
        )
        self._close(1.0 if is_planned else 0.2)

    def _close(self, seconds: float) -> None:
        self._is_closed = True
        if self._endpoint is not None:
            self._endpoint.close(0.0)
        self._link.close(seconds)
        if self._tunnel is not None:
            self._tunnel.close()


class _Guard(AbstractContextManager[None]):
    """Translates errors of JAX; see `Group.guarded`."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __enter__(self) -> None:
        self._group.require_complete()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, errors.DistributeError):
            explained = self._group.explain(error)
            if explained is not None:
                raise explained from error


def _may_be_of_peer(error: BaseException) -> bool:
    """Whether an error may be that of a collective, so that it pays to wait for the monitor."""
    is_status = isinstance(error, ValueError | RuntimeError) and _STATUS.match(str(error))
    return isinstance(error, jax.errors.JaxRuntimeError) or bool(is_status)
