"""`replicax port`: what it prints, what it writes, and how it exits."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from replicax.cli.main import app

GOOD = """\
import tensorflow as tf
AUTO = tf.data.experimental.AUTOTUNE
x = tf.cast([1, 2], tf.float32)
metric.reset_states()
"""
BAD = """\
import tensorflow as tf
import tensorflow_hub as hub
session = tf.compat.v1.Session()
x = tf.constant(1.0)
"""


def run(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["port", *(str(a) for a in args)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.py"
    path.write_text(GOOD)
    return path


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    path = tmp_path / "bad.py"
    path.write_text(BAD)
    return path


def test_the_report_goes_line_by_line(good: Path) -> None:
    code, out, err = run(good)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        str(good),
        "       1  changes `import tensorflow as tf` becomes `import replicax.tf as tf`",
        "       2  changes `tf.data.experimental.AUTOTUNE` becomes `tf.data.AUTOTUNE`",
        "       3  runs    tf.cast, tf.float32",
        "       4  changes `reset_states` becomes `reset_state`",
        "100.0 % of 3 names run (2 as they are, 1 rewritten), 100.0 % of 4 lines",
        "1 file, 1 changes",
    ]
    assert good.read_text() == GOOD


def test_what_is_refused_says_what_to_do_and_exits_with_1(bad: Path) -> None:
    code, out, _ = run(bad, "--brief")
    assert code == 1
    lines = out.splitlines()
    assert lines[2].startswith("       2  outside tensorflow_hub: Load the weights")
    assert lines[3].startswith("       3  refused tf.compat.v1.Session: ")
    assert "@tf.function" in lines[3]
    assert "tf.constant" not in out
    assert "50.0 % of 2 names run" in out
    assert lines[-1] == "1 file, 1 changes, 1 line refused, 1 line needs another package"


def test_write_changes_the_file_once(good: Path) -> None:
    code, out, _ = run(good, "--write")
    assert code == 0 and "  written" in out.splitlines()
    ported = good.read_text()
    assert ported == (
        GOOD.replace("tensorflow", "replicax.tf")
        .replace("data.experimental.AUTOTUNE", "data.AUTOTUNE")
        .replace("reset_states", "reset_state")
    )
    before = good.stat().st_mtime_ns
    code, out, _ = run(good, "--write")
    assert code == 0 and "  written" not in out.splitlines() and "  changes" not in out
    assert good.read_text() == ported and good.stat().st_mtime_ns == before


def test_a_reader_never_sees_half_a_file(good: Path) -> None:
    """The file is replaced, not overwritten: an open one keeps its bytes."""
    with good.open() as reader:
        assert run(good, "--write")[0] == 0
        assert reader.read() == GOOD
    assert os.listdir(good.parent) == ["good.py"]


def test_a_directory(good: Path, bad: Path) -> None:
    (good.parent / "plain.py").write_text("import numpy as np\n")
    (good.parent / "python2.py").write_text("import tensorflow\nprint 'x'\n")
    code, out, _ = run(good.parent, "--write")
    assert code == 1
    assert "plain.py" not in out
    assert "left as it is, not valid Python 3 (line 2)" in out
    assert out.splitlines()[-1].startswith("4 files, 2 change,")
    assert "replicax.tf" in good.read_text() and "replicax.tf" in bad.read_text()


def of_type(kind: type, *others: type) -> Any:
    return lambda value: (
        isinstance(value, (kind, *others)) and not (isinstance(value, bool) and kind is not bool)
    )


# The keys of the report, with a check of each value.
FINDING = {
    "cell": of_type(int, type(None)),
    "line": of_type(int),
    "column": of_type(int),
    "kind": ("runs", "changes", "refused", "outside").__contains__,
    "name": of_type(str),
    "message": of_type(str),
    "rewritten": of_type(bool),
}
COUNT = {
    **{kind: of_type(int) for kind in ("runs", "changes", "refused", "outside", "total")},
    "percent": of_type(float),
}


def check(value: dict[str, Any], schema: dict[str, Any]) -> None:
    assert value.keys() == schema.keys()
    for key, is_valid in schema.items():
        assert is_valid(value[key]), (key, value[key])


def test_json(good: Path, bad: Path) -> None:
    notebook = good.parent / "n.ipynb"
    cells = [{"cell_type": "code", "source": ["import tensorflow as tf\n", "tf.Session()"]}]
    cells.append({"cell_type": "code", "source": "def ("})
    notebook.write_text(json.dumps({"cells": cells}))
    code, out, _ = run(good.parent, "--json")
    assert code == 1
    content = json.loads(out)
    assert content.keys() == {"version", "files", "summary"} and content["version"] == 1
    assert [Path(file["path"]).name for file in content["files"]] == [
        "bad.py",
        "good.py",
        "n.ipynb",
    ]
    for file in content["files"]:
        assert file.keys() == {"path", "changed", "written", "problems", "findings"}
        for finding in file["findings"]:
            check(finding, FINDING)
    last = content["files"][-1]
    assert last["problems"][0]["cell"] == 2
    assert [(f["cell"], f["line"], f["kind"]) for f in last["findings"]] == [
        (1, 1, "changes"),
        (1, 2, "refused"),
    ]
    summary = content["summary"]
    check(summary.pop("names"), COUNT)
    check(summary.pop("lines"), COUNT)
    assert summary == {"files": 3, "changed": 3, "problems": 1, "runs": False}


def test_wrong_arguments_exit_with_2(tmp_path: Path, good: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("")
    for args, word in (
        ((tmp_path / "missing.py",), "does not exist"),
        ((text,), ".ipynb"),
        ((), "Missing argument"),
        ((good, "--unknown"), "No such option"),
    ):
        code, out, err = run(*args)
        assert code == 2 and out == "" and word in err, (args, err)


def test_an_empty_directory_is_fine(tmp_path: Path) -> None:
    code, out, _ = run(tmp_path)
    assert code == 0 and "0 files" in out


def test_colours_on_a_terminal_only(good: Path) -> None:
    command = [sys.executable, "-m", "replicax", "port", str(good)]
    forced = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    forced.pop("NO_COLOR", None)
    done = subprocess.run(command, env=forced, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "\x1b[36mchanges" in done.stdout
    assert "\x1b[" not in run(good)[1]


def test_the_missing_extra_is_named(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys; sys.modules['libcst'] = None; sys.argv = ['replicax', 'port', sys.argv[1]];"
        "from replicax.cli.main import app; app()"
    )
    command = [sys.executable, "-c", code, str(good)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "pip install replicax[port]" in done.stderr


def test_the_guide_shows_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = Path(__file__).parents[2] / "docs" / "guides" / "porting.md"
    text = guide.read_text()
    shown = text.split("$ replicax port train.py\n")[1].split("```")[0]
    program = text.split("```python\n")[1].split("```")[0]
    (tmp_path / "train.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("train.py")
    assert code == 1
    assert out == shown


def test_the_guide_shows_what_tapes_become(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = Path(__file__).parents[2] / "docs" / "guides" / "porting.md"
    before, after = (b.split("```")[0] for b in guide.read_text().split("```python\n")[2:4])
    (tmp_path / "train.py").write_text(f"import tensorflow as tf\n\n{before}")
    monkeypatch.chdir(tmp_path)
    run("--write", "--tape", "train.py")
    written = ast.dump(ast.parse((tmp_path / "train.py").read_text()))
    assert ast.dump(ast.parse(after)).removeprefix("Module(body=[") in written
