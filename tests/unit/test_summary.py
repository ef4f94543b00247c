"""rx.summary: one implementation for event files, CSV files and trackers; tf.summary uses it."""

from __future__ import annotations

import csv
import sys
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from vocabulary import refused

import replicax as rx
import replicax.tf as tf
from replicax.foundation import errors, peers
from replicax.observe import progress
from replicax.summary import trackers
from replicax.tensorflow_files.events import read_events


def written(folder: Path) -> list[tuple[int, str, str]]:
    """Step, tag and plugin of all summaries of a directory."""
    return [
        (event.step, value.tag, value.plugin)
        for path in sorted(folder.glob("*tfevents*"))
        for event in read_events(path)
        for value in event.values
    ]


class Kept:
    """A tracker that keeps what it gets."""

    def __init__(self) -> None:
        self.found: list[tuple[Any, ...]] = []
        self.num_closed = 0

    def scalar(self, tag: str, value: Any, step: int, description: str = "") -> None:
        self.found.append(("scalar", tag, float(value), step, description))

    def histogram(
        self, tag: str, data: Any, step: int, buckets: int = 30, description: str = ""
    ) -> None:
        self.found.append(("histogram", tag, np.asarray(data).tolist(), step, buckets))

    def image(
        self, tag: str, data: Any, step: int, max_outputs: int = 3, description: str = ""
    ) -> None:
        self.found.append(("image", tag, np.asarray(data).shape, step, max_outputs))

    def text(self, tag: str, data: Any, step: int, description: str = "") -> None:
        self.found.append(("text", tag, data, step))

    def flush(self) -> None: ...

    def close(self) -> None:
        self.num_closed += 1


def test_event_files_have_scalars_histograms_images_and_texts(tmp_path: Path) -> None:
    with rx.summary.create_file_writer(tmp_path) as writer, writer.as_default(step=5):
        assert rx.summary.scalar("loss", jnp.float32(0.5))
        assert rx.summary.histogram("weights", jnp.arange(10.0), step=6, buckets=4)
        assert rx.summary.image("digit", np.zeros((2, 8, 8, 1), np.uint8), step=6)
        assert rx.summary.text("note", "hello", step=6)
    assert written(tmp_path) == [
        (5, "loss", "scalars"),
        (6, "weights", "histograms"),
        (6, "digit", "images"),
        (6, "note", "text"),
    ]


def test_all_trackers_of_a_writer_get_everything() -> None:
    first, second = Kept(), Kept()
    with rx.summary.create_writer(first, second) as writer, writer.as_default():
        rx.summary.scalar("loss", 0.25, step=3, description="of a batch")
        rx.summary.histogram("w", [1.0, 2.0], step=3, buckets=5)
        rx.summary.image("i", np.zeros((1, 2, 2, 3)), step=4, max_outputs=2)
        rx.summary.text("t", ["a", "b"], step=4)
    assert first.found == second.found
    assert first.found == [
        ("scalar", "loss", 0.25, 3, "of a batch"),
        ("histogram", "w", [1.0, 2.0], 3, 5),
        ("image", "i", (1, 2, 2, 3), 4, 2),
        ("text", "t", ["a", "b"], 4),
    ]
    assert first.num_closed == second.num_closed == 1


def test_compiled_functions_write_when_they_run() -> None:
    kept = Kept()
    count = rx.Variable(0, dtype=jnp.int32)

    @rx.function
    def step(x: Any) -> None:
        count.assign_add(1)
        rx.summary.scalar("double", 2.0 * x, step=count)

    with rx.summary.create_writer(kept) as writer, writer.as_default():
        for number in range(3):
            step(jnp.float32(number))
    assert sorted(kept.found) == [("scalar", "double", 2.0 * i, i + 1, "") for i in range(3)]


def test_conditions_and_steps() -> None:
    kept = Kept()
    with rx.summary.create_writer(kept).as_default():
        with refused(errors.InvalidArgumentError, "needs a step"):
            rx.summary.scalar("loss", 1.0)
        rx.summary.set_step(4)
        try:
            assert rx.summary.scalar("loss", 1.0)
            with rx.summary.record_if(lambda: jnp.bool_(False)):
                assert not rx.summary.scalar("loss", 2.0)
        finally:
            rx.summary.set_step(None)
    assert kept.found == [("scalar", "loss", 1.0, 4, "")]


def test_scalars_are_shown_to_observers_without_a_writer() -> None:
    assert not rx.summary.scalar("seen loss", jnp.float32(0.125), step=9)
    shown: Any = progress.snapshot()["values"]
    assert (shown["seen loss"]["value"], shown["seen loss"]["step"]) == (0.125, 9)
    progress.forget("seen loss")


def test_one_task_of_a_group_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in (0, 1):
        monkeypatch.setattr(peers, "_of_process", types.SimpleNamespace(index=index, count=2))
        folder = tmp_path / str(index)
        with rx.summary.create_file_writer(folder) as writer, writer.as_default():
            assert rx.summary.scalar("loss", 1.0, step=1) == (index == 0)
        kept = Kept()
        with rx.summary.create_writer(kept).as_default():
            rx.summary.scalar("loss", 1.0, step=1)
        assert bool(kept.found) == (index == 0)
        with rx.summary.create_file_writer(folder, every_task=True) as writer, writer.as_default():
            assert rx.summary.scalar("own", 1.0, step=1)
    assert [tag for _, tag, _ in written(tmp_path / "1")] == ["own"]


def test_a_csv_file_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "log.csv"
    for run in range(2):
        with rx.summary.create_writer(rx.summary.CsvTracker(path)) as writer, writer.as_default():
            for step in range(3):
                rx.summary.scalar("loss", 1.0 / (step + 1), step=3 * run + step)
            rx.summary.histogram("left out", [1.0], step=0)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == list(range(6))
    assert {row["tag"] for row in rows} == {"loss"}
    assert float(rows[1]["value"]) == 0.5
    assert float(rows[0]["wall_time"]) > 1.7e9


def test_a_closed_writer_and_incomplete_trackers_are_refused(tmp_path: Path) -> None:
    writer = rx.summary.create_file_writer(tmp_path)
    writer.close()
    writer.close()
    with writer.as_default(), refused(errors.ContextError, "this writer is closed"):
        rx.summary.scalar("loss", 1.0, step=1)
    with refused(errors.ArgumentTypeError, "lacks histogram, image, text, flush, close"):
        rx.summary.create_writer(types.SimpleNamespace(scalar=print))  # type: ignore[arg-type]
    with refused(errors.UnsupportedError, "is remote"):
        rx.summary.create_file_writer("gs://bucket/logs")


def test_tf_summary_is_the_same_implementation(tmp_path: Path) -> None:
    assert tf.summary.SummaryWriter is rx.summary.SummaryWriter
    kept = Kept()
    with rx.summary.create_writer(kept).as_default():
        is_written = tf.summary.scalar("loss", tf.constant(0.5), step=tf.constant(2))
        assert bool(is_written)
    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        rx.summary.scalar("loss", 0.5, step=3)
    assert kept.found == [("scalar", "loss", 0.5, 2, "")]
    assert written(tmp_path) == [(3, "loss", "scalars")]


class FakeRun:
    """What `wandb.init` returns, as far as it is used."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, Any], int]] = []
        self.is_finished = False

    def log(self, data: dict[str, Any], step: int) -> None:
        self.logged.append((data, step))

    def finish(self) -> None:
        self.is_finished = True


def test_weights_and_biases_gets_its_own_types(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("wandb")
    for name in ("Histogram", "Image", "Html"):
        setattr(module, name, lambda *given, _kind=name, **named: (_kind, given, named))
    monkeypatch.setitem(sys.modules, "wandb", module)
    run = FakeRun()
    with rx.summary.create_writer(rx.summary.WandbTracker(run)) as writer, writer.as_default():
        rx.summary.scalar("loss", jnp.float32(0.5), step=1)
        rx.summary.histogram("w", np.ones((2, 2)), step=2, buckets=8)
        rx.summary.image("i", np.full((4, 2, 2, 1), 0.5), step=3, max_outputs=2)
        rx.summary.text("t", [["a", "b"], ["c", "d"]], step=4)
    assert run.is_finished
    scalar, histogram, image, text = run.logged
    assert scalar == ({"loss": 0.5}, 1)
    assert histogram[0]["w"][0] == "Histogram"
    assert histogram[0]["w"][1][0].shape == (4,)
    assert [kind for kind, *_ in image[0]["i"]] == ["Image", "Image"]
    assert image[0]["i"][0][1][0].dtype == np.uint8
    assert text[0]["t"][1] == ("<pre>a\nb\nc\nd</pre>",)


def test_mlflow_gets_metrics_images_and_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    class Client:
        def __getattr__(self, name: str) -> Any:
            return lambda *given, **named: calls.append((name, given, named))

    module = types.ModuleType("mlflow")
    run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))
    module.active_run = lambda: None  # type: ignore[attr-defined]
    module.start_run = lambda: run  # type: ignore[attr-defined]
    module.end_run = lambda: calls.append(("end_run", (), {}))  # type: ignore[attr-defined]
    module.MlflowClient = Client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    tracker = rx.summary.MLflowTracker()
    assert tracker.run_id == "r1"
    with rx.summary.create_writer(tracker) as writer, writer.as_default():
        rx.summary.scalar("loss", 0.5, step=1)
        rx.summary.histogram("left out", [1.0], step=1)
        rx.summary.image("i", np.zeros((3, 2, 2, 3), np.uint8), step=2)
        rx.summary.text("note", "hello", step=3)
    names = [name for name, *_ in calls]
    assert names == ["log_metric", *["log_image"] * 3, "log_text", "end_run"]
    assert calls[0] == ("log_metric", ("r1", "loss", 0.5), {"step": 1})
    assert calls[4] == ("log_text", ("r1", "hello", "note/3.txt"), {})


def test_services_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with refused(errors.MissingDependencyError, "mlflow"):
        trackers.MLflowTracker()
