"""Where summaries go: event files, CSV files, and services that track experiments."""

from __future__ import annotations

import csv
import os
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from replicax.foundation import errors, lazy


class Tracker(Protocol):
    """Receives the summaries of one task. Several threads may call it.

    A tracker ignores what it cannot show. `replicax.tensorflow_files.events.EventWriter`, which
    writes event files, is one.

    Example:
      >>> class Printer:
      ...     def scalar(self, tag, value, step, description=""):
      ...         print(step, tag, float(value))
      ...     def histogram(self, tag, data, step, buckets=30, description=""): ...
      ...     def image(self, tag, data, step, max_outputs=3, description=""): ...
      ...     def text(self, tag, data, step, description=""): ...
      ...     def flush(self): ...
      ...     def close(self): ...
      >>> import replicax as rx
      >>> with rx.summary.create_writer(Printer()).as_default():
      ...     _ = rx.summary.scalar("loss", 0.5, step=1)
      1 loss 0.5
    """

    def scalar(self, tag: str, value: ArrayLike, step: int, description: str = "") -> None:
        """Receives a number."""
        ...

    def histogram(
        self, tag: str, data: ArrayLike, step: int, buckets: int = 30, description: str = ""
    ) -> None:
        """Receives values whose distribution is to be shown."""
        ...

    def image(
        self, tag: str, data: ArrayLike, step: int, max_outputs: int = 3, description: str = ""
    ) -> None:
        """Receives images: (number, height, width, channels), from 0 to 1 or uint8."""
        ...

    def text(self, tag: str, data: str | Sequence[str], step: int, description: str = "") -> None:
        """Receives a text, or a nest of lists of texts."""
        ...

    def flush(self) -> None:
        """Makes visible what was received."""
        ...

    def close(self) -> None:
        """Ends the tracking. Idempotent."""
        ...


# What `create_writer` requires of a tracker.
METHODS = ("scalar", "histogram", "image", "text", "flush", "close")


class CsvTracker:
    """Writes scalars to a CSV file with the columns `wall_time`, `step`, `tag` and `value`.

    Rows are appended to a file that exists, so that a training that resumes continues it.
    Histograms, images and texts are left out.

    Args:
      path: The file; its directory is created.

    Raises:
      InvalidArgumentError: A scalar is not one number.
      ContextError: It is closed.

    Example:
      >>> import tempfile
      >>> folder = tempfile.TemporaryDirectory()
      >>> import replicax as rx
      >>> tracker = rx.summary.CsvTracker(f"{folder.name}/log.csv")
      >>> tracker.scalar("loss", 0.5, step=3)
      >>> tracker.close()
      >>> tracker.path.read_text().splitlines()[1].split(",")[1:]
      ['3', 'loss', '0.5']
      >>> folder.cleanup()
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        file: IO[str] = open(self.path, "a", newline="", encoding="utf-8")  # noqa: SIM115
        self._file = file
        self._closer = weakref.finalize(self, file.close)
        self._rows = csv.writer(file)
        if file.tell() == 0:
            self._rows.writerow(["wall_time", "step", "tag", "value"])

    def __repr__(self) -> str:
        return f"<CsvTracker of {str(self.path)!r}>"

    def scalar(self, tag: str, value: ArrayLike, step: int, description: str = "") -> None:
        """Writes a row."""
        del description
        number = np.asarray(value)
        if number.shape:
            raise errors.InvalidArgumentError(
                f"The scalar {tag!r} must be one number",
                f"it has the shape {number.shape}",
                "Reduce it to one number.",
            )
        with self._lock:
            if self._file.closed:
                raise errors.ContextError(
                    f"Scalars are written to an open file, such as {self.path}",
                    "this tracker is closed",
                    "Write before `close()`.",
                )
            self._rows.writerow([f"{time.time():.6f}", step, tag, number.item()])

    def histogram(
        self, tag: str, data: ArrayLike, step: int, buckets: int = 30, description: str = ""
    ) -> None:
        """Writes nothing."""

    def image(
        self, tag: str, data: ArrayLike, step: int, max_outputs: int = 3, description: str = ""
    ) -> None:
        """Writes nothing."""

    def text(self, tag: str, data: str | Sequence[str], step: int, description: str = "") -> None:
        """Writes nothing."""

    def flush(self) -> None:
        """Writes all rows to the file."""
        with self._lock:
            if not self._file.closed:
                self._file.flush()

    def close(self) -> None:
        """Closes the file. Idempotent."""
        with self._lock:
            self._closer()


class WandbTracker:
    """Logs to a run of Weights & Biases.

    Args:
      run: A run, which `wandb.init` has returned.

    >>> import replicax as rx
    >>> def record(run):  # run = wandb.init(project="digits")
    ...     with rx.summary.create_writer(rx.summary.WandbTracker(run)) as writer:
    ...         with writer.as_default(step=1):
    ...             rx.summary.scalar("loss", 0.5)
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._wandb = lazy.module("wandb")

    def scalar(self, tag: str, value: ArrayLike, step: int, description: str = "") -> None:
        """Logs a number."""
        self._run.log({tag: np.asarray(value).item()}, step=step)

    def histogram(
        self, tag: str, data: ArrayLike, step: int, buckets: int = 30, description: str = ""
    ) -> None:
        """Logs a histogram."""
        self._run.log(
            {tag: self._wandb.Histogram(np.asarray(data).ravel(), num_bins=buckets)}, step=step
        )

    def image(
        self, tag: str, data: ArrayLike, step: int, max_outputs: int = 3, description: str = ""
    ) -> None:
        """Logs images."""
        shown = [self._wandb.Image(one, caption=description or None) for one in _pixels(data)]
        self._run.log({tag: shown[:max_outputs]}, step=step)

    def text(self, tag: str, data: str | Sequence[str], step: int, description: str = "") -> None:
        """Logs a text."""
        self._run.log({tag: self._wandb.Html(f"<pre>{_as_text(data)}</pre>")}, step=step)

    def flush(self) -> None:
        """Does nothing: the service has a process of its own."""

    def close(self) -> None:
        """Finishes the run. Idempotent."""
        self._run.finish()


class MLflowTracker:
    """Logs to a run of MLflow. Histograms are left out, which MLflow does not have.

    Args:
      run_id: The id of the run; None for the active one, or a new one.

    >>> import replicax as rx
    >>> def record():  # to the active run, or a new one
    ...     with rx.summary.create_writer(rx.summary.MLflowTracker()) as writer:
    ...         with writer.as_default(step=1):
    ...             rx.summary.scalar("loss", 0.5)
    """

    def __init__(self, run_id: str | None = None) -> None:
        self._mlflow = lazy.module("mlflow")
        active = self._mlflow.active_run()
        self._is_own = run_id is None and active is None
        if run_id is None:
            run_id = (active or self._mlflow.start_run()).info.run_id
        self.run_id = run_id
        self._client = self._mlflow.MlflowClient()

    def scalar(self, tag: str, value: ArrayLike, step: int, description: str = "") -> None:
        """Logs a metric."""
        self._client.log_metric(self.run_id, tag, np.asarray(value).item(), step=step)

    def histogram(
        self, tag: str, data: ArrayLike, step: int, buckets: int = 30, description: str = ""
    ) -> None:
        """Logs nothing."""

    def image(
        self, tag: str, data: ArrayLike, step: int, max_outputs: int = 3, description: str = ""
    ) -> None:
        """Logs images."""
        for one in _pixels(data)[:max_outputs]:
            self._client.log_image(self.run_id, one, key=tag, step=step)

    def text(self, tag: str, data: str | Sequence[str], step: int, description: str = "") -> None:
        """Logs a text as an artifact."""
        self._client.log_text(self.run_id, _as_text(data), f"{tag}/{step}.txt")

    def flush(self) -> None:
        """Does nothing: MLflow logs at once."""

    def close(self) -> None:
        """Ends the run, if this has started it. Idempotent."""
        if self._is_own:
            self._is_own = False
            self._mlflow.end_run()


def _pixels(data: ArrayLike) -> np.ndarray:
    """Returns images as uint8."""
    images = np.asarray(data)
    if images.dtype == np.uint8:
        return images
    return (np.clip(images.astype(np.float32), 0.0, 1.0) * 255.0 + 0.5).astype(np.uint8)


def _as_text(data: str | Sequence[str]) -> str:
    return data if isinstance(data, str) else "\n".join(map(_as_text, data))
