"""Which strategy and which context is in force (S1-S18, T1-T8)."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from strategies_under_test import TWO_REPLICAS

import replicax as rx


def test_s1_s2_no_scope_is_a_replica_context() -> None:
    assert not rx.in_cross_replica_context()
    assert isinstance(rx.get_replica_context(), rx.ReplicaContext)
    assert not rx.has_strategy()


def test_s3_s5_s6_s7_scope_is_a_cross_replica_context(strategy: Any) -> None:
    if strategy is rx.get_strategy():
        pytest.skip("the default strategy's scope changes nothing")
    with strategy.scope() as entered:
        assert entered is strategy
        assert rx.get_strategy() is strategy
        assert rx.has_strategy()
        assert rx.in_cross_replica_context()
        assert rx.get_replica_context() is None
    assert rx.get_strategy() is not strategy


def test_s4_run_is_a_replica_context(strategy: Any, run: Any) -> None:
    seen = []

    def fn() -> None:
        seen.append((rx.get_replica_context(), rx.in_cross_replica_context(), rx.get_strategy()))

    run(strategy, fn)
    assert seen
    for context, is_cross, current in seen:
        assert isinstance(context, rx.ReplicaContext)
        assert not is_cross
        assert current is strategy


@pytest.mark.strategies(*TWO_REPLICAS)
def test_s12_scope_is_per_thread(strategy: Any) -> None:
    seen: list[Any] = []
    with strategy.scope():
        thread = threading.Thread(target=lambda: seen.append(rx.has_strategy()))
        thread.start()
        thread.join(10)
    assert seen == [False]


def test_t1_another_strategy_in_scope_is_refused() -> None:
    one, other = rx.OneDeviceStrategy("CPU:0"), rx.OneDeviceStrategy("CPU:1")
    with one.scope():
        with pytest.raises(RuntimeError, match="Mixing different"), other.scope():
            pass
        assert rx.get_strategy() is one
