"""`tf.profiler.experimental`: profiles of JAX, which TensorBoard and Perfetto show."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from replicax.foundation import errors
from replicax.tf.arguments import PathValue, Value
from replicax.tf.io.gfile import path_text

__all__ = ["Profile", "ProfilerOptions", "Trace", "client", "server", "start", "stop"]


@dataclasses.dataclass
class ProfilerOptions:
    """What a profile records.

    >>> ProfilerOptions(host_tracer_level=3).python_tracer_level
    0
    """

    host_tracer_level: int = 2
    python_tracer_level: int = 0
    device_tracer_level: int = 1
    delay_ms: int | None = None


def _options(options: ProfilerOptions | None) -> Any:
    given = options or ProfilerOptions()
    found = jax.profiler.ProfileOptions()
    found.host_tracer_level = given.host_tracer_level
    found.python_tracer_level = given.python_tracer_level
    return found


def start(logdir: PathValue, options: ProfilerOptions | None = None) -> None:
    """Starts to record a profile.

    Args:
      logdir: The directory for its files.
      options: What is recorded.
    """
    try:
        jax.profiler.start_trace(path_text(logdir), profiler_options=_options(options))
    except RuntimeError as error:
        raise errors.ContextError(
            "Only one profile can be recorded at a time", str(error), "Call `stop()` first."
        ) from error


def stop(save: bool = True) -> None:
    """Ends the profile and writes its files.

    Args:
      save: Accepted for portability; the files are always written.
    """
    del save
    try:
        jax.profiler.stop_trace()
    except RuntimeError as error:
        raise errors.ContextError(
            "`stop` needs a profile that is being recorded", str(error), "Call `start` before."
        ) from error


@contextlib.contextmanager
def Profile(logdir: PathValue, options: ProfilerOptions | None = None) -> Iterator[None]:
    """Records a profile of a block.

    Args:
      logdir: The directory for its files.
      options: What is recorded.
    """
    start(logdir, options)
    try:
        yield
    finally:
        stop()


class Trace:
    """Names a part of the program in profiles; a step if it has `step_num`.

    >>> with Trace("train", step_num=1, _r=1):
    ...     pass
    """

    def __init__(self, name: str, **kwargs: Any) -> None:
        kwargs.pop("_r", None)
        kind = jax.profiler.TraceAnnotation
        if "step_num" in kwargs:
            kind = jax.profiler.StepTraceAnnotation
        self._annotation: Any = kind(name, **{k: _number(v) for k, v in kwargs.items()})

    def __enter__(self) -> Trace:
        self._annotation.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._annotation.__exit__(*error)

    def set_metadata(self, **kwargs: Any) -> None:
        """Accepts further facts; they belong into the constructor.

        >>> Trace("train").set_metadata(batch=3)
        """
        del kwargs


def _number(value: Value) -> Any:
    return int(value) if hasattr(value, "numpy") else value


class _Server:
    """`tf.profiler.experimental.server`."""

    _running: Any = None

    def start(self, port: int) -> None:
        """Starts a server that TensorBoard can ask for profiles of this process."""
        if _Server._running is None:
            _Server._running = jax.profiler.start_server(int(port))


class _Client:
    """`tf.profiler.experimental.client`."""

    def trace(self, *args: object, **kwargs: object) -> None:
        """Not offered: profiles of other processes are taken by TensorBoard."""
        raise errors.UnsupportedError(
            "A profile of another process is taken by TensorBoard",
            "tf.profiler.experimental.client.trace was called",
            "Use its button `Capture profile`, with the address of the server.",
        )

    monitor = trace


server = _Server()
client = _Client()
