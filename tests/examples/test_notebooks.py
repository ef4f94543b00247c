"""The notebooks run from top to bottom in a kernel, as on Colab."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
# In a process of its own: the client of a kernel keeps sockets and threads.
EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""


def execute(path: Path, executed: Path) -> str:
    """Runs all cells; returns what they printed and showed."""
    env = {k: v for k, v in os.environ.items() if k != "NPROC"}
    # The kernel's files, in a place that goes away.
    env |= {"JUPYTER_RUNTIME_DIR": str(executed.parent), "IPYTHONDIR": str(executed.parent)}
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(path), str(executed)],
        cwd=executed.parent,
        env=env,
        check=False,
        timeout=200,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    cells = json.loads(executed.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.get("name") == "stderr"], outputs
    texts = [o.get("text") or o.get("data", {}).get("text/plain") or [] for o in outputs]
    return "\n".join("".join(text) for text in texts)


def test_the_first_steps_compute_the_same_under_three_strategies(tmp_path: Path) -> None:
    output = execute(EXAMPLES / "first_steps.ipynb", tmp_path / "executed.ipynb")
    found = re.findall(r": loss ([\d.]+), accuracy ([\d.]+)", output)
    assert len(found) == 3 and len(set(found)) == 1
    assert float(found[0][1]) > 0.9
    assert output.rstrip().endswith("True")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs_and_installs_what_it_needs(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not [cell for cell in cells if cell["outputs"] or cell["execution_count"]]
    assert "%pip install --quiet replicax" in "".join(cells[0]["source"])
