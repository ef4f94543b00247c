"""A recommender on parameter servers loses a worker but no step.

Ratings of a made-up film club are learnt by two tables of vectors, one for members and one for
films, each cut over two parameter servers. Three workers train; one of them is killed on the
way and started again later. Training goes on all the time, and in the end every step that was
scheduled is in the model exactly once.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console

import replicax as rx
from replicax.coordinator.scheduling.status import WorkerStatus
from replicax.demo.live import LiveTable, sparkline

PICTURE = "demo_parameter_servers.png"
MEMBERS, FILMS, RATINGS, TEST_RATINGS = 4_000, 2_000, 600_000, 40_000
WIDTH, BATCH = 8, 1024
COLUMNS = ("task", "state", "waiting", "steps", "steps/s", "steps/s over time")
# How many moments of a tenth of a second are shown.
HISTORY = 40
# Steps that wait for a worker.
AHEAD = 60
VICTIM = 1
# Seconds after the first step.
KILL_S, RESTART_S, END_S, LATEST_S = 5.0, 7.5, 18.0, 40.0


def ratings() -> dict[str, np.ndarray]:
    """Returns ratings in half stars, from tastes that are hidden from the model."""
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
                lambda rows=rows, key=key: 0.2 * jax.random.normal(jax.random.key(key), rows),
                name=name,
            )
            for key, (name, rows) in enumerate(
                {"members": (MEMBERS, WIDTH), "films": (FILMS, WIDTH)}.items()
            )
        )

    def __call__(self, member: jax.Array, film: jax.Array) -> jax.Array:
        # Only the rows of this batch travel.
        m = rx.nn.embedding_lookup(self.members, member)
        f = rx.nn.embedding_lookup(self.films, film)
        return self.mean + jnp.sum(m[:, :-1] * f[:, :-1], axis=1) + m[:, -1] + f[:, -1]


@dataclasses.dataclass
class Record:
    """What was seen while training: seconds count from the first step that ended."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    # The sum of all losses so far, and how many there were.
    losses: list[np.ndarray] = dataclasses.field(default_factory=list)
    # How many steps each worker has done.
    done: list[list[int]] = dataclasses.field(default_factory=list)
    events: dict[str, float] = dataclasses.field(default_factory=dict)
    num_scheduled: int = 0

    def error(self, since_s: float = 0.5) -> float:
        """The error of late, in stars."""
        first = np.searchsorted(self.seconds, self.seconds[-1] - since_s)
        total, count = self.losses[-1] - self.losses[max(0, first - 1)]
        return float(np.sqrt(total / count)) if count else float("nan")


class ProgressLines(logging.Handler):
    """Shows what the library logs as lines of the demo: the worker is lost on purpose."""

    def __init__(self, training: Training) -> None:
        super().__init__(logging.WARNING)
        self._training = training

    def emit(self, record: logging.LogRecord) -> None:
        self._training.say(f"the coordinator notices: {record.getMessage()}")


class Training:
    """Keeps the workers busy, harms one of them, and writes down what it sees."""

    def __init__(
        self,
        cluster: rx.testing.LocalCluster,
        coordinator: rx.coordinator.ClusterCoordinator,
        console: Console,
    ) -> None:
        self._cluster = cluster
        self._coordinator = coordinator
        self._console = console
        self._shown_s = 4.0
        self._done_before = 0
        self.record = Record()

    def run(self, step: Callable[..., None], iterator: object, losses: rx.Variable) -> Record:
        """Trains until the time is over and the lost worker has come back."""
        logger, lines = logging.getLogger("replicax"), ProgressLines(self)
        logger.addHandler(lines)
        logger.propagate = False
        try:
            self._run(step, iterator, losses)
        finally:
            logger.propagate = True
            logger.removeHandler(lines)
        return self.record

    def _run(self, step: Callable[..., None], iterator: object, losses: rx.Variable) -> None:
        record, begun_s = self.record, 0.0
        with LiveTable(self._console, "compiling", COLUMNS, is_kept=False) as table:
            while not self._is_over():
                status = self._coordinator.status()
                for _ in range(AHEAD - status.num_queued):
                    self._coordinator.schedule(step, args=(iterator,))
                    record.num_scheduled += 1
                time.sleep(0.1)
                if not status.num_finished:
                    continue
                begun_s = begun_s or time.monotonic()
                record.seconds.append(time.monotonic() - begun_s)
                record.losses.append(losses.numpy())
                record.done.append([worker.num_done for worker in status.workers])
                self._harm(status.workers[VICTIM])
                description = f"{record.error():.2f} stars off"
                table.title = f"{record.seconds[-1]:.0f} s: {description}"
                self._show_workers(table, status.workers)
                self._show(description)
            self._coordinator.join()

    def _show_workers(self, table: LiveTable, workers: Sequence[WorkerStatus]) -> None:
        done = np.array(self.record.done)
        rates = np.diff(done, axis=0, prepend=done[:1]) / np.diff(
            self.record.seconds, prepend=self.record.seconds[0] - 0.1
        ).reshape(-1, 1)
        for index, worker in enumerate(workers):
            now = np.mean(rates[-10:, index])
            history = sparkline(rates[:, index].tolist(), HISTORY, float(rates.max()))
            numbers = str(worker.num_closures), str(worker.num_done), f"{now:.0f}"
            table.set(f"worker {index}", worker.state, *numbers, history)

    def _is_over(self) -> bool:
        now = self.record.seconds[-1] if self.record.seconds else 0.0
        back = self.record.events.get("back", LATEST_S)
        return now > min(LATEST_S, max(END_S, back + 4.0))

    def _harm(self, victim: WorkerStatus) -> None:
        """Kills the worker when it is time, starts it again, and sees it come back."""
        events, now = self.record.events, self.record.seconds[-1]
        if "killed" not in events:
            if now > KILL_S and victim.num_closures:
                text = f"killing worker {VICTIM}, which has {victim.num_closures} steps"
                self._note("killed", text)
                self._cluster.kill("worker", VICTIM)
        elif "restarted" not in events:
            if now > RESTART_S:
                self._done_before = victim.num_done
                self._cluster.restart("worker", VICTIM, wait=False)
                self._note("restarted", f"started worker {VICTIM} again")
        elif "back" not in events and victim.num_done > self._done_before:
            self._note("back", f"worker {VICTIM} is back")

    def _note(self, event: str, text: str) -> None:
        self.record.events[event] = self.record.seconds[-1]
        self.say(text)

    def say(self, text: str) -> None:
        """Prints a line behind the time."""
        now = self.record.seconds[-1] if self.record.seconds else 0.0
        self._console.print(f"{now:4.0f} s: {text}", highlight=False, soft_wrap=True)

    def _show(self, text: str) -> None:
        now = self.record.seconds[-1]
        if now > self._shown_s and not self._console.is_terminal:
            self._console.print(f"{now:4.0f} s: {text}")
            self._shown_s += 4.0


def per_second(seconds: np.ndarray, counts: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Turns a count into a rate: how much it grew in the half second around each moment."""
    low, high = np.clip(grid - 0.25, 0, seconds[-1]), np.clip(grid + 0.25, 0, seconds[-1])
    return (np.interp(high, seconds, counts) - np.interp(low, seconds, counts)) / (high - low)


def draw(record: Record, error: float, baseline: float, picture: Path) -> None:
    """Draws the error and what each worker did, over time."""
    figure = Figure(figsize=(12, 6.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.1))
    seconds = np.array(record.seconds)
    grid = np.arange(0.0, seconds[-1], 0.2)
    total, count = (per_second(seconds, c, grid) for c in np.array(record.losses).T)
    upper.axhline(baseline, color="0.5", linestyle="--", linewidth=1.5)
    where = (seconds[-1], baseline * 0.97)
    upper.text(*where, "guessing the mean", ha="right", va="top", color="0.35", fontsize="large")
    upper.plot(grid, np.sqrt(total / np.maximum(count, 1e-9)), color="#c23b22", linewidth=3)
    upper.set_ylabel("error in stars", fontsize="large")
    upper.set_ylim(0, baseline * 1.4)
    done = np.array(record.done).T
    order = [*(i for i in range(len(done)) if i != VICTIM), VICTIM]
    rates = [per_second(seconds, done[i], grid) for i in order]
    names = [f"worker {i}" for i in order]
    lower.stackplot(grid, rates, labels=names, colors=["#4c78a8", "#72b7b2", "#f58518"])
    lower.set_ylabel("steps per second", fontsize="large")
    lower.set_xlabel("seconds", fontsize="large")
    lower.set_xlim(0, seconds[-1])
    lower.set_xticks(range(0, int(seconds[-1]) + 1, 2))
    lower.set_ylim(0, 1.3 * np.sum(rates, axis=0).max())
    lower.legend(loc="upper right", ncols=3, edgecolor="none", framealpha=1, fontsize="large")
    words = {"killed": f"worker {VICTIM} killed", "restarted": "started again", "back": "back"}
    for row, (event, moment) in enumerate(record.events.items()):
        for axes in (upper, lower):
            axes.axvline(moment, color="black", linewidth=1.3, linestyle=":")
        # One below the other: a worker may start again at once.
        place = {"xytext": (5, -15 * row), "textcoords": "offset points", "va": "top"}
        upper.annotate(words[event], (moment, baseline * 1.39), fontsize="large", **place)
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
    steps = f"{record.num_scheduled:,}"
    title = f"{steps} steps scheduled, {steps} counted; unseen ratings: {error:.2f} stars off"
    figure.suptitle(title, fontsize="x-large")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)


def play(console: Console, pictures: Path) -> None:
    """Trains while a worker is lost and comes back, and counts the steps."""
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
            adagrad = optax.adagrad(0.1, initial_accumulator_value=1e-8)
            optimizer = rx.optimizers.Optimizer(adagrad, tables)
            losses = rx.Variable(np.zeros(2, np.float32), name="losses")  # their sum and number

        @rx.function
        def step(iterator: Iterator[dict[str, jax.Array]]) -> None:
            batch = next(iterator)

            def loss_fn() -> jax.Array:
                return jnp.mean((model(batch["member"], batch["film"]) - batch["stars"]) ** 2)

            loss, gradients = rx.value_and_grad(loss_fn, tables)()
            optimizer.apply_gradients(zip(gradients, tables, strict=True))
            losses.assign_add(jnp.stack([loss, 1.0]))

        iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
        record = Training(cluster, coordinator, console).run(step, iterator, losses)
        found = coordinator.schedule(rx.function(model), args=(unseen["member"], unseen["film"]))
        counted = int(optimizer.iterations), int(losses.numpy()[1])
        error = float(np.sqrt(np.mean((found.fetch() - unseen["stars"]) ** 2)))
        console.print(str(coordinator.status()), highlight=False)
        coordinator.close()
        strategy.close()
    assert counted == (record.num_scheduled,) * 2, (counted, record.num_scheduled)
    baseline = float(np.sqrt(np.mean((mean - unseen["stars"]) ** 2)))
    assert error < 0.6 * baseline, (error, baseline)
    console.print(
        f"{record.num_scheduled} steps scheduled, {counted[0]} counted: each exactly once"
    )
    console.print(f"Error on unseen ratings: {error:.2f} stars; guessing the mean: {baseline:.2f}")
    draw(record, error, baseline, pictures / PICTURE)
    console.print(f"Picture: {pictures / PICTURE}")
