"""Orders of elements against those recorded from tf.data, and positions at every element."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tf_data_orders

from replicax.data import Dataset

ORDERS: dict[str, list[Any]] = json.loads(tf_data_orders.RECORDED.read_text())["orders"]


def stream(*args: int) -> Dataset:
    """A range without random access."""
    return Dataset.range(*args).filter(lambda x: x == x)


SOURCES = {"indexed": Dataset.range, "stream": stream}


def test_every_pipeline_is_recorded() -> None:
    for numbers in SOURCES.values():
        assert set(tf_data_orders.pipelines(Dataset, numbers)) == set(ORDERS)


@pytest.mark.parametrize("source", SOURCES)
def test_orders_are_those_of_tf_data(source: str) -> None:
    built = tf_data_orders.pipelines(Dataset, SOURCES[source])
    found = {name: [tf_data_orders.plain(e) for e in d] for name, d in built.items()}
    assert found == ORDERS


@pytest.mark.parametrize("source", SOURCES)
def test_T76_every_position_continues_with_the_recorded_order(source: str) -> None:
    """Positions pass through JSON; fresh and used iterators continue from them."""
    built = tf_data_orders.pipelines(Dataset, SOURCES[source])
    fresh = tf_data_orders.pipelines(Dataset, SOURCES[source])
    for name, order in ORDERS.items():
        iterator = iter(built[name])
        states = [json.dumps(iterator.get_state())]
        for _ in iterator:
            states.append(json.dumps(iterator.get_state()))
        assert len(states) == len(order) + 1
        for count, state in enumerate(states):
            for other in (iter(fresh[name]), iterator):
                other.set_state(json.loads(state))
                found = [tf_data_orders.plain(e) for e in other]
                assert found == order[count:], (name, count)
