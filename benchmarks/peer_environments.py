"""The environments of peers that do not share ours, made on demand from pinned `peers-*.lock`."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable

from benchmarks.harness import ROOT

TIMEOUT = 1800.0


@dataclasses.dataclass(frozen=True)
class Peer:
    """A library that contestants of one name run with."""

    # Names its lock file and its environment.
    short: str
    # An interpreter that has it already, if this environment variable names one.
    variable: str
    # The names of its distributions, one of which is installed.
    distributions: tuple[str, ...]


PEERS = {
    "tensorflow": Peer("tf", "REPLICAX_TF_PYTHON", ("tensorflow", "tensorflow-cpu")),
    "torch": Peer("torch", "REPLICAX_TORCH_PYTHON", ("torch",)),
}


def python(contestant: str, report: Callable[[str], None]) -> str:
    """Returns an interpreter with what a contestant needs: a given one, or one of our own."""
    peer = PEERS[contestant]
    given = os.environ.get(peer.variable)
    if given:
        return given
    home = ROOT / ".venv-peers" / peer.short
    interpreter, ready = home / "bin" / "python", home / ".ready"
    path = ROOT / "benchmarks" / f"peers-{peer.short}.lock"
    lock = path.read_text()
    if not ready.exists() or ready.read_text() != lock:
        report(f"Installing {contestant} into {home.relative_to(ROOT)}, once.")
        install = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        for command in (
            (sys.executable, "-m", "venv", "--clear", str(home)),
            (str(interpreter), *install, "-r", str(path)),
        ):
            subprocess.run(command, check=True, timeout=TIMEOUT)
        ready.write_text(lock)
    return str(interpreter)


def version(contestant: str, interpreter: str) -> str:
    """Returns the version of a peer in an interpreter."""
    names = PEERS[contestant].distributions
    code = (
        "import importlib.metadata as m; "
        "print(*(d.version for d in m.distributions() "
        f"if d.name.lower().replace('_', '-') in {names!r}))"
    )
    command = [interpreter, "-c", code]
    done = subprocess.run(command, check=True, timeout=60.0, capture_output=True, text=True)
    return done.stdout.split()[0]
