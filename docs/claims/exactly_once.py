"""Kills workers while they train, and compares what was scheduled with what was counted.

    python docs/claims/exactly_once.py [--seconds 10] [--picture FILE]

Each closure adds 1 to a counter on a parameter server, then works on for a while. A worker that is
killed in that time has sent its update already, so the closure runs twice; the server applies the
update once. Workers note in a file when an attempt begins and ends, which happens on every attempt:
the number of attempts exceeds the number of closures, the counter does not.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
import threading
import time
from pathlib import Path

import replicax as rx

NUM_WORKERS = 3
SECONDS = 0.15  # of one closure


@dataclasses.dataclass
class Attempt:
    """One run of a closure on a worker; `end` is None if it was killed."""

    number: int
    worker: int
    begin: float
    is_sent: bool = False
    end: float | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--picture", type=Path, help="draws the attempts over time")
    options = parser.parse_args()
    log = Path(tempfile.mkdtemp()) / "attempts"
    log.touch()

    with rx.testing.LocalCluster(workers=NUM_WORKERS, ps=2) as cluster:
        strategy = rx.ParameterServerStrategy(cluster.resolver)
        coordinator = rx.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            counter = rx.Variable(0, dtype="int32", name="counter")

        def step(number: int) -> None:
            worker = rx.coordinator.experimental_get_current_worker_index()
            note(log, "begins", number, worker)
            counter.assign_add(1)
            note(log, "sent", number, worker)
            time.sleep(SECONDS)  # the server has the update; a kill here repeats the closure
            note(log, "ends", number, worker)

        # All workers are connected, and have the function, before the clock starts.
        warm_up = 5 * NUM_WORKERS
        for number in range(warm_up):
            coordinator.schedule(step, args=(number,))
        coordinator.join()
        start = time.time()
        kills: list[tuple[float, str, int]] = []

        def kill_and_restart() -> None:
            for worker in (1, 2):
                time.sleep(options.seconds / 4)
                cluster.kill("worker", worker)
                kills.append((time.time() - start, "kill", worker))
                time.sleep(options.seconds / 8)
                cluster.restart("worker", worker)
                kills.append((time.time() - start, "restart", worker))

        saboteur = threading.Thread(target=kill_and_restart)
        saboteur.start()
        scheduled = warm_up
        while time.time() < start + options.seconds:
            coordinator.schedule(step, args=(scheduled,))
            scheduled += 1
            time.sleep(SECONDS / NUM_WORKERS)
        saboteur.join()
        coordinator.join()
        counted = int(counter.numpy())
        coordinator.close()
        strategy.close()

    attempts = read(log)
    lost = [attempt for attempt in attempts if attempt.end is None]
    print(
        f"{scheduled} closures scheduled, {counted} counted; {len(attempts)} attempts, of which "
        f"{len(lost)} were killed, {sum(a.is_sent for a in lost)} after their update was sent"
    )
    if options.picture:
        draw(attempts, kills, start, scheduled, counted, options.picture)
    if counted != scheduled:
        raise SystemExit("an update was lost, or applied twice")


def note(log: Path, what: str, number: int, worker: int) -> None:
    """Appends one line; lines of several processes do not mix."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.write(descriptor, f"{what} {number} {worker} {time.time()}\n".encode())
    os.close(descriptor)


def read(log: Path) -> list[Attempt]:
    """Returns all attempts, by their begin."""
    attempts: list[Attempt] = []
    for line in log.read_text().splitlines():
        what, number, worker, moment = line.split()
        if what == "begins":
            attempts.append(Attempt(int(number), int(worker), float(moment)))
            continue
        own = [a for a in attempts if (a.number, a.worker) == (int(number), int(worker))]
        if what == "sent":
            own[-1].is_sent = True
        else:
            own[-1].end = float(moment)
    return attempts


def draw(
    attempts: list[Attempt],
    kills: list[tuple[float, str, int]],
    start: float,
    scheduled: int,
    counted: int,
    path: Path,
) -> None:
    """Draws a row of attempts for each worker, and the number of finished closures below."""
    import matplotlib.pyplot as plt

    colors = {"done": "#9db8d6", "killed": "#d62728", "repeated": "#2ca02c"}
    lost = {a.number: a for a in attempts if a.end is None}
    deaths = [(moment + start, worker) for moment, what, worker in kills if what == "kill"]
    figure, (top, below) = plt.subplots(
        2, 1, figsize=(10, 4.4), sharex=True, height_ratios=[2, 1], layout="constrained"
    )
    for a in attempts:
        kind = "killed" if a.end is None else "repeated" if a.number in lost else "done"
        end = a.end or min(at for at, worker in deaths if worker == a.worker and at > a.begin)
        top.barh(
            a.worker,
            end - a.begin,
            left=a.begin - start,
            height=0.6,
            color=colors[kind],
            edgecolor="white",
            linewidth=0.8,
        )
        if kind == "repeated":
            first = lost[a.number]
            top.annotate(
                "",
                xy=(a.begin - start, a.worker + (0.3 if a.worker < first.worker else -0.3)),
                xytext=(first.begin - start, first.worker),
                arrowprops={"arrowstyle": "->", "color": colors["repeated"], "linewidth": 1.5},
            )
    for moment, what, worker in kills:
        if what == "kill":
            top.plot([moment], [worker - 0.5], marker="X", color=colors["killed"], markersize=9)
            top.annotate(
                "kill -9", (moment + 0.12, worker - 0.5), va="center", color=colors["killed"]
            )
        else:
            top.annotate("restarted ", (moment, worker), va="center", ha="right")
    top.set_yticks(range(NUM_WORKERS), [f"worker {i}" for i in range(NUM_WORKERS)])
    top.set_ylim(NUM_WORKERS - 0.5, -0.6)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    labels = ["one closure", "killed while it ran", "the same closure, on another worker"]
    top.legend(
        handles, labels, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False
    )
    ends = sorted(a.end for a in attempts if a.end is not None)
    below.step(
        [end - start for end in ends], range(1, len(ends) + 1), where="post", color="#4c78a8"
    )
    below.set_ylabel("finished")
    below.set_xlabel("seconds")
    below.set_xlim(left=0)
    below.set_ylim(bottom=0)
    num_sent = sum(a.is_sent for a in lost.values())
    below.set_title(
        f"{scheduled} scheduled · {len(attempts)} attempts · {len(lost)} killed, {num_sent} after "
        f"their update was sent · {counted} counted",
        loc="right",
        fontsize=11,
    )
    for axis in (top, below):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
