"""One thread and many tasks: what the pool reports, and when."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transport_partners import COORDINATOR, PS, WORKER, Place, echo, process

from replicax import errors
from replicax.protocol import limits, messages
from replicax.protocol.tasks import Task
from replicax.testing.proxy import Proxy
from replicax.transport import addresses, connection
from replicax.transport import keys as key_files
from replicax.transport.client_pool import ClientPool
from replicax.transport.service import Service

PING = messages.Ping(0)


class Recorder:
    """A pool whose callbacks are put into a queue."""

    def __init__(self, **more: Any) -> None:
        self.events: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.threads: set[threading.Thread] = set()
        self.pool = ClientPool(
            COORDINATOR,
            more.pop("keys", None),
            lambda task, envelope, buffers: self._put(
                "message", task, envelope.body, [bytes(b) for b in buffers], envelope.request
            ),
            lambda task, welcome: self._put("connected", task, welcome.incarnation),
            lambda task, reason: self._put("lost", task, reason),
            **more,
        )

    def _put(self, *event: Any) -> None:
        self.threads.add(threading.current_thread())
        self.events.put(event)

    def next(self, timeout: float = 60.0) -> tuple[Any, ...]:
        return self.events.get(timeout=timeout)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.pool.close()
    assert recorder.events.empty()
    assert recorder.threads <= {recorder.pool._thread}


@pytest.fixture(params=["inproc", "ipc"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(request.param, tmp_path)


@pytest.fixture
def ipc(tmp_path: Path) -> Place:
    return Place("ipc", tmp_path)


def test_a_request_after_a_rejected_handshake_says_why(
    recorder: Recorder, ipc: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "library_version", lambda: "99.0.0")
    with ipc.serve():
        recorder.pool.connect(PS, ipc.resolve("coordinator"))
        event, task, reason = recorder.next()
        assert (event, task) == ("lost", PS)
        assert "99.0.0" in reason
        with pytest.raises(errors.ProtocolError, match=r"99\.0\.0"):
            recorder.pool.request(PS, PING, timeout=5.0)


def test_the_pool_reports_connections_and_messages(recorder: Recorder, place: Place) -> None:
    with place.serve(incarnation=5):
        recorder.pool.connect(PS, place.resolve("coordinator"))
        assert recorder.next() == ("connected", PS, 5)
        for i in range(50):
            recorder.pool.send(PS, messages.Ping(i), [b"%d" % i], request=i + 1)
        for i in range(50):
            assert recorder.next() == ("message", PS, messages.Ping(i), [b"%d" % i], i + 1)
    assert recorder.next()[:2] == ("lost", PS)


def test_the_pool_speaks_over_tcp(tmp_path: Path) -> None:
    place = Place("tcp", tmp_path)
    recorder = Recorder(keys=place.key("coordinator"))
    with recorder.pool as pool, place.serve():
        pool.connect(PS, place.resolve("coordinator"))
        assert recorder.next()[0] == "connected"
        large = np.arange(1_000_000, dtype=np.uint8)
        _, (data,) = pool.request(PS, PING, [large], timeout=60)
        np.testing.assert_array_equal(np.frombuffer(data, np.uint8), large)


def test_messages_wait_for_a_task_that_starts_later(recorder: Recorder, place: Place) -> None:
    recorder.pool.connect(PS, place.resolve("coordinator"))
    recorder.pool.send(PS, PING, request=3)
    with place.serve():
        got = {recorder.next()[0], recorder.next()[0]}
    assert got == {"connected", "message"}
    assert recorder.next()[:2] == ("lost", PS)


def test_notices_of_a_task_arrive(recorder: Recorder, place: Place) -> None:
    def handler(session: Any, envelope: Any, buffers: Any) -> None:
        service.send(session, messages.Finished([]))

    with place.serve(handler, WORKER) as service:
        recorder.pool.connect(WORKER, place.resolve("coordinator"))
        recorder.pool.send(WORKER, messages.Run([]))
        assert recorder.next()[0] == "connected"
        assert recorder.next() == ("message", WORKER, messages.Finished([]), [], 0)
    assert recorder.next()[:2] == ("lost", WORKER)


def test_requests_of_other_threads_get_their_replies(recorder: Recorder, place: Place) -> None:
    wrong: list[int] = []

    def ask(index: int) -> None:
        for i in range(20):
            body = messages.Ping(index * 100 + i)
            if recorder.pool.request(PS, body, timeout=60)[0] != body:
                wrong.append(body.settled)

    with place.serve():
        recorder.pool.connect(PS, place.resolve("coordinator"))
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert recorder.next()[0] == "connected"
    assert wrong == []
    assert recorder.next()[:2] == ("lost", PS)


def test_errors_of_a_task_are_raised_where_it_was_asked(recorder: Recorder, ipc: Place) -> None:
    def handler(session: Any, envelope: Any, buffers: Any) -> Any:
        if envelope.body.settled:
            return None
        raise errors.NotFoundError("There is no such part.")

    with ipc.serve(handler):
        recorder.pool.connect(PS, ipc.resolve("coordinator"))
        with pytest.raises(errors.NotFoundError):
            recorder.pool.request(PS, messages.Ping(0), timeout=60)
        with pytest.raises(errors.DeadlineExceededError, match="/job:ps/task:0"):
            recorder.pool.request(PS, messages.Ping(1), timeout=0.1)
        with pytest.raises(errors.UnavailableError, match="/job:ps/task:7"):
            recorder.pool.request(Task("ps", 7), PING, timeout=60)
        recorder.pool.disconnect(PS)
        assert recorder.next()[0] == "connected"


def test_a_lost_task_is_reported_once_and_found_again(recorder: Recorder, place: Place) -> None:
    with place.serve(incarnation=1):
        recorder.pool.connect(PS, place.resolve("coordinator"))
        assert recorder.next() == ("connected", PS, 1)
    kind, task, reason = recorder.next()
    assert (kind, task) == ("lost", PS)
    assert "listens" in reason or "closed" in reason
    with pytest.raises(errors.PSUnavailableError):
        recorder.pool.request(PS, PING, timeout=60)
    recorder.pool.send(PS, messages.Ping(77))  # dropped: it was meant for the old life
    with place.serve(incarnation=2):
        assert recorder.next() == ("connected", PS, 2)
        recorder.pool.send(PS, PING, request=1)
        assert recorder.next() == ("message", PS, PING, [], 1)
        recorder.pool.disconnect(PS)
        with pytest.raises(errors.UnavailableError):
            recorder.pool.request(PS, PING, timeout=60)


def test_a_task_restarted_at_once_is_lost_first(recorder: Recorder, place: Place) -> None:
    with place.serve(incarnation=1):
        recorder.pool.connect(PS, place.resolve("coordinator"))
        assert recorder.next() == ("connected", PS, 1)
    with place.serve(incarnation=2):
        kind, task, reason = recorder.next()
        assert (kind, task) == ("lost", PS)
        # A request in between fails.
        assert reason in ("it was restarted", "nothing listens there")
        assert recorder.next() == ("connected", PS, 2)
        recorder.pool.disconnect(PS)
        with pytest.raises(errors.UnavailableError):
            recorder.pool.request(PS, PING, timeout=60)


def test_bar25_a_short_break_is_no_loss(
    recorder: Recorder, ipc: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However long this machine takes to connect again, it is a short break.
    monkeypatch.setattr(limits, "RESET", 5.0)
    answers: list[Any] = []
    asked = threading.Event()

    def answer_the_second(session: Any, envelope: Any, buffers: Any) -> Any:
        is_first = not asked.is_set()
        asked.set()
        return None if is_first else (envelope.body, buffers)

    with (
        ipc.serve(answer_the_second, incarnation=3) as service,
        Proxy(f"{ipc.address}-proxy", service.address) as proxy,
    ):
        recorder.pool.connect(PS, addresses.resolve(proxy.address))
        assert recorder.next() == ("connected", PS, 3)
        asking = threading.Thread(
            target=lambda: answers.append(recorder.pool.request(PS, PING, timeout=60)[0])
        )
        asking.start()
        assert asked.wait(60)
        assert proxy.blip() == 1
        assert recorder.next() == ("connected", PS, 3)
        asking.join()
        recorder.pool.disconnect(PS)
        with pytest.raises(errors.UnavailableError):
            recorder.pool.request(PS, PING, timeout=60)
    assert answers == [PING]


def test_bar19_a_killed_task_is_reported(recorder: Recorder, ipc: Place) -> None:
    with process(ipc.address, 9) as child:
        recorder.pool.connect(PS, ipc.resolve("coordinator"))
        assert recorder.next() == ("connected", PS, 9)
        child.kill()
        assert recorder.next()[:2] == ("lost", PS)


def test_bar49_a_task_of_another_version_is_reported(
    recorder: Recorder, ipc: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicax.transport.service.library_version", lambda: "99.1.0")
    with ipc.serve():
        recorder.pool.connect(PS, ipc.resolve("coordinator"))
        kind, _, reason = recorder.next()
        assert kind == "lost"
        assert "99.1.0" in reason
        recorder.pool.disconnect(PS)
        with pytest.raises(errors.UnavailableError):
            recorder.pool.request(PS, PING, timeout=60)


def test_a_task_that_gets_the_right_keys_later_is_found(tmp_path: Path) -> None:
    place = Place("tcp", tmp_path)
    wrong = key_files.load(key_files.make(tmp_path / "other"), "ps")
    recorder = Recorder(keys=place.key("coordinator"))
    with recorder.pool as pool:
        with Service(addresses.resolve("127.0.0.1:0", None, wrong), PS, echo, wrong) as service:
            service.start()
            place.address = service.address
            pool.connect(PS, place.resolve("coordinator"))
            with pytest.raises(errors.PermissionDeniedError, match="certificate"):
                pool.request(PS, PING, timeout=60)
        assert recorder.next()[:2] == ("lost", PS)
        with place.serve(incarnation=4):
            assert recorder.next() == ("connected", PS, 4)
            assert pool.request(PS, PING, timeout=60)[0] == PING


def test_many_tasks_share_one_thread(recorder: Recorder, tmp_path: Path) -> None:
    tasks = [Task("worker", i) for i in range(8)]
    places = [Place("inproc", tmp_path) for _ in tasks]
    for task, place in zip(tasks, places, strict=True):
        recorder.pool.connect(task, place.resolve("coordinator"))
    services = [p.serve(echo, t) for t, p in zip(tasks, places, strict=True)]
    for service in services:
        service.__enter__()
    assert {recorder.next()[1] for _ in tasks} == set(tasks)
    for i, task in enumerate(tasks):
        recorder.pool.send(task, messages.Ping(i))
    assert {recorder.next()[1:3] for _ in tasks} == {
        (t, messages.Ping(i)) for i, t in enumerate(tasks)
    }
    for task in tasks:
        recorder.pool.disconnect(task)
    with pytest.raises(errors.UnavailableError):
        recorder.pool.request(tasks[0], PING, timeout=60)
    for service in services:
        service.__exit__(None, None, None)


def test_callbacks_that_fail_do_not_end_the_pool(ipc: Place) -> None:
    called: queue.Queue[float] = queue.Queue()

    def fail(*_: Any) -> None:
        called.put(time.monotonic())
        raise ValueError("of the user")

    with ClientPool(COORDINATOR, None, fail, fail, fail, fail) as pool, ipc.serve():
        pool.connect(PS, ipc.resolve("coordinator"))
        assert pool.request(PS, PING, timeout=60)[0] == PING
        pool.send(PS, PING)
        for _ in range(5):
            called.get(timeout=60)
        pool.wake()
        assert pool.request(PS, PING, timeout=60)[0] == PING


def test_a_callback_cannot_wait_for_replies(ipc: Place) -> None:
    caught: queue.Queue[BaseException] = queue.Queue()

    def on_connected(task: Task, welcome: Any) -> None:
        try:
            pool.request(task, PING)
        except errors.ContextError as error:
            caught.put(error)

    with (
        ClientPool(COORDINATOR, None, lambda *_: None, on_connected, lambda *_: None) as pool,
        ipc.serve(),
    ):
        pool.connect(PS, ipc.resolve("coordinator"))
        assert "thread" in str(caught.get(timeout=60))


def test_a_pool_can_be_closed_by_a_callback_and_twice(ipc: Place) -> None:
    pool = ClientPool(COORDINATOR, None, lambda *_: None, lambda *_: pool.close(), lambda *_: None)
    with ipc.serve():
        pool.connect(PS, ipc.resolve("coordinator"))
        pool._thread.join(timeout=60)
        pool.close()
        with pytest.raises(errors.UnavailableError):
            pool.request(PS, PING, timeout=60)


def test_what_was_sent_before_closing_arrives(ipc: Place) -> None:
    arrived: queue.Queue[Any] = queue.Queue()

    def handler(session: Any, envelope: Any, buffers: Any) -> None:
        arrived.put(envelope.body)

    is_connected = threading.Event()
    with ipc.serve(handler):
        pool = ClientPool(
            COORDINATOR, None, lambda *_: None, lambda *_: is_connected.set(), lambda *_: None
        )
        pool.connect(PS, ipc.resolve("coordinator"))
        assert is_connected.wait(60)
        with pytest.raises(errors.DeadlineExceededError):
            pool.request(PS, PING, timeout=0.2)
        pool.send(PS, messages.Detach())
        pool.close()
        assert arrived.get(timeout=60) == PING
        assert arrived.get(timeout=60) == messages.Detach()


def test_tcp_without_keys_is_reported(recorder: Recorder) -> None:
    recorder.pool.connect(PS, addresses.Location("tcp", "tcp://127.0.0.1:9", "127.0.0.1:9"))
    kind, _, reason = recorder.next()
    assert kind == "lost"
    assert "REPLICAX_KEYS" in reason
