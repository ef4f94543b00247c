"""The check of the linearizability of one variable."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from torture.checks import Outcome, Plan, check
from torture.histories import Operation, is_linearizable
from torture.jobs import Job, job

_CLIENTS = 4
_OPERATIONS = 12
# Shorter and longer than the time until a task is declared dead.
_SHORT_STOP, _LONG_STOP = 0.5, 3.0


class Client(threading.Thread):
    """Reads and writes a variable, one operation after the other, and records the times.

    Attributes:
      history: What it did.
      error: What ended it early.
    """

    def __init__(self, work: Job, operate: Any, first: int, seed: str) -> None:
        super().__init__(name=f"client-{first}", daemon=True)
        self._work = work
        self._operate = operate
        self._first = first
        self._rng = random.Random(seed)
        self.history: list[Operation] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for number in range(self._first, self._first + _OPERATIONS):
                self._do(number)
        except BaseException as error:
            self.error = error

    def _do(self, number: int) -> None:
        kind = self._rng.choice(["read", "read", "assign", "add"])
        value = float(number)
        begin = time.monotonic()
        result = self._work.coordinator.schedule(self._operate, args=(kind, value, number))
        found = result.fetch(60)
        end = time.monotonic()
        if kind == "read":
            value = float(found)
        self.history.append(Operation(kind, value, begin, end))


@check(
    28,
    claim="reads and writes of a variable fit one order, under kills and stops",
    limit="200 of 200 histories, ≥ 50 operations/s before the fault",
    minutes=30,
)
def linearizable(plan: Plan) -> Outcome:
    """Runs four clients on a variable, injects a fault meanwhile, and checks the history."""
    histories, rng = plan.size(200, 6), plan.rng()
    good = landed = 0
    rates: list[float] = []
    with job(plan, workers=3) as work:
        operations = [_operation(work, counter) for counter in work.counters[:2]]
        for turn in range(histories):
            register = turn % 2
            work.counters[register].assign(0.0)
            first = 1 + turn * _CLIENTS * _OPERATIONS
            clients = [
                Client(
                    work,
                    operations[register],
                    first + i * _OPERATIONS,
                    f"{plan.seed} {turn} {i}",
                )
                for i in range(_CLIENTS)
            ]
            begin = time.monotonic()
            for client in clients:
                client.start()
            hit, when = _harm_in_the_midst(work, clients, turn, rng)
            for client in clients:
                client.join(90)
                if client.error is not None:
                    raise client.error
            history = [operation for client in clients for operation in client.history]
            before = [op for op in history if op.end < when]
            rates.append(len(before) / (when - begin))
            is_within = any(op.begin < when < op.end for op in history)
            landed += hit and is_within
            good += is_linearizable(history)
            _mend(work)
            plan.report(f"{good} of {turn + 1} histories fit, {landed} faults landed")
    rate = statistics.median(rates)
    outcome = Outcome(
        f"{good} of {histories} fit, {landed} faults landed, {rate:.0f} operations/s",
        {"good": good, "landed": landed, "rate": rate},
    )
    outcome.require(good == histories, f"{histories - good} histories fit no order")
    least = int(0.9 * histories)
    outcome.require_landed(landed >= least, f"{landed} of {least} faults landed")
    outcome.require_landed(rate >= 50, f"only {rate:.0f} operations/s before the fault")
    return outcome


def _operation(work: Job, register: Any) -> Callable[..., float]:
    marks = work.marks

    def operate(kind: str, value: float, number: int) -> float:
        rng = random.Random(number)
        with marks.around(number):
            time.sleep(0.004 * rng.random())
            if kind == "read":
                found = float(register.numpy())
            else:
                (register.assign if kind == "assign" else register.assign_add)(value)
                found = 0.0
            time.sleep(0.004 * rng.random())
        return found

    return operate


def _harm_in_the_midst(
    work: Job, clients: list[Client], turn: int, rng: random.Random
) -> tuple[bool, float]:
    """Injects a fault after a third of the operations; returns whether it hit work, and when."""
    total = _CLIENTS * _OPERATIONS
    deadline = time.monotonic() + 30
    while sum(len(c.history) for c in clients) < total // 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    index = rng.randrange(3)
    if turn % 6 == 5:
        when = time.monotonic()
        _stop(work, "ps", turn // 6 % 2, _SHORT_STOP)
        return True, when
    if turn % 6 == 4:
        hit = work.hit(index, work.cluster.stop) is not None
        when = time.monotonic()
        _stop(work, "worker", index, _LONG_STOP if turn % 12 == 4 else _SHORT_STOP)
        return hit, when
    hit = work.hit(index, work.cluster.kill) is not None
    return hit, time.monotonic()


def _stop(work: Job, task: str, index: int, seconds: float) -> None:
    work.cluster.stop(task, index)
    time.sleep(seconds)
    work.cluster.cont(task, index)


def _mend(work: Job) -> None:
    """Restarts workers that have exited."""
    deadline = time.monotonic() + 60
    while not all(w.state == "idle" for w in work.coordinator.status().workers):
        for index in range(work.num_workers):
            if not work.cluster.alive("worker", index):
                work.cluster.restart("worker", index)
        if time.monotonic() > deadline:
            raise TimeoutError("60 s passed without idle workers")
        time.sleep(0.01)
