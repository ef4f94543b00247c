"""`rx.profiler`: a timeline of everything that the tasks of a job do, in one file.

    with rx.profiler.trace("traces"):
        for _ in range(20):
            train_step(next(iterator))

The file opens at https://ui.perfetto.dev, which reads it in the browser and uploads nothing.
`replicax trace` records a job that is running already.
"""

from replicax.foundation.public_names import show_as_public
from replicax.observe.metrics import MetricsServer as MetricsServer
from replicax.profiler.metrics_server import serve_metrics as serve_metrics
from replicax.profiler.recording import Trace as Trace
from replicax.profiler.recording import trace as trace
from replicax.timeline.merging import merge as merge
from replicax.timeline.picture import draw as draw

__all__ = ["MetricsServer", "Trace", "draw", "merge", "serve_metrics", "trace"]


def __dir__() -> list[str]:
    return __all__


show_as_public(__name__)
