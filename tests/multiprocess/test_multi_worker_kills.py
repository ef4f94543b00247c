"""Workers of a sync group are killed at random; the result is that of a training without kills."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from torture import sync_groups

# 200 in the torture bench: `python -m torture.run --only 31`.
KILLS = int(os.environ.get("REPLICAX_TEST_KILLS", "5"))


@pytest.mark.slow
@pytest.mark.timeout(600 + 30 * KILLS)
def test_bar31_random_kills_and_restarts_change_no_bit(tmp_path: Path) -> None:
    whole, killed = sync_groups.train_with_kills(tmp_path, 2, KILLS, seed=7, report=print)
    assert killed.problems == []
    assert killed.num_kills == KILLS and killed.num_at_start < KILLS
    assert sync_groups.are_equal(whole, killed.values)
    assert [one["steps"] for one in killed.values] == [sync_groups.num_steps(KILLS)] * 2
    # Bounds for a busy machine; the torture bench has those of the contract.
    assert killed.notice_s < 15 and killed.lost_steps <= sync_groups.SAVE_EVERY


def test_bar31_the_comparison_sees_one_bit() -> None:
    a, b = np.ones(3, np.float32), np.ones(3, np.float32)
    first, second = {"steps": 1, "state": [a]}, {"steps": 1, "state": [b]}
    assert sync_groups.are_equal([first], [second])
    b.view(np.uint8)[0] ^= 1
    assert not sync_groups.are_equal([first], [second])
    assert not sync_groups.are_equal([first], [{"steps": 2, "state": [a]}])
