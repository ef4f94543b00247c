"""The collectives inside of compiled programs, as the profiler of XLA reports them."""

from __future__ import annotations

import collections
import contextlib
import logging
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from replicax.foundation import spans

_log = logging.getLogger(__name__)
# Names of operations as XLA and JAX write them, by the kind of span. Sums over the processes of a
# group consist of permutations; see collectives/in_replica.py.
_KINDS = {
    "all-reduce": "all-reduce psum pmean reduce-scatter reduce_scatter ppermute collective-permute",
    "all-gather": "all-gather all_gather",
    "all-to-all": "all-to-all all_to_all",
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names.split()}
_NAME = re.compile(r"(end: )?([a-z_-]+?)(?:-start|-done)?(?:\.[0-9]+)*$")


@contextlib.contextmanager
def recorded_collectives(*, is_on: bool = True) -> Iterator[None]:
    """Adds the collectives that run in a block to the spans of this process, when it ends.

    Args:
      is_on: Whether to do so.
    """
    if not is_on:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="replicax-xla-") as folder:
        clocks = spans.clocks()
        is_started = _start(folder)
        try:
            yield
        finally:
            if is_started:
                jax.profiler.stop_trace()
                _add(Path(folder), clocks["realtime_ns"] - clocks["monotonic_ns"])


def _start(folder: str) -> bool:
    options = jax.profiler.ProfileOptions()
    # Of the host, the operations of XLA only; not the calls of Python.
    options.host_tracer_level = 1
    options.python_tracer_level = 0
    try:
        jax.profiler.start_trace(folder, profiler_options=options)
    except RuntimeError as error:
        _log.warning("The trace has no collectives of compiled programs: %s", error)
        return False
    return True


def _add(folder: Path, offset_ns: int) -> None:
    recorder = spans.recorder()
    if recorder is None:
        return
    for path in sorted(folder.rglob("*.xplane.pb")):
        profile = jax.profiler.ProfileData.from_file(str(path))
        # The times of events are counted from the start of the profile.
        begun = next(
            int(value)
            for plane in profile.planes
            for name, value in plane.stats
            if name == "profile_start_time"
        )
        for name, start, end in _collectives_of(profile):
            match = _NAME.match(name)
            assert match is not None
            zero = begun - offset_ns
            recorder.add_on_track("collectives", _KIND_OF[match[2]], zero + start, zero + end, name)


def _collectives_of(profile: Any) -> list[tuple[str, int, int]]:
    """Returns name, start and end of each collective.

    An operation may end in another thread than it has started in, where XLA reports its end as an
    event of its own.
    """
    events: list[tuple[int, int, str]] = []
    ends: dict[str, list[int]] = collections.defaultdict(list)
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                match = _NAME.match(event.name)
                if match is None or match[2] not in _KIND_OF:
                    continue
                end = int(event.start_ns + event.duration_ns)
                if match[1]:
                    ends[event.name.removeprefix(match[1])].append(end)
                else:
                    events.append((int(event.start_ns), end, event.name))
    for own in ends.values():
        own.sort(reverse=True)
    found: list[tuple[str, int, int]] = []
    for start, end, name in sorted(events):
        own = ends[name]
        while own and own[-1] < start:
            own.pop()
        found.append((name, start, max(end, own.pop() if own else end)))
    return found
