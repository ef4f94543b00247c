"""`rx.summary`: scalars, histograms, images and texts of a training, for TensorBoard and others.

    writer = rx.summary.create_file_writer("logs")
    with writer.as_default():
        for step in range(1000):
            loss = train_step(next(iterator))
            rx.summary.scalar("loss", loss, step=step)

A writer passes them to trackers: event files, which TensorBoard shows, CSV files, Weights & Biases,
MLflow, or what implements `Tracker`. One task of a group writes, the chief. `replicax top` and the
metrics for Prometheus show the newest scalars, also without a writer.
"""

from replicax.foundation.public_names import show_as_public
from replicax.summary.trackers import CsvTracker as CsvTracker
from replicax.summary.trackers import MLflowTracker as MLflowTracker
from replicax.summary.trackers import Tracker as Tracker
from replicax.summary.trackers import WandbTracker as WandbTracker
from replicax.summary.writing import SummaryWriter as SummaryWriter
from replicax.summary.writing import create_file_writer as create_file_writer
from replicax.summary.writing import create_noop_writer as create_noop_writer
from replicax.summary.writing import create_writer as create_writer
from replicax.summary.writing import flush as flush
from replicax.summary.writing import get_step as get_step
from replicax.summary.writing import histogram as histogram
from replicax.summary.writing import image as image
from replicax.summary.writing import record_if as record_if
from replicax.summary.writing import scalar as scalar
from replicax.summary.writing import set_step as set_step
from replicax.summary.writing import should_record_summaries as should_record_summaries
from replicax.summary.writing import text as text

__all__ = [
    "CsvTracker",
    "MLflowTracker",
    "SummaryWriter",
    "Tracker",
    "WandbTracker",
    "create_file_writer",
    "create_noop_writer",
    "create_writer",
    "flush",
    "get_step",
    "histogram",
    "image",
    "record_if",
    "scalar",
    "set_step",
    "should_record_summaries",
    "text",
]


def __dir__() -> list[str]:
    return __all__


show_as_public(__name__)
