"""The pictures of ARCHITECTURE.md show the tree as it is."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_pictures_of_the_architecture_are_up_to_date() -> None:
    script = runpy.run_path(str(DOCS / "draw_architecture.py"))
    for name, draw in script["PICTURES"].items():
        text = (DOCS / name).read_text()
        assert text == draw(), f"run `python docs/draw_architecture.py`: {name} is out of date"
