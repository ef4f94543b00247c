"""What the threads of this process are doing, as text for people."""

from __future__ import annotations

import sys
import threading
from types import FrameType

# Texts travel in headers of messages, beside other things.
MOST_CHARACTERS = 32 * 1024
# What every thread begins with tells nothing.
_BEGINNING = {(threading.__file__, name) for name in ("_bootstrap", "_bootstrap_inner", "run")}
# Of one stack, the newest; and of the path of a file, the end.
_MOST_CALLS = 40
_MOST_PATH = 160


def text(limit: int = MOST_CHARACTERS) -> str:
    """Returns the stack of each thread, the newest call last.

    Names of files and functions, and numbers of lines: no values, since some may be secret, and
    no lines of source, since reading files may take any time. Threads that do the same are
    shown once. The main thread comes first, the calling thread last.

    Args:
      limit: How long the text may be, in bytes as it travels. What does not fit is left out,
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
    # Paths may hold bytes that are no text.
    return _fit([b.encode(errors="replace").decode() for b in blocks], limit)


def cleaned(said: str, limit: int = MOST_CHARACTERS) -> str:
    r"""Returns what another task said, as it may be shown: it might steer a terminal.

    >>> cleaned("Thread x:\n  \x1b[2Jfile:1 in f")
    'Thread x:\n  ?[2Jfile:1 in f'
    """
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in said[:limit])


def _order(item: tuple[int, FrameType]) -> tuple[bool, bool, int]:
    ident = item[0]
    is_asking = ident == threading.get_ident()
    return is_asking, ident != threading.main_thread().ident, ident


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
    """Joins blocks of text as long as there is room, and says how many are left out."""
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
