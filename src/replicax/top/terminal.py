"""The live view on a terminal: a table that is drawn again, and keys."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import termios
import threading
import tty
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from replicax.foundation import errors
from replicax.top import table
from replicax.top.view import Row, Sampler, View

# The seconds between two looks at the job.
_SAMPLE_S = 1.0
# The seconds to wait for the sampling thread at the end: tasks may not answer.
_END_S = 0.5
_NAMES = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
}
# A special key, or a character.
_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO.|.", re.DOTALL)
_HELP = "↑ ↓ select   s stack   k kill   q quit"
_STACK_HELP = "↑ ↓ scroll   s or Esc back   q quit"


class Sampling:
    """Looks at a job in a thread of its own, since tasks may take seconds to answer.

    Attributes:
      view: The last view.
    """

    def __init__(self, sampler: Sampler, every_s: float = _SAMPLE_S) -> None:
        self._sampler = sampler
        self._every_s = every_s
        self.view = View(sampler.directory.name)
        self._ended = threading.Event()
        self._has_view = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replicax-top", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self.view = self._sampler.sample()
            self._has_view.set()
            if self._ended.wait(self._every_s):
                return

    def wait_for_view(self, seconds: float) -> None:
        """Waits until there is a first view."""
        self._has_view.wait(seconds)

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._ended.set()
        self._thread.join(_END_S)


class Screen:
    """What is on the screen, changed by keys.

    Args:
      sampler: Looks at the job, shows stacks, and kills.

    Attributes:
      is_done: Whether the user has quit.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._selected: str | None = None
        # The task that is asked about: kill it?
        self._asked: Row | None = None
        self._stack: list[str] | None = None
        self._first_line = 0
        self._note = ""
        self.is_done = False

    def render(self, view: View, width: int, height: int) -> RenderableType:
        """Returns what the screen shows.

        Args:
          view: The last view.
          width: The number of characters of a line of the terminal.
          height: The number of lines of the terminal.
        """
        if self._stack is not None:
            num_lines = max(height - 2, 1)
            self._first_line = max(min(self._first_line, len(self._stack) - num_lines), 0)
            lines = self._stack[self._first_line : self._first_line + num_lines]
            shown = [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]
            return Group(*shown, Text(_STACK_HELP, "dim"))
        if self._selected is None or view.find(self._selected) is None:
            self._selected = view.rows[0].task if view.rows else None
        note = self._note or _HELP
        if self._asked is not None:
            note = f"Kill {self._asked.task} (process {self._asked.pid})? y / n"
        most = max(height - len(view.rows) - 8, 0)
        return table.render(view, self._selected, width=width, most_waits=most, note=note)

    def press(self, key: str, view: View) -> None:
        """Handles a key."""
        self._note = ""
        if self._asked is not None:
            self._answer(key)
        elif key in ("q", "\x03"):
            self.is_done = True
        elif self._stack is not None:
            self._scroll(key)
        elif key in ("up", "down"):
            self._select(1 if key == "down" else -1, view)
        elif key in ("s", "k"):
            row = view.find(self._selected or "")
            if row is not None:
                (self._show_stack if key == "s" else self._ask)(row)

    def _select(self, change: int, view: View) -> None:
        names = [row.task for row in view.rows]
        if self._selected in names:
            index = names.index(self._selected) + change
            self._selected = names[max(0, min(index, len(names) - 1))]

    def _scroll(self, key: str) -> None:
        changes = {"up": -1, "down": 1, "page up": -20, "page down": 20}
        if key in ("s", "\x1b"):
            self._stack = None
        self._first_line += changes.get(key, 0)

    def _show_stack(self, row: Row) -> None:
        lines = self._sampler.stack(row).splitlines()
        self._stack = [f"{row.task}, process {row.pid or 'unknown'}", *lines]
        self._first_line = 0

    def _ask(self, row: Row) -> None:
        if row.pid is None:
            self._note = f"{row.task} does not run on this host, nor on one of a launcher here."
        else:
            self._asked = row

    def _answer(self, key: str) -> None:
        row, self._asked = self._asked, None
        if key != "y" or row is None:
            return
        try:
            pid = self._sampler.kill(row)
        except errors.DistributeError as error:
            self._note = str(error)
        else:
            self._note = f"Killed {row.task} (process {pid})."


def run(sampler: Sampler) -> None:
    """Shows a job until the user quits."""
    console = Console()
    screen, sampling = Screen(sampler), Sampling(sampler)
    try:
        sampling.wait_for_view(_SAMPLE_S)
        with (
            _keys(sys.stdin.fileno()) as keys,
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            while not screen.is_done:
                live.update(screen.render(sampling.view, *console.size), refresh=True)
                for key in keys.read():
                    screen.press(key, sampling.view)
    except KeyboardInterrupt:
        pass
    finally:
        sampling.close()


class Keyboard:
    """Reads keys from a terminal without waiting for a line feed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self) -> Iterator[str]:
        """Yields the keys that are pressed within a tenth of a second."""
        if not select.select([self._descriptor], [], [], 0.1)[0]:
            return
        data = os.read(self._descriptor, 1024)
        # The terminal is gone.
        yield from keys_of(data) if data else ["q"]


def keys_of(data: bytes) -> list[str]:
    r"""Splits the bytes of a terminal into keys: characters, and names of special keys.

    >>> keys_of(b"\x1b[Bs\x1b[5~\x1b[19~q")
    ['down', 's', 'page up', 'q']
    """
    found: list[str] = _KEY.findall(data.decode(errors="ignore"))
    named = [_NAMES.get(text, text) for text in found]
    return [name for name in named if len(name) == 1 or name in _NAMES.values()]


@contextlib.contextmanager
def _keys(descriptor: int) -> Iterator[Keyboard]:
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield Keyboard(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
