"""The stacks of the threads of this process, as text."""

from __future__ import annotations

import sys
import threading
from types import FrameType

# The text is part of the header of a message.
MOST_CHARACTERS = 32 * 1024
# The first calls of every thread, which are omitted.
_BEGINNING = {(threading.__file__, name) for name in ("_bootstrap", "_bootstrap_inner", "run")}
# The number of the newest calls of a stack, and of the last characters of a path.
_MOST_CALLS = 40
_MOST_PATH = 160


def text(limit: int = MOST_CHARACTERS) -> str:
    """Returns the stack of each thread, the newest call last.

    Contains names of files and functions, and line numbers: no values, since some may be secret,
    and no source lines, since reading files may block. Threads with equal stacks are shown once.
    The main thread comes first, the calling thread last.

    Args:
      limit: The maximum size of the text, in bytes of UTF-8. Stacks that do not fit are omitted,
        and counted.

    Returns:
      The text; it ends without a line feed.

    >>> "Thread MainThread:" in text()
    True
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    alike: dict[str, list[str]] = {}
    for ident, frame in sorted(sys._current_frames().items(), key=_order):
        name = names.get(ident, f"{ident:#x}, unknown to Python")
        alike.setdefault(_calls(frame), []).append(name)
    blocks = [f"{_title(threads)}\n{calls}" for calls, threads in alike.items()]
    # Paths may contain bytes that are not valid text.
    return _fit([b.encode(errors="replace").decode() for b in blocks], limit)


def cleaned(received: str, limit: int = MOST_CHARACTERS) -> str:
    r"""Returns the text of another task without control characters, for a terminal.

    >>> cleaned("Thread x:\n  \x1b[2Jfile:1 in f")
    'Thread x:\n  ?[2Jfile:1 in f'
    """
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in received[:limit])


def _order(item: tuple[int, FrameType]) -> tuple[bool, bool, int]:
    ident = item[0]
    is_own = ident == threading.get_ident()
    return is_own, ident != threading.main_thread().ident, ident


def _title(threads: list[str]) -> str:
    if len(threads) == 1:
        return f"Thread {threads[0]}:"
    shown = ", ".join(sorted(threads)[:4])
    return f"{len(threads)} threads ({shown}{', …' if len(threads) > 4 else ''}):"


def _calls(newest: FrameType) -> str:
    lines: list[str] = []
    frame: FrameType | None = newest
    while frame is not None and len(lines) < _MOST_CALLS:
        code, path = frame.f_code, frame.f_code.co_filename
        if (path, code.co_name) in _BEGINNING:
            break
        path = path if len(path) <= _MOST_PATH else f"…{path[-_MOST_PATH:]}"
        lines.append(f"  {path}:{frame.f_lineno} in {code.co_qualname[:_MOST_PATH]}")
        frame = frame.f_back
    if len(lines) == _MOST_CALLS:
        lines.append("  … older calls")
    return "\n".join(reversed(lines))


def _fit(blocks: list[str], limit: int) -> str:
    """Joins blocks of text up to a size, and appends the number of omitted ones."""
    room = limit - 64
    shown: list[str] = []
    for block in blocks:
        size = len(block.encode()) + 1
        if size > room:
            break
        room -= size
        shown.append(block)
    left_out = len(blocks) - len(shown)
    if left_out:
        shown.append(f"… and {left_out} stacks more")
    return "\n".join(shown)
