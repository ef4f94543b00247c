"""`View`: what is known about a running job, made of the answers of its tasks.

Tasks on this host answer themselves, and so do those on other hosts if the launcher of the job runs
on this one. Others appear as the coordinator or the chief of a group knows them.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from replicax.foundation import errors, thread_stacks
from replicax.observe import client, job_directory
from replicax.observe.client import Answer

# The seconds that a task may take to answer.
_ANSWER_S = 2.0
# The order of the rows; other roles come last.
_ROLES = ("launcher", "coordinator", "member", "program", "worker", "ps")
# The name of the counter that is the progress of a role, and what it counts.
_PROGRESS = {
    "coordinator": ("closures", "closures"),
    "worker": ("closures", "closures"),
    "ps": ("requests", "requests"),
}
_MOST_WAITS = 40
_COORDINATOR = "/job:coordinator/task:0"


@dataclasses.dataclass(frozen=True)
class Row:
    """One task of a job; None where nothing is known.

    Attributes:
      task: Its name.
      role: "coordinator", "worker", "ps", "member" of a sync group, "program" or "launcher".
      state: What it does.
      reason: Why it is in that state; empty if it works.
      pid: Its process on its host, if it listens.
      host: Its host, or its address.
      program: The name of its program.
      rate: What it does per second.
      unit: What the rate and `count` count: "closures", "requests" or "steps".
      count: How many it has done.
      values: The newest values that it has logged.
      in_flight: The closures that are assigned to it, or of the coordinator, all open ones.
      mean_staleness: The mean number of steps of others that arriving gradients lacked.
      max_staleness: The maximum number of such steps.
      memory: Its resident memory in bytes.
      held: The size of the variables that it holds, in bytes.
      cpu: The share of one processor that it uses.
      restarts: How often it was lost.
      waits_for: What it waits for.
    """

    task: str
    role: str
    state: str
    reason: str = ""
    pid: int | None = None
    host: str = ""
    program: str = ""
    rate: float | None = None
    unit: str = "steps"
    count: int | None = None
    values: Mapping[str, float] = dataclasses.field(default_factory=dict)
    in_flight: int | None = None
    mean_staleness: float | None = None
    max_staleness: int | None = None
    memory: int | None = None
    held: int | None = None
    cpu: float | None = None
    restarts: int | None = None
    waits_for: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class View:
    """A job at one time.

    Attributes:
      job: The name of its directory.
      program: The name of its program.
      age_s: The seconds since its first task has started.
      rows: Its tasks.
      waits: Who waits for whom, one sentence each.
    """

    job: str
    program: str = ""
    age_s: float = 0.0
    rows: tuple[Row, ...] = ()
    waits: tuple[str, ...] = ()

    @property
    def has_ended(self) -> bool:
        """Whether no task of the job answers."""
        return all(row.pid is None for row in self.rows)

    def find(self, task: str) -> Row | None:
        """Returns the row of a task, or None."""
        return next((row for row in self.rows if row.task == task), None)


class Sampler:
    """Looks at a job again and again, and computes rates between two looks.

    Args:
      directory: The directory of the job.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # The tasks of other hosts, which the launcher asks.
        self._far: set[str] = set()
        # By task and process: when it was asked, its count, and its processor time.
        self._before: dict[tuple[str, int], tuple[float, float, float]] = {}

    def sample(self) -> View:
        """Asks all tasks, and returns what they told."""
        answers = client.ask_all(self.directory, "status", timeout=_ANSWER_S)
        here = {answer.path for answer in answers if not answer.is_gone}
        far = client.ask_hosts(self.directory, "status", timeout=_ANSWER_S)
        answers += [answer for answer in far if answer.path not in here]
        self._far = {client.task_of(answer.path) for answer in far if answer.path not in here}
        rows: dict[str, Row] = {}
        told: list[Mapping[str, Any]] = []
        for answer in answers:
            try:
                row = self._row(answer)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                reason = f"its status is not of this version of replicax ({error!r})"
                row = Row(client.task_of(answer.path), "", "no answer", reason, answer.pid)
            else:
                told += [answer.reply] if isinstance(answer.reply, dict) else []
            rows[row.task] = row
        waits: list[str] = []
        for status in told:
            for known in status.get("tasks", ()):
                if "task" in known:
                    _add(rows, known)
            waits += _waits(status, rows[status["task"]])
        found = [status for status in told if status.get("role") in ("coordinator", "member")]
        programs = [status["program"] for status in found or told]
        ages = [time.time() - float(status["started_s"]) for status in told]
        return View(
            self.directory.name,
            programs[0] if programs else "",
            max(ages, default=0.0),
            tuple(sorted(rows.values(), key=_order)),
            tuple(dict.fromkeys(waits))[:_MOST_WAITS],
        )

    def _row(self, answer: Answer) -> Row:
        status = answer.reply
        if not isinstance(status, dict):
            state = "ended" if answer.is_gone else "no answer"
            return Row(client.task_of(answer.path), "", state, answer.error, answer.pid)
        role = str(status.get("role", "program"))
        counters = status.get("counters", {})
        name, unit = _PROGRESS.get(role, ("", "steps"))
        count = int(counters.get(name, 0)) if name else int(status.get("steps", 0))
        process = status["process"]
        rate, cpu = self._rates((status["task"], answer.pid or 0), count, process["cpu_s"])
        values = {name: found["value"] for name, found in status.get("values", {}).items()}
        in_flight = status.get("in_flight")
        if in_flight is not None and "queued" in status:
            in_flight += status["queued"]
        staleness = _staleness(counters) if role == "ps" else (None, None)
        return Row(
            status["task"],
            role,
            str(status.get("state", "running")),
            str(status.get("reason", "")),
            answer.pid,
            status["host"],
            status["program"],
            rate if role != "launcher" else None,
            unit,
            count if role != "launcher" else None,
            values,
            in_flight,
            *staleness,
            memory=process["rss_bytes"],
            held=counters.get("bytes") if role == "ps" else None,
            cpu=cpu,
            restarts=status.get("num_restarts") if role == "launcher" else None,
            waits_for=tuple(status.get("waits_for", ())) if role != "coordinator" else (),
        )

    def _rates(
        self, key: tuple[str, int], count: float, cpu_s: float
    ) -> tuple[float | None, float | None]:
        now = time.monotonic()
        before = self._before.get(key)
        self._before[key] = now, count, cpu_s
        if before is None or now <= before[0]:
            return None, None
        spent_s = now - before[0]
        return max(count - before[1], 0.0) / spent_s, max(cpu_s - before[2], 0.0) / spent_s

    # What can be done to a task.

    def stack(self, row: Row) -> str:
        """Returns the stacks of the threads of a task, also of one on another host."""
        answer = Answer(self.directory, error="it does not run on this host")
        path = self._find_socket(row.task)
        if path is not None:
            answer = client.ask(path, "stack", timeout=_ANSWER_S)
        if answer.reply is None and row.task in self._far:
            far = client.ask_hosts(self.directory, "stack", timeout=_ANSWER_S, task=row.task)
            answer = far[0] if far else answer
        coordinator = self._find_socket(_COORDINATOR)
        if answer.reply is None and coordinator is not None:
            answer = client.ask(coordinator, "stack", {"task": row.task}, _ANSWER_S)
        if isinstance(answer.reply, dict):
            return thread_stacks.cleaned(str(answer.reply.get("text", "")))
        return f"{row.task} does not answer: {answer.error}"

    def kill(self, row: Row) -> int:
        """Kills the process of a task (SIGKILL), and returns its id.

        Raises:
          UnavailableError: It does not run on this host, nor on one of its launcher.
        """
        path = self._find_socket(row.task)
        if row.task in self._far and row.pid is not None:
            return client.kill_through_launcher(self.directory, row.task, row.pid)
        if path is None:
            raise errors.UnavailableError(
                f"{row.task} does not run on this host. Kill it where it runs, or where its "
                "launcher runs."
            )
        return client.kill(path, signal.SIGKILL)

    def _find_socket(self, task: str) -> Path | None:
        found = job_directory.sockets(self.directory)
        return next((path for path in found if client.task_of(path) == task), None)


def _add(rows: dict[str, Row], known: Mapping[str, Any]) -> None:
    """Adds what one task knows of another."""
    row = rows.get(known["task"])
    restarts = known.get("num_restarts")
    if row is None or row.pid is None:
        # On another host, or just lost: nothing better is known.
        rate = known.get("rate")
        row = Row(
            known["task"],
            known.get("role", ""),
            str(known.get("state", "")),
            str(known.get("reason") or known.get("address", "")),
            host=str(known.get("address", "")),
            rate=None if rate is None else float(rate),
            unit=_PROGRESS.get(known.get("role", ""), ("", "programs"))[1],
            count=known.get("num_done", known.get("programs")),
            in_flight=known.get("num_closures"),
            held=known.get("num_bytes"),
            mean_staleness=known.get("mean_staleness"),
            max_staleness=known.get("max_staleness"),
        )
    elif known.get("role") == "worker":
        # The coordinator knows of closures that have not arrived, and of workers that it avoids.
        state = known.get("state", row.state)
        is_other = state not in ("idle", "busy")
        row = dataclasses.replace(
            row,
            in_flight=known.get("num_closures", row.in_flight),
            state=state if is_other else row.state,
            reason=str(known.get("reason", "")) if is_other else row.reason,
        )
    if restarts is not None:
        row = dataclasses.replace(row, restarts=max(int(restarts), row.restarts or 0))
    rows[row.task] = row


def _waits(status: Mapping[str, Any], row: Row) -> list[str]:
    """Returns who waits for whom, as one task tells it."""
    lines: list[str] = []
    waits = [str(line) for line in status.get("waits_for", ())]
    if row.role != "coordinator":
        lines += [f"{row.task} waits for {line}" for line in waits]
    elif row.in_flight and not row.rate:
        # No closure has ended since the last look: the whole wait report.
        lines += waits
    for known in status.get("tasks", ()):
        awaited_by = known.get("awaited_by", ())
        lines += [f"{known.get('task')} is awaited by {line}" for line in awaited_by]
    return lines


def _staleness(counters: Mapping[str, float]) -> tuple[float | None, int | None]:
    count = counters.get("staleness_count", 0)
    if not count:
        return None, None
    return counters.get("staleness_sum", 0) / count, int(counters.get("staleness_max", 0))


def _order(row: Row) -> tuple[int, str, int]:
    role = _ROLES.index(row.role) if row.role in _ROLES else len(_ROLES)
    name, _, index = row.task.rpartition(":")
    return role, name, int(index) if index.isdigit() else 0


def pick_loss(rows: Iterable[Row]) -> tuple[str, float] | None:
    """Returns the name and the value of the loss that a task has logged, or of another value.

    >>> pick_loss([Row("a", "member", "", values={"accuracy": 0.9, "train/loss": 0.5})])
    ('train/loss', 0.5)
    """
    found: Sequence[tuple[str, float]] = [item for row in rows for item in row.values.items()]
    losses = [item for item in found if "loss" in item[0].lower()]
    return next(iter(losses or found), None)
