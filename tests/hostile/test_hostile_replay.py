"""Replay: what was said once, by the right task, is said again by somebody else."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_partners import ByteProxy, dial, seconds_until_closed
from transport_partners import COORDINATOR, PS, Place, RawPeer

from replicax import errors
from replicax.protocol import limits, messages
from replicax.protocol.tasks import Task
from replicax.ps.process.parameter_server import ParameterServerTask
from replicax.transport import addresses
from replicax.transport.channel import Channel

NUM_FRAMES = 1_000


class Reached:
    """A handler that counts which questions reached it."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def __call__(self, session: Any, envelope: Any, buffers: Any) -> Any:
        self.numbers.append(envelope.body.settled)
        return messages.Done(), ()


@pytest.fixture
def reached() -> Reached:
    return Reached()


@pytest.fixture
def tcp(tmp_path: Path) -> Place:
    return Place("tcp", tmp_path)


def _through(proxy: ByteProxy, place: Place) -> Channel:
    keys = place.key("coordinator")
    return Channel(addresses.resolve(proxy.address, None, keys), COORDINATOR, keys, peer=PS)


def _record(proxy: ByteProxy, place: Place, number: int) -> list[bytes]:
    """A session of so many questions; returns what the caller sent, piece by piece."""
    with _through(proxy, place) as channel:
        for i in range(number):
            channel.request(messages.Ping(i), timeout=60)
    (session,) = proxy.sessions
    return session


def test_bar47_a_recorded_session_is_worth_nothing(tcp: Place, reached: Reached) -> None:
    """The whole of it, and its 1,000 messages one by one, on new connections."""
    with tcp.serve(reached) as service, ByteProxy(service.address) as proxy:
        session = _record(proxy, tcp, NUM_FRAMES)
        assert len(session) >= NUM_FRAMES and reached.numbers == list(range(NUM_FRAMES))
        for pieces in ([b"".join(session)], session[:3] + session[-5:], session[3:]):
            with dial(service.address) as raw:
                with contextlib.suppress(OSError):
                    for piece in pieces:
                        raw.sendall(piece)
                seconds_until_closed(raw)
        with tcp.channel() as good:
            good.request(messages.Ping(-1), timeout=60)
    assert reached.numbers == [*range(NUM_FRAMES), -1]


def test_bar47_a_repeated_frame_breaks_its_own_connection(tcp: Place, reached: Reached) -> None:
    """Somebody between two tasks says again what the caller said, on the same connection."""
    with tcp.serve(reached) as service, ByteProxy(service.address) as proxy:
        num_repeats = 0
        with _through(proxy, tcp) as channel:
            for i in range(80):
                channel.request(messages.Ping(i), timeout=60)
                session = proxy.sessions[-1]
                if len(session) >= 6 and proxy.upstream is not None:
                    # The last one, the one before, and a whole conversation.
                    again = (session[-1], session[-2], b"".join(session[3:]))[num_repeats % 3]
                    num_repeats += 1
                    with contextlib.suppress(OSError):
                        proxy.upstream.sendall(again)
        assert num_repeats >= 6
        assert len(proxy.sessions) >= 4, "the connections were broken"
    assert reached.numbers == list(range(80))


def test_bar47_a_handshake_that_is_reflected_opens_nothing(
    tcp: Place, reached: Reached, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that says back what it hears, and a listener that does."""
    monkeypatch.setattr(limits, "HANDSHAKE", 0.5)
    with tcp.serve(reached) as service:
        with dial(service.address) as raw, contextlib.suppress(OSError):
            raw.settimeout(60)
            while data := raw.recv(65_536):
                raw.sendall(data)
        assert reached.numbers == []
    with socket.create_server(("127.0.0.1", 0)) as mirror:
        heard: list[int] = []

        def reflect() -> None:
            with contextlib.suppress(OSError):
                while True:
                    one, _ = mirror.accept()
                    with one, contextlib.suppress(OSError):
                        one.settimeout(1)
                        while data := one.recv(65_536):
                            heard.append(len(data))
                            one.sendall(data)

        thread = threading.Thread(target=reflect)
        thread.start()
        keys = tcp.key("coordinator")
        place = addresses.resolve(f"127.0.0.1:{mirror.getsockname()[1]}", None, keys)
        with Channel(place, COORDINATOR, keys, peer=PS) as channel:
            # What answers with our own handshake has no certificate to show.
            with pytest.raises(errors.UnavailableError, match="TLS handshake"):
                channel.request(messages.Ping(0), timeout=20)
            assert channel.peer_incarnation is None
        mirror.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert heard, "the caller has tried"


def test_bar47_recorded_messages_change_nothing_on_one_machine(tmp_path: Path) -> None:
    """On `ipc` bytes are not signed: each update counts once."""
    place = Place("ipc", tmp_path)
    server = ParameterServerTask(0, place.resolve("ps"))
    server.start()
    worker = Task("worker", 0)
    recorded: list[list[bytes]] = []
    one = np.ones(1, np.float32)
    try:
        with place.channel() as coordinator, place.channel(worker, incarnation=99) as channel:
            for c in (coordinator, channel):
                c.job, c.epoch = "job", 1
            coordinator.request(messages.Attach([], {}), timeout=60)
            part = messages.CreatePart(1, "v", (1,), "float32", messages.FromBuffer())
            coordinator.request(part, [0 * one], timeout=60)
            for i in range(100):
                push = messages.Push(i + 1, [messages.Update(0, "assign_add", 1)])
                number = channel.send(messages.Exchange([push], []), [one])
                recorded.append([bytes(f) for f in channel._in_flight[number]])
                assert channel.receive(20) is not None
            # Without a word about itself; as another life; as the life that said them.
            for life in (None, 98, 99):
                num_sent = 0
                while num_sent < NUM_FRAMES:
                    with RawPeer(place.address) as raw_peer:
                        raw_peer.connect()
                        if life is not None:
                            raw_peer.hello("worker", incarnation=life)
                            assert type(raw_peer.receive()) is messages.Welcome
                        # A connection without a handshake is closed soon.
                        for _ in range(10 if life is None else NUM_FRAMES):
                            raw_peer.send_parts(recorded[num_sent % 100])
                            num_sent += 1
                            answer = raw_peer.receive()
                            is_done = type(answer) is messages.Exchanged
                            assert is_done or "hello first" in answer.text
                            assert is_done <= (life == 99)
            question = messages.Exchange([], [messages.Read(1, -1, False)])
            (value,) = coordinator.request(question, timeout=60)[1]
            assert np.frombuffer(value, np.float32) == 100
            coordinator.request(messages.Detach(), timeout=60)
    finally:
        server.close()
