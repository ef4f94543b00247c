"""Shared memory between tasks of one machine: what goes through it, and when it is free again."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vocabulary import refused

from replicax.foundation import errors
from replicax.protocol import limits, messages
from replicax.protocol.tasks import Task
from replicax.transport import addresses, shared_memory
from replicax.transport.channel import Channel
from replicax.transport.service import Service

WORKER, PS = Task("worker", 0), Task("ps", 0)


class Echo:
    """A server that returns what it gets, and remembers where it lay."""

    def __init__(self) -> None:
        self.offsets: list[list[int]] = []
        self.kept: list[memoryview] | None = None

    def __call__(self, session: Any, envelope: Any, buffers: list[memoryview]) -> Any:
        self.offsets.append(envelope.offsets)
        if self.kept is not None:
            self.kept += buffers
        copies = [np.frombuffer(buffer, np.uint8).copy() for buffer in buffers]
        return messages.Exchanged([], []), copies


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def channel(echo: Echo, tmp_path: Path) -> Iterator[Channel]:
    tmp_path.chmod(0o700)
    place = addresses.resolve(f"ipc://{tmp_path}/s")
    with Service(place, PS, echo) as service:
        service.start()
        with Channel(place, WORKER, peer=PS) as found:
            # The first request opens the shared memory.
            found.request(messages.Exchange([], []))
            yield found


def ask(channel: Channel, *buffers: Any) -> list[memoryview]:
    return channel.request(messages.Exchange([], []), list(buffers), timeout=10.0)[1]


def data(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size).astype(np.uint8)


@pytest.mark.parametrize(
    "size",
    [
        0,
        1,
        limits.SHARED_BUFFER,
        limits.SHARED_MESSAGE // 2 - 1,
        limits.SHARED_MESSAGE // 2,
        3 << 20,
    ],
)
def test_buffers_arrive_as_they_were_and_only_large_ones_of_large_messages_are_shared(
    channel: Channel, echo: Echo, size: int
) -> None:
    sent = data(size)
    found = ask(channel, sent, b"xy", sent)
    assert [bytes(f) for f in found] == [sent.tobytes(), b"xy", sent.tobytes()]
    is_shared = 2 * size >= limits.SHARED_MESSAGE
    assert [place >= 0 for place in echo.offsets[-1]] == ([True, False, True] if is_shared else [])
    assert all(place % limits.ALIGNMENT == 0 for place in echo.offsets[-1] if place >= 0)


def test_blocks_are_reused_after_the_last_view_is_gone(channel: Channel, echo: Echo) -> None:
    for seed in range(50):
        sent = data(1 << 20, seed)
        assert bytes(ask(channel, sent)[0]) == sent.tobytes()
    assert len({offsets[0] % (1 << 32) for offsets in echo.offsets[1:]}) <= 2


def test_what_is_held_on_either_side_keeps_its_bytes(channel: Channel, echo: Echo) -> None:
    echo.kept = []
    answers = [ask(channel, data(150_000, seed))[0] for seed in range(20)]
    assert len({offsets[0] for offsets in echo.offsets[1:]}) == 20
    for seed, (answer, kept) in enumerate(zip(answers, echo.kept, strict=True)):
        assert bytes(answer) == bytes(kept) == data(150_000, seed).tobytes()


@pytest.mark.slow
def test_without_room_buffers_take_the_socket(channel: Channel, echo: Echo) -> None:
    echo.kept = []
    half = limits.SHARED_MEMORY_BYTES // 2
    first = data(half)
    for _ in range(3):
        assert len(ask(channel, first)[0]) == half
    assert [len(offsets) for offsets in echo.offsets[1:]] == [1, 0, 0]
    echo.kept = None
    gc.collect()
    ask(channel, first)
    assert echo.offsets[-1][0] >= 0


def test_sent_requests_keep_their_blocks_until_they_are_replied() -> None:
    mine = shared_memory.SharedMemoryClient()
    try:
        found = shared_memory.attach(mine.offer())
        assert found is not None
        reader = found[0]
        offsets = mine.writer.put([b"a" * 10_000, b"z" * 100], request=7)
        assert list(map(bytes, reader.views(offsets, [3, 2]))) == [b"aaa", b"zz"]
        # Read, and free; but it may have to be sent again.
        other = mine.writer.put([b"b" * 10_000], request=8)
        assert other[0] % (1 << 32) != offsets[0] % (1 << 32)
        mine.writer.release(7)
        again = mine.writer.put([b"c" * 10_000])
        assert again[0] % (1 << 32) == offsets[0] % (1 << 32)
        # The question was repeated, and comes when its block belongs to another one.
        with refused(shared_memory.OutdatedError, "a later one"):
            reader.views(offsets, [3, 2])
        assert bytes(reader.views(again, [3])[0]) == b"ccc"
    finally:
        mine.close()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda fds, other: [],
        lambda fds, other: fds[:1],
        lambda fds, other: [*fds, fds[0]],
        lambda fds, other: [fds[0], other],
        lambda fds, other: [other, fds[1]],
        lambda fds, other: [fds[0], 0],
    ],
)
def test_bar42_only_two_sealed_regions_of_the_right_size_are_mapped(spoil: Any) -> None:
    mine = shared_memory.SharedMemoryClient()
    # The right size, but the peer could shorten it while it is used.
    other = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(other, limits.SHARED_MEMORY_BYTES)
    try:
        fds = mine.offer()
        assert shared_memory.attach(fds) is not None
        assert shared_memory.attach(spoil(fds, other)) is None
    finally:
        mine.close()
        os.close(other)


def test_bar45_a_region_cannot_be_made_smaller() -> None:
    mine = shared_memory.SharedMemoryClient()
    try:
        fd = mine.offer()[0]
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 4096)
    finally:
        mine.close()


@pytest.mark.parametrize(
    ("offsets", "sizes"),
    [
        ([0], [10]),
        ([-64], [10]),
        ([65], [10]),
        ([64], [limits.SHARED_MEMORY_BYTES]),
        ([64], [0]),
        ([limits.SHARED_MEMORY_BYTES], [1]),
        ([64, 128], [100, 10]),
        ([128, 64], [10, 10]),
        ([64, 128], [10, -5]),
    ],
)
def test_bar45_places_outside_of_a_region_are_refused(offsets: Any, sizes: Any) -> None:
    mine = shared_memory.SharedMemoryClient()
    try:
        found = shared_memory.attach(mine.offer())
        assert found is not None
        with pytest.raises(errors.ProtocolError):
            found[0].views(offsets, sizes)
    finally:
        mine.close()
