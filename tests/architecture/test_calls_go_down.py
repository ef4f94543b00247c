"""Calls go down the layers, also at run time: imports are checked by import-linter."""

from __future__ import annotations

import ast
import sys
import threading
import tomllib
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import replicax as rx

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "replicax"
# Rooms that must reach a strategy by what its frame carries only.
BELOW_STRATEGIES = (
    "foundation",
    "values",
    "contexts",
    "collectives",
    "variables",
    "tracing",
    "execution",
    "input",
    "training",
    "checkpointing",
    "exporting",
    "ps",
    "transport",
    "protocol",
    "cluster",
    "cluster_resolver",
)


def _layers() -> dict[str, int]:
    """Returns the height of each room, by the layers of pyproject.toml."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = contracts["contracts"][0]["layers"]
    return {
        room.strip().removeprefix("replicax."): len(layers) - height
        for height, layer in enumerate(layers)
        for room in layer.split("|")
    }


@pytest.mark.parametrize("room", BELOW_STRATEGIES)
def test_no_room_below_strategies_asks_for_extended(room: str) -> None:
    found: list[str] = []
    for path in sorted((SOURCE / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            is_dtype = isinstance(node, ast.Attribute) and ast.unparse(node).endswith(
                "dtypes.extended"
            )
            if isinstance(node, ast.Attribute) and node.attr == "extended" and not is_dtype:
                found.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert not found


class _Walk:
    """Records the files of the library that calls go through, and calls that go up."""

    def __init__(self) -> None:
        self.files: dict[str, int] = {}
        self.upward: list[str] = []
        self._layers = _layers()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "call":
            return
        path = self._path(frame)
        if path is None:
            return
        self.files[path] = self.files.get(path, 0) + 1
        caller = frame.f_back
        while caller is not None and self._path(caller) is None:
            if "/tests/" in caller.f_code.co_filename:
                return  # called by the user's code
            caller = caller.f_back
        if caller is None:
            return
        source = self._path(caller)
        assert source is not None
        if self._height(path) > self._height(source):
            self.upward.append(f"{source} calls {path}:{frame.f_code.co_name}")

    def _path(self, frame: FrameType) -> str | None:
        path = Path(frame.f_code.co_filename)
        return str(path.relative_to(SOURCE)) if path.is_relative_to(SOURCE) else None

    def _height(self, path: str) -> int:
        return self._layers[path.partition("/")[0]]


def _walk(strategy: Any, call: Any) -> _Walk:
    """Follows one call on every replica; an earlier one has compiled what there is to compile."""
    walk = _Walk()

    def replica_code() -> None:
        call()
        sys.setprofile(walk)
        try:
            call()
        finally:
            sys.setprofile(None)

    threading.setprofile(None)
    strategy.run(replica_code)
    if not walk.files:
        # Full runs of the suite have recorded nothing at times; what took the profiler is unknown.
        strategy.run(replica_code)
    return walk


def test_an_eager_assign_goes_down_through_twelve_files() -> None:
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        v = rx.Variable(1.0, aggregation=rx.VariableAggregation.SUM)
    walk = _walk(strategy, lambda: v.assign_add(1.0))
    assert v.numpy() in (5.0, 9.0)
    assert walk.files["variables/variable.py"] >= 2  # of both replicas
    assert not walk.upward
    assert len(walk.files) <= 12, walk.files


def test_an_eager_read_goes_down() -> None:
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        v = rx.Variable(1.0, aggregation=rx.VariableAggregation.SUM)
    walk = _walk(strategy, v.read_value)
    assert not walk.upward
    assert len(walk.files) <= 12, walk.files
