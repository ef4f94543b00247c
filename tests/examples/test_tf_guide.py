"""The programs of the guide to `replicax.tf` run, and print what stands next to them."""

from __future__ import annotations

import linecache
import re
from pathlib import Path
from typing import Any

import pytest

import replicax.tf as tf

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "tf-programs.md"


def test_programs_of_the_guide_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    # This process has its devices.
    source = "\n".join(blocks).replace("rx.set_virtual_cpu_devices(2)", "")
    # `tf.function` reads the source of what it compiles.
    name = "<tf-programs.md>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), {"__name__": "guide"})
    printed = capsys.readouterr().out.splitlines()
    stated = re.findall(r"print\(.*\)  # (.*)", source)
    assert len(stated) == 2
    assert [line for line in printed if line in stated] == stated


def resolve(path: str) -> Any:
    found: Any = tf
    for part in path.split(".")[1:]:
        found = getattr(found, part)
    return found


def test_names_that_the_guide_says_are_refused_say_what_to_write() -> None:
    table = GUIDE.read_text().partition("## What is refused")[2].partition("\n## ")[0]
    rows = [row for row in table.splitlines() if row.startswith("| ") and "---" not in row]
    named = [re.findall(r"`(tf\.[\w.]+)`", row.split("|")[1]) for row in rows]
    names = [name for row in named for name in row]
    assert len(names) >= 12
    # The first column of some rows names a namespace of which some names are offered.
    for name in set(names) - {"tf.sparse"}:
        with pytest.raises(AttributeError, match="is not offered"):
            resolve(name)
