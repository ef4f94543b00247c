"""Runs a job on hosts to its end: starts tasks, restarts lost ones, and passes signals on.

Tasks that train in lock step form a group, which ends and restarts as a whole, with new ports: JAX
cannot join a group again. All others, those of a cluster with parameter servers and an evaluator,
restart alone, at the address that they had.
"""

from __future__ import annotations

import collections
import dataclasses
import queue
import signal
import time
from collections.abc import Callable, Sequence

from replicax.foundation import errors, settings
from replicax.group import exit_codes
from replicax.launch import outcomes, restart_rules
from replicax.launch.backoff import Backoff
from replicax.launch.host import Event, Host, HostLost, Signalled, Start, Started
from replicax.launch.job import JobSpec, cluster_of
from replicax.launch.outcomes import Outcome
from replicax.launch.restart_rules import Attempt, Ending
from replicax.launch.task_output import TaskOutput
from replicax.launch.terminal import label
from replicax.protocol.tasks import Task

# The seconds that the tasks of a group get to leave by themselves after one of them was lost (they
# notice it within 12 s), and after one has failed for good.
_LOST_GRACE_S = 25.0
_FAILED_GRACE_S = 3.0
# The shares of the time to stop after which coordinator, workers and servers are killed.
_STOP_SHARES = (0.6, 0.85, 1.0)
_KILLED_SECONDS = 5.0
# The longest wait for an event; tasks that wait for their restart need no event.
_LOOK_S = 1.0
_NUM_LOG_LINES = 20
# The jobs whose tasks compute, and share the cores and GPUs of their host.
_COMPUTING = ("worker", "evaluator")
# A connection that was lost counts as this signal for the tasks of the host.
_HUNG_UP = -int(signal.SIGHUP)


@dataclasses.dataclass
class _TaskState:
    """What is known of a task.

    Attributes:
      host: The host that it runs on.
      incarnation: The number of its current or last process.
      pid: Its id on its host; None before it was started.
      code: The exit code of that; None while it runs.
      was_killed: Whether the launcher has killed it.
      due_s: When it restarts; None if it does not wait for that.
      is_over: Whether it has ended and does not restart.
    """

    host: Host
    incarnation: int = -1
    pid: int | None = None
    code: int | None = None
    was_killed: bool = False
    due_s: float | None = None
    is_over: bool = False

    @property
    def is_running(self) -> bool:
        return self.incarnation >= 0 and self.code is None

    @property
    def text(self) -> str:
        """What it does, in a word."""
        if self.is_running:
            return "running"
        if self.due_s is not None:
            return "restarting"
        return "starting" if self.incarnation < 0 else "ended"


class _Stopped(Exception):
    """The launcher was told to stop, by a signal."""


class _Failed(Exception):
    """The job has failed; its tasks have ended.

    Attributes:
      code: The exit code.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Supervisor:
    """Runs one job.

    Args:
      job: The job.
      hosts: The hosts, in the order in which tasks are placed.
      events: What happens to tasks and hosts.
      output: What the tasks print.
      say: Prints a message of the launcher.
      directory: The directory that programs run in.
      on_processes: Called with the processes of the tasks when there are new ones.
    """

    def __init__(
        self,
        job: JobSpec,
        hosts: Sequence[Host],
        events: queue.SimpleQueue[Event],
        output: TaskOutput,
        say: Callable[[str], None],
        directory: str,
        on_processes: Callable[[list[dict[str, object]]], None] = lambda processes: None,
    ) -> None:
        self._on_processes = on_processes
        self._job = job
        self._hosts = list(hosts)
        self._events = events
        self._output = output
        self._say = say
        self._directory = directory
        self._tasks: dict[Task, _TaskState] = {}
        self._cluster: dict[str, list[str]] = {}
        self._cores: dict[Task, list[int]] = {}
        self._incarnations: collections.Counter[Task] = collections.Counter()
        self._backoffs: dict[Task, Backoff] = {}
        self._signals: list[int] = []
        self._is_stopping = False
        self._started_s = time.monotonic()
        self.num_restarts = 0

    def status(self) -> str:
        """Returns the state of the job in one line."""
        tasks = list(self._tasks.items())
        texts = []
        for job in dict.fromkeys(task.job for task, _ in tasks):
            states = [state for task, state in tasks if task.job == job]
            running = sum(state.is_running for state in states)
            texts.append(f"{job} {running}/{len(states)}")
        minutes, seconds = divmod(int(time.monotonic() - self._started_s), 60)
        restarts = [f"restarts {self.num_restarts}"] if self.num_restarts else []
        stopping = ["stopping"] if self._signals else []
        parts = [self._job.program.name, *texts, *restarts, *stopping, f"{minutes}:{seconds:02d}"]
        return " · ".join(parts)

    def observed(self) -> dict[str, object]:
        """Returns the state of the job for those that observe it; from any thread."""
        states = dict(self._tasks)
        is_waiting = states and not any(state.is_running for state in states.values())
        state = "stopping" if self._signals else "restarting" if is_waiting else "running"
        return {
            "role": "launcher",
            "state": state,
            "num_restarts": self.num_restarts,
            "tasks": [
                {
                    "task": self._observed_name(task),
                    "state": state.text,
                    "address": state.host.name,
                    "num_restarts": max(state.incarnation, 0),
                }
                for task, state in states.items()
            ],
        }

    def kill(self, name: str, pid: int) -> int:
        """Kills the process of a task, which then counts as lost; from any thread.

        Args:
          name: The name under which the task is observed.
          pid: The process, on the host of the task.

        Raises:
          UnavailableError: This process of it does not run any more.
        """
        for task, state in dict(self._tasks).items():
            if self._observed_name(task) == name and state.is_running and state.pid == pid:
                state.host.send(task, signal.SIGKILL)
                return pid
        raise errors.UnavailableError(f"Process {pid} of {name} does not run any more.")

    def _observed_name(self, task: Task) -> str:
        """Returns the name that a task has when it is observed: that of its coordinator."""
        return str(Task("coordinator", 0) if task.job == "chief" else task)

    def processes(self) -> list[dict[str, object]]:
        """Returns the task, the host and the id of each process that was started last."""
        return [
            {"job": task.job, "index": task.index, "host": state.host.name, "pid": state.pid}
            for task, state in self._tasks.items()
            if state.pid is not None
        ]

    def run(self) -> int:
        """Runs the job; returns the exit code for the command line."""
        try:
            return self._run_group() if self._job.is_sync else self._run_cluster()
        except _Failed as failed:
            return failed.code
        except _Stopped:
            self._is_stopping = True
            self._say(
                f"{signal.Signals(self._signals[0]).name}: stopping, at most {self._job.stop_s:g} "
                "s. Interrupt again to kill all tasks."
            )
            self._stop(self._signals[0])
            return self._code_when_stopped()
        finally:
            self._is_stopping = True
            self._kill(self._tasks_running())

    # A group in lock step.

    def _run_group(self) -> int:
        job = self._job
        attempts: list[Attempt] = []
        backoff = Backoff(job.max_restarts, job.restart_window_s)
        least = job.workers if job.min_workers is None else job.min_workers
        while True:
            count = restart_rules.next_num_workers(attempts, least, job.workers)
            tasks = job.tasks_with(count)
            group = [task for task in tasks if task.job != "evaluator"]
            started_s = time.monotonic()
            self._place(tasks, keep=[t for t in self._tasks if t.job == "evaluator"])
            self._start([t for t in tasks if t in group or t not in self._tasks_running()])
            ended = self._wait_for_group(group)
            ending = restart_rules.classify(ended)
            now = time.monotonic()
            attempts.append(
                Attempt(len(attempts), tuple(group), tuple(ended), ending, started_s, now)
            )
            if ending is Ending.FINISHED:
                self._wait_for_evaluator()
                return 0
            cause = outcomes.first_cause(ended)
            assert cause is not None, "a run that has not finished has failed"
            if ending is Ending.FAILED:
                raise self._failure(cause)
            due_s = now if ending is Ending.PREEMPTED else backoff.next(now)
            if due_s is None:
                raise self._too_often(cause, backoff)
            self.num_restarts += 1
            self._say(
                f"{cause.text}. Restarting all workers (restart {self.num_restarts}) in "
                f"{max(0.0, due_s - now):.1f} s."
            )
            while time.monotonic() < due_s:
                self._pump(due_s)

    def _wait_for_group(self, group: Sequence[Task]) -> list[Outcome]:
        """Waits until all have ended; when one has failed, the others get some time."""
        order: list[Task] = []
        deadline: float | None = None
        while True:
            order += [t for t in group if t not in order and not self._tasks[t].is_running]
            running = [task for task in group if task not in order]
            if not running:
                break
            if deadline is None and (failed := [t for t in order if self._tasks[t].code]):
                is_lost = restart_rules.classify([self._outcome(t) for t in failed])
                is_final = is_lost is Ending.FAILED
                grace_s = _FAILED_GRACE_S if is_final else _LOST_GRACE_S
                deadline = time.monotonic() + grace_s
            if deadline is not None and time.monotonic() >= deadline:
                self._kill(running)
                continue
            self._pump(deadline)
            self._restart_lost()
        return [self._outcome(task) for task in order]

    def _wait_for_evaluator(self) -> None:
        evaluator = self._tasks.get(Task("evaluator", 0))
        if evaluator is None or evaluator.is_over:
            return
        self._say("All workers have finished; waiting for the evaluator.")
        while not evaluator.is_over:
            self._pump(self._next_due())
            self._restart_lost()

    # Tasks that restart alone.

    def _run_cluster(self) -> int:
        chief = Task("chief", 0)
        self._place(self._job.tasks)
        self._start(self._job.tasks)
        while not self._tasks[chief].is_over:
            self._pump(self._next_due())
            self._restart_lost()
        self._wait_for_evaluator()
        self._stop(signal.SIGTERM)
        return 0

    def _restart_lost(self) -> None:
        """Restarts the tasks that were lost, and restart alone."""
        now = time.monotonic()
        for task, state in self._tasks.items():
            if (self._job.is_sync and task.job != "evaluator") or state.is_running or state.is_over:
                continue
            if state.due_s is None:
                self._end_or_restart(task, state)
            elif now >= state.due_s:
                state.due_s = None
                if self._reconnect(state):
                    self._start([task])

    def _end_or_restart(self, task: Task, state: _TaskState) -> None:
        """Decides what follows the end of a process that was just seen to have ended."""
        outcome = self._outcome(task)
        if state.code == 0 and not self._job.serves(task):
            state.is_over = True
        elif self._is_final(task, outcome):
            raise self._failure(outcome)
        else:
            self._restart_alone(task, state, outcome)

    def _is_final(self, task: Task, outcome: Outcome) -> bool:
        if self._job.serves(task):
            return restart_rules.is_final_for_serving(outcome.exit_code)
        return restart_rules.classify([outcome]) is Ending.FAILED

    def _restart_alone(self, task: Task, state: _TaskState, outcome: Outcome) -> None:
        now = time.monotonic()
        job = self._job
        backoff = self._backoffs.setdefault(task, Backoff(job.max_restarts, job.restart_window_s))
        due_s = backoff.next(now)
        if due_s is not None:
            self.num_restarts += 1
            self._say(f"{outcome.text}. Restarting it in {due_s - now:.1f} s.")
            state.due_s = due_s
            return
        workers = [s for t, s in self._tasks.items() if t.job == "worker" and not s.is_over]
        if task.job != "worker" or job.min_workers is None or len(workers) <= job.min_workers:
            raise self._too_often(outcome, backoff)
        state.is_over = True
        self._say(f"{outcome.text}, too often to restart it. The job goes on without it.")

    # Starting.

    def _place(self, tasks: Sequence[Task], keep: Sequence[Task] = ()) -> None:
        """Gives every task a host and an address; those to keep have the ones that they had."""
        connected = self._connected()
        kept = {task: self._tasks[task] for task in keep if self._tasks[task].is_running}
        self._tasks = {
            task: kept.get(task) or _TaskState(connected[task.index % len(connected)])
            for task in tasks
        }
        addresses: dict[Task, str] = {}
        for host in dict.fromkeys(connected):
            here = [task for task in tasks if self._tasks[task].host is host]
            ports = host.reserve([0] * len(here))
            addresses |= {t: f"{host.address}:{p}" for t, p in zip(here, ports, strict=True)}
            self._share_cores(host, here)
        self._cluster = cluster_of(tasks, [addresses[task] for task in tasks])

    def _connected(self) -> list[Host]:
        """Returns the hosts for the next run, after those that were lost were tried again.

        Raises:
          UnavailableError: One is still lost, and the job is not elastic; or all are.
        """
        found: list[Host] = []
        for host in dict.fromkeys(self._hosts):
            try:
                if not host.is_connected:
                    host.reconnect()
                found += [host] * self._hosts.count(host)
            except errors.UnavailableError as error:
                if self._job.min_workers is None:
                    raise
                self._say(f"{error}. Going on without {host.name}.")
        if not found:
            raise errors.UnavailableError("None of the hosts can be reached.")
        return found

    def _reconnect(self, state: _TaskState) -> bool:
        """Connects a lost host again, with the ports that its tasks had; returns whether it is."""
        host = state.host
        if host.is_connected:
            return True
        here = [task for task, other in self._tasks.items() if other.host is host]
        try:
            host.reconnect()
            host.reserve([int(self._address(task).rpartition(":")[2]) for task in here])
        except (errors.UnavailableError, errors.AddressInUseError) as error:
            self._say(str(error))
            return False
        return True

    def _address(self, task: Task) -> str:
        return self._cluster[task.job][task.index]

    def _share_cores(self, host: Host, tasks: Sequence[Task]) -> None:
        """Gives each task that computes its share of the cores of its host."""
        computing = [t for t in tasks if t.job in _COMPUTING]
        wanted = self._job.cpus_per_worker
        all_cores = list(host.cores)
        for number, task in enumerate(computing):
            if wanted is None:
                share = max(1, len(all_cores) // len(computing))
                self._cores[task] = all_cores[:share]
            elif wanted * len(computing) <= len(all_cores):
                self._cores[task] = all_cores[number * wanted : (number + 1) * wanted]
            else:
                self._cores[task] = all_cores[:wanted]
        for task in tasks:
            if task not in computing:
                self._cores[task] = all_cores[:1]

    def _pinned(self, task: Task) -> list[int]:
        """Returns the cores that only this task runs on; empty if it shares them."""
        wanted = self._job.cpus_per_worker
        if wanted is None or task.job != "worker":
            return []
        host = self._tasks[task].host
        here = [t for t, s in self._tasks.items() if s.host is host and t.job in _COMPUTING]
        return self._cores[task] if wanted * len(here) <= len(host.cores) else []

    def _gpus(self, task: Task) -> dict[str, str]:
        """Returns the variable that gives a task its part of the GPUs of its host."""
        host = self._tasks[task].host
        here = [t for t, s in self._tasks.items() if s.host is host and t.job in _COMPUTING]
        if not host.gpus or task not in here:
            return {}
        count = self._job.devices_per_worker or max(1, len(host.gpus) // len(here))
        first = here.index(task) * count
        # More tasks than GPUs share them.
        found = [host.gpus[(first + i) % len(host.gpus)] for i in range(min(count, len(host.gpus)))]
        return {settings.CUDA_VISIBLE_DEVICES: ",".join(found)}

    def _tasks_running(self) -> list[Task]:
        return [task for task, state in self._tasks.items() if state.is_running]

    def _start(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            state = self._tasks[task]
            state.incarnation = self._incarnations[task]
            state.code, state.was_killed = None, False
            self._incarnations[task] += 1
            cores = len(self._cores[task])
            variables = self._gpus(task) | self._job.variables(task, self._cluster, cores)
            start = Start(
                task.job,
                task.index,
                state.incarnation,
                self._job.command(task, state.host.python),
                variables,
                self._pinned(task),
                self._directory,
            )
            state.host.start(start)

    # Events.

    def _next_due(self) -> float | None:
        return min((s.due_s for s in self._tasks.values() if s.due_s is not None), default=None)

    def _pump(self, deadline: float | None) -> None:
        """Takes the next event, and all that have happened since; waits for it."""
        left = _LOOK_S if deadline is None else deadline - time.monotonic()
        left = max(0.0, min(left, _LOOK_S))
        try:
            self._note(self._events.get(timeout=left))
            while True:
                self._note(self._events.get_nowait())
        except queue.Empty:
            pass
        if self._signals and not self._is_stopping:
            raise _Stopped

    def _note(self, event: Event) -> None:
        if isinstance(event, Signalled):
            self._signals.append(event.number)
        elif isinstance(event, HostLost):
            self._say(f"Lost {event.host}: {event.reason}")
            for state in self._tasks.values():
                if state.host.name == event.host and state.is_running:
                    state.code = _HUNG_UP
        else:
            state = self._tasks.get(event.task)
            if state is None or state.incarnation != event.incarnation or not state.is_running:
                return
            if isinstance(event, Started):
                state.pid = event.pid
                self._on_processes(self.processes())
            else:
                state.code = event.code
                self._output.finish(event.task)

    def _outcome(self, task: Task) -> Outcome:
        state = self._tasks[task]
        log = self._output.tail(task, _NUM_LOG_LINES)
        return Outcome(task, state.code, log=log, was_killed=state.was_killed)

    # Ending.

    def _failure(self, cause: Outcome) -> _Failed:
        """Stops all tasks because of a failure."""
        self._say(f"{cause.text}. It printed last:")
        for line in cause.log.splitlines():
            self._say(f"  {line}")
        self._stop(signal.SIGTERM)
        return _Failed(_exit_code(cause))

    def _too_often(self, cause: Outcome, backoff: Backoff) -> _Failed:
        what = label(cause.task) if not self._job.is_sync else "the group"
        self._say(
            f"Restarted {what} {backoff.most} times within {backoff.window_s:g} s: giving up."
        )
        return self._failure(cause)

    def _stop(self, number: int) -> None:
        """Stops all tasks in order: who coordinates, then workers, then servers."""
        self._is_stopping = True
        begun_s = time.monotonic()
        # A further one kills: the second, or the first while the tasks stop for another reason.
        num_signals = min(len(self._signals), 1)
        phases: tuple[tuple[str, ...], ...] = (("chief", "evaluator"), ("worker",), ("ps",))
        if self._job.is_sync:
            phases = (("worker", "evaluator"),)
        shares = _STOP_SHARES[-len(phases) :]
        for jobs, share in zip(phases, shares, strict=True):
            here = [task for task in self._tasks_running() if task.job in jobs]
            for task in here:
                # Those that serve know one signal; a stopped one must run to handle it.
                serving = self._job.serves(task)
                self._tasks[task].host.send(task, signal.SIGTERM if serving else number)
                self._tasks[task].host.send(task, signal.SIGCONT)
            deadline = begun_s + share * self._job.stop_s
            while any(self._tasks[task].is_running for task in here):
                if len(self._signals) > num_signals or time.monotonic() >= deadline:
                    break
                self._pump(deadline)
            self._kill([task for task in here if self._tasks[task].is_running])
        self._kill(self._tasks_running())

    def _kill(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            self._tasks[task].was_killed = True
            self._tasks[task].host.send(task, signal.SIGKILL)
        deadline = time.monotonic() + _KILLED_SECONDS
        while any(self._tasks[t].is_running for t in tasks) and time.monotonic() < deadline:
            self._pump(deadline)

    def _code_when_stopped(self) -> int:
        """Returns 42 if the program has saved before it ended, or the number of the signal."""
        codes = {s.code for t, s in self._tasks.items() if not self._job.serves(t)}
        has_saved = exit_codes.PREEMPTED in codes and codes <= {0, exit_codes.PREEMPTED}
        return exit_codes.PREEMPTED if has_saved else 128 + self._signals[0]


def _exit_code(outcome: Outcome) -> int:
    """Returns the exit code of a failure, as a shell writes it.

    >>> _exit_code(Outcome(Task("worker", 0), -9)), _exit_code(Outcome(Task("worker", 0), 3))
    (137, 3)
    """
    code = outcome.exit_code
    assert code is not None, "it has ended"
    return 128 - code if code < 0 else code
