"""Builds the wheel, installs it outside of the clone, and uses it as a newcomer does.

    python tests/packaging/fresh_install.py                       # this Python, newest packages
    python tests/packaging/fresh_install.py --python python3.13   # another Python
    python tests/packaging/fresh_install.py --versions lowest     # the oldest packages allowed

In a fresh virtual environment, in a temporary directory: each program of the README is pasted into
a file and run; then `replicax demo`, `replicax doctor`, `replicax new`, and the test of the project
that it wrote. Takes minutes, most of them for the packages; with --directory, the environment is
kept there, and the next run only installs the wheel again.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ("demo", "flax", "keras", "port", "tf")
# Seconds after which a step has failed.
INSTALL_TIMEOUT, RUN_TIMEOUT = 1800.0, 600.0


class Failed(Exception):
    """A step that did not end as it should."""


class FreshInstall:
    """A virtual environment with the wheel, and what was done with it."""

    def __init__(self, directory: Path, python: str, timeout: float) -> None:
        self._directory = directory
        self._python = python
        self._timeout = timeout
        self._bin = directory / "venv" / "bin"
        # New in each run: it has nothing of the last one.
        self._home = Path(tempfile.mkdtemp(prefix="home-", dir=directory))
        # Nothing of the clone or of the caller's environment: neither paths nor settings.
        names = ("HOME", "LANG", "PATH", "TMPDIR", "PIP_CACHE_DIR")
        self._env = {name: os.environ[name] for name in names if name in os.environ}
        self._env |= {name: v for name, v in os.environ.items() if name.startswith("PIP_")}

    def run(self, title: str, *command: str | Path, cwd: Path | None = None, timeout: float) -> str:
        """Runs a command, prints how it went, and returns its output."""
        start = time.monotonic()
        done = subprocess.run(
            list(map(str, command)),
            cwd=cwd or self._home,
            env=self._env,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        outcome = "ok" if done.returncode == 0 else f"FAILED with {done.returncode}"
        print(f"{outcome:>6}  {time.monotonic() - start:6.1f} s  {title}", flush=True)
        if done.returncode:
            raise Failed(f"{title}:\n{done.stdout[-6000:]}")
        return done.stdout

    def install(self, wheel: Path, versions: str) -> None:
        """Makes the environment, or puts the wheel into the one that is there."""
        pip = (self._bin / "python", "-m", "pip", "--disable-pip-version-check")
        if (self._directory / "ready").exists():
            again = (*pip, "install", "--quiet", "--force-reinstall", "--no-deps", wheel)
            self.run(f"pip install {wheel.name} again", *again, timeout=INSTALL_TIMEOUT)
            self._print_versions()
            return
        self.run("make a virtual environment", self._python, "-m", "venv", self._bin.parent,
                 timeout=INSTALL_TIMEOUT)  # fmt: skip
        constraints = self._directory / "constraints.txt"
        constraints.write_text("\n".join(lower_bounds(wheel)) if versions == "lowest" else "")
        target = f"{wheel}[{','.join(EXTRAS)}]"
        self.run(
            f"pip install {wheel.name}[{','.join(EXTRAS)}], {versions} versions",
            *(*pip, "install", "--quiet", "--constraint", constraints, target, "pytest"),
            timeout=INSTALL_TIMEOUT,
        )
        self.run("pip check", *pip, "check", timeout=INSTALL_TIMEOUT)
        (self._directory / "ready").touch()
        self._print_versions()

    def _print_versions(self) -> None:
        code = (
            "import importlib.metadata as m, sys; print(sys.version.split()[0], *(f'{p}=={m.version"
            "(p)}' for p in 'jax numpy optax grain keras flax msgspec rich typer'.split()))"
        )
        print(f"{'':16}{self.python_code('versions', code).strip()}", flush=True)

    def python_code(self, title: str, code: str) -> str:
        """Runs code in the environment."""
        return self.run(title, self._bin / "python", "-c", code, timeout=self._timeout)

    def replicax(self, *arguments: str, cwd: Path | None = None) -> str:
        """Runs a command of replicax in the environment."""
        title = f"replicax {' '.join(arguments)}"
        return self.run(title, self._bin / "replicax", *arguments, cwd=cwd, timeout=self._timeout)

    def check(self) -> None:
        """Uses everything."""
        where = self.python_code("import replicax", "import replicax; print(replicax.__file__)")
        if str(self._bin.parent) not in where:
            raise Failed(f"replicax was imported from {where}")
        for number, program in enumerate(readme_programs()):
            path = self._home / f"readme_{number}.py"
            path.write_text(program)
            title = f"program {number + 1} of the README, line {line_of(program)}"
            self.run(title, self._bin / "python", path, timeout=self._timeout)
        output = self.replicax("demo")
        for line in re.findall(r".*(?:counted|opened on|model\.fit).*", output):
            print(f"{'':16}{line}")
        if "doctor" in self.replicax("--help"):
            self.replicax("doctor")
        else:
            print("SKIPPED            replicax doctor: this version does not have it")
        self.replicax("new", "project")
        project = self._home / "project"
        self.run("python train.py", self._bin / "python", "train.py", cwd=project,
                 timeout=self._timeout)  # fmt: skip
        tested = self.run("pytest of the project", self._bin / "python", "-m", "pytest", "-q",
                          cwd=project, timeout=self._timeout)  # fmt: skip
        print(f"{'':16}{tested.strip().splitlines()[-1]}")


def build(directory: Path) -> Path:
    """Builds the wheel of the clone."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=RUN_TIMEOUT)
    (wheel,) = directory.glob("*.whl")
    return wheel


def lower_bounds(wheel: Path) -> Iterator[str]:
    """Yields a constraint to the oldest version that the wheel allows of each package."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    for text in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(text)
        for specifier in requirement.specifier:
            if specifier.operator == ">=":
                yield f"{requirement.name}=={specifier.version}"


def readme_programs() -> list[str]:
    """Returns the programs of the README; each must be whole."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    for block in blocks:
        if "import replicax" not in block:
            raise Failed(f"Not a program that can be pasted into a file:\n{block}")
    return blocks


def line_of(program: str) -> int:
    """Returns the line of the README where a program begins."""
    text = (ROOT / "README.md").read_text()
    return text[: text.index(program)].count("\n") + 1


def main() -> int:
    """Runs all steps; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="the interpreter to install into")
    parser.add_argument("--versions", choices=("newest", "lowest"), default="newest")
    parser.add_argument("--directory", type=Path, help="where to keep the environment")
    parser.add_argument("--timeout", type=float, default=RUN_TIMEOUT, metavar="SECONDS",
                        help="how long each program may run; more on a busy machine")  # fmt: skip
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="replicax-fresh-") as temporary:
        directory = (options.directory or Path(temporary)).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        if directory.is_relative_to(ROOT):
            parser.error("The environment must be outside of the clone.")
        try:
            install = FreshInstall(directory, options.python, options.timeout)
            install.install(build(Path(temporary)), options.versions)
            install.check()
        except (Failed, subprocess.TimeoutExpired) as failure:
            print(failure, file=sys.stderr)
            return 1
    print("everything works")
    return 0


if __name__ == "__main__":
    sys.exit(main())
