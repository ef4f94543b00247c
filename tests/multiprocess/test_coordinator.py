"""The coordinator with real workers' code and real sockets, all in this process."""

from __future__ import annotations

import dataclasses
import functools
import gc
import io
import itertools
import os
import re
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from vocabulary import refused

import replicax as rx
from replicax.coordinator.cluster_coordinator import ClusterCoordinator
from replicax.coordinator.progress import Progress
from replicax.coordinator.remote_value import PerWorkerValues, RemoteValue
from replicax.coordinator.scheduling.timing import Timing
from replicax.foundation import errors, private_directories
from replicax.protocol import messages
from replicax.protocol.tasks import Task, new_incarnation
from replicax.transport import addresses
from replicax.transport.service import Service
from replicax.variables.per_worker import PerWorkerVariables
from replicax.worker.worker import WorkerTask

# No task is lost because the machine is busy. Tests of what is done when a time is
# over make that one time short.
STEADY = Timing(beat_s=0.05, dead_s=60.0, cancel_s=60.0, no_workers_s=60.0)
# The timeout for events that must happen.
SECONDS = 60.0
_names = itertools.count()


class Shared(types.ModuleType):
    """Can be imported by functions that travel; holds what tests and closures share."""

    gate: threading.Event
    started: threading.Event
    trigger: threading.Event
    log: list[Any]


@pytest.fixture(autouse=True)
def shared() -> Iterator[Shared]:
    module = Shared("coordinator_test_shared")
    module.gate, module.started, module.log = threading.Event(), threading.Event(), []
    module.trigger = threading.Event()
    sys.modules[module.__name__] = module
    yield module
    module.gate.set()
    del sys.modules[module.__name__]


class Session:
    """A worker's side of the job without variables: closures arrive when they end."""

    def __init__(self, worker: FakeWorker, incarnation: int) -> None:
        self.strategy = rx.OneDeviceStrategy("CPU:0")
        self._worker, self._life = worker, incarnation
        self._ended: list[tuple[int, Exception | None]] = []

    def begin(self, closure: int) -> None:
        pass

    def end(self, closure: int) -> None:
        failure = self._worker.failures.pop(0) if self._worker.failures else None
        self._ended.append((closure, failure))

    def poll(self) -> list[tuple[int, Exception | None]]:
        ended, self._ended = self._ended, []
        return ended

    drain = poll

    def pending(self) -> int:
        return len(self._ended)

    def waiting_for(self) -> None:
        return None

    def close(self) -> None:
        pass


class FakeWorker:
    """A real worker task in a thread; death is the end of its socket."""

    def __init__(self, index: int, location: addresses.Location) -> None:
        self.index, self.location = index, location
        # What the next closures meet when their updates are sent.
        self.failures: list[Exception | None] = []
        self.start()

    def start(self) -> None:
        self.task = WorkerTask(self.index, self.location, self.make_session)
        self.task.start()
        self.thread = threading.Thread(target=self.task.run_forever)
        self.thread.start()

    def make_session(self, attach: Any, job: str, epoch: int, incarnation: int) -> Session:
        assert job == "job" and epoch == 3
        return Session(self, incarnation)

    def mute(self) -> None:
        """Like SIGSTOP: the socket is open, and there are no replies."""
        self.task._service._handler = lambda *_: None

    def die(self) -> None:
        self.task.close()

    def close(self) -> None:
        self.task.close()
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()


class FakeServer:
    """A parameter server that counts heartbeats and fences."""

    def __init__(self, index: int, location: addresses.Location) -> None:
        self.location, self.index = location, index
        self.fenced: list[int] = []
        self.settled: list[int] = []
        self.error_reply: errors.DistributeError | None = None
        self.is_slow = False
        self.start()

    def start(self) -> None:
        self.service = Service(self.location, Task("ps", self.index), self.handle)
        self.service.start()

    def handle(self, caller: Any, envelope: Any, buffers: Any) -> Any:
        if self.error_reply is not None:
            raise self.error_reply
        body = envelope.body
        if isinstance(body, messages.Ping):
            self.settled.append(body.settled)
            return messages.Pong(1, {"bytes": 4096, "requests": 10 * len(self.settled)}), ()
        if self.is_slow:
            return None
        assert isinstance(body, messages.Fence)
        self.fenced += body.incarnations
        return messages.Done(), ()

    def close(self) -> None:
        self.service.close()


class FakeCluster:
    job, epoch, keys = "job", 3, None
    me = Task("coordinator", 0)

    def __init__(self, num_workers: int, num_servers: int, scheme: str) -> None:
        self.incarnation = new_incarnation()
        self.settings = {"orphan": 30.0}
        # All processes of a user meet in one directory, also those of another run of these tests.
        name = f"coordinator-test-{os.getpid()}-{next(_names)}"
        self.workers = [self._place(scheme, f"{name}-w{i}") for i in range(num_workers)]
        self.servers = [self._place(scheme, f"{name}-p{i}") for i in range(num_servers)]
        self._ids = itertools.count(1)
        self.write: int | None = None
        self.num_attached = 0
        self.fenced: set[int] = set()

    @staticmethod
    def _place(scheme: str, name: str) -> addresses.Location:
        if scheme == "inproc":
            return addresses.resolve(f"inproc://{name}")
        return addresses.resolve(f"ipc://{private_directories.of_user()}/{name}.sock")

    def attach(self) -> None:
        self.num_attached += 1

    def follow(self, loss_of: Any) -> None:
        self.loss_of = loss_of

    def is_saved(self, server: int) -> bool:
        del server
        return False

    def attach_again(self, server: int) -> messages.Attach:
        raise AssertionError(f"server {server} cannot come back")

    def next_closure(self) -> int:
        return next(self._ids)

    def oldest_write(self) -> int | None:
        return self.write


class FakeStrategy:
    def __init__(self, cluster: FakeCluster) -> None:
        self.extended = types.SimpleNamespace(cluster=cluster, per_worker=PerWorkerVariables())


class Setting:
    """A coordinator with workers and servers."""

    def __init__(self, workers: int = 2, servers: int = 1, scheme: str = "inproc", **options: Any):
        self.cluster = FakeCluster(workers, servers, scheme)
        self.servers = [FakeServer(i, at) for i, at in enumerate(self.cluster.servers)]
        self.workers = [FakeWorker(i, at) for i, at in enumerate(self.cluster.workers)]
        options.setdefault("timing", STEADY)
        self.strategy = FakeStrategy(self.cluster)
        self.coordinator = ClusterCoordinator(self.strategy, **options)

    def close(self) -> None:
        self.coordinator.close()
        for task in (*self.workers, *self.servers):
            task.close()

    def until(self, condition: Callable[[], Any], what: str = "") -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, what or "it did not happen"
            threading.Event().wait(0.005)

    def until_ready(self, *workers: int) -> None:
        states = ("idle", "busy")
        self.until(
            lambda: all(self.coordinator.status().workers[i].state in states for i in workers)
        )


@pytest.fixture
def make(shared: Shared) -> Iterator[Callable[..., Setting]]:
    made: list[Setting] = []

    def make(*args: Any, **kwargs: Any) -> Setting:
        made.append(Setting(*args, **kwargs))
        return made[-1]

    yield make
    shared.gate.set()
    for setting in made:
        setting.close()


def add(a: Any, b: Any = 1) -> Any:
    return a + b


def fail(text: str) -> None:
    raise ValueError(text)


def fail_when_told(text: str) -> None:
    import coordinator_test_shared as shared  # pyright: ignore[reportMissingImports]

    shared.trigger.wait(100)
    raise ValueError(text)


def wait_at_gate(number: int) -> int:
    import coordinator_test_shared as shared  # pyright: ignore[reportMissingImports]

    shared.log.append(number)
    shared.started.set()
    shared.gate.wait(100)
    return number


def note(number: int) -> int:
    import coordinator_test_shared as shared  # pyright: ignore[reportMissingImports]

    shared.log.append(number)
    return number


# schedule, join, done, fetch.


@pytest.mark.parametrize("scheme", ["inproc", "ipc"])
def test_S184_S185_scheduled_functions_run_and_join_waits_for_them(
    make: Any, shared: Shared, scheme: str
) -> None:
    setting = make(workers=2, servers=2, scheme=scheme)
    values = [setting.coordinator.schedule(note, args=(i,)) for i in range(200)]
    setting.coordinator.join(timeout=SECONDS)
    assert setting.coordinator.done()
    assert sorted(shared.log) == list(range(200))
    assert setting.coordinator.fetch(values) == list(range(200))
    assert sum(w.num_done for w in setting.coordinator.status().workers) == 200
    setting.coordinator.join()


def test_S184_any_callable_and_nested_results(make: Any) -> None:
    coordinator = make().coordinator
    compiled = rx.function(lambda x: {"twice": 2 * x, "sum": [x.sum(), None]})
    values = {
        "function": coordinator.schedule(add, args=(1,), kwargs={"b": 4}),
        "lambda": coordinator.schedule(lambda: (1, "two", [3.0])),
        "partial": coordinator.schedule(functools.partial(add, 5)),
        "compiled": coordinator.schedule(compiled, args=(np.arange(3.0, dtype=np.float32),)),
        "other": 7,
    }
    fetched = coordinator.fetch(values)
    assert fetched["function"] == 5
    assert fetched["lambda"] == (1, "two", [3.0])
    assert fetched["partial"] == 6
    assert fetched["other"] == 7
    assert isinstance(fetched["compiled"]["twice"], np.ndarray)
    np.testing.assert_array_equal(fetched["compiled"]["twice"], [0.0, 2.0, 4.0])
    got = values["compiled"].get()
    assert isinstance(got["twice"], jax.Array) and got["sum"][1] is None


def test_T94_done_is_false_until_finished(make: Any, shared: Shared) -> None:
    coordinator = make().coordinator
    assert coordinator.done()
    value = coordinator.schedule(wait_at_gate, args=(1,))
    assert shared.started.wait(SECONDS)
    assert not coordinator.done()
    text = r"^fetch\(\) timed out after 0.01 s: closure 1 \(wait_at_gate\) has run on /job:worker/"
    with pytest.raises(errors.DeadlineExceededError, match=text):
        value.fetch(timeout=0.01)
    text = r"^join\(\) timed out after 0.01 s with 1 closure unfinished \(1 assigned to /job:worker"
    with pytest.raises(errors.DeadlineExceededError, match=text):
        coordinator.join(timeout=0.01)
    shared.gate.set()
    coordinator.join(timeout=SECONDS)
    assert coordinator.done() and value.fetch() == 1


def test_T95_an_error_is_raised_once_then_the_coordinator_is_usable(make: Any) -> None:
    coordinator = make().coordinator
    value = coordinator.schedule(fail, args=("bad batch",))
    with pytest.raises(ValueError, match="bad batch") as caught:
        coordinator.join(timeout=SECONDS)
    assert "/job:worker/task:" in "".join(caught.value.__notes__)
    with pytest.raises(ValueError, match="bad batch"):
        value.fetch()
    coordinator.join(timeout=SECONDS)
    assert coordinator.done()
    assert coordinator.schedule(add, args=(1,)).fetch(timeout=SECONDS) == 2


@pytest.mark.parametrize("how", ["schedule", "done"])
def test_T95_the_error_is_raised_by_schedule_and_done_too(make: Any, how: str) -> None:
    setting = make()
    coordinator = setting.coordinator
    value = coordinator.schedule(fail, args=("bad",))
    with pytest.raises(ValueError, match="bad"):
        value.fetch(timeout=SECONDS)
    with pytest.raises(ValueError, match="bad"):
        coordinator.schedule(add, args=(1,)) if how == "schedule" else coordinator.done()
    assert coordinator.done()
    assert coordinator.schedule(add, args=(1,)).fetch(timeout=SECONDS) == 2


def test_T96_queued_closures_are_cancelled_and_running_ones_waited_for(
    make: Any, shared: Shared
) -> None:
    setting = make(workers=2)
    coordinator = setting.coordinator
    setting.until_ready(0, 1)
    running = coordinator.schedule(wait_at_gate, args=(1,))
    assert shared.started.wait(SECONDS)
    failing = coordinator.schedule(fail_when_told, args=("first",))
    queued = [coordinator.schedule(note, args=(i,)) for i in range(2, 30)]
    shared.trigger.set()
    with pytest.raises(ValueError, match="first"):
        failing.fetch(timeout=SECONDS)
    # What is in the window of a worker behind the failing one may have run.
    for value in queued[4:]:
        with pytest.raises(errors.CancelledError):
            value.fetch(timeout=SECONDS)
    assert not coordinator.done(), "the error waits for what runs"
    shared.gate.set()
    with pytest.raises(ValueError, match="first"):
        coordinator.join(timeout=SECONDS)
    assert running.fetch() == 1
    assert len(shared.log) <= 5


def test_bar9_join_does_not_wait_for_ever_for_what_runs(make: Any, shared: Shared) -> None:
    setting = make(workers=2, timing=dataclasses.replace(STEADY, cancel_s=0.5))
    coordinator = setting.coordinator
    setting.until_ready(0, 1)
    running = coordinator.schedule(wait_at_gate, args=(1,))
    assert shared.started.wait(SECONDS)
    coordinator.schedule(fail, args=("first",))
    with pytest.raises(ValueError, match="first"):
        coordinator.join(timeout=SECONDS)
    with pytest.raises(errors.ClosureAbortedError):
        running.fetch(timeout=0)
    assert len(setting.servers[0].fenced) == 1
    found = [coordinator.schedule(add, args=(i,)).fetch(timeout=SECONDS) for i in range(3)]
    assert found == [1, 2, 3]
    # The worker that did not stop is told to end.
    setting.until(lambda: sum(bool(w.task.ending) for w in setting.workers) == 1)


def test_T98_schedule_waits_while_the_queue_is_full(make: Any, shared: Shared) -> None:
    coordinator = make(workers=1, queue_limit=2).coordinator
    values = []
    blocked = threading.Thread(
        target=lambda: values.extend(
            coordinator.schedule(wait_at_gate, args=(i,)) for i in range(30)
        )
    )
    blocked.start()
    assert shared.started.wait(SECONDS)
    blocked.join(0.2)
    assert blocked.is_alive(), "it waits"
    shared.gate.set()
    blocked.join(SECONDS)
    assert not blocked.is_alive()
    coordinator.join(timeout=SECONDS)
    assert coordinator.fetch(values) == list(range(30))


def test_T102_remote_values_and_things_that_are_no_functions_are_refused(make: Any) -> None:
    coordinator = make().coordinator
    value = coordinator.schedule(add, args=(1,))
    for args, kwargs in [((value,), {}), (([{"a": value}],), {}), ((), {"b": value})]:
        with pytest.raises(ValueError, match="RemoteValue"):
            coordinator.schedule(add, args=args, kwargs=kwargs)
    with pytest.raises(TypeError, match="takes a function"):
        coordinator.schedule(3)
    for args in (3, "ab", np.ones(2), iter([1])):
        with pytest.raises(ValueError, match=r"`args` must be a list or tuple.*args=\(value,\)"):
            coordinator.schedule(add, args=args)
        with pytest.raises(ValueError, match="`args` must be a list or tuple"):
            coordinator.create_per_worker_value(add, args=args)
    with pytest.raises(TypeError, match="`kwargs` must be a dict"):
        coordinator.schedule(add, kwargs=[1])
    with pytest.raises(TypeError, match="picklable"):
        coordinator.schedule(add, args=(threading.Lock(),))
    coordinator.join(timeout=SECONDS)


def test_T102_arguments_that_are_nested_without_end_are_refused_at_once(make: Any) -> None:
    coordinator = make().coordinator
    loop: list[Any] = [1]
    loop.append({"again": (loop,)})
    deep: list[Any] = []
    chain: Any = None
    for _ in range(5_000):
        deep, chain = [deep], types.SimpleNamespace(next=chain)
    cases: list[tuple[Any, str]] = [
        (loop, r"args\[0\]\[1\]\['again'\]\[0\] is args\[0\] itself"),
        (deep, "args is nested too deeply"),
    ]
    for value, found in cases:
        with refused(errors.InvalidArgumentError, found):
            coordinator.schedule(add, args=(value,))
        with refused(errors.InvalidArgumentError, "kwargs"):
            coordinator.schedule(add, kwargs={"a": value})
        with refused(errors.InvalidArgumentError, found):
            coordinator.create_per_worker_value(add, args=(value,))
        with refused(errors.InvalidArgumentError):
            coordinator.fetch(value)
    for fn, args in ((add, (chain,)), (lambda: deep, ()), (lambda: chain, ())):
        with refused(errors.InvalidArgumentError, "nested deeply"):
            coordinator.schedule(fn, args=args)
    assert coordinator.schedule(add, args=(1,)).fetch() == 2


def test_X12_other_strategies_are_refused() -> None:
    with pytest.raises(ValueError, match="ParameterServerStrategy"):
        ClusterCoordinator(rx.OneDeviceStrategy("CPU:0"))


def test_there_is_one_coordinator_per_strategy_until_it_is_closed(make: Any) -> None:
    setting = make()
    again = ClusterCoordinator(setting.strategy)
    assert again is setting.coordinator and again.strategy is setting.strategy
    again.close()
    again.close()
    for call in (again.join, again.done, lambda: again.schedule(add, args=(1,))):
        with pytest.raises(errors.ContextError, match="closed"):
            call()
    with ClusterCoordinator(setting.strategy, timing=STEADY) as other:
        assert other is not again
        assert other.schedule(add, args=(1,)).fetch(timeout=SECONDS) == 2


def test_close_cancels_what_has_not_ended(make: Any, shared: Shared) -> None:
    coordinator = make(workers=1).coordinator
    values = [coordinator.schedule(wait_at_gate, args=(i,)) for i in range(20)]
    assert shared.started.wait(SECONDS)
    coordinator.close()
    for value in values:
        with pytest.raises(errors.CancelledError):
            value.fetch(timeout=0)


# Per-worker objects.


def dataset() -> rx.data.Dataset:
    return rx.data.Dataset.range(4).batch(2)


def test_S186_S187_S188_each_worker_has_its_own_iterator(make: Any) -> None:
    coordinator = make(workers=1).coordinator
    data = coordinator.create_per_worker_dataset(dataset)

    @rx.function
    def step(iterator: Any) -> Any:
        return next(iterator)

    for _ in range(2):
        iterator = iter(data)
        values = [coordinator.schedule(step, args=(iterator,)) for _ in range(2)]
        assert [v.fetch(timeout=SECONDS).tolist() for v in values] == [[0, 1], [2, 3]]
        with pytest.raises(errors.OutOfRangeError):
            coordinator.schedule(step, args=(iterator,)).fetch(timeout=SECONDS)
        with pytest.raises(errors.OutOfRangeError):
            coordinator.join(timeout=SECONDS)
    with pytest.raises(NotImplementedError, match="on the workers"):
        next(iter(data))
    with pytest.raises(RuntimeError, match=r"inside an rx\.function"):
        rx.function(lambda: iter(data))()


@pytest.mark.parametrize("given", ["function", "rx.function", "dataset"])
def test_T103_what_a_per_worker_dataset_is_made_from(make: Any, given: str) -> None:
    coordinator = make(workers=1).coordinator
    source = {"function": dataset, "rx.function": rx.function(dataset), "dataset": dataset()}
    iterator = iter(coordinator.create_per_worker_dataset(source[given]))
    assert coordinator.schedule(next, args=(iterator,)).fetch(timeout=SECONDS).tolist() == [0, 1]


def broken_dataset() -> Any:
    raise KeyError("no files")


def test_T99_T100_a_failed_resource_harms_only_those_that_use_it(make: Any) -> None:
    coordinator = make().coordinator
    iterator = iter(coordinator.create_per_worker_dataset(broken_dataset))
    assert coordinator.done(), "making resources does not count"
    assert coordinator.schedule(add, args=(1,)).fetch(timeout=SECONDS) == 2
    coordinator.join(timeout=SECONDS)
    coordinator.schedule(next, args=(iterator,))
    with pytest.raises(errors.ClosureInputError, match="no files"):
        coordinator.join(timeout=SECONDS)
    assert coordinator.schedule(add, args=(1,)).fetch(timeout=SECONDS) == 2


def test_T106_dropped_iterators_are_dropped_on_the_workers(make: Any) -> None:
    setting = make(workers=1)
    coordinator = setting.coordinator
    data = coordinator.create_per_worker_dataset(dataset)
    iterator = iter(data)
    value = coordinator.schedule(next, args=(iterator,))
    assert value.fetch(timeout=SECONDS).tolist() == [0, 1]
    runner = setting.workers[0].task._runner
    assert runner is not None and len(runner.resources) == 2
    del iterator
    gc.collect()
    setting.until(lambda: len(runner.resources) == 1)
    del data
    gc.collect()
    setting.until(lambda: len(runner.resources) == 0)


def test_T106_an_iterator_is_kept_as_long_as_a_closure_needs_it(make: Any, shared: Shared) -> None:
    coordinator = make(workers=1).coordinator
    blocking = coordinator.schedule(wait_at_gate, args=(1,))
    assert shared.started.wait(SECONDS)
    value = coordinator.schedule(next, args=(iter(coordinator.create_per_worker_dataset(dataset)),))
    gc.collect()
    shared.gate.set()
    assert value.fetch(timeout=SECONDS).tolist() == [0, 1]
    assert blocking.fetch() == 1


def test_per_worker_values_are_kept_by_the_workers(make: Any) -> None:
    setting = make(workers=2)
    coordinator = setting.coordinator
    values = coordinator.create_per_worker_value(add, args=(3,), kwargs={"b": 4})
    assert coordinator.fetch(values) == (7, 7)
    assert coordinator.schedule(add, args=(values, 1)).fetch(timeout=SECONDS) == 8
    assert [v.fetch() for v in values.values] == [7, 7]
    with pytest.raises(TypeError, match="RemoteValues"):
        PerWorkerValues([1])  # pyright: ignore[reportArgumentType]
    by_hand = PerWorkerValues([coordinator.schedule(add, args=(i,)) for i in range(2)])
    assert coordinator.fetch(by_hand) == (1, 2)
    with pytest.raises(ValueError, match="create_per_worker_value"):
        coordinator.schedule(add, args=(by_hand,))


def test_per_worker_value_of_a_lost_worker_is_made_again(make: Any) -> None:
    setting = make(workers=2, timing=dataclasses.replace(STEADY, no_workers_s=0.8))
    coordinator = setting.coordinator
    values = coordinator.create_per_worker_value(add, args=(3,))
    setting.until_ready(0, 1)
    setting.workers[1].close()
    setting.until(lambda: coordinator.status().workers[1].num_restarts == 1)
    with pytest.raises(errors.UnavailableError, match="/job:worker/task:1"):
        values.values[1].fetch(timeout=SECONDS)
    setting.workers[1].start()
    setting.until_ready(1)
    assert values.values[1].fetch(timeout=SECONDS) == 4


# Faults.


def test_T111_closures_of_a_lost_worker_run_on_another_worker(make: Any, shared: Shared) -> None:
    setting = make(workers=2, servers=2)
    coordinator = setting.coordinator
    setting.until_ready(0, 1)
    value = coordinator.schedule(wait_at_gate, args=(1,))
    assert shared.started.wait(SECONDS)
    busy = next(i for i in (0, 1) if coordinator.status().workers[i].num_closures)
    incarnation = setting.workers[busy].task.incarnation
    setting.workers[busy].die()
    setting.until(lambda: len(shared.log) == 2, "no other worker runs it")
    shared.gate.set()
    coordinator.join(timeout=SECONDS)
    assert value.fetch() == 1
    assert [server.fenced for server in setting.servers] == [[incarnation], [incarnation]]


def test_bar4_bar5_a_worker_that_does_not_answer_is_given_up(make: Any, shared: Shared) -> None:
    setting = make(workers=2, timing=dataclasses.replace(STEADY, dead_s=1.0))
    coordinator = setting.coordinator
    setting.until_ready(0, 1)
    values = [coordinator.schedule(wait_at_gate, args=(i,)) for i in range(2)]
    setting.until(lambda: len(shared.log) == 2)
    setting.workers[0].mute()
    setting.until(lambda: setting.servers[0].fenced)
    assert coordinator.status().workers[0].state == "fenced"
    shared.gate.set()
    coordinator.join(timeout=SECONDS)
    assert sorted(coordinator.fetch(values)) == [0, 1]


def test_T111_T113_a_restarted_worker_gets_functions_and_iterators_again(
    make: Any, shared: Shared
) -> None:
    setting = make(workers=1)
    coordinator = setting.coordinator
    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    assert coordinator.schedule(next, args=(iterator,)).fetch(timeout=SECONDS).tolist() == [0, 1]
    for restarts in (1, 2):
        setting.workers[0].close()
        setting.workers[0].start()
        setting.until(lambda count=restarts: coordinator.status().workers[0].num_restarts == count)
        value = coordinator.schedule(next, args=(iterator,))
        assert value.fetch(timeout=SECONDS).tolist() == [0, 1], "a fresh iterator"
    coordinator.join(timeout=SECONDS)


def test_bar6_no_workers(make: Any) -> None:
    setting = make(workers=1, timing=dataclasses.replace(STEADY, no_workers_s=0.8))
    setting.until_ready(0)
    setting.workers[0].close()
    setting.until(lambda: setting.coordinator.status().workers[0].state == "connecting")
    value = setting.coordinator.schedule(add, args=(1,))
    with pytest.raises(errors.NoWorkersError, match="/job:worker/task:0"):
        setting.coordinator.join(timeout=SECONDS)
    with pytest.raises(errors.CancelledError):
        value.fetch()
    setting.workers[0].start()
    setting.until_ready(0)
    assert setting.coordinator.schedule(add, args=(1,)).fetch(timeout=SECONDS) == 2


def test_T114_a_lost_server_ends_join_and_schedule(make: Any, shared: Shared) -> None:
    setting = make(workers=1, servers=2)
    coordinator = setting.coordinator
    values = [coordinator.schedule(wait_at_gate, args=(i,)) for i in range(5)]
    assert shared.started.wait(SECONDS)
    setting.servers[1].close()
    with pytest.raises(errors.PSUnavailableError, match="/job:ps/task:1"):
        coordinator.join(timeout=SECONDS)
    for call in (coordinator.join, coordinator.done, lambda: coordinator.schedule(add, args=(1,))):
        with pytest.raises(errors.PSUnavailableError, match="/job:ps/task:1"):
            call()
    with pytest.raises(errors.ClosureAbortedError):
        values[0].fetch()
    with pytest.raises(errors.CancelledError):
        values[-1].fetch()
    setting.servers[1].start()
    setting.until(lambda: coordinator.status().servers[1].state == "lost")
    with pytest.raises(errors.PSUnavailableError):
        coordinator.join()


def test_T114_a_server_that_does_not_fence_in_time_is_lost(make: Any, shared: Shared) -> None:
    setting = make(workers=1, timing=dataclasses.replace(STEADY, dead_s=1.0))
    setting.servers[0].is_slow = True
    setting.coordinator.schedule(wait_at_gate, args=(1,))
    assert shared.started.wait(SECONDS)
    setting.workers[0].die()
    with pytest.raises(errors.PSUnavailableError, match="fence"):
        setting.coordinator.join(timeout=SECONDS)


def ps_failure(index: int) -> errors.PSUnavailableError:
    error = errors.PSUnavailableError(f"/job:ps/task:{index} does not answer")
    error.task_index = index  # type: ignore[attr-defined]
    return error


def test_T118_two_reports_about_a_server_put_the_closure_back(make: Any) -> None:
    setting = make(workers=1, servers=2)
    setting.workers[0].failures += [ps_failure(1), ps_failure(1)]
    value = setting.coordinator.schedule(add, args=(1,))
    setting.coordinator.join(timeout=SECONDS)
    assert value.fetch() == 2
    assert not setting.workers[0].failures


def test_T118_a_server_that_goes_on_failing_is_named(make: Any) -> None:
    setting = make(workers=1, servers=2)
    setting.workers[0].failures += [ps_failure(1)] * 100_000
    setting.coordinator.schedule(add, args=(1,))
    with pytest.raises(errors.PSUnavailableError, match="/job:ps/task:1"):
        setting.coordinator.join(timeout=SECONDS)
    setting.workers[0].failures.clear()


def test_bar12_a_worker_that_forgot_a_function_gets_it_again(make: Any) -> None:
    setting = make(workers=1)
    coordinator = setting.coordinator
    assert coordinator.schedule(add, args=(1,)).fetch(timeout=SECONDS) == 2
    job = setting.workers[0].task._job
    assert job is not None
    job.functions.__init__()
    assert coordinator.schedule(add, args=(1,)).fetch(timeout=SECONDS) == 2
    coordinator.join(timeout=SECONDS)


def test_a_closure_that_cannot_be_sent_fails(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = make(workers=1)
    coordinator = setting.coordinator
    setting.until_ready(0)
    pool = coordinator._engine._clients
    send = pool.send

    def choosy(task: Task, body: Any, buffers: Any = (), request: int = 0) -> None:
        if isinstance(body, messages.Run) and any(len(b) > 100_000 for b in buffers):
            raise errors.ResourceExhaustedError("more than a message may have")
        send(task, body, buffers, request)

    monkeypatch.setattr(pool, "send", choosy)
    assert coordinator.schedule(len, args=("x" * 10,)).fetch(timeout=SECONDS) == 10
    large = coordinator.schedule(len, args=("x" * 200_000,))
    with pytest.raises(errors.ResourceExhaustedError, match="more than"):
        coordinator.join(timeout=SECONDS)
    with pytest.raises(errors.ResourceExhaustedError):
        large.fetch()
    assert coordinator.schedule(add, args=(1,)).fetch(timeout=SECONDS) == 2


def test_bar16_lost_messages_are_said_again(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = make(workers=1)
    coordinator = setting.coordinator
    assert coordinator.schedule(add, args=(1,)).fetch(timeout=SECONDS) == 2
    pool = coordinator._engine._clients
    send, lost = pool.send, []

    def losing(task: Task, body: Any, *rest: Any) -> None:
        if isinstance(body, messages.Run) and not lost:
            lost.append(body)
        else:
            send(task, body, *rest)

    monkeypatch.setattr(pool, "send", losing)
    assert coordinator.schedule(note, args=(7,)).fetch(timeout=SECONDS) == 7
    assert lost


def test_a_coordinator_that_was_replaced_says_so(make: Any) -> None:
    setting = make(workers=1)
    setting.until_ready(0)
    setting.servers[0].error_reply = errors.FencedError("epoch 4 has taken over")
    with pytest.raises(errors.FencedError, match="epoch 4"):
        setting.until(lambda: not setting.coordinator.done())
    with pytest.raises(errors.FencedError, match="epoch 4"):
        setting.coordinator.schedule(add, args=(1,))


def test_heartbeats_carry_the_watermark(make: Any) -> None:
    setting = make(workers=1)
    setting.coordinator.schedule(add, args=(1,)).fetch(timeout=SECONDS)
    setting.until(lambda: setting.servers[0].settled[-1:] == [2])
    setting.cluster.write = 1
    setting.until(lambda: setting.servers[0].settled[-1] == 1)


def test_T115_values_survive_the_death_of_their_worker(make: Any) -> None:
    setting = make(workers=1)
    values = [setting.coordinator.schedule(add, args=(np.arange(4), i)) for i in range(2)]
    setting.coordinator.join(timeout=SECONDS)
    assert values[0].fetch().tolist() == [0, 1, 2, 3]
    setting.workers[0].close()
    setting.until(lambda: setting.coordinator.status().workers[0].num_restarts)
    assert values[0].fetch().tolist() == [0, 1, 2, 3]
    assert values[1].get().tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("what", ["idle", "busy"])
def test_T119_dropping_coordinator_and_strategy_ends_the_threads(
    make: Any, shared: Shared, what: str
) -> None:
    setting = make(workers=1)
    before = {t for t in threading.enumerate() if t.name == "replicax-pool"}
    assert before
    values = []
    if what == "busy":
        values.append(setting.coordinator.schedule(wait_at_gate, args=(1,)))
        assert shared.started.wait(SECONDS)
    gone = weakref.ref(setting.coordinator)
    setting.coordinator = types.SimpleNamespace(close=lambda: None)
    setting.strategy = None
    gc.collect()
    setting.until(lambda: gone() is None)
    setting.until(lambda: not any(t.is_alive() for t in before))
    for value in values:
        with pytest.raises(errors.CancelledError):
            value.fetch(timeout=SECONDS)


def test_keyboard_interrupt_leaves_join_and_the_cluster_usable(
    make: Any, shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = make(workers=1).coordinator
    value = coordinator.schedule(wait_at_gate, args=(1,))
    assert shared.started.wait(SECONDS)
    condition = coordinator._engine._is_idle
    with monkeypatch.context() as patch:

        def interrupted(_: float) -> None:
            raise KeyboardInterrupt

        patch.setattr(condition, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            coordinator.join()
    shared.gate.set()
    coordinator.join(timeout=SECONDS)
    assert value.fetch() == 1


# What people see.


def test_status_says_how_everything_is_doing(make: Any, shared: Shared) -> None:
    setting = make(workers=1)
    coordinator = setting.coordinator
    for i in range(20):
        coordinator.schedule(wait_at_gate, args=(i,))
    assert shared.started.wait(SECONDS)
    setting.until(lambda: coordinator.status().servers[0].rate > 0)
    status = coordinator.status()
    assert status.workers[0].state == "busy"
    assert status.num_queued + status.num_running == 20
    assert status.servers[0].num_bytes == 4096
    text = str(status)
    assert "/job:worker/task:0: busy" in text and "/job:ps/task:0: ready, 4,096 bytes" in text
    shared.gate.set()
    coordinator.join(timeout=SECONDS)
    assert coordinator.status().num_finished == 20


def test_join_shows_progress(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    coordinator = make().coordinator
    for i in range(20):
        coordinator.schedule(add, args=(i,))
    begun_s = time.monotonic()
    coordinator.join(timeout=SECONDS, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) <= time.monotonic() - begun_s + 2, "at most one a second"
    # Those that had ended before `join` was called do not count.
    assert re.fullmatch(r"closures: (\d+) of \1 ended, [\d.]+/s", lines[-1])


def test_progress_is_a_bar_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    counts = iter([(5, 10), (8, 7), (15, 0)])
    with Progress(lambda: next(counts), stream) as progress:
        progress.update()
    assert "10/10" in stream.getvalue()
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("rich"):
            thread.join(SECONDS)
            assert not thread.is_alive()


def test_remote_values_have_a_short_repr(make: Any) -> None:
    value = make().coordinator.schedule(add, args=(1,))
    assert isinstance(value, RemoteValue)
    assert repr(value).startswith("<RemoteValue of closure 1, ")
