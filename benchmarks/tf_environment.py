"""The environment with TensorFlow, made on demand from the pinned `peers-tf.lock`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from benchmarks.harness import ROOT

HOME = ROOT / ".venv-peers" / "tf"
LOCK = ROOT / "benchmarks" / "peers-tf.lock"
TIMEOUT = 1800.0


def python(report: Callable[[str], None]) -> str:
    """Returns an interpreter with TensorFlow: `$REPLICAX_TF_PYTHON`, or one of our own."""
    given = os.environ.get("REPLICAX_TF_PYTHON")
    if given:
        return given
    interpreter, ready = HOME / "bin" / "python", HOME / ".ready"
    lock = LOCK.read_text()
    if not ready.exists() or ready.read_text() != lock:
        report(f"Installing TensorFlow into {HOME.relative_to(ROOT)}, once.")
        install = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        for command in (
            (sys.executable, "-m", "venv", "--clear", str(HOME)),
            (str(interpreter), *install, "-r", str(LOCK)),
        ):
            subprocess.run(command, check=True, timeout=TIMEOUT)
        ready.write_text(lock)
    return str(interpreter)


def version(interpreter: str) -> str:
    """Returns the version of TensorFlow of an interpreter."""
    code = (
        "import importlib.metadata as m; "
        "print(*(d.version for d in m.distributions() "
        "if d.name.lower().replace('_', '-') in ('tensorflow', 'tensorflow-cpu')))"
    )
    command = [interpreter, "-c", code]
    done = subprocess.run(command, check=True, timeout=60.0, capture_output=True, text=True)
    return done.stdout.split()[0]
