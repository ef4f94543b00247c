"""Versions, extras and devices."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator

from replicax.doctor.findings import Check, Finding, Level

# The seconds that starting the devices may take, in another process.
_DEVICES_S = 90.0
_REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)(?:\[([^\]]*)\])?\s*([<>=!~0-9.,\s]*)(?:;\s*(.*))?")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")
_BOUND = re.compile(r"(>=|<=|==|!=|<|>|~=)\s*([0-9.]+)")
# Extras for the developers of the library.
_HIDDEN_EXTRAS = ("dev",)

# Starts JAX in a process of its own: a device that hangs, or that one process can use at a time,
# does not affect this one.
_LIST_DEVICES = """
import json, jax
found = [[d.platform, d.device_kind, (d.memory_stats() or {}).get("bytes_limit", 0)]
         for d in jax.local_devices()]
print("\\n" + json.dumps(found))
"""


def checks() -> list[Check]:
    """Returns the checks of the installation."""
    return [
        Check("versions", check_versions),
        Check("extras", check_extras),
        Check("devices", check_devices, _DEVICES_S + 5.0),
    ]


def check_versions() -> Iterator[Finding]:
    """Compares the versions of installed packages with those that the library requires."""
    python = platform.python_version()
    shown = [f"Python {python}", f"replicax {_version('replicax') or 'not installed'}"]
    wrong: list[tuple[str, str, str]] = []
    for name, extra, bounds in _requirements():
        if extra is not None:
            continue
        version = _version(name)
        if name in ("jax", "numpy", "cryptography"):
            shown.append(f"{name} {version or 'not installed'}")
        if version is None or not is_within(version, bounds):
            wrong.append((name, version or "not installed", bounds))
    jax, jaxlib = _version("jax"), _version("jaxlib")
    shown.append(f"jaxlib {jaxlib or 'not installed'}")
    for name, version, bounds in wrong:
        yield Finding(
            "versions",
            Level.PROBLEM,
            f"{name} must be {bounds or 'installed'}, but it is {version}",
            f"Run `pip install '{name}{bounds}'`.",
        )
    if jax and jaxlib and jax.split(".")[:2] != jaxlib.split(".")[:2]:
        yield Finding(
            "versions",
            Level.PROBLEM,
            f"jax {jax} and jaxlib {jaxlib} are not of one release",
            f"Run `pip install jaxlib=={jax}`.",
        )
    yield Finding("versions", Level.OK, ", ".join(shown))


def check_extras() -> Iterator[Finding]:
    """Tells which optional parts can be used."""
    wanted: dict[str, list[str]] = {}
    for name, extra, _ in _requirements():
        if extra is not None and extra not in _HIDDEN_EXTRAS and name != "replicax":
            wanted.setdefault(extra, []).append(name)
    complete = [extra for extra, names in wanted.items() if all(map(_version, names))]
    missing = sorted(set(wanted) - set(complete))
    text = f"usable: {', '.join(sorted(complete)) or 'none'}"
    if missing:
        text += f"; pip install 'replicax[NAME]' adds {', '.join(missing)}"
    yield Finding("extras", Level.OK, text)


def check_devices() -> Iterator[Finding]:
    """Lists the devices that JAX finds."""
    advice = "Run `python -c 'import jax; print(jax.devices())'`, and correct what it reports."
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LIST_DEVICES],
            capture_output=True,
            text=True,
            timeout=_DEVICES_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        text = f"JAX did not start its devices within {_DEVICES_S:g} s"
        yield Finding("devices", Level.PROBLEM, text, "Another process may hold them; end it.")
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        text = f"JAX cannot start: {last[:300]}"
        yield Finding("devices", Level.PROBLEM, text, advice)
        return
    counts: dict[str, int] = {}
    for kind, model, memory in json.loads(done.stdout.strip().splitlines()[-1]):
        size = f", {memory / 2**30:.1f} GiB" if memory else ""
        name = f"{kind.upper()} ({model}{size})"
        counts[name] = counts.get(name, 0) + 1
    text = ", ".join(f"{count} {name}" for name, count in counts.items())
    yield Finding("devices", Level.OK, text)


@functools.cache
def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirements() -> Iterator[tuple[str, str | None, str]]:
    """Yields the packages that the library names: each with its extra, and its bounds."""
    try:
        lines = importlib.metadata.requires("replicax") or []
    except importlib.metadata.PackageNotFoundError:
        return
    for line in lines:
        match = _REQUIREMENT.match(line)
        if match is not None:
            name, _, bounds, marker = match.groups()
            extra = _EXTRA.search(marker or "")
            yield name, extra[1] if extra else None, bounds.strip()


def is_within(version: str, bounds: str) -> bool:
    """Returns whether a version is within bounds, as far as their numbers tell.

    >>> is_within("0.10.2", "<0.11,>=0.10"), is_within("0.11.0", "<0.11"), is_within("3", "")
    (True, False, True)
    """
    mine = _numbers(version)
    for operator, text in _BOUND.findall(bounds):
        other = _numbers(text)
        size = max(len(mine), len(other))
        one, two = (numbers + (0,) * (size - len(numbers)) for numbers in (mine, other))
        if operator == "~=":
            is_met = one >= two and mine[: len(other) - 1] == other[:-1]
        else:
            is_met = {
                ">=": one >= two, "<=": one <= two, "==": one == two,
                "!=": one != two, "<": one < two, ">": one > two,
            }[operator]  # fmt: skip
        if not is_met:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in version.split("."):
        match = re.match(r"\d+", part)
        if match is None:
            break
        found.append(int(match[0]))
    return tuple(found)
