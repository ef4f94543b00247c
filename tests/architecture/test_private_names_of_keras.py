"""The private names of Keras that replicax uses: one module has them, and Keras still does."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from keras_programs import keras

import replicax
import replicax as rx
from replicax.keras import internals

PACKAGE = Path(replicax.__file__).parent
# Of Keras under strategies, of tapes, and of the names of Keras 2.
HOLDERS = tuple(
    PACKAGE / name
    for name in ("keras/internals.py", "tf/tape_keras_internals.py", "tf/keras/internals.py")
)


def test_other_modules_import_nothing_private_of_keras() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        if path not in HOLDERS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        if any(name.startswith("keras.src") for name in _imported(node))
    ]
    assert not found, f"Import private names of Keras in {HOLDERS} alone, not in {found}."


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names]


def test_keras_has_each_private_name_that_is_used() -> None:
    """Attributes of instances too, which `require_known` cannot ask a class for."""
    sources = "\n".join(p.read_text() for p in (Path(keras.__file__).parent / "src").rglob("*.py"))
    used = {
        name: f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in HOLDERS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute | ast.Constant)
        for name in [node.attr if isinstance(node, ast.Attribute) else str(node.value)]
        if name.isidentifier() and name.startswith("_") and not name.startswith("__")
    }
    assert {"_compile_config", "_jax_state", "_learning_rate"} <= used.keys()
    lost = {name: place for name, place in used.items() if not re.search(rf"\b{name}\b", sources)}
    assert not lost, f"Keras {keras.__version__} has lost names that replicax uses: {lost}."


def test_a_name_that_keras_has_lost_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.require_known()
    monkeypatch.setitem(internals._METHODS, "keras.Model", ("fit", "_lost"))
    internals.require_known.cache_clear()
    strategy = rx.MirroredStrategy(["CPU:0"], virtual_replicas=2)
    lost = rf"keras {keras.__version__} lacks keras\.Model\._lost"
    with strategy.scope(), pytest.raises(rx.errors.UnsupportedError, match=lost):
        keras.Variable(1.0)
    monkeypatch.undo()
    with strategy.scope():
        keras.Variable(1.0)
