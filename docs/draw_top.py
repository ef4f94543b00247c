"""Draws docs/top_terminal.png and docs/top_web.png from a running job: `python docs/draw_top.py`.

Needs Debian's chromium and chromium-driver.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from io import StringIO
from pathlib import Path

from rich.console import Console

from replicax.observe import client
from replicax.top import terminal, web
from replicax.top.view import Sampler

DOCS = Path(__file__).parent
SUPPORT = DOCS.parent / "tests" / "support"
sys.path.insert(0, str(SUPPORT))

import browser  # noqa: E402

WIDTH, HEIGHT = 132, 10


def draw_terminal(sampler: Sampler, page: browser.Browser, directory: Path) -> None:
    """Draws what `replicax top` shows on a terminal."""
    console = Console(width=WIDTH, height=HEIGHT, record=True, file=StringIO(), force_terminal=True)
    screen = terminal.Screen(sampler)
    view = sampler.sample()
    screen.press("down", view)
    screen.render(view, WIDTH, HEIGHT)
    screen.press("down", view)
    console.print(screen.render(view, WIDTH, HEIGHT))
    drawn = console.export_svg(title="replicax top")
    # The fonts that it names are on the internet.
    path = directory / "terminal.svg"
    path.write_text(re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL))
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn)
    assert size is not None
    page.resize(round(float(size[1])), round(float(size[2])))
    page.open(path.as_uri())
    page.screenshot(DOCS / "top_terminal.png")


def draw_page(sampler: Sampler, page: browser.Browser) -> None:
    """Draws the page of `replicax top --web`."""
    with web.Server(sampler) as server:
        server.start()
        page.resize(1200, 330)
        page.open(server.url)
        page.wait_for_text("tbody", r"/job:worker/task:0\s+(busy|idle)\s[^\n]*/s")
        time.sleep(2.0)
        page.screenshot(DOCS / "top_web.png")


def main() -> None:
    """Starts a job, and draws it."""
    command = [sys.executable, str(SUPPORT / "programs" / "observed_job.py"), "6000"]
    with (
        tempfile.TemporaryDirectory() as name,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job,
    ):
        try:
            assert job.stdout is not None and job.stdout.readline() == "ready\n"
            found = client.find_job(f"observed_job.py-{job.pid}")
            with browser.opened(Path(name)) as page:
                draw_page(Sampler(found), page)
                sampler = Sampler(found)
                sampler.sample()
                time.sleep(1.0)
                draw_terminal(sampler, page, Path(name))
        finally:
            job.kill()


if __name__ == "__main__":
    main()
