"""Tests that fail, for the test of the battery: see test_multi_worker_battery.py."""

from __future__ import annotations

import time
from typing import Any

import worker_groups


def test_passes(strategy: Any) -> None:
    assert strategy.num_replicas_in_sync == 1


def test_fails_everywhere(strategy: Any) -> None:
    raise ValueError(f"the same on all workers with {strategy.num_replicas_in_sync} replica")


def test_passes_after_a_common_failure(strategy: Any) -> None:
    assert strategy.num_replicas_in_sync == 1


def test_without_a_strategy_is_left_out() -> None:
    raise AssertionError("a test without a strategy is not for the group")


def test_fails_on_worker_1(strategy: Any) -> None:
    worker = worker_groups.current()
    assert worker is not None
    if worker.index == 1:
        raise KeyError("only here")


def test_hangs_on_worker_1(strategy: Any) -> None:
    worker = worker_groups.current()
    assert worker is not None
    if worker.index == 1:
        time.sleep(600)


def test_dies_on_worker_1(strategy: Any) -> None:
    import os

    worker = worker_groups.current()
    assert worker is not None
    if worker.index == 1:
        os._exit(7)
    worker.exchange("both are alive", None)


def test_is_not_reached(strategy: Any) -> None:
    raise AssertionError("the workers disagreed before")
