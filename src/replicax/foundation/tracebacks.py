"""Removes the frames of this library from the tracebacks of errors.

JAX removes its own frames from tracebacks; this module does the same where an error leaves the
library. REPLICAX_TRACEBACK=full, or JAX_TRACEBACK_FILTERING=off, shows all frames.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import TracebackType

import jax

from replicax.foundation import errors, settings

_NOTE = f"replicax: its own frames are hidden; set {settings.REPLICAX_TRACEBACK}=full to see them."
_LONGEST_CHAIN = 10

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OF_JAX = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep
# Its frames surround ours.
_PLUMBING = contextlib.__file__


def hide_own_frames(error: BaseException, is_expected: bool = False) -> None:
    """Removes the frames of this library from the traceback of an error, and of its causes.

    Called where the error leaves the library, before a bare `raise`, which keeps the traceback. An
    unexpected error inside of the library keeps the frames between the user's code and its origin.

    Args:
      error: The error.
      is_expected: Whether the library raised it deliberately, whatever its type.
    """
    if _shows_all():
        return
    has_hidden = False
    for link in _chain(error):
        frames = list(_frames(link.__traceback__))
        kept = _kept(frames, is_expected or isinstance(link, errors.DistributeError))
        if len(kept) < len(frames):
            link.__traceback__ = _joined(kept)
            has_hidden = True
    if has_hidden and _NOTE not in getattr(error, "__notes__", ()):
        error.add_note(_NOTE)


def _shows_all() -> bool:
    is_off = jax.config.jax_traceback_filtering == "off"  # pyright: ignore[reportAttributeAccessIssue]
    return is_off or settings.REPLICAX_TRACEBACK.read("").lower() == "full"


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if link is None:
            return
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _frames(link: TracebackType | None) -> Iterator[TracebackType]:
    while link is not None:
        yield link
        link = link.tb_next


def _kept(frames: list[TracebackType], is_expected: bool) -> list[TracebackType]:
    paths = [frame.tb_frame.f_code.co_filename for frame in frames]
    is_own = [path.startswith(_OWN) or path == _PLUMBING for path in paths]
    first_kept = len(frames)
    if frames and is_own[-1] and not is_expected:
        # An unexpected error inside of the library: show its origin.
        is_user = [
            not own and not p.startswith(_OF_JAX) for own, p in zip(is_own, paths, strict=True)
        ]
        first_kept = max((i + 1 for i, user in enumerate(is_user) if user), default=0)
    return [
        frame
        for i, (frame, own) in enumerate(zip(frames, is_own, strict=True))
        if not own or i >= first_kept
    ]


def _joined(frames: list[TracebackType]) -> TracebackType | None:
    joined: TracebackType | None = None
    for frame in reversed(frames):
        joined = TracebackType(joined, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return joined
