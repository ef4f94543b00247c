"""A worker behind a real socket: closures, resources, errors, and the ends of its incarnations."""

from __future__ import annotations

import contextlib
import gc
import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import replicax as rx
from replicax.contexts.worker_index import experimental_get_current_worker_index
from replicax.coordinator.shipping import remote_errors, serialization
from replicax.foundation import errors
from replicax.protocol import messages
from replicax.protocol.tasks import Task
from replicax.transport import addresses
from replicax.transport.client_pool import ClientPool
from replicax.worker.job import Job
from replicax.worker.worker import WorkerTask

WORKER = Task("worker", 1)
_names = itertools.count()


class Session:
    """Stands for the way to the servers. The closures find it as `extended.session`."""

    def __init__(self, strategy: Any, incarnation: int) -> None:
        self.strategy = strategy
        strategy.extended.session = self
        strategy.extended.adopt = lambda key: f"variable {key}"
        self.incarnation = incarnation
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.arrived: list[int] = []
        self.errors: dict[int, Exception] = {}
        # Closures may wait for `gate`; `poll` and `drain` look at `servers_answer`.
        self.gate, self.started = threading.Event(), threading.Event()
        self.servers_answer = threading.Event()
        self.servers_answer.set()
        self.drain_error: Exception | None = None
        self.closed, self.has_ended = threading.Event(), threading.Event()

    def begin(self, closure: int) -> None:
        self.begun.append(closure)

    def end(self, closure: int) -> None:
        self.ended.append(closure)
        self.has_ended.set()

    def poll(self) -> list[tuple[int, Exception | None]]:
        is_there = self.servers_answer.is_set() and self.drain_error is None
        return self._take() if is_there else []

    def drain(self) -> list[tuple[int, Exception | None]]:
        assert self.servers_answer.wait(30)
        if self.drain_error is not None:
            raise self.drain_error
        return self._take()

    def _take(self) -> list[tuple[int, Exception | None]]:
        new = self.ended[len(self.arrived) :]
        self.arrived += new
        return [(closure, self.errors.get(closure)) for closure in new]

    def pending(self) -> int:
        return len(self.ended) - len(self.arrived)

    def waiting_for(self) -> None:
        return None

    def close(self) -> None:
        self.closed.set()


class Desk:
    """A coordinator's end of the line."""

    def __init__(self, location: Any, make_strategy: Callable[[], Any]) -> None:
        self.sessions: list[Session] = []
        self.failure: Exception | None = None
        self._make_strategy = make_strategy
        self.worker = WorkerTask(1, location, self._make_session)
        self.worker.start()
        self.thread = threading.Thread(target=self.worker.run_forever, name="worker")
        self.thread.start()
        self.inbox: queue.Queue[tuple[messages.Envelope, list[memoryview]]] = queue.Queue()
        self.incarnations: queue.Queue[int] = queue.Queue()
        self.pool = ClientPool(
            Task("coordinator", 0),
            None,
            lambda task, envelope, buffers: self.inbox.put((envelope, buffers)),
            lambda task, welcome: self.incarnations.put(welcome.incarnation),
            lambda task, reason: None,
        )
        self.pool.job, self.pool.epoch = "job", 1
        self.pool.connect(WORKER, location)
        self.closures = itertools.count(1)
        self.resources = itertools.count(1)
        self.shipped: set[str] = set()
        self.results: dict[int, tuple[messages.Result, list[memoryview]]] = {}
        self.num_results = 0

    def _make_session(
        self, attach: messages.Attach, job: str, epoch: int, incarnation: int
    ) -> Session:
        if self.failure is not None:
            raise self.failure
        self.sessions.append(Session(self._make_strategy(), incarnation))
        return self.sessions[-1]

    @property
    def session(self) -> Session:
        return self.sessions[-1]

    def close(self) -> None:
        for session in self.sessions:
            session.gate.set()
            session.servers_answer.set()
        self.pool.close()
        self.worker.close()
        self.thread.join(30)
        assert not self.thread.is_alive()
        assert all(session.closed.is_set() for session in self.sessions)

    def attach(self, **settings: Any) -> messages.Body:
        body, _ = self.pool.request(WORKER, messages.Attach([], settings), timeout=30)
        return body

    def ping(self, settled: int = 0) -> messages.Pong:
        body, _ = self.pool.request(WORKER, messages.Ping(settled), timeout=30)
        assert isinstance(body, messages.Pong)
        return body

    def ship(self, fn: Any) -> str:
        shipped = serialization.ship(fn, self.session.strategy)
        if shipped.sha not in self.shipped:
            self.shipped.add(shipped.sha)
            self.pool.send(WORKER, messages.ShipFunction(shipped.sha), shipped.buffers)
        return shipped.sha

    def call(self, fn: Any, args: Any = (), kwargs: Any = None) -> tuple[Any, list[Any]]:
        buffers = serialization.pickle_arguments(args, kwargs, self.session.strategy)
        sha = self.ship(fn)
        return messages.ClosureCall(next(self.closures), 0, sha, [], len(buffers)), buffers

    def run(self, fn: Any, *args: Any, **kwargs: Any) -> int:
        call, buffers = self.call(fn, args, kwargs)
        self.pool.send(WORKER, messages.Run([call]), buffers)
        return call.closure

    def run_on(self, fn: Any, *resources: int) -> int:
        call = messages.ClosureCall(next(self.closures), 0, self.ship(fn), list(resources), 0)
        self.pool.send(WORKER, messages.Run([call]))
        return call.closure

    def make(self, kind: Any, fn: Any = None, source: int = 0, args: Any = ()) -> int:
        number = next(self.resources)
        sha = "" if fn is None else self.ship(fn)
        buffers = serialization.pickle_arguments(args, None)
        order = messages.CreateResource(number, kind, sha, source, len(buffers))
        self.pool.send(WORKER, order, buffers)
        return number

    def receive(self, kind: type) -> Any:
        """Returns the next message of a kind; results on the way to it are kept."""
        while True:
            envelope, buffers = self.inbox.get(timeout=30)
            body = envelope.body
            if isinstance(body, messages.Finished):
                self._keep(body, buffers)
            if isinstance(body, kind):
                return body

    def _keep(self, body: messages.Finished, buffers: list[memoryview]) -> None:
        for result in body.results:
            self.num_results += 1
            self.results[result.closure] = (result, buffers[: result.num_buffers])
            buffers = buffers[result.num_buffers :]

    def result(self, closure: int) -> messages.Result:
        while closure not in self.results:
            self.receive(messages.Finished)
        return self.results[closure][0]

    def value(self, closure: int) -> Any:
        result = self.result(closure)
        if result.error is not None:
            raise remote_errors.rebuild_error(result.error, 1)
        return serialization.unpack_result(*self.results[closure])

    def error(self, closure: int) -> messages.RemoteError:
        error = self.result(closure).error
        assert error is not None
        return error


def one_device() -> Any:
    return rx.OneDeviceStrategy("CPU:0")


def two_replicas() -> Any:
    return rx.MirroredStrategy(["CPU:0"], virtual_replicas=2)


@contextlib.contextmanager
def opened(location: Any = None, make_strategy: Any = one_device) -> Iterator[Desk]:
    desk = Desk(location or addresses.resolve(f"inproc://worker-{next(_names)}"), make_strategy)
    try:
        yield desk
    finally:
        desk.close()


@pytest.fixture
def desk() -> Iterator[Desk]:
    with opened() as desk:
        assert desk.attach() == messages.Done()
        yield desk


def wait_at_gate() -> str:
    """A closure that waits until the test opens the gate."""
    session = rx.get_strategy().extended.session  # type: ignore[attr-defined]
    session.started.set()
    assert session.gate.wait(30)
    return "through"


# Closures.


def test_S184_functions_of_all_kinds_run_in_order(desk: Desk) -> None:
    offset = np.arange(2000.0)
    compiled = rx.function(lambda x: x * 2)
    closures = [
        desk.run(lambda: None),
        desk.run(lambda x, k: {"sum": (offset + x).sum(), "k": [k, ("t", 2**70)]}, 1.0, k=None),
        desk.run(compiled, np.ones(3, np.float32)),
        desk.run(compiled, np.ones(3, np.float32)),
        desk.run(np.add, 1, 2),
    ]
    values = [desk.value(c) for c in closures]
    assert values[0] is None and values[4] == 3
    assert values[1] == {"sum": (offset + 1).sum(), "k": [None, ("t", 2**70)]}
    assert values[2].tolist() == [2, 2, 2]
    assert desk.session.begun == desk.session.ended == closures
    assert desk.ping().progress == 5


def test_S184_an_rx_function_is_traced_once(desk: Desk) -> None:
    traces: list[int] = []

    @rx.function
    def step(x: Any) -> Any:
        traces.append(1)
        return x + len(traces)

    assert [int(desk.value(desk.run(step, np.float32(1)))) for _ in range(3)] == [2, 2, 2]


def test_S184_over_ipc_with_large_arrays(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with opened(addresses.resolve(f"ipc://{tmp_path}/worker")) as desk:
        desk.attach()
        batch = np.arange(1 << 20, dtype=np.float32)
        assert np.array_equal(desk.value(desk.run(lambda x: (x, x + 1), batch))[1], batch + 1)


def test_S185_closures_are_finished_when_servers_have_acknowledged(desk: Desk) -> None:
    desk.session.servers_answer.clear()
    closure = desk.run(lambda: 1)
    assert desk.session.has_ended.wait(30)
    # Messages arrive in order: no result was sent before this answer.
    assert desk.ping().counters["open"] == 1
    assert desk.inbox.empty()
    desk.session.servers_answer.set()
    assert desk.value(closure) == 1


def test_S185_errors_of_updates_are_errors_of_their_closures(desk: Desk) -> None:
    desk.session.errors[2] = errors.InvalidArgumentError("row 9 is out of range")
    good, bad, other = (desk.run(lambda k=k: k) for k in range(3))
    assert desk.value(good) == 0 and desk.value(other) == 2
    with pytest.raises(errors.InvalidArgumentError, match="row 9"):
        desk.value(bad)


def test_T118_a_server_that_does_not_answer_fails_all_that_wait_for_it(desk: Desk) -> None:
    lost = errors.PSUnavailableError("ps 2 does not answer")
    lost.task_index = 2  # type: ignore[attr-defined]
    desk.session.servers_answer.clear()
    desk.session.drain_error = lost
    closures = [desk.run(lambda: 1), desk.run(lambda: 2)]
    desk.session.servers_answer.set()
    for error in map(desk.error, closures):
        assert (error.cause, error.task) == ("server", 2)
    desk.session.drain_error = None
    assert desk.value(desk.run(lambda: 3)) == 3


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("bad"), ValueError),
        (SystemExit(1), errors.ClosureError),
        (KeyboardInterrupt(), errors.ClosureError),
        (StopIteration(), errors.OutOfRangeError),
    ],
)
def test_T95_errors_of_closures_leave_the_worker_alive(
    desk: Desk, error: BaseException, expected: type[Exception]
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(expected) as caught:
        desk.value(desk.run(fail))
    assert type(caught.value) is expected
    assert "raise error" in caught.value.__notes__[0]
    assert "worker/runner.py" not in caught.value.__notes__[0]
    assert desk.value(desk.run(lambda: "alive")) == "alive"


def test_bad_input_a_result_that_is_no_array_tree_is_named(desk: Desk) -> None:
    closure = desk.run(lambda: {"a": [1, object()]})
    with pytest.raises(errors.ArgumentTypeError, match=r"the result at \['a'\]\[1\]"):
        desk.value(closure)
    assert desk.session.ended == [closure]
    assert desk.value(desk.run(lambda: 1)) == 1


def test_functions_that_cannot_be_made_on_the_worker_fail_their_closures(desk: Desk) -> None:
    class Broken:
        def __reduce__(self) -> Any:
            return (int, ("no number",))

    broken = Broken()
    with pytest.raises(ValueError, match="no number"):
        desk.value(desk.run(lambda: broken))
    with pytest.raises(ValueError, match="no number"):
        desk.value(desk.run(lambda x: x, [broken]))
    assert desk.session.begun == []


def test_variables_and_the_strategy_are_found_on_the_worker(desk: Desk) -> None:
    strategy = desk.session.strategy

    class Remote:
        owner = strategy.extended

        def shipping_key(self) -> Any:
            return ("part", 4)

    variable = Remote()
    closure = desk.run(lambda x: (variable, x, rx.get_strategy() is strategy), [variable])
    name = "variable ('part', 4)"
    assert desk.value(closure) == (name, [name], True)


def test_unknown_functions_are_asked_for_again(desk: Desk) -> None:
    shipped = serialization.ship(lambda: 5)
    call = messages.ClosureCall(next(desk.closures), 0, shipped.sha, [], 0)
    desk.pool.send(WORKER, messages.Run([call]))
    assert desk.error(call.closure).cause == "unknown_function"
    desk.results.clear()
    desk.pool.send(WORKER, messages.ShipFunction(shipped.sha), shipped.buffers)
    desk.pool.send(WORKER, messages.Run([call]))
    assert desk.value(call.closure) == 5


def test_T96_cancelled_closures_do_not_run(desk: Desk) -> None:
    running = desk.run(wait_at_gate)
    queued, kept = desk.run(lambda: 1), desk.run(lambda: 2)
    assert desk.session.started.wait(30)
    desk.pool.send(WORKER, messages.Cancel([running, queued, 99]))
    assert desk.error(queued).kind == "CancelledError"
    desk.session.gate.set()
    assert desk.value(running) == "through" and desk.value(kept) == 2
    assert desk.session.begun == [running, kept]


def test_bar17_closures_that_come_twice_run_once(desk: Desk) -> None:
    first, buffers = desk.call(wait_at_gate)
    for _ in range(2):
        desk.pool.send(WORKER, messages.Run([first]), buffers)
    assert desk.session.started.wait(30)
    desk.pool.send(WORKER, messages.Run([first]), buffers)
    assert desk.ping().counters["open"] == 1
    desk.session.gate.set()
    assert desk.value(first.closure) == "through"
    desk.results.clear()
    desk.pool.send(WORKER, messages.Run([first]), buffers)
    assert desk.value(first.closure) == "through"
    assert desk.session.begun == [first.closure]
    # Once the coordinator has settled it, the worker forgets it.
    desk.ping(settled=first.closure + 1)
    desk.pool.send(WORKER, messages.Run([first]), buffers)
    last = desk.run(lambda: "last")
    assert desk.value(last) == "last"
    assert desk.session.begun == [first.closure, first.closure, last]


def test_heartbeats_are_answered_while_a_closure_computes(desk: Desk) -> None:
    closure = desk.run(wait_at_gate)
    waiting = desk.run(lambda: 1)
    assert desk.session.started.wait(30)
    figures = desk.ping().counters
    assert figures["open"] == 2 and figures["waiting"] == 1 and figures["running_s"] > 0
    desk.session.gate.set()
    desk.value(closure)
    desk.value(waiting)
    assert desk.ping().counters["open"] == 0


def test_results_are_reported_before_a_closure_that_may_take_long(desk: Desk) -> None:
    quick = desk.run(lambda: "quick")
    slow = desk.run(wait_at_gate)
    assert desk.value(quick) == "quick"
    assert not desk.session.gate.is_set()
    desk.session.gate.set()
    assert desk.value(slow) == "through"


def test_many_results_share_messages(desk: Desk) -> None:
    first = desk.run(wait_at_gate)
    step = rx.function(lambda x: x + 1)
    closures = [desk.run(step, np.array(i, np.float32)) for i in range(300)]
    text = "é" * 2_000
    words = [desk.run(lambda: [text] * 100) for _ in range(8)]
    desk.session.gate.set()
    assert desk.value(first) == "through"
    assert [int(desk.value(c)) for c in closures] == list(range(1, 301))
    assert all(desk.value(c) == [text] * 100 for c in words)


def test_closures_that_leave_something_open_do_not_disturb_the_next(desk: Desk) -> None:
    def careless() -> None:
        rx.variable_creator_scope(lambda next_creator, **kw: next_creator(**kw)).__enter__()
        rx.get_strategy().scope().__enter__()

    def depth() -> list[int]:
        from replicax.contexts import frames
        from replicax.variables import creators

        return [len(frames.stack()), len(creators.creator_stack())]

    before = desk.value(desk.run(depth))
    desk.value(desk.run(careless))
    assert desk.value(desk.run(depth)) == before == [1, 1]


@pytest.mark.parametrize("num_buffers", [1, -1])
def test_bar44_closures_with_wrong_buffers_are_refused(desk: Desk, num_buffers: int) -> None:
    call = messages.ClosureCall(1, 0, desk.ship(len), [], num_buffers)
    desk.pool.send(WORKER, messages.Run([call]))
    assert desk.receive(messages.ErrorReply).code == "ProtocolError"
    assert desk.value(desk.run(lambda: 1)) == 1


# The index of the worker.


def test_S186_the_index_is_known_on_workers_only() -> None:
    with opened(make_strategy=two_replicas) as desk:
        desk.attach()
        index = experimental_get_current_worker_index

        def everywhere() -> Any:
            strategy = rx.get_strategy()
            inside = strategy.experimental_local_results(strategy.run(lambda: index()))
            return [index(), *inside]

        assert set(desk.value(desk.run(everywhere))) == {1}
    with pytest.raises(errors.ContextError, match="runs on no worker"):
        experimental_get_current_worker_index()


# Resources.


def test_S186_S187_S188_datasets_and_iterators(desk: Desk) -> None:
    def dataset_fn() -> Any:
        offset = 10 * experimental_get_current_worker_index()
        return rx.data.Dataset.range(6).batch(2).map(lambda x: x + offset)

    step = rx.function(lambda iterator: next(iterator).sum())
    dataset = desk.make("dataset", dataset_fn)
    first = desk.make("iterator", source=dataset)
    assert [desk.receive(messages.ResourceCreated).error for _ in range(2)] == [None, None]
    closures = [desk.run_on(step, first) for _ in range(4)]
    assert [int(desk.value(c)) for c in closures[:3]] == [21, 25, 29]
    with pytest.raises(errors.OutOfRangeError):
        desk.value(closures[3])
    again = desk.make("iterator", source=dataset)
    assert int(desk.value(desk.run_on(step, again))) == 21
    # Without a compiled function, and among other arguments.
    assert desk.value(desk.run_on(lambda it: next(it), again)).tolist() == [12, 13]


def test_S189_several_replicas_read_one_batch_each() -> None:
    with opened(make_strategy=two_replicas) as desk:
        desk.attach()

        @rx.function
        def step(iterator: Any) -> Any:
            strategy = rx.get_strategy()
            return strategy.run(lambda x: x * 2, args=(next(iterator),))

        def distributed() -> Any:
            strategy = rx.get_strategy()
            return strategy.experimental_distribute_dataset(rx.data.Dataset.range(8).batch(4))

        plain = desk.make("dataset", lambda: rx.data.Dataset.range(8).batch(2))
        cut = desk.make("dataset", distributed)
        values = [
            desk.value(desk.run_on(step, desk.make("iterator", source=source))).values
            for source in (plain, cut)
        ]
        assert [[part.tolist() for part in value] for value in values] == [[[0, 2], [4, 6]]] * 2


@pytest.mark.parametrize("kind", ["rx.function", "dataset", "list"])
def test_T103_datasets_may_be_given_in_several_ways(desk: Desk, kind: str) -> None:
    ways = {
        "rx.function": rx.function(lambda: rx.data.Dataset.range(4).batch(2)),
        "dataset": rx.data.Dataset.range(4).batch(2),
        "list": [np.array([0, 1]), np.array([2, 3])],
    }
    dataset = desk.make("dataset", ways[kind])
    iterator = desk.make("iterator", source=dataset)
    step = rx.function(lambda it: [next(it), next(it)])
    assert [v.tolist() for v in desk.value(desk.run_on(step, iterator))] == [[0, 1], [2, 3]]


def test_T103_a_dataset_function_must_not_create_variables(desk: Desk) -> None:
    def dataset_fn() -> Any:
        return [rx.Variable(1.0, name="lr")]

    desk.make("dataset", dataset_fn)
    error = desk.receive(messages.ResourceCreated).error
    assert error.kind == "InvalidArgumentError" and "lr" in error.text


def test_T100_a_failed_resource_fails_the_closures_that_use_it(desk: Desk) -> None:
    def dataset_fn() -> Any:
        raise OSError("no such file")

    dataset = desk.make("dataset", dataset_fn)
    iterator = desk.make("iterator", source=dataset)
    assert desk.receive(messages.ResourceCreated).error.kind == "OSError"
    assert desk.receive(messages.ResourceCreated).error.cause == "input"
    for closure in (desk.run_on(next, iterator), desk.run_on(next, 77)):
        assert desk.error(closure).cause == "input"
        with pytest.raises(errors.ClosureInputError, match="/job:worker/task:1"):
            desk.value(closure)
    with pytest.raises(errors.ClosureInputError, match="no such file"):
        desk.value(desk.run_on(next, iterator))
    assert desk.value(desk.run(lambda: "unused is ignored")) == "unused is ignored"


def test_T99_resources_are_made_before_closures_that_wait(desk: Desk) -> None:
    running = desk.run(wait_at_gate)
    assert desk.session.started.wait(30)
    number = next(desk.resources)
    user = desk.run_on(lambda x: x, number)
    shipped = desk.ship(lambda k: k + 1)
    buffers = serialization.pickle_arguments((4,), None)
    desk.pool.send(WORKER, messages.CreateResource(number, "value", shipped, 0, 1), buffers)
    desk.ping()
    desk.session.gate.set()
    assert desk.value(running) == "through" and desk.value(user) == 5


class Closable:
    """Tells the session when it is closed."""

    def __init__(self) -> None:
        self.session = rx.get_strategy().extended.session  # type: ignore[attr-defined]

    def close(self) -> None:
        self.session.errors[-1] = ValueError("closed")


def test_T106_dropped_resources_are_closed_and_freed(desk: Desk) -> None:
    number = desk.make("value", lambda: Closable())
    seen: list[Any] = []
    desk.session.seen = seen  # type: ignore[attr-defined]

    def look(value: Any) -> None:
        rx.get_strategy().extended.session.seen.append(weakref.ref(value))  # type: ignore

    desk.value(desk.run_on(look, number))
    assert seen[0]() is not None and -1 not in desk.session.errors
    desk.pool.send(WORKER, messages.DropResources([number, 55]))
    desk.value(desk.run(lambda: None))
    assert -1 in desk.session.errors
    gc.collect()
    assert seen[0]() is None
    assert desk.error(desk.run_on(look, number)).cause == "input"


def test_resources_that_come_twice_are_made_once(desk: Desk) -> None:
    number = desk.make("value", lambda: Closable())
    desk.resources = itertools.count(number)
    desk.make("value", lambda: 1 / 0)
    made = [desk.receive(messages.ResourceCreated).error for _ in range(2)]
    assert made == [None, None]


# Incarnations.


def test_bar5_a_fenced_worker_drops_everything_and_begins_a_new_life(desk: Desk) -> None:
    old = desk.session
    first_incarnation = desk.incarnations.get(timeout=30)

    def fenced() -> None:
        raise RuntimeError("push failed") from errors.FencedError("this incarnation is over")

    assert desk.error(desk.run(fenced)).cause == "fenced"
    assert old.closed.wait(30)
    # The next message tells the pool.
    with contextlib.suppress(errors.DistributeError):
        desk.ping()
    second_incarnation = desk.incarnations.get(timeout=30)
    assert second_incarnation != first_incarnation == old.incarnation
    assert desk.attach() == messages.Done()
    assert desk.session is not old and desk.session.incarnation == second_incarnation
    desk.shipped.clear()
    assert desk.value(desk.run(lambda: 1)) == 1


def test_bar5_a_fenced_worker_hears_first_whether_it_was_declared_dead() -> None:
    with opened() as desk:
        desk.attach()

        def fenced() -> None:
            raise errors.FencedError("this incarnation is over")

        assert desk.error(desk.run(fenced)).cause == "fenced"
        # A new incarnation would not know this connection.
        desk.ping()
        desk.pool.send(WORKER, messages.Detach(is_dead=True))
        assert desk.session.closed.wait(30)
        assert "declared it dead" in str(desk.worker.ending)


def test_a_released_worker_begins_a_new_life(desk: Desk) -> None:
    first_incarnation = desk.incarnations.get(timeout=30)
    desk.run(wait_at_gate)
    assert desk.session.started.wait(30)
    desk.pool.send(WORKER, messages.Detach())
    assert desk.incarnations.get(timeout=30) != first_incarnation
    old = desk.session
    old.gate.set()
    assert old.closed.wait(30)
    # What the old incarnation was doing is not reported by the new one.
    desk.attach()
    assert desk.value(desk.run(lambda: 2)) == 2
    assert list(desk.results) == [2]


def test_T_orphan_a_worker_without_a_coordinator_ends() -> None:
    with opened() as desk:
        desk.attach(orphan=0.3)
        assert desk.session.closed.wait(30)
        assert "its coordinator has been silent" in str(desk.worker.ending)


def test_bar5_a_worker_that_was_declared_dead_ends() -> None:
    with opened() as desk:
        desk.attach()
        desk.pool.send(WORKER, messages.Detach(is_dead=True))
        assert desk.session.closed.wait(30)
        assert "declared it dead" in str(desk.worker.ending)


def test_bar5_messages_of_another_coordinator_end_no_worker() -> None:
    with opened() as desk:
        desk.attach()
        epoch, desk.pool.epoch = desk.pool.epoch, desk.pool.epoch - 1
        desk.pool.send(WORKER, messages.Detach(is_dead=True))
        desk.pool.epoch = epoch
        assert desk.value(desk.run(lambda: 1)) == 1
        assert desk.worker.ending is None


@pytest.mark.parametrize(("orphan", "ends"), [(5.0, True), (5, True), (None, False), ("5", False)])
def test_a_job_without_heartbeats_is_an_orphan(orphan: Any, ends: bool) -> None:
    job = Job("job", 1, 1, messages.Attach([], {"orphan": orphan}), None, 0)
    job.last_seen_s = 100.0
    assert not job.is_orphaned(104.9) and job.is_orphaned(105.1) is ends


def test_only_the_coordinator_of_the_job_is_heard(desk: Desk) -> None:
    location = addresses.resolve(desk.worker.address)

    def ignore(*_: Any) -> None:
        pass

    with ClientPool(Task("coordinator", 0), None, ignore, ignore, ignore) as other:
        other.job, other.epoch = "job", 1
        other.connect(WORKER, location)
        pong, _ = other.request(WORKER, messages.Ping(0), timeout=30)
        assert isinstance(pong, messages.Pong) and pong.counters["attached"] == 0
        for order in (messages.ShipFunction("x"), messages.Run([]), messages.DropResources([1])):
            with pytest.raises(errors.UnavailableError, match="is not its coordinator"):
                other.request(WORKER, order, timeout=30)
        other.request(WORKER, messages.Detach(), timeout=30)
    assert desk.ping().counters["attached"] == 1
    assert desk.value(desk.run(lambda: 1)) == 1


def test_bar30_a_newer_coordinator_takes_over_and_the_older_is_refused(desk: Desk) -> None:
    old = desk.session
    desk.pool.epoch = 2
    assert desk.attach() == messages.Done()
    assert old.closed.wait(30) and desk.session is not old
    desk.shipped.clear()
    assert desk.value(desk.run(lambda: 1)) == 1
    desk.pool.epoch = 1
    for question in (messages.Attach([], {}), messages.Cancel([1])):
        with pytest.raises(errors.FencedError, match="with epoch 1: a newer one has epoch 2"):
            desk.pool.request(WORKER, question, timeout=30)
    assert desk.ping().counters["attached"] == 0
    desk.pool.epoch, desk.pool.job = 1, "another"
    with pytest.raises(errors.UnavailableError, match="is attached to job 'job'"):
        desk.pool.request(WORKER, messages.Cancel([1]), timeout=30)
    assert desk.attach() == messages.Done()


def test_bar17_attaching_twice_is_attaching_once(desk: Desk) -> None:
    assert desk.attach() == messages.Done()
    assert len(desk.sessions) == 1 and not desk.session.closed.is_set()


def test_a_job_that_cannot_be_joined_is_refused_with_the_reason() -> None:
    with opened() as desk:
        desk.failure = errors.PSUnavailableError("ps 0 does not answer")
        with pytest.raises(errors.PSUnavailableError, match="ps 0"):
            desk.attach()
        desk.failure = None
        assert desk.attach() == messages.Done()
        assert desk.value(desk.run(lambda: 1)) == 1


def test_an_interrupted_worker_finishes_the_closure_that_runs(desk: Desk) -> None:
    desk.run(wait_at_gate)
    desk.run(lambda: 1)
    assert desk.session.started.wait(30)
    desk.worker.interrupt()
    desk.session.gate.set()
    desk.thread.join(30)
    assert not desk.thread.is_alive()
    assert desk.session.closed.is_set() and len(desk.session.begun) == 1
