"""Tracebacks of errors in replica code and functions: the user's frames, and not ours."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import replicax as rx

OURS = str(Path(rx.__file__).parent)


def _fail(x: Any) -> Any:
    return x @ jnp.ones((7, 7))


def _misuse(x: Any) -> Any:
    return rx.Variable(x, name="v", aggregation=None).assign(jnp.ones(2))


def _frames(call: Callable[[], Any], error: type[Exception]) -> list[traceback.FrameSummary]:
    with pytest.raises(error) as caught:
        call()
    assert (
        caught.value.__notes__.count(
            "replicax: its own frames are hidden; set REPLICAX_TRACEBACK=full to see them."
        )
        == 1
    )
    return list(traceback.extract_tb(caught.value.__traceback__))


@pytest.mark.parametrize(("fail", "error"), [(_fail, TypeError), (_misuse, ValueError)])
@pytest.mark.strategies("one_device", "mirrored_2")
def test_only_frames_of_the_user_are_shown(
    strategy: Any, run: Any, fail: Any, error: type[Exception]
) -> None:
    found = _frames(lambda: run(strategy, lambda x: fail(x), (jnp.ones(3),)), error)
    assert not [f for f in found if f.filename.startswith(OURS)]
    names = [f.name for f in found]
    assert names[0] == "_frames" and fail.__name__ in names


@pytest.mark.strategies("mirrored_2")
def test_errors_in_merge_call_show_where_they_happened(strategy: Any, run: Any) -> None:
    def merge(strategy: Any, x: Any) -> Any:
        raise KeyError("missing")

    def fn(x: Any) -> Any:
        return rx.get_replica_context().merge_call(merge, (x,))

    found = _frames(lambda: run(strategy, fn, (jnp.ones(2),)), KeyError)
    assert found[-1].name == "merge"
    assert not [f for f in found if f.filename.startswith(OURS)]


def test_a_traced_value_shows_the_line_that_used_it() -> None:
    def branch(x: Any) -> int:
        return 1 if x > 0 else 2

    found = _frames(lambda: rx.function(branch)(jnp.ones(())), rx.errors.TracedValueError)
    assert found[-1].name == "branch"


def test_an_error_that_was_not_meant_shows_where_it_happened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from replicax.variables import updates

    monkeypatch.setitem(updates._RULES, "assign_add", None)
    v = rx.Variable(1.0)
    found = _frames(lambda: rx.function(lambda: v.assign_add(2.0))(), TypeError)
    own = [f.name for f in found if f.filename.startswith(OURS)]
    assert own and "__call__" not in own and "apply" in own


@pytest.mark.parametrize("is_by_jax", [True, False])
def test_switches_show_all_frames(monkeypatch: pytest.MonkeyPatch, is_by_jax: bool) -> None:
    before = jax.config.jax_traceback_filtering
    if is_by_jax:
        jax.config.update("jax_traceback_filtering", "off")
    else:
        monkeypatch.setenv("REPLICAX_TRACEBACK", "full")
    try:
        with pytest.raises(TypeError) as caught:
            rx.function(_fail)(jnp.ones(3))
    finally:
        jax.config.update("jax_traceback_filtering", before)
    found = traceback.extract_tb(caught.value.__traceback__)
    assert [f for f in found if f.filename.startswith(OURS)]


def test_errors_of_closures_are_raised_at_the_line_of_the_user(desk: Any) -> None:
    coordinator = desk.coordinator()

    @rx.function
    def fail() -> Any:
        return {}["missing"]

    def join() -> None:
        coordinator.join()

    coordinator.schedule(fail)
    assert _frames(join, KeyError)[-1].name == "join"
    value = coordinator.schedule(fail)
    assert _frames(lambda: value.fetch(), KeyError)[-1].name == "<lambda>"
    with pytest.raises(KeyError) as caught:
        value.fetch()
    (remote,) = [note for note in caught.value.__notes__ if note.startswith("This happened on")]
    assert "in fail" in remote and "replicax/tracing" not in remote
