"""Messages over real sockets: round trips, order, deadlines, many callers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import psutil
import pytest
from transport_partners import (
    ALL_BODIES,
    PS,
    WORKER,
    Place,
    RawPeer,
    echo,
    process,
    random_body,
)

from replicax import errors
from replicax.protocol import codec, error_replies, limits, messages
from replicax.protocol.tasks import Task
from replicax.transport import addresses
from replicax.transport.channel import Channel
from replicax.transport.service import Service
from replicax.transport.streams import frames
from replicax.transport.streams import wire as wires

PING = messages.Ping(0)


@pytest.fixture(params=["inproc", "ipc", "tcp"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(request.param, tmp_path)


@pytest.fixture
def ipc(tmp_path: Path) -> Place:
    return Place("ipc", tmp_path)


# Encoding.


@pytest.mark.parametrize("kind", ALL_BODIES, ids=lambda k: k.__name__)
def test_every_body_survives_encoding(kind: type[messages.Body]) -> None:
    rng = random.Random(kind.__name__)
    for _ in range(30):
        body = random_body(kind, rng)
        sizes = [
            rng.choice((0, 1, 63, 64, 1000, limits.JOINED - 1, limits.JOINED, 40_000))
            for _ in range(rng.randrange(5))
        ]
        buffers = [rng.randbytes(n) for n in sizes]
        parts = codec.encode("job", 3, 1 << 62, 7, body, buffers)
        envelope, received = codec.decode([parts[0], b"".join(parts[1:])])
        assert envelope == messages.Envelope("job", 3, 1 << 62, 7, sizes, body)  # type: ignore[arg-type]
        assert [bytes(b) for b in received] == buffers
        large = {id(b) for b in buffers if len(b) >= limits.JOINED}
        assert {id(p) for p in parts if id(p) in large} == large, "no copy of a large buffer"


def test_small_buffers_are_aligned_in_the_body() -> None:
    parts = codec.encode("", 0, 1, 1, messages.Done(), [b"a", b"b" * 65, b"c"])
    assert bytes(parts[1]) == b"a" + bytes(63) + b"b" * 65 + bytes(63) + b"c"


@pytest.mark.parametrize("more", [0, 1, limits.PIECE - 1, limits.PIECE])
def test_bar50_long_messages_are_cut_into_pieces_and_put_together(more: int) -> None:
    rng = random.Random(more)
    long = rng.randbytes(2 * limits.PIECE + more)
    parts = codec.encode("", 0, 1, 1, messages.Done(), [b"short", long, b"x" * limits.PIECE])
    pieces = frames.pack(parts)
    assert all(sum(map(len, piece)) <= limits.PIECE + frames.PREFIX for piece in pieces)
    stream = b"".join(part for piece in pieces for part in piece)
    for size in (1 << 20, limits.PIECE + 3, 70_001, 4_097):
        reader = frames.FrameReader()
        for i in range(0, len(stream), size):
            reader.feed(memoryview(stream[i : i + size]))
        (message,) = reader.messages
        buffers = codec.decode(message)[1]
        assert [bytes(b) for b in buffers] == [b"short", long, b"x" * limits.PIECE]
        addresses_of = [np.frombuffer(b, np.uint8).ctypes.data for b in buffers]
        assert all(address % limits.ALIGNMENT == 0 for address in addresses_of)


def test_an_urgent_message_overtakes_the_pieces_of_a_long_one() -> None:
    long = frames.pack(codec.encode("", 0, 1, 1, messages.Done(), [bytes(3 * limits.PIECE)]))
    (urgent,) = frames.pack(codec.encode("", 0, 1, 2, PING), frames.URGENT)
    reader = frames.FrameReader()
    for piece in [long[0], urgent, *long[1:]]:
        reader.feed(memoryview(b"".join(piece)))
    found = [codec.decode(message)[0].request for message in reader.messages]
    assert found == [2, 1]


def test_bar45_pieces_that_do_not_fit_are_refused() -> None:
    rng = random.Random(45)
    pieces = frames.pack(codec.encode("", 0, 1, 1, messages.Done(), [bytes(3 * limits.PIECE)]))
    good = [b"".join(piece) for piece in pieces]
    for bad in (
        [b"\xff" * 40],
        [good[0], good[-1]],
        [good[0], *good[1:-1], good[1]],
        [good[0][:5] + b"\x01" + good[0][6:]],  # the last piece of a longer message
        [rng.randbytes(100)],
    ):
        reader = frames.FrameReader()
        for data in bad[:-1]:
            reader.feed(memoryview(data))
        with pytest.raises(errors.ProtocolError):
            reader.feed(memoryview(bad[-1]))
        assert not reader.messages


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int64).reshape(2, 3),
        np.array(3.5, np.float32),
        np.zeros((0, 4), np.float32),
        np.arange(5).astype(ml_dtypes.bfloat16),
        np.array([True, False]),
        np.array([1 + 2j], np.complex64),
    ],
    ids=str,
)
def test_arrays_of_all_types_travel_as_their_bytes(array: np.ndarray) -> None:
    parts = codec.encode("", 0, 1, 1, messages.Done(), [array])
    _, (received,) = codec.decode(parts)
    assert bytes(received) == array.tobytes()


@pytest.mark.parametrize(
    "bad", [np.zeros((4, 4))[:, 1], "text", object(), memoryview(b"abcd")[::2]]
)
def test_what_is_no_contiguous_memory_is_refused(bad: Any) -> None:
    with pytest.raises(errors.ArgumentTypeError):
        codec.encode("", 0, 1, 1, messages.Done(), [bad])


def test_too_long_messages_are_refused_before_they_are_sent() -> None:
    with pytest.raises(errors.ResourceExhaustedError, match="header"):
        codec.encode("", 0, 1, 1, messages.ErrorReply("x", "y" * limits.HEADER))
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (limits.MESSAGE // 2 + 1,), (0,))
    with pytest.raises(errors.ArgumentTypeError, match="contiguous"):
        codec.encode("", 0, 1, 1, messages.Done(), [huge])
    lazily = np.zeros(limits.MESSAGE // 2 + 1, np.uint8)
    with pytest.raises(errors.ResourceExhaustedError, match="buffers"):
        codec.encode("", 0, 1, 1, messages.Done(), [lazily, lazily])


@pytest.mark.parametrize(
    "sizes",
    [[-1], [1 << 31], [1 << 32], [(1 << 63) - 1], [2**64 - 1], [limits.MESSAGE, 1], [4], [1, 1, 1]],
    ids=str,
)
def test_bar45_sizes_that_do_not_fit_the_parts_are_refused(sizes: list[int]) -> None:
    header = codec.encode("", 0, 1, 1, messages.Done())[0]
    fake = header.replace(b"\x90", codec._encoder.encode(sizes), 1)
    assert fake != header
    for more in ([], [b"abc"], [b"x" * limits.JOINED]):
        with pytest.raises(errors.ProtocolError):
            codec.decode([fake, *more])


def test_parts_that_are_not_named_are_refused() -> None:
    header = codec.encode("", 0, 1, 1, messages.Done())[0]
    for parts in (
        [],
        [header, b"x"],
        [b""],
        [header + b"x"],
        [bytes(limits.HEADER + 1)],
    ):
        with pytest.raises(errors.ProtocolError):
            codec.decode(parts)


def test_deep_nesting_is_refused_and_not_followed() -> None:
    text = b"\x91" * limits.HEADER
    header = codec.encode("", 0, 1, 1, messages.Finished([]))[0]
    count = len(messages.Envelope.__struct_fields__)
    longer = bytes([0x90 + count + 1]) + header[1:]
    for begin in (header[:-1], longer):
        with pytest.raises(errors.ProtocolError):
            codec.decode([begin + text[: limits.HEADER - 1000]])


# Requests and replies.


def test_every_body_travels_as_an_reply(place: Place) -> None:
    rng = random.Random(5)
    bodies = [
        random_body(k, rng) for k in ALL_BODIES if k not in (messages.Welcome, messages.ErrorReply)
    ]

    def handler(session: Any, envelope: Any, buffers: Any) -> Any:
        return bodies[envelope.body.settled], buffers

    with place.serve(handler), place.channel() as channel:
        for i, body in enumerate(bodies):
            answer, (data,) = channel.request(messages.Ping(i), [b"%d" % i], timeout=60)
            assert answer == body
            assert bytes(data) == b"%d" % i


@pytest.mark.parametrize("size", [0, 1, 1_000, limits.JOINED, limits.PIECE, 1_000_000])
def test_arrays_of_all_sizes_travel(place: Place, size: int) -> None:
    _check_echo(place, size)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_large_arrays_travel(tmp_path: Path, scheme: str) -> None:
    _check_echo(Place(scheme, tmp_path), 40_000_000)


def _check_echo(place: Place, size: int) -> None:
    data = np.resize(np.arange(251, dtype=np.uint8), size)
    with place.serve(), place.channel() as channel:
        _, received = channel.request(PING, [data, b"end", data[: size // 2]], timeout=30)
    assert [len(b) for b in received] == [size, 3, size // 2]
    np.testing.assert_array_equal(np.frombuffer(received[0], np.uint8), data)
    assert bytes(received[1]) == b"end"


def test_handlers_see_who_asks_and_for_what(place: Place) -> None:
    seen: list[Any] = []

    def handler(session: Any, envelope: Any, buffers: Any) -> Any:
        seen.append((session.role, session.task, session.incarnation, envelope.job, envelope.epoch))
        return messages.Done(), ()

    with place.serve(handler), place.channel(Task("worker", 3), incarnation=44) as channel:
        channel.job, channel.epoch = "j", 5
        channel.request(messages.Exchange([], []), timeout=60)
    assert seen == [("worker", 3, 44, "j", 5)]


def test_errors_of_the_handler_reach_the_peer_with_their_type(place: Place) -> None:
    raised: list[BaseException] = [
        errors.NotFoundError("There is no part 3."),
        ValueError("of no class of ours"),
        errors.FencedError("You are dead."),
    ]

    def handler(session: Any, envelope: Any, buffers: Any) -> Any:
        raise raised[envelope.body.settled]

    with place.serve(handler), place.channel() as channel:
        with pytest.raises(errors.NotFoundError, match="part 3"):
            channel.request(messages.Ping(0), timeout=60)
        with pytest.raises(errors.DistributeError, match="ValueError: of no class") as caught:
            channel.request(messages.Ping(1), timeout=60)
        assert type(caught.value) is errors.DistributeError
        with pytest.raises(errors.FencedError):
            channel.request(messages.Ping(2), timeout=60)


def test_sent_requests_are_replied_in_order(place: Place) -> None:
    with place.serve(), place.channel() as channel:
        numbers = [channel.send(messages.Ping(i), [b"%d" % i]) for i in range(200)]
        assert channel.num_in_flight() == 200
        for i, number in enumerate(numbers):
            answer = channel.receive(timeout=60)
            assert answer is not None
            assert answer[:2] == (number, messages.Ping(i))
            assert bytes(answer[2][0]) == b"%d" % i
        assert channel.receive(timeout=60) is None


def test_a_request_between_sent_requests_gets_its_own_reply(ipc: Place) -> None:
    with ipc.serve(), ipc.channel() as channel:
        first = channel.send(messages.Ping(1))
        assert channel.request(messages.Ping(2), timeout=60)[0] == messages.Ping(2)
        assert channel.receive(timeout=60) == (first, messages.Ping(1), [])


def test_refused_replies_to_sent_requests_are_returned(ipc: Place) -> None:
    def handler(session: Any, envelope: Any, buffers: Any) -> Any:
        raise errors.NotFoundError("no")

    with ipc.serve(handler), ipc.channel() as channel:
        number = channel.send(PING)
        assert channel.receive(timeout=60) == (
            number,
            messages.ErrorReply("NotFoundError", "no"),
            [],
        )


def test_too_many_sent_requests_are_refused(ipc: Place) -> None:
    with ipc.serve(lambda *_: None), ipc.channel() as channel:
        for _ in range(limits.IN_FLIGHT):
            channel.send(PING)
        with pytest.raises(errors.ResourceExhaustedError, match="/job:ps/task:0"):
            channel.send(PING)


def test_many_peers_get_their_own_replies(place: Place) -> None:
    wrong: list[Any] = []

    def ask(index: int) -> None:
        with place.channel(Task("worker", index)) as channel:
            for i in range(50):
                body = messages.Exchange([], [messages.Read(index, i)])
                answer, (data,) = channel.request(body, [b"%d" % index], timeout=30)
                if answer != body or bytes(data) != b"%d" % index:
                    wrong.append((index, i, answer))

    with place.serve():
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_one_channel_serves_many_threads(ipc: Place) -> None:
    wrong: list[Any] = []

    def ask(channel: Channel, index: int) -> None:
        for i in range(50):
            body = messages.Ping(index * 1000 + i)
            if channel.request(body, timeout=30)[0] != body:
                wrong.append(body)

    with ipc.serve(), ipc.channel() as channel:
        threads = [threading.Thread(target=ask, args=(channel, i)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_an_reply_that_does_not_come_ends_at_the_deadline(place: Place) -> None:
    def handler(session: Any, envelope: Any, buffers: Any) -> Any:
        return None if envelope.body.settled else (messages.Done(), ())

    with place.serve(handler), place.channel() as channel:
        with pytest.raises(errors.DeadlineExceededError, match="must reply to Ping"):
            channel.request(messages.Ping(1), timeout=0.2)
        assert channel.request(messages.Ping(0), timeout=60)[0] == messages.Done()
        channel.send(messages.Ping(1))
        assert channel.receive(timeout=0.05) is None


def test_late_replies_and_notices_come_from_any_thread(ipc: Place) -> None:
    threads: list[threading.Thread] = []

    def handler(session: Any, envelope: Any, buffers: Any) -> None:
        def late() -> None:
            service.send(session, messages.Done(), [b"late"], request=envelope.request)

        threads.append(threading.Thread(target=late))
        threads[-1].start()

    with ipc.serve(handler) as service, ipc.channel() as channel:
        for _ in range(20):
            body, (data,) = channel.request(PING, timeout=60)
            assert (body, bytes(data)) == (messages.Done(), b"late")
    for thread in threads:
        thread.join()


def test_replies_too_long_for_a_message_become_an_error(ipc: Place) -> None:
    def handler(session: Any, envelope: Any, buffers: Any) -> Any:
        return messages.ErrorReply("x", "y" * limits.HEADER), ()

    with ipc.serve(handler), ipc.channel() as channel, pytest.raises(errors.ResourceExhaustedError):
        channel.request(PING, timeout=60)


def test_regular_work_is_called_while_messages_come(ipc: Place) -> None:
    called = threading.Event()
    times: list[float] = []

    def regularly(now: float) -> None:
        times.append(now)
        if len(times) == 5:
            called.set()
        raise ValueError("must not end the service")

    with ipc.serve(on_idle=regularly), ipc.channel() as channel:
        while not called.is_set():
            channel.request(PING, timeout=60)
    assert times == sorted(times)


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_a_service_does_not_read_from_a_peer_that_does_not_read(
    tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "QUEUE_BYTES", 1 << 20)
    place = Place(scheme, tmp_path)
    handled: list[int] = []

    def handler(session: Any, envelope: Any, buffers: Any) -> Any:
        handled.append(envelope.request)
        return messages.Done(), [bytes(1 << 20)]

    with (
        place.serve(handler) as service,
        RawPeer(service.url, place.key("coordinator")) as raw_peer,
        place.channel() as good,
    ):
        raw_peer.connect()
        raw_peer.hello()
        assert type(raw_peer.receive()) is messages.Welcome
        ping = frames.pack(codec.encode("job", 1, 99, 0, PING))[0][0]
        # More than one read of the service takes.
        for i in range(40):
            raw_peer.socket.sendall(ping)
            good.request(messages.Ping(i), timeout=60)
        num_before = len(handled) - 40
        # The buffers of the kernel take some replies, on TCP several megabytes.
        assert 1 <= num_before < 40
        for _ in range(40):
            assert raw_peer.receive() == messages.Done()
    assert len(handled) == 80


# Restarts and lost tasks.


def test_a_channel_does_not_wait_for_a_task_that_does_not_listen(place: Place) -> None:
    place.fix_port()
    with place.channel() as channel:
        with pytest.raises(errors.PSUnavailableError, match=r"/job:ps/task:0 .*nothing listens"):
            channel.request(PING, timeout=30)
        with place.serve():
            assert channel.request(PING, timeout=30)[0] == PING


def test_a_server_that_starts_in_time_is_found(ipc: Place) -> None:
    with ipc.channel() as channel:
        channel.send(PING)
        with ipc.serve():
            assert channel.receive(timeout=60) == (1, PING, [])


def test_bar23_a_new_incarnation_of_a_server_is_an_error_until_reset(place: Place) -> None:
    place.fix_port()
    with place.channel() as channel:
        with place.serve(incarnation=1):
            channel.request(PING, timeout=60)
            assert channel.peer_incarnation == 1
        reached: list[Any] = []
        with place.serve(lambda *a: reached.append(a), incarnation=2):
            channel.send(PING)
            with pytest.raises(errors.PSIncarnationError, match="/job:ps/task:0"):
                channel.receive(timeout=60)
            with pytest.raises(errors.PSIncarnationError):
                channel.request(PING, timeout=60)
        assert reached == []
        with place.serve(incarnation=2):
            with pytest.raises(errors.PSIncarnationError):
                channel.request(PING, timeout=60)
            channel.reset()
            assert channel.request(PING, timeout=60)[0] == PING


def test_a_new_incarnation_of_a_worker_is_unavailable(ipc: Place) -> None:
    with ipc.channel(peer=WORKER) as channel:
        for life in (1, 2):
            with ipc.serve(task=WORKER, incarnation=life):
                if life == 1:
                    channel.request(PING, timeout=60)
                else:
                    with pytest.raises(errors.UnavailableError, match="restarted"):
                        channel.request(PING, timeout=60)


def test_a_service_may_begin_a_new_incarnation_behind_its_connections(ipc: Place) -> None:
    with ipc.serve(incarnation=1) as service, ipc.channel() as channel:
        channel.request(PING, timeout=60)
        service.incarnation = 2
        with pytest.raises(errors.PSIncarnationError):
            channel.request(PING, timeout=60)


def test_a_peer_may_begin_a_new_incarnation(ipc: Place) -> None:
    incarnations: list[int] = []

    def handler(session: Any, envelope: Any, buffers: Any) -> Any:
        incarnations.append(session.incarnation)
        return messages.Done(), ()

    with ipc.serve(handler), ipc.channel(incarnation=1) as channel:
        channel.request(PING, timeout=60)
        channel.incarnation = 2
        channel.request(PING, timeout=60)
    assert incarnations == [1, 2]


def test_bar25_a_request_outlives_a_break_of_the_connection(place: Place) -> None:
    """The same life listens again in time: what was not answered is asked again."""
    place.fix_port()
    with place.channel() as channel:
        with place.serve(lambda *_: None, incarnation=7) as service:
            numbers = [channel.send(messages.Ping(i)) for i in range(3)]
            while channel.peer_incarnation is None:
                channel.receive(timeout=0.01)
            service.close()
        with place.serve(incarnation=7):
            for i, number in enumerate(numbers):
                assert channel.receive(timeout=60) == (number, messages.Ping(i), [])


def test_bar25_an_unused_connection_breaks_once_and_blocks_no_other(ipc: Place) -> None:
    """A proxy without its server accepts connections and closes them, while the channel is unused.

    Retries would queue events for as long as no thread handles them.
    """
    place = addresses.resolve(f"ipc://{Path(ipc.resolve('ps').path).parent}/away")
    with socket.socket(socket.AF_UNIX) as listener, ipc.serve(), ipc.channel() as good:
        listener.bind(place.path)
        listener.listen()
        listener.settimeout(60)
        with Channel(place, Task("coordinator", 0), peer=PS) as idle:
            idle.send(PING)
            listener.accept()[0].close()
            listener.settimeout(0.5)
            with pytest.raises(TimeoutError):
                listener.accept()
            assert good.request(PING, timeout=60)[0] == PING
            listener.settimeout(60)
            # Now that somebody waits, it is tried again until the peer counts as lost.
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(idle.receive, timeout=60)
                num_tries = 0
                while not waiting.done():
                    listener.settimeout(1)
                    with contextlib.suppress(TimeoutError):
                        listener.accept()[0].close()
                        num_tries += 1
                with pytest.raises(errors.PSUnavailableError, match="/job:ps/task:0"):
                    waiting.result()
            assert 2 <= num_tries <= 50


def test_forgotten_peers_say_hello_again(ipc: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SESSIONS", 1)
    with ipc.serve(), ipc.channel() as one, ipc.channel() as two:
        for i in range(5):
            for channel in (one, two):
                assert channel.request(messages.Ping(i), timeout=60)[0] == messages.Ping(i)


def test_the_wrong_task_at_an_address_is_named(ipc: Place) -> None:
    with (
        ipc.serve(task=Task("ps", 1)),
        ipc.channel() as channel,
        pytest.raises(errors.UnavailableError, match=r"task:0 must listen .*task:1 listens there"),
    ):
        channel.request(PING, timeout=60)


def _state(pid: int, thread: int) -> str:
    """Returns what the kernel says about a thread: "T" if it is stopped."""
    stat = Path(f"/proc/{pid}/task/{thread}/stat").read_text()
    return stat.rpartition(")")[2].split()[0]


def test_bar19_a_server_that_is_stopped_and_then_killed(ipc: Place) -> None:
    with ipc.channel() as channel, process(ipc.address, 1) as child:
        channel.request(PING, timeout=60)
        with pytest.raises(errors.AddressInUseError, match=f"process {child.pid} "):
            Service(ipc.resolve("ps"), PS, echo)
        stopped = psutil.Process(child.pid)
        stopped.suspend()
        while any(_state(child.pid, thread.id) != "T" for thread in stopped.threads()):
            time.sleep(0.001)
        with pytest.raises(errors.DeadlineExceededError, match="/job:ps/task:0"):
            channel.request(PING, timeout=0.3)
        stopped.resume()
        assert channel.request(messages.Ping(5), timeout=60)[0] == messages.Ping(5)
        child.kill()
        child.wait()
        with pytest.raises(errors.PSUnavailableError, match="/job:ps/task:0"):
            channel.request(PING, timeout=60)
    # The file that it left behind does not keep the next one away.
    assert Path(ipc.resolve("ps").path).exists()
    with ipc.serve(), ipc.channel() as channel:
        assert channel.request(PING, timeout=60)[0] == PING


# Nothing is left.


def test_closing_is_idempotent_and_leaves_nothing(place: Place) -> None:
    process_ = psutil.Process()
    before = process_.num_fds()
    threads = threading.active_count()
    for _ in range(5):
        with place.serve() as service, place.channel() as channel:
            channel.request(PING, [np.zeros(limits.PIECE * 4, np.uint8)], timeout=60)
            channel.close()
            channel.close()
            service.close()
            service.close()
    assert threading.active_count() == threads
    assert process_.num_fds() == before
    assert not wires.opened


def test_a_service_that_was_never_started_is_closed(ipc: Place) -> None:
    Service(ipc.resolve("ps"), PS, echo).close()
    with ipc.serve(), ipc.channel() as channel:
        channel.request(PING, timeout=60)


def test_a_service_can_be_closed_by_its_handler(ipc: Place) -> None:
    def handler(session: Any, envelope: Any, buffers: Any) -> Any:
        service.close()
        return messages.Done(), ()

    with ipc.serve(handler) as service, ipc.channel() as channel:
        assert channel.request(PING, timeout=60)[0] == messages.Done()


@pytest.mark.slow
def test_a_forked_process_has_sockets_of_its_own(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    code = f"""
import os
from replicax.protocol import messages
from replicax.transport import addresses
from replicax.transport.channel import Channel
from replicax.transport.service import Service
from replicax.protocol.tasks import Task
echo = lambda session, envelope, buffers: (envelope.body, buffers)
place = addresses.resolve("ipc://{tmp_path}/s")
ps, me = Task("ps", 0), Task("coordinator", 0)
with Service(place, ps, echo) as service, Channel(place, me, peer=ps) as mine:
    service.start()
    mine.request(messages.Ping(1), timeout=60)
    pid = os.fork()
    if pid == 0:
        with Channel(place, me, peer=ps) as channel:
            is_good = channel.request(messages.Ping(2), timeout=60)[0] == messages.Ping(2)
        os._exit(0 if is_good else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert mine.request(messages.Ping(3), timeout=60)[0] == messages.Ping(3)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=250)


def test_the_reply_to_a_request_without_a_handshake_is_recognised() -> None:
    assert error_replies.is_hello_first(error_replies.hello_first())
    assert not error_replies.is_hello_first(messages.ErrorReply("ProtocolError", "else"))
    assert error_replies.to_error(messages.ErrorReply("message", "x")).args == ("x",)
