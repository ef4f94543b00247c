"""The queue of closures, without threads or sockets."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import replicax as rx
from replicax.coordinator.scheduling.closures import Closure, ClosureQueue, State
from replicax.foundation import errors


@dataclasses.dataclass
class Shipped:
    sha: str = "f"
    buffers: tuple[Any, ...] = ()


def filled(count: int, limit: int = 100) -> tuple[ClosureQueue, list[Closure]]:
    queue = ClosureQueue(limit)
    closures = [Closure(i, Shipped()) for i in range(count)]
    for closure in closures:
        queue.put(closure)
    return queue, closures


def test_T94_queue_is_idle_when_everything_is_finished() -> None:
    queue, closures = filled(2)
    assert not queue.is_idle
    assert queue.take(5, 0) == closures
    assert not len(queue) and not queue.is_idle
    queue.finish(closures[0], "a")
    assert not queue.is_idle
    queue.finish(closures[1], "b")
    assert queue.is_idle and queue.take_error() is None
    assert [c.state for c in closures] == [State.FINISHED] * 2
    assert [c.result for c in closures] == ["a", "b"]


def test_T94_put_back_makes_closures_available_again_in_their_old_order() -> None:
    queue, closures = filled(6)
    first = queue.take(3, 0)
    second = queue.take(2, 1)
    assert queue.requeue(reversed(second)) == []
    assert queue.requeue(reversed(first)) == []
    assert not queue.in_flight
    assert queue.take(6, 2) == closures
    assert [c.attempt for c in closures] == [1, 1, 1, 1, 1, 0]
    assert all(c.worker == 2 for c in closures)


def test_T94_put_back_of_what_is_not_in_flight_changes_nothing() -> None:
    queue, closures = filled(2)
    taken = queue.take(1, 0)
    queue.finish(taken[0], None)
    assert queue.requeue(taken) == []
    assert len(queue) == 1
    assert closures[0].state is State.FINISHED


def test_T95_first_error_wins_and_is_handed_out_once() -> None:
    queue, closures = filled(4)
    queue.take(2, 0)
    cancelled = queue.fail(closures[0], ValueError("first"))
    assert cancelled == [closures[0], closures[2], closures[3]]
    assert queue.take_error() is None, "something still runs"
    # Caused by the cancellation, or not: it is not reported, only kept with its closure.
    queue.fail(closures[1], KeyError("second"))
    error = queue.take_error()
    assert isinstance(error, ValueError)
    assert queue.take_error() is None
    assert isinstance(closures[1].error, KeyError)
    late = Closure(9, Shipped())
    queue.put(late)
    assert queue.take(1, 0) == [late]
    queue.finish(late, None)
    assert queue.is_idle and queue.take_error() is None


def test_T96_queued_closures_are_cancelled_and_in_flight_ones_waited_for() -> None:
    queue, closures = filled(4)
    queue.take(2, 0)
    queue.fail(closures[1], ValueError("bad batch"))
    assert [c.state for c in closures[2:]] == [State.CANCELLED] * 2
    for closure in closures[2:]:
        assert isinstance(closure.error, errors.CancelledError)
        assert "bad batch" in str(closure.error)
    assert queue.is_cancelling and not queue.is_error_ready
    queue.finish(closures[0], "in time")
    assert closures[0].result == "in time"
    assert queue.is_error_ready


def test_T96_put_back_after_an_error_cancels() -> None:
    queue, closures = filled(2)
    queue.take(2, 0)
    queue.fail(closures[0], ValueError("first"))
    assert queue.requeue([closures[1]]) == [closures[1]]
    assert closures[1].state is State.CANCELLED
    assert isinstance(queue.take_error(), ValueError)


def test_T96_abandoned_closures_do_not_hold_the_error_back() -> None:
    queue, closures = filled(2)
    queue.take(2, 0)
    queue.fail(closures[0], ValueError("first"))
    queue.abandon(closures[1], errors.ClosureAbortedError("given up"))
    assert isinstance(closures[1].error, errors.ClosureAbortedError)
    assert isinstance(queue.take_error(), ValueError)


def test_bar8_an_error_that_does_not_cancel_leaves_the_others() -> None:
    queue, closures = filled(3)
    queue.take(1, 0)
    assert queue.fail(closures[0], errors.PoisonClosureError("x"), cancels=False) == closures[:1]
    assert len(queue) == 2 and queue.take_error() is None
    assert queue.take(2, 1) == closures[1:]
    assert queue.take_error() is None
    for closure in closures[1:]:
        queue.finish(closure, None)
    assert isinstance(queue.take_error(), errors.PoisonClosureError)


def test_T98_queue_is_full_at_its_limit() -> None:
    queue, closures = filled(2, limit=2)
    assert queue.is_full
    queue.take(1, 0)
    assert not queue.is_full
    queue.requeue(closures[:1])
    assert queue.is_full
    with pytest.raises(rx.errors.InvalidArgumentError, match="at least 1"):
        ClosureQueue(0)


def test_settled_is_the_smallest_id_that_is_not_settled() -> None:
    queue = ClosureQueue()
    assert queue.settled == 0
    closures = [Closure(i, Shipped()) for i in (3, 5, 8, 9)]
    for closure in closures:
        queue.put(closure)
    assert queue.settled == 3
    queue.take(4, 0)
    queue.finish(closures[1], None)
    assert queue.settled == 3
    queue.finish(closures[0], None)
    assert queue.settled == 8
    queue.requeue([closures[2]])
    queue.finish(closures[3], None)
    assert queue.settled == 8
    queue.take(1, 1)
    queue.fail(closures[2], ValueError("x"))
    assert queue.settled == 10


def test_T106_a_settled_closure_lets_go_of_what_it_needed() -> None:
    queue = ClosureQueue()
    closure = Closure(0, Shipped(), [1], (), keep_alive=object())
    queue.put(closure)
    queue.take(1, 0)
    assert closure.keep_alive is not None
    queue.finish(closure, None)
    assert closure.keep_alive is None and closure.function is None and not closure.resources


def test_bar13_a_full_queue_is_cancelled_with_one_error_for_all() -> None:
    queue, closures = filled(1000, limit=1000)
    queue.take(1, 0)
    queue.fail(closures[0], ValueError("x"))
    assert len({id(c.error) for c in closures[1:]}) == 1


# Closures that may still be made somewhere.


def test_bar9_unconfirmed_closures_are_settled_last() -> None:
    queue, closures = filled(4)
    queue.take(4, 0)
    for closure in closures[1:3]:
        closure.unconfirmed = (77,)
    assert queue.requeue([closures[1]]) == []
    assert queue.fail(closures[0], ValueError("bad")) == [closures[0]]
    # One was queued, one still runs and is returned, and one is not unconfirmed.
    assert queue.requeue(closures[2:]) == [closures[3]]
    assert [c.state for c in closures[1:3]] == [State.QUEUED, State.IN_FLIGHT]
    assert queue.list_unconfirmed() == closures[1:3]
    assert not queue.is_error_ready and queue.settled == 1
    for closure in closures[1:3]:
        closure.unconfirmed = ()
    assert queue.requeue(closures[1:3]) == closures[1:3]
    assert [c.state for c in closures[1:3]] == [State.CANCELLED] * 2
    assert isinstance(queue.take_error(), ValueError) and queue.is_idle
    assert queue.list_unconfirmed() == []


@pytest.mark.parametrize("cancels", [True, False])
def test_bar9_an_unconfirmed_closure_that_fails_keeps_its_error(cancels: bool) -> None:
    queue, closures = filled(2)
    queue.take(1, 0)
    closures[0].unconfirmed = (77,)
    error = ValueError("bad")
    assert queue.fail(closures[0], error, cancels=cancels) == closures[1:] * cancels
    assert not closures[0].is_settled and queue.list_unconfirmed() == closures[:1]
    closures[0].unconfirmed = ()
    assert queue.requeue(closures[:1]) == closures[:1]
    assert closures[0].state is State.FAILED and closures[0].error is error


def test_bar9_another_attempt_may_settle_an_unconfirmed_closure() -> None:
    queue, closures = filled(1)
    queue.take(1, 0)
    closures[0].unconfirmed = (77,)
    queue.report(ValueError("bad"))
    queue.requeue(closures)
    queue.finish(closures[0], "value")
    assert queue.list_unconfirmed() == [] and queue.is_error_ready
