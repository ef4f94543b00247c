"""The demo's second act: a recommender on parameter servers loses a worker, and no step.

Ratings of a made-up film club are learnt by two tables of vectors, one for members and one for
films, each cut over two parameter servers. Three workers train; one of them is killed on the
way and started again later. Training goes on all the time, and in the end every step that was
scheduled is in the model exactly once. Run it alone, or with `make demo`.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress

import replicax as rx

PICTURE = Path(__file__).resolve().parent.parent / "out" / "demo_parameter_servers.png"
MEMBERS, FILMS, RATINGS, TEST_RATINGS = 8_000, 4_000, 600_000, 40_000
WIDTH, BATCH = 16, 1024
# Steps that are scheduled ahead of what has ended.
AHEAD = 120
VICTIM = 1
# Seconds after the first step.
KILL_S, RESTART_S, END_S, LATEST_S = 5.0, 8.0, 19.0, 40.0


def ratings() -> dict[str, np.ndarray]:
    """Returns ratings in half stars, from tastes that nobody tells the model."""
    rng = np.random.default_rng(7)
    members, films = rng.integers(0, MEMBERS, RATINGS), rng.integers(0, FILMS, RATINGS)
    tastes, styles = rng.normal(0, 0.6, (MEMBERS, 6)), rng.normal(0, 0.6, (FILMS, 6))
    kindness, quality = rng.normal(0, 0.3, MEMBERS), rng.normal(0, 0.4, FILMS)
    stars = 3 + kindness[members] + quality[films] + rng.normal(0, 0.25, RATINGS)
    stars += np.sum(tastes[members] * styles[films], axis=1)
    stars = np.clip(np.round(2 * stars) / 2, 0.5, 5.5).astype(np.float32)
    return {"member": members.astype(np.int32), "film": films.astype(np.int32), "stars": stars}


def dataset_fn() -> rx.data.Dataset:
    """Makes the data of one worker; the last ratings are kept for the test."""
    known = {name: column[:-TEST_RATINGS] for name, column in ratings().items()}
    return rx.data.Dataset.from_tensor_slices(known).shuffle(RATINGS).repeat().batch(BATCH)


class Recommender(rx.Module):
    """Knows a vector for each member and film; the last number of each is added as it is."""

    def __init__(self, mean: float) -> None:
        super().__init__()
        self.mean = mean
        # Each server makes the first values of its own rows.
        self.members, self.films = (
            rx.Variable(
                lambda rows=rows, key=key: 0.1 * jax.random.normal(jax.random.key(key), rows),
                name=name,
            )
            for key, (name, rows) in enumerate(
                {"members": (MEMBERS, WIDTH), "films": (FILMS, WIDTH)}.items()
            )
        )

    def __call__(self, member: Any, film: Any) -> Any:
        # Only the rows of this batch travel.
        m = rx.nn.embedding_lookup(self.members, member)
        f = rx.nn.embedding_lookup(self.films, film)
        return self.mean + jnp.sum(m[:, :-1] * f[:, :-1], axis=1) + m[:, -1] + f[:, -1]


@dataclasses.dataclass
class Record:
    """What was seen while training: seconds count from the first step that ended."""

    losses: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    done: list[tuple[float, list[int]]] = dataclasses.field(default_factory=list)
    events: list[tuple[float, str]] = dataclasses.field(default_factory=list)
    num_scheduled: int = 0


class Training:
    """Schedules steps, harms the cluster on the way, and keeps a record."""

    def __init__(self, cluster: Any, coordinator: Any, console: Console) -> None:
        self._cluster = cluster
        self._coordinator = coordinator
        self._console = console
        self._begun_s: float | None = None
        self.record = Record()

    def run(self, step: Any, iterator: Any) -> Record:
        """Trains until the time is over and the lost worker has come back."""
        record, pending = self.record, collections.deque()
        with Progress(console=self._console, disable=not self._console.is_terminal) as bars:
            bar = bars.add_task("starting", total=END_S)
            shown_s = 0.0
            while not self._is_over(now := self._now()):
                while len(pending) < AHEAD:
                    pending.append(self._coordinator.schedule(step, args=(iterator,)))
                    record.num_scheduled += 1
                try:
                    loss = float(pending[0].fetch(timeout=0.1))
                except rx.errors.DeadlineExceededError:
                    continue
                finally:
                    self._observe(now)
                pending.popleft()
                self._begun_s = self._begun_s or time.monotonic()
                record.losses.append((self._now(), loss))
                bars.update(bar, completed=now, description=f"error {loss**0.5:.2f} stars")
                if now >= shown_s and not self._console.is_terminal:
                    self._console.print(f"{now:4.0f} s: error {loss**0.5:.2f} stars")
                    shown_s += 4.0
            self._coordinator.join()
        return record

    def _now(self) -> float:
        return 0.0 if self._begun_s is None else time.monotonic() - self._begun_s

    def _is_over(self, now: float) -> bool:
        happened = [what for _, what in self.record.events]
        return now > LATEST_S or (now > END_S and "back" in happened)

    def _observe(self, now: float) -> None:
        """Looks at the workers, ten times a second, and does the next harm when it is time."""
        done, events = self.record.done, self.record.events
        if self._begun_s is None or (done and now - done[-1][0] < 0.1):
            return
        workers = self._coordinator.status().workers
        done.append((now, [worker.num_done for worker in workers]))
        victim, happened = workers[VICTIM], [what for _, what in events]
        if not happened and now > KILL_S and victim.num_closures:
            self._cluster.kill("worker", VICTIM)
            self._say(now, "killed", f"killed worker {VICTIM}, with {victim.num_closures} steps")
        elif happened == ["killed"] and now > RESTART_S:
            self._cluster.restart("worker", VICTIM, wait=False)
            self._say(now, "restarted", f"started worker {VICTIM} again")
        elif happened == ["killed", "restarted"] and victim.num_done > self._done_at(events[0][0]):
            self._say(now, "back", f"worker {VICTIM} is back")

    def _done_at(self, moment: float) -> int:
        """How many steps the victim had done half a second after it was killed."""
        return next(n[VICTIM] for t, n in self.record.done if t > moment + 0.5)

    def _say(self, now: float, event: str, text: str) -> None:
        self.record.events.append((now, event))
        self._console.print(f"{now:4.0f} s: {text}")


def draw(record: Record, errors: tuple[float, float]) -> None:
    """Draws the error and what each worker did, over time."""
    error, baseline = errors
    figure = Figure(figsize=(12, 6.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.15))
    times, losses = np.array(record.losses).T
    last_s = float(times[-1])
    edges = np.arange(0.0, last_s, 0.5)
    in_bin = np.digitize(times, edges)
    mean = [np.sqrt(losses[in_bin == i].mean()) for i in np.unique(in_bin)]
    upper.axhline(baseline, color="0.5", linestyle="--", linewidth=1.5)
    upper.text(last_s, baseline, "always guessing the mean", ha="right", va="bottom", color="0.35")
    upper.plot(edges[np.unique(in_bin) - 1] + 0.25, mean, color="C3", linewidth=2.5)
    upper.set(ylabel="error in stars", ylim=(0, baseline * 1.25))
    seen = np.array([t for t, _ in record.done])
    counts = np.array([n for _, n in record.done])
    at_edges = np.array([np.interp(edges, seen, column) for column in counts.T])
    rates = np.diff(at_edges, axis=1) / np.diff(edges)
    lower.stackplot(
        edges[:-1] + 0.25,
        rates,
        labels=[f"worker {i}" for i in range(len(rates))],
        colors=["#4c78a8", "#f58518", "#72b7b2"],
    )
    lower.set(ylabel="steps per second", xlabel="seconds", xlim=(0, last_s))
    lower.set_ylim(0, 1.3 * rates.sum(axis=0).max())
    lower.legend(loc="upper left", ncols=3, frameon=False)
    words = {"killed": f"worker {VICTIM} killed", "restarted": "started again", "back": "back"}
    for moment, event in record.events:
        for axes in (upper, lower):
            axes.axvline(moment, color="black", linewidth=1.2, linestyle=":")
        upper.annotate(
            words[event], (moment, baseline * 1.23), (4, 0), textcoords="offset points", va="top"
        )
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
    total = f"{record.num_scheduled:,} steps scheduled, {record.num_scheduled:,} in the model"
    figure.suptitle(f"{total}; {error:.2f} stars off on ratings not seen", fontsize="x-large")
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=120)


def main(console: Console) -> None:
    console.print("Starting 3 workers and 2 parameter servers")
    data = ratings()
    mean = float(data["stars"][:-TEST_RATINGS].mean())
    unseen = {name: column[-TEST_RATINGS:] for name, column in data.items()}
    partitioner = rx.experimental.partitioners.FixedShardsPartitioner(num_shards=2)
    with rx.testing.LocalCluster(workers=3, ps=2) as cluster:
        strategy = rx.ParameterServerStrategy(cluster.resolver, partitioner)
        coordinator = rx.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            model = Recommender(mean)
            tables = [model.members, model.films]
            optimizer = rx.optimizers.Optimizer(optax.adagrad(0.15), tables)

        @rx.function
        def step(iterator: Any) -> Any:
            batch = next(iterator)

            def loss_fn() -> Any:
                return jnp.mean((model(batch["member"], batch["film"]) - batch["stars"]) ** 2)

            loss, gradients = rx.value_and_grad(loss_fn, tables)()
            optimizer.apply_gradients(zip(gradients, tables, strict=True))
            return loss

        iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
        record = Training(cluster, coordinator, console).run(step, iterator)
        found = coordinator.schedule(rx.function(model), args=(unseen["member"], unseen["film"]))
        counted = int(optimizer.iterations)
        error = float(np.sqrt(np.mean((found.fetch() - unseen["stars"]) ** 2)))
        console.print(str(coordinator.status()), highlight=False)
        coordinator.close()
        strategy.close()
    assert counted == record.num_scheduled, (counted, record.num_scheduled)
    baseline = float(np.sqrt(np.mean((mean - unseen["stars"]) ** 2)))
    assert error < 0.6 * baseline, (error, baseline)
    console.print(f"{record.num_scheduled} steps scheduled, {counted} counted: each exactly once")
    console.print(f"Error on unseen ratings: {error:.2f} stars; guessing the mean: {baseline:.2f}")
    draw(record, (error, baseline))
    console.print(f"Picture: {PICTURE.relative_to(PICTURE.parent.parent)}")


if __name__ == "__main__":
    main(Console())
