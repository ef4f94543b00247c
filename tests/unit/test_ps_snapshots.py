"""Snapshots of a parameter server: cuts, files, and what starts from them."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import errno
import itertools
import json
import logging
import mmap
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from parameter_store_client import COORDINATOR, WORKER, Caller, exported, octets, open_rows
from vocabulary import refused

from replicax.foundation import errors
from replicax.protocol import messages
from replicax.ps.process import snapshot_files
from replicax.ps.process.snapshot_files import GivenUpError, SnapshotDirectory
from replicax.ps.process.snapshots import Pace, Schedule
from replicax.ps.store import frozen, memory
from replicax.ps.store.parts import Part
from replicax.ps.store.service import ParameterStore
from replicax.ps.store.snapshot import ChangeCounts, Cut

ADD = messages.Update(0, "assign_add", 0)
ONE = np.ones((), np.float32)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[SnapshotDirectory]:
    directory = SnapshotDirectory(tmp_path / "ps-0")
    yield directory
    directory.close()


@contextlib.contextmanager
def cut_of(store: ParameterStore) -> Iterator[Cut]:
    cut = store.snapshot()
    assert cut is not None
    try:
        yield cut
    finally:
        cut.close()


def save(store: ParameterStore, directory: SnapshotDirectory, **options: Any) -> int:
    with cut_of(store) as cut:
        return directory.save(cut, **options).number


def load(directory: SnapshotDirectory) -> ParameterStore | None:
    """A store that starts from what is there."""
    store = ParameterStore(task=3, is_saved=True)
    return store if directory.load(store.restore) is not None else None


def again(caller: Caller, directory: SnapshotDirectory, parts: list[int] | None = None) -> Caller:
    """The same coordinator and workers, with a server that came back."""
    store = load(directory)
    assert store is not None
    other = Caller(store, job=caller.job)
    other.epoch, other.specs, other.closures = caller.epoch, caller.specs, caller.closures
    wanted = sorted(caller.specs) if parts is None else parts
    answer, _ = other.ask(messages.Attach([], {}, wanted))
    assert answer == messages.Attached(is_saved=True, is_restored=True)
    return other


def bundle_of(directory: SnapshotDirectory, number: int) -> Path:
    return directory._path / f"snapshot-{number:012d}"


def data_of(directory: SnapshotDirectory, number: int) -> Path:
    return bundle_of(directory, number) / "data.safetensors"


def manifest_of(directory: SnapshotDirectory, number: int) -> Path:
    return bundle_of(directory, number) / "manifest.json"


def numbers_in(directory: SnapshotDirectory) -> list[int]:
    return list(directory._bundles())


# The view of a part that is frozen.


def make_part(shape: tuple[int, ...], dtype: str = "float32") -> Part:
    spec = messages.CreatePart(0, "v", shape, dtype, messages.FromBuffer())
    return Part(spec, np.dtype(dtype), "/job:ps/task:0")


@pytest.mark.parametrize("shape", [(3000, 7), (40_000,), (3, 9000), (2, 20_001), (1, 30_000)])
@pytest.mark.parametrize("seed", range(6))
def test_bar21_a_frozen_part_keeps_its_value_whatever_is_changed(
    shape: tuple[int, ...], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random changes between pieces, of rows and of all, with readers that hold on to values."""
    monkeypatch.setattr(frozen, "PIECE_BYTES", 1 << 14)
    monkeypatch.setattr(frozen, "_GRANT_BYTES", 3000)
    rng = np.random.default_rng(seed)
    part = make_part(shape)
    part.replace(rng.normal(size=shape).astype(np.float32))
    model = part.value.copy()
    lent: list[Any] = []
    found = np.empty(part.num_bytes, np.uint8)
    kinds = ["put_rows"] * 6 + ["write_rows"] * 3 + ["replace", "adopt", "combine", "lend", "drop"]
    # Some histories never leave the first block.
    kinds = kinds[:9] if seed < 3 else kinds

    def change() -> None:
        kind = rng.choice(kinds)
        value = rng.normal(size=shape).astype(np.float32)
        if kind == "put_rows":
            count = int(rng.integers(0, min(shape[0], 200) + 1))
            numbers = np.sort(rng.choice(shape[0], count, replace=False)).astype(np.intp)
            part.put_rows(numbers, value[numbers])
            model[numbers] = value[numbers]
        elif kind == "write_rows":
            start = int(rng.integers(0, shape[0]))
            count = int(rng.integers(0, shape[0] - start + 1))
            part.write_rows(start, value[:count])
            model[start : start + count] = value[:count]
        elif kind == "lend":
            lent.append(part.read())
        elif kind == "drop":
            lent.clear()
        else:
            getattr(part, kind)(*([np.add] if kind == "combine" else []), value)
            model[...] = model + value if kind == "combine" else value
        assert np.array_equal(part.value, model)

    for _ in range(3):
        before = part.value.copy()
        view = part.freeze()
        for start in view.pieces():
            for _ in range(rng.integers(0, 4)):
                with part.lock:
                    change()
            piece = view.read(start)
            found[start : start + piece.size] = piece
        assert np.array_equal(found.view(np.float32).reshape(shape), before)
        part.thaw(view)
        part.thaw(view)
        for _ in range(5):
            change()
        assert not part._is_frozen()


@pytest.mark.parametrize("shape", [(200_000, 4), (40, 20_001)])
def test_bar21_rows_that_change_while_they_are_copied_are_put_right(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No change waits for the copy of a piece: the worst moment for a change is right after it."""
    monkeypatch.setattr(frozen, "PIECE_BYTES", 1 << 16)
    part = make_part(shape)
    before = np.arange(part.num_bytes // 4, dtype=np.float32).reshape(shape)
    part.replace(before)
    view = part.freeze()
    rng = np.random.default_rng(0)
    block, copied = part._block, view._copied
    num_copies = 0

    def change() -> None:
        count = max(shape[0] // 20, 1)
        numbers = np.sort(rng.choice(shape[0], count, replace=False)).astype(np.intp)
        with part.lock:
            part.put_rows(numbers, -np.ones((count, shape[1]), np.float32))

    def change_under_its_hands(start: int, end: int) -> np.ndarray:
        nonlocal num_copies
        piece = copied(start, end)
        change()
        half = piece.size // 2
        piece[half:] = copied(start, end)[half:]
        change()
        num_copies += 1
        return piece

    monkeypatch.setattr(
        frozen.FrozenView, "_copied", lambda _, *args: change_under_its_hands(*args)
    )
    found = np.concatenate([view.read(start).copy() for start in view.pieces()])
    assert num_copies >= 40
    assert np.array_equal(found.view(np.float32).reshape(shape), before)
    assert np.count_nonzero(part.value == -1) > before.size // 2, "most rows were changed"
    assert part._block is block, "only rows were copied for that"


def test_a_piece_that_is_being_copied_does_not_count_as_lent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a change at that moment would copy the whole part."""
    part = make_part((1 << 16, 16))
    view = part.freeze()
    copyto, seen = np.copyto, []

    def look(target: np.ndarray, source: np.ndarray) -> None:
        seen.append(part._block.is_borrowed())
        copyto(target, source)

    monkeypatch.setattr(np, "copyto", look)
    for start in view.pieces():
        view.read(start)
    assert seen == [False]


@pytest.mark.parametrize("shortage", ["none left", "refused"])
def test_bar37_without_memory_for_old_rows_the_snapshot_fails_and_training_goes_on(
    directory: SnapshotDirectory, shortage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = Caller().attach()
    caller.create(0, np.zeros((1 << 16, 32), np.float32))
    if shortage == "none left":
        monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    else:
        mapped = mock.Mock(side_effect=MemoryError("no room"))
        monkeypatch.setattr(memory, "mapped", mapped)
    rows = np.arange(0, 1 << 16, 9, dtype=np.int32)

    def change(_: float) -> bool:
        caller.update("scatter_add", 0, rows, np.ones((rows.size, 32), np.float32))
        return True

    with refused(errors.ResourceExhaustedError, "A snapshot preserved 0 bytes"):
        save(caller.store, directory, is_wanted=change)
    assert caller.read(0)[rows].min() >= 1, "no change has failed"
    monkeypatch.undo()
    assert save(caller.store, directory, is_wanted=change) == 1


def test_a_frozen_part_costs_the_rows_that_are_touched() -> None:
    part = make_part((1 << 16, 16))
    block = part._block
    view = part.freeze()
    rows = np.ones((100, 16), np.float32)
    numbers = np.arange(100, dtype=np.intp) * 5
    for _ in range(10):
        part.put_rows(numbers, rows)
    assert part._block is block, "nothing was copied but rows"
    assert view.num_preserved_bytes == rows.nbytes
    for start in view.pieces():
        assert not view.read(start).any()
    part.put_rows(numbers + 1, rows)
    assert view.num_preserved_bytes == rows.nbytes, "what was read needs no copy"
    part.thaw(view)
    part.replace(np.zeros(part.shape, np.float32))
    assert part._block is block


def test_a_part_keeps_the_memory_that_its_last_view_needed() -> None:
    part = make_part((1 << 14, 256))
    numbers = np.arange(1 << 14, dtype=np.intp)
    rows = np.ones((1 << 14, 256), np.float32)

    def freeze_and_change(count: int) -> tuple[int, int]:
        """Returns where the memory for old rows is, and how many bytes of it are taken then."""
        part.replace(np.zeros_like(rows))
        view = part.freeze()
        part.put_rows(numbers[:count], rows[:count])
        assert not any(view.read(start).any() for start in view.pieces())
        part.thaw(view)
        kept = view.old_rows._rows
        pages = np.zeros(kept.nbytes // mmap.PAGESIZE, np.uint8)
        where = ctypes.c_void_p(kept.ctypes.data), ctypes.c_size_t(kept.nbytes)
        assert ctypes.CDLL(None).mincore(*where, pages.ctypes.data_as(ctypes.c_void_p)) == 0
        return kept.ctypes.data, int((pages & 1).sum()) * mmap.PAGESIZE

    where, taken = freeze_and_change(1 << 14)
    assert taken == rows.nbytes
    assert freeze_and_change(1 << 14) == (where, taken), "the same memory serves again"
    assert freeze_and_change(1 << 10) == (where, taken >> 4), "what was not needed is given back"
    assert freeze_and_change(0) == (where, 0)


# Cuts.


def make_optimizer(caller: Caller) -> None:
    program = exported(
        lambda g, v, m, c: (v - g, m + g, c + 1), *[open_rows(2)] * 3, jnp.zeros((), np.int32)
    )
    caller.create(10, np.zeros((3, 2), np.float32))
    caller.create(11, np.zeros((3, 2), np.float32))
    caller.create(12, np.int32(0))
    trained = [messages.TrainedPart(10, [11], 0, True)]
    assert caller.ask(messages.RegisterOptimizer(4, [12], trained, 1), [program])


def test_bar21_all_that_a_server_keeps_comes_back(directory: SnapshotDirectory) -> None:
    rng = np.random.default_rng(0)
    caller = Caller().attach()
    values: dict[int, Any] = {
        0: np.float32(3),
        1: rng.normal(size=(70_000, 3)).astype(np.float32),
        2: np.zeros((0, 4), np.float64),
        3: np.array([True, False]),
        4: rng.integers(0, 99, (5, 0, 3)),
        5: rng.normal(size=(1, 2_000_000)),
        6: np.asarray(jnp.arange(40_000, dtype=jnp.bfloat16)),
    }
    for number, value in values.items():
        caller.create(number, value)
    caller.fill(7, (1 << 20, 16))
    caller.update("scatter_add", 7, np.array([5, 700_000], np.int32), np.ones((2, 16), np.float32))
    make_optimizer(caller)
    step = messages.Apply(0, 4, [messages.Gradient(10, False)])
    assert caller.push(step, buffers=[np.ones((3, 2), np.float32)], closure=77) == []
    caller.ask(messages.Fence([55, 56]))
    caller.ask(messages.Ping(60))
    versions = {number: caller.version(number) for number in caller.specs}
    save(caller.store, directory)
    # Rows that were never written stay a hole.
    file = data_of(directory, 1).stat()
    assert file.st_size > 80 << 20 and file.st_blocks * 512 < 40 << 20

    back = again(caller, directory)
    for number, value in values.items():
        assert np.array_equal(back.read(number), value), number
    assert np.array_equal(back.read(7), caller.read(7))
    assert [back.read(n).tolist() for n in (10, 11, 12)] == [[[-1] * 2] * 3, [[1] * 2] * 3, 1]
    sizes, expected = back.counters(), caller.counters()
    for name in (
        "bytes",
        "slot_bytes",
        "parts",
        "optimizers",
        "applied_entries",
        "settled",
        "clock",
    ):
        assert sizes[name] == expected[name], name
    with refused(errors.FencedError, "incarnation 55 was declared dead"):
        back.push(ADD, buffers=[ONE], incarnation=55)
    # The step was made; the next one is made by the same program.
    assert back.push(step, buffers=[np.ones((3, 2), np.float32)], closure=77) == []
    assert back.read(12) == 1
    assert back.push(step, buffers=[np.ones((3, 2), np.float32)], closure=78) == []
    assert back.read(10).tolist() == [[-2] * 2] * 3
    # No version is used for two values, and none is too long for a message.
    for number, version in versions.items():
        assert version + (1 << 20) <= back.version(number) < 1 << 62
    back.create(20, np.float32(1))
    assert back.version(20) > 1 << 20


def test_bar21_exactly_once_goes_on_after_a_restore(directory: SnapshotDirectory) -> None:
    caller = Caller().attach()
    caller.create(0, np.float32(0))
    caller.push(ADD, buffers=[ONE], closure=5)
    save(caller.store, directory)
    caller.push(ADD, buffers=[ONE], closure=6)
    back = again(caller, directory)
    assert back.read(0) == 1, "the snapshot knows nothing of closure 6"
    for closure in (5, 6, 6, 5, 7):
        assert back.push(ADD, buffers=[ONE], closure=closure) == []
    assert back.read(0) == 3
    found, _ = back.ask(messages.QueryJob())
    assert found == messages.JobInfo("job", 1, 7, 0, [0])


def test_bar21_gradients_that_wait_for_others_are_part_of_a_cut(
    directory: SnapshotDirectory,
) -> None:
    caller = Caller()
    caller.ask(messages.Attach([], {"aggregate": 2}))
    make_optimizer(caller)
    gradient = messages.Gradient(10, False)
    of_rows = messages.Gradient(10, True)
    rows = [np.array([1], np.int32), np.ones((1, 2), np.float32)]
    assert caller.push(messages.Apply(0, 4, [of_rows]), buffers=rows, closure=1) == []
    assert not caller.read(10).any()
    save(caller.store, directory)
    store = load(directory)
    assert store is not None
    back = Caller(store)
    back.specs = caller.specs
    back.ask(messages.Attach([], {"aggregate": 2}, [10]))
    ones = np.ones((3, 2), np.float32)
    assert back.push(messages.Apply(0, 4, [of_rows]), buffers=rows, closure=1) == []
    assert back.counters()["waiting_gradients"] == 1
    assert back.push(messages.Apply(0, 4, [gradient]), buffers=[ones], closure=2) == []
    assert back.read(10).tolist() == [[-0.5] * 2, [-1] * 2, [-0.5] * 2]


def test_bar21_an_optimizer_whose_parts_were_dropped_comes_back_without_them(
    directory: SnapshotDirectory,
) -> None:
    program = exported(lambda g, v: v - g, open_rows(2), open_rows(2))
    caller = Caller().attach()
    for number in (0, 1):
        caller.create(number, np.zeros((3, 2), np.float32))
    trained = [messages.TrainedPart(n, [], 0, True) for n in (0, 1)]
    register = messages.RegisterOptimizer(0, [], trained, 1)
    caller.ask(register, [program])
    caller.ask(messages.DropParts([1]))
    caller.create(1, np.ones((3, 2), np.float32))
    save(caller.store, directory)
    back = again(caller, directory)
    ones = np.ones((3, 2), np.float32)
    step = [messages.Apply(0, 0, [messages.Gradient(n, False)]) for n in (0, 1)]
    assert back.push(step[0], buffers=[ones]) == []
    assert back.read(0).tolist() == [[-1] * 2] * 3
    (failure,) = back.push(step[1], buffers=[ones])
    assert failure.error.code == "NotFoundError", "the number is that of another part now"
    assert back.ask(register, [program])[0] == messages.Done()


def test_bar21_every_cut_is_consistent_under_concurrent_pushes(
    directory: SnapshotDirectory,
) -> None:
    """Two closures change both parts in one push each: all cuts agree with the table."""
    size = 50_000
    caller = Caller().attach()
    caller.create(0, np.zeros(size, np.int64))
    caller.create(1, np.int64(0))
    caller.create(2, np.zeros((size, 2), np.int64))
    rows = np.arange(0, size, 7, dtype=np.int32)
    is_over = threading.Event()
    failures: list[Any] = []

    def push(first: int) -> None:
        mine = Caller(caller.store)
        ones = [np.ones(size, np.int64), np.int64(1), rows, np.ones((rows.size, 2), np.int64)]
        kinds = ["assign_add", "assign_add", "scatter_add"]
        changes = [messages.Update(i, kind, i) for i, kind in enumerate(kinds)]
        for closure in itertools.count(first, 2):
            if is_over.is_set():
                return
            failures.extend(mine.push(*changes, buffers=ones, closure=closure))

    threads = [threading.Thread(target=push, args=(first,)) for first in range(2)]
    for thread in threads:
        thread.start()
    try:
        counts = []
        for _ in range(12):
            save(caller.store, directory)
            store = load(directory)
            assert store is not None
            made = {closure for closure, _ in store._storage.applied.entries()}
            values = [store._storage.part(n).value for n in range(3)]
            counts.append(len(made))
            assert (values[0] == len(made)).all() and values[1] == len(made)
            assert (values[2][rows] == len(made)).all()
            assert values[2].sum() == len(made) * rows.size * 2
            assert len(store._storage.applied) == 3 * len(made)
    finally:
        is_over.set()
        for thread in threads:
            thread.join(30)
    assert not failures
    assert counts == sorted(counts) and counts[-1] > counts[0] + 5, "pushes came in between"


def test_bar21_changes_during_the_write_are_not_in_the_snapshot(
    directory: SnapshotDirectory,
) -> None:
    caller = Caller().attach()
    rng = np.random.default_rng(1)
    values = {n: rng.normal(size=(200_000, 8)).astype(np.float32) for n in range(3)}
    for number, value in values.items():
        caller.create(number, value)
    pieces = 0

    def change(_: float) -> bool:
        nonlocal pieces
        pieces += 1
        rows = np.unique(rng.integers(0, 200_000, 500)).astype(np.int32)
        for number in (0, 1):
            caller.update("scatter_add", number, rows, np.ones((rows.size, 8), np.float32))
        caller.update("write_rows", 0, np.zeros((100, 8), np.float32), start=pieces * 1000)
        if pieces % 2:
            caller.update("assign_add", 2, np.ones((200_000, 8), np.float32))
        if pieces == 2:
            caller.update("assign", 1, np.zeros((200_000, 8), np.float32))
            caller.ask(messages.DropParts([2]))
            caller.create(2, np.zeros((200_000, 8), np.float32))
        return True

    save(caller.store, directory, is_wanted=change)
    assert pieces >= 6
    back = again(caller, directory)
    for number, value in values.items():
        assert np.array_equal(back.read(number), value), number


def test_bar21_a_cut_that_is_given_up_thaws_all_parts(directory: SnapshotDirectory) -> None:
    caller = Caller().attach()
    for number in range(3):
        caller.create(number, np.zeros(1_500_000, np.float64))
    answers = iter([True, False])
    with pytest.raises(GivenUpError):
        save(caller.store, directory, is_wanted=lambda _: next(answers))
    parts = [caller.store._storage.part(n) for n in range(3)]
    assert all(part._frozen is None for part in parts)
    assert list(directory._path.glob("*.tmp*")) == [] and numbers_in(directory) == []
    assert save(caller.store, directory) == 1


# Who may use what was restored.


@pytest.fixture
def restored(directory: SnapshotDirectory) -> Caller:
    caller = Caller().attach()
    caller.create(0, np.float32(0))
    caller.create(1, np.float32(5))
    caller.push(ADD, buffers=[ONE], closure=40)
    save(caller.store, directory)
    store = load(directory)
    assert store is not None
    back = Caller(store)
    back.specs = caller.specs
    return back


@pytest.mark.parametrize("job", ["job", "other"])
def test_bar23_a_restored_server_refuses_all_until_it_is_attached_again(
    restored: Caller, job: str
) -> None:
    caller = Caller(restored.store, job=job)
    for body in (messages.Ping(0), messages.Fence([1]), messages.DropParts([0])):
        with refused(errors.PSIncarnationError, "'job' is restored, waiting for its coordinator"):
            caller.ask(body)
    for role in ("worker", "coordinator"):
        question = messages.Exchange([], [messages.Read(0)])
        with refused(errors.PSIncarnationError, "waiting for its coordinator"):
            caller.ask(question, role=role)  # type: ignore[arg-type]
    with refused(errors.PSIncarnationError, "waiting for its coordinator"):
        caller.push(ADD, buffers=[ONE])
    assert restored.store.snapshot() is None, "it would only be what it came from"
    assert not restored.store.expire(1e9), "no coordinator holds it, so no lease expires"
    assert restored.ask(messages.QueryJob())[0] == messages.JobInfo("job", 1, 40, 0, [0, 1])


def test_bar23_attaching_as_if_for_the_first_time_is_refused(restored: Caller) -> None:
    with refused(errors.PSIncarnationError, "waiting for its coordinator"):
        restored.ask(messages.Attach([], {}))
    restored.ask(messages.Attach([], {}, [0, 1]))
    assert restored.read(0) == 1


def test_bar23_a_server_that_lacks_a_part_is_refused(restored: Caller) -> None:
    for _ in range(2):
        with refused(errors.PSIncarnationError, "restarted without 1 parts: 9"):
            restored.ask(messages.Attach([], {}, [0, 9]))
        with refused(errors.PSIncarnationError, "waiting for its coordinator"):
            restored.ask(messages.Ping(0))
    restored.ask(messages.Attach([], {}, [0]))
    assert restored.read(0) == 1


def test_bar23_a_part_that_was_half_written_does_not_count(directory: SnapshotDirectory) -> None:
    """Its rows come in several messages, and the server is lost in between."""
    caller = Caller().attach()
    caller.create(0, np.float32(1))
    caller.specs[1] = ((6, 2), np.dtype(np.float32))
    spec = messages.CreatePart(1, "table", (6, 2), "float32", messages.FromBuffer())
    rows = np.ones((2, 2), np.float32)
    caller.ask(spec, [octets(rows)])
    caller.update("write_rows", 1, rows, start=2)
    assert caller.ask(messages.QueryJob())[0].parts == [0]
    # The server that has it is as good as it was.
    caller.ask(messages.Attach([], {}, [0, 1]))
    save(caller.store, directory)
    caller.update("write_rows", 1, rows, start=4)
    assert caller.ask(messages.QueryJob())[0].parts == [0, 1]

    store = load(directory)
    assert store is not None
    back = Caller(store)
    assert back.ask(messages.QueryJob())[0].parts == [0]
    with refused(errors.PSIncarnationError, "restarted without 1 parts: 1"):
        back.ask(messages.Attach([], {}, [0, 1]))
    # Another coordinator creates it again.
    back.epoch = 2
    back.attach()
    back.specs = caller.specs
    with refused(errors.NotFoundError, "must hold part 1"):
        back.read(1)
    assert back.ask(spec, [octets(np.full((6, 2), 3, np.float32))]) == (messages.Done(), ())
    assert back.read(1).min() == 3 and back.ask(messages.QueryJob())[0].parts == [0, 1]
    # What is whole stays for the next one.
    back.epoch = 3
    back.attach()
    assert back.read(1).min() == 3


def test_bar23_a_server_that_came_back_empty_never_serves_zeros() -> None:
    caller = Caller()
    for parts in ([], [3]):
        with refused(errors.PSIncarnationError, "it holds no job: it was restarted, or the lease"):
            caller.ask(messages.Attach([], {}, parts))
    assert caller.store.job is None
    other = Caller(caller.store, job="other").attach()
    with refused(errors.PermissionDeniedError, "'other' holds it"):
        caller.ask(messages.Attach([], {}, [3]))
    assert other.counters()["parts"] == 0


def test_bar23_an_attached_server_may_be_attached_again(restored: Caller) -> None:
    caller = Caller().attach()
    caller.create(0, np.float32(4))
    answer, _ = caller.ask(messages.Attach([], {}, [0]))
    assert answer == messages.Attached(is_saved=False, is_restored=False)
    for _ in range(2):
        answer, _ = restored.ask(messages.Attach([], {}, [0, 1]))
        assert answer == messages.Attached(is_saved=True, is_restored=True)


def test_bar30_the_same_coordinator_keeps_the_table_and_the_next_starts_a_new_one(
    restored: Caller,
) -> None:
    with refused(errors.PermissionDeniedError, "higher epoch"):
        restored.ask(messages.Attach([], {}, []), incarnation=COORDINATOR + 1)
    restored.ask(messages.Attach([], {}, [0]))
    assert restored.push(ADD, buffers=[ONE], closure=40) == [] and restored.read(0) == 1
    restored.epoch = 2
    restored.ask(messages.Attach([], {}, []), incarnation=COORDINATOR + 1)
    found, _ = restored.ask(messages.QueryJob())
    assert found == messages.JobInfo("job", 2, 40, 0, [0, 1]), "no number is used again"
    assert restored.push(ADD, buffers=[ONE], closure=40) == [] and restored.read(0) == 2


@pytest.mark.parametrize("parts", [None, []])
def test_bar30_another_coordinator_takes_a_restored_job_over(
    restored: Caller, parts: list[int] | None
) -> None:
    restored.epoch = 2
    restored.ask(messages.Attach([], {}, parts), incarnation=99)
    assert restored.read(0) == 1
    restored.epoch = 1
    with refused(errors.FencedError, "epoch 2"):
        restored.ask(messages.Attach([], {}, [0]))


def test_a_job_without_a_coordinator_gives_way(
    restored: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    other = Caller(restored.store, job="other")
    with caplog.at_level(logging.WARNING):
        other.attach()
    assert "drops job 'job'" in caplog.text and "'other'" in caplog.text
    assert other.counters()["parts"] == 0
    with refused(errors.PermissionDeniedError, "'other' holds it"):
        restored.ask(messages.Attach([], {}, [0]))


def test_a_restored_job_may_be_let_go(restored: Caller) -> None:
    restored.epoch = 0
    with refused(errors.FencedError, "epoch 1"):
        restored.ask(messages.Detach())
    restored.epoch = 1
    before = restored.store.change_counts().ended_jobs
    assert restored.ask(messages.Detach()) == (messages.Done(), ())
    assert restored.store.job is None and restored.store.change_counts().ended_jobs == before + 1


def test_look_needs_no_job_and_changes_nothing() -> None:
    caller = Caller()
    assert caller.ask(messages.QueryJob())[0] == messages.JobInfo("", -1, -1, 0, [])
    caller.attach(lease=10.0)
    caller.create(3, np.float32(0))
    caller.ask(messages.Ping(7))
    other = Caller(caller.store, job="other")
    other.now = 9.0
    assert other.ask(messages.QueryJob())[0] == messages.JobInfo("job", 1, -1, 7, [3])
    with refused(errors.PermissionDeniedError, "the sender is a worker"):
        other.ask(messages.QueryJob(), role="worker", incarnation=WORKER)
    assert caller.store.expire(10.0), "looking does not renew the lease"


# Files.


@pytest.fixture
def written(directory: SnapshotDirectory) -> Caller:
    """A server with two snapshots: part 0 is 1 in the first, and 2 in the second."""
    caller = Caller().attach()
    caller.create(0, np.float32(1))
    caller.create(1, np.arange(300_000, dtype=np.float64))
    save(caller.store, directory)
    make_optimizer(caller)
    caller.push(ADD, buffers=[ONE], closure=3)
    save(caller.store, directory)
    return caller


def value_of(store: ParameterStore | None) -> float | None:
    return None if store is None else float(store._storage.part(0).value)


def test_the_last_two_snapshots_are_kept_and_the_number_counts(
    directory: SnapshotDirectory, written: Caller
) -> None:
    for _ in range(3):
        save(written.store, directory)
    assert numbers_in(directory) == [4, 5]
    os.utime(bundle_of(directory, 4), (4e9, 4e9))
    size = sum(file.stat().st_size for file in bundle_of(directory, 5).iterdir())
    assert directory.load(lambda loaded: None) == (5, size)
    assert save(written.store, directory, num_kept=1) == 6
    assert numbers_in(directory) == [6]
    directory.clear()
    assert numbers_in(directory) == [] and load(directory) is None
    assert save(written.store, directory) == 7


def test_bar38_bit_flips_and_truncations_are_found_and_the_one_before_is_used(
    directory: SnapshotDirectory, written: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(5)

    def mutants_of(path: Path) -> list[tuple[Path, bytes]]:
        good = path.read_bytes()
        header = int.from_bytes(good[:8], "little") + 8 if path.suffix != ".json" else len(good)
        places = [rng.randrange(len(good)) for _ in range(40)]
        places += [rng.randrange(header) for _ in range(40)] + list(range(30))
        found = [
            good[:i] + bytes([good[i] ^ 1 << rng.randrange(8)]) + good[i + 1 :] for i in places
        ]
        found += [good[: rng.randrange(len(good))] for _ in range(25)]
        found += [good[:n] for n in (0, 1, 8, 20, header - 1, len(good) - 1)]
        return [(path, mutant) for mutant in (*found, good + b"x", good + bytes(5000))]

    mutants = mutants_of(data_of(directory, 2)) + mutants_of(manifest_of(directory, 2))
    kept = {path: path.read_bytes() for path in bundle_of(directory, 2).iterdir()}
    name = bundle_of(directory, 2).name
    used: list[float | None] = []

    def check(loaded: Any) -> None:
        """Reads everything, as a store does, without compiling the optimizer again."""
        sections = range(len(loaded.state.sections()))
        pieces = [[piece.copy() for _, piece in loaded.pieces(i)] for i in sections]
        used.append(float(pieces[0][0].view(np.float32)[0]))

    with caplog.at_level(logging.WARNING):
        for path, mutant in mutants:
            path.write_bytes(mutant)
            caplog.clear()
            found = directory.load(check)
            assert found is not None and found.number == 1
            assert name in caplog.text and bundle_of(directory, 1).name in caplog.text
            path.write_bytes(kept[path])
    assert used == [1.0] * len(mutants)
    data_of(directory, 2).unlink()
    # The store itself starts from the one before as well, or from nothing.
    assert value_of(load(directory)) == 1
    data_of(directory, 1).write_bytes(b"")
    caplog.clear()
    assert load(directory) is None and "no snapshot left" in caplog.text
    for path, content in kept.items():
        path.write_bytes(content)
    assert value_of(load(directory)) == 2


def test_bar38_manifests_that_lie_are_found(directory: SnapshotDirectory, written: Caller) -> None:
    """Checksums are right, as of one who wants to do harm; what they protect is not."""
    path = manifest_of(directory, 2)
    good = json.loads(path.read_bytes())
    del good["crc32"]

    def write(text: bytes) -> None:
        path.write_bytes(b'{"crc32":"%08x",' % zlib.crc32(text) + text[1:])

    def read_all(loaded: Any) -> None:
        for section in range(len(loaded.state.sections())):
            assert sum(piece.size for _, piece in loaded.pieces(section)) < 1 << 24

    def lying(change: Callable[[dict[str, Any]], Any]) -> bytes:
        other = copy.deepcopy(good)
        change(other)
        return json.dumps(other).encode()

    def set_part(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
        return lambda other: other["contents"]["parts"][1].update({key: value})

    def set_shape(*shape: int, dtype: str = "float64") -> Callable[[dict[str, Any]], None]:
        def change(other: dict[str, Any]) -> None:
            other["contents"]["parts"][1]["spec"][3:5] = [shape, dtype]
            (array,) = [one for one in other["arrays"] if one["name"].startswith("parts/1/")]
            array.update(shape=shape, dtype=dtype)
            for part in array["slices"]:
                part.update(stop=shape[0])

        return change

    lies = [
        set_part("num_bytes", 1 << 60),
        set_part("num_bytes", -1),
        set_part("version", "x"),
        set_shape(1 << 40),
        set_shape(-300_000),
        set_shape(0, 1 << 62),
        set_shape(300_000, *[1] * 100),
        set_shape(300_001),
        set_shape(300_000, dtype="object"),
        set_shape(300_000, dtype="U8"),
        set_shape(600_000, dtype="nonsense"),
        lambda other: other["contents"].update(blobs=[1 << 50]),
        lambda other: other["contents"].update(blobs=[]),
        lambda other: other["contents"].update(epoch=None),
        lambda other: other["contents"]["parts"].append(other["contents"]["parts"][0]),
        lambda other: other["arrays"].pop(),
        lambda other: other["arrays"][1]["slices"][0].update(sums="MTIz"),
        lambda other: other.pop("contents"),
        lambda other: other["contents"]["optimizers"][0].update(trained=[10, 99]),
        lambda other: other["contents"]["optimizers"][0]["spec"].__setitem__(4, 7),
    ]
    for number, lie in enumerate(lies):
        write(lying(lie))
        kept = value_of(load(directory))
        # An optimizer cannot train what it was not made for: that lie changes nothing.
        assert kept == (2.0 if number == 18 else 1.0), number
    write(b"[" * 100_000)
    assert value_of(load(directory)) == 1
    rng = random.Random(8)
    text = json.dumps(good).encode()
    for _ in range(200):
        mutant = bytearray(text)
        for _ in range(rng.randrange(1, 4)):
            mutant[rng.randrange(len(mutant))] = rng.randrange(256)
        write(bytes(mutant))
        found = directory.load(read_all)
        assert found is not None and found.number in (1, 2)


def test_bar38_a_newer_format_is_left_alone(
    directory: SnapshotDirectory, written: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    path = manifest_of(directory, 2)
    text = json.dumps(json.loads(path.read_bytes()) | {"version": 3}).encode()
    text = b"{" + text.partition(b", ")[2]
    path.write_bytes(b'{"crc32":"%08x",' % zlib.crc32(text) + text[1:])
    content = path.read_bytes()
    with caplog.at_level(logging.WARNING):
        assert value_of(load(directory)) == 1
    assert "its format is replicax.bundle 3" in caplog.text
    assert path.read_bytes() == content


def test_files_of_the_format_before_bundles_are_named(
    directory: SnapshotDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    (directory._path / "snapshot-000000000001.rxs").write_bytes(b"RXPSSNAP")
    with caplog.at_level(logging.WARNING):
        assert load(directory) is None
    assert "snapshot-000000000001.rxs" in caplog.text and "format RXPSSNAP" in caplog.text


def test_safetensors_reads_the_parts_of_a_snapshot(
    directory: SnapshotDirectory, written: Caller
) -> None:
    found = safetensors.numpy.load_file(data_of(directory, 2))
    parts = {int(name.split("/")[1]): one for name, one in found.items() if "parts/" in name}
    assert parts[0] == 2 and np.array_equal(parts[1], np.arange(300_000.0))
    assert [name for name in found if not name.startswith("parts/")] == ["blobs/0"]


def test_a_snapshot_that_is_sent_is_checked_like_one_on_disk(
    written: Caller, tmp_path: Path
) -> None:
    path = tmp_path / "packed"
    with path.open("w+b") as file, cut_of(written.store) as cut:
        size = snapshot_files.write(file, cut)
    good = path.read_bytes()
    assert len(good) == size

    def value(content: bytes) -> float | None:
        path.write_bytes(content)
        with path.open("rb") as file:
            loaded, found = snapshot_files.read(file, "The copy")
            assert found == size
            store = ParameterStore(task=3)
            store.restore(loaded)
            return value_of(store)

    assert value(good) == 2
    rng = random.Random(1)
    mutants = [good[: rng.randrange(size)] for _ in range(30)] + [b"", good + b"x"]
    places = [rng.randrange(size) for _ in range(20)] + [size - n for n in range(1, 3000, 97)]
    mutants += [good[:i] + bytes([good[i] ^ 4]) + good[i + 1 :] for i in places]
    for mutant in mutants:
        with refused(errors.DataLossError):
            value(mutant)


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The kernel refuses to write longer files, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 1, 100, 10_000, 1_000_000, 2_400_000])
def test_bar37_without_room_the_last_snapshot_stays(
    directory: SnapshotDirectory, written: Caller, size: int
) -> None:
    with files_of_at_most(size), pytest.raises(errors.CheckpointError, match="unchanged") as info:
        save(written.store, directory)
    assert info.value.errno == errno.EFBIG
    assert numbers_in(directory) == [1, 2] and list(directory._path.glob("*.tmp*")) == []
    assert all(part._frozen is None for part in written.store._storage.parts.values())
    assert save(written.store, directory) == 3


@pytest.mark.parametrize("broken", range(4))
def test_bar36_data_is_synced_before_the_name_and_any_failure_is_told(
    directory: SnapshotDirectory, written: Caller, broken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    fsync, rename = os.fsync, os.rename

    def sync(descriptor: int) -> None:
        happened.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.partition(".")[2][:5])
        fsync(descriptor)

    def move(*args: Any) -> None:
        happened.append("rename")
        rename(*args)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", move)
    save(written.store, directory)
    assert happened[:5] == ["safet", "json", "tmp-" + str(os.getpid())[:1], "rename", ""]
    calls = itertools.count()

    def fail(descriptor: int) -> None:
        if next(calls) == broken:
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(errors.CheckpointError, match="Input/output error") as info:
        save(written.store, directory)
    assert info.value.errno == errno.EIO
    assert numbers_in(directory) == [2, 3] and list(directory._path.glob("*.tmp*")) == []


HOLD = """
import pathlib, sys, time
from replicax.ps.process.snapshot_files import SnapshotDirectory
directory = SnapshotDirectory(pathlib.Path(sys.argv[1]))
(directory._path / "snapshot-000000000009.tmp-1-2").mkdir()
print("held", flush=True)
time.sleep(60)
"""


def test_two_processes_cannot_share_a_directory_but_one_may_follow(tmp_path: Path) -> None:
    path = tmp_path / "ps-0"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            with refused(errors.CheckpointError, f"that of process {process.pid} does so"):
                SnapshotDirectory(path)
            assert (path / "snapshot-000000000009.tmp-1-2").exists(), "it is not ours to remove"
            process.send_signal(signal.SIGKILL)
            process.wait(60)
            directory = SnapshotDirectory(path)
        finally:
            process.kill()
    assert not list(path.glob("*.tmp*"))
    with refused(errors.CheckpointError, f"that of process {os.getpid()} does so"):
        SnapshotDirectory(path)
    directory.close()
    SnapshotDirectory(path).close()


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused(errors.CheckpointError, "must be written"):
        SnapshotDirectory(tmp_path / "file" / "ps-0")


# When to save.


def counts(changes: int, creations: int = 1, job: str | None = "job") -> ChangeCounts:
    return ChangeCounts(job, changes, creations, 0)


def test_what_is_made_is_saved_as_soon_as_it_is_quiet() -> None:
    schedule = Schedule(every_s=30.0, now=0.0)
    assert not schedule.is_due(counts(0, 0, None), is_busy=False, now=5.0)
    assert not schedule.is_due(counts(1, 1), is_busy=True, now=10.0)
    assert not schedule.is_due(counts(1, 1), is_busy=True, now=11.0)
    assert not schedule.is_due(counts(2, 2), is_busy=False, now=11.1)
    assert not schedule.is_due(counts(2, 2), is_busy=False, now=11.2)
    assert schedule.is_due(counts(2, 2), is_busy=False, now=11.31)
    schedule.saved(counts(2, 2), 11.31)
    assert not schedule.is_due(counts(2, 2), is_busy=False, now=1e6), "nothing is new"
    # However busy it is, not for ever.
    schedule.saved(counts(2, 2), 100.0)
    assert not schedule.is_due(counts(3, 3), is_busy=True, now=129.0)
    assert schedule.is_due(counts(4, 4), is_busy=True, now=130.0)


def test_changes_are_saved_at_their_time_and_failures_wait_for_the_next() -> None:
    schedule = Schedule(every_s=30.0, now=0.0)
    schedule.saved(counts(1), 10.0)
    assert not schedule.is_due(counts(2), is_busy=False, now=39.9)
    assert schedule.is_due(counts(2), is_busy=False, now=40.0)
    schedule.failed(40.0)
    assert not schedule.is_due(counts(3, 2), is_busy=False, now=40.1)
    assert not schedule.is_due(counts(3, 2), is_busy=False, now=69.9)
    assert schedule.is_due(counts(3, 2), is_busy=False, now=70.0)


def test_saving_rests_longer_than_it_works_and_ends_in_time() -> None:
    pace = Pace(limit_s=15.0, now=100.0)
    assert pace.pause(100.004, 0.01) == 0, "many small pieces rest together"
    assert pace.pause(100.01, 0.02) == pytest.approx(0.19)
    pace.resumed(100.2)
    assert pace.pause(100.21, 0.03) == pytest.approx(0.19)


@pytest.mark.parametrize(
    ("work_s", "takes_s"), [(0.1, 2.0), (0.5, 10.0), (3.0, 15.0), (7.0, 15.0), (40.0, 80.0)]
)
def test_a_snapshot_takes_what_it_may_but_never_all_of_the_processor(
    work_s: float, takes_s: float
) -> None:
    pace, now, num_pieces = Pace(limit_s=15.0, now=0.0), 0.0, 200
    for piece in range(num_pieces):
        rest_s = pace.pause(now, piece / num_pieces)
        if rest_s:
            now += rest_s
            pace.resumed(now)
        now += work_s / num_pieces
    assert now == pytest.approx(takes_s, rel=0.1)


def test_marks_tell_what_is_new() -> None:
    caller = Caller()
    seen = [caller.store.change_counts()]

    def has_grown() -> tuple[bool, bool]:
        seen.append(caller.store.change_counts())
        return seen[-1].changes > seen[-2].changes, seen[-1].creations > seen[-2].creations

    caller.attach()
    assert has_grown() == (True, True) and seen[-1].job == "job"
    caller.create(0, np.float32(0))
    assert has_grown() == (True, True)
    caller.push(ADD, buffers=[ONE])
    assert has_grown() == (True, False)
    caller.read(0)
    caller.ask(messages.Ping(0))
    caller.ask(messages.QueryJob())
    caller.attach()
    assert has_grown() == (False, False)
    caller.ask(messages.Fence([4]))
    assert has_grown() == (True, False)
    caller.epoch = 2
    caller.attach()
    assert has_grown() == (True, True)
    caller.ask(messages.DropParts([0]))
    assert has_grown() == (True, True)
    caller.ask(messages.Detach())
    assert caller.store.change_counts().ended_jobs == 1 and caller.store.change_counts().job is None
