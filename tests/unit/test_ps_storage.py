"""What a parameter server keeps: parts, their changes and reads, and their memory."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parameter_store_client import Caller, exported, octets

import replicax as rx
from replicax.foundation import jax_compat
from replicax.protocol import messages
from replicax.ps.store import memory, parts
from replicax.ps.store import updates as store_updates
from replicax.ps.store.service import ParameterStore
from replicax.variables import updates

TYPES = [
    "bool",
    "int32",
    "int64",
    "uint8",
    "float32",
    "float16",
    "bfloat16",
    "float64",
    "complex64",
]
WHOLE = ["assign", "assign_add", "assign_sub"]
ROWS = [kind for kind in updates._RULES if kind.startswith("scatter")]
NOT_FOR_BOOL = {"assign_sub", "scatter_add", "scatter_sub", "scatter_mul", "scatter_div"}


@pytest.fixture
def caller() -> Caller:
    return Caller().attach()


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    numbers = rng.integers(1, 100, shape)
    if dtype.startswith(("float", "bfloat", "complex")):
        numbers = numbers / 7
    if dtype.startswith("complex"):
        numbers = numbers + 1j * rng.integers(1, 9, shape)
    return np.asarray(numbers % 2 if dtype == "bool" else numbers).astype(jnp.dtype(dtype))


def expected(kind: str, old: np.ndarray, payload: Any) -> np.ndarray:
    with jax_compat.any_dtype(old.dtype):
        return np.asarray(updates.apply(kind, jnp.asarray(old), payload))


SHAPES = [(), (7,), (5, 3), (4, 2, 3), (20_001,), (0, 3)]
# Each pair takes a compiler's time: the default suite has some for every type and every shape.
PAIRS = [
    pytest.param(t, shape, marks=[pytest.mark.slow] if (i + j) % 6 else [])
    for i, t in enumerate(TYPES)
    for j, shape in enumerate(SHAPES)
]


@pytest.mark.parametrize(("dtype", "shape"), PAIRS)
def test_S182_dense_updates_equal_those_of_local_variables(
    caller: Caller, dtype: str, shape: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(1)
    value = random(rng, shape, dtype)
    caller.create(0, value)
    for kind in WHOLE:
        payload = random(rng, shape, dtype)
        if dtype == "bool" and kind in NOT_FOR_BOOL:
            failures = caller.push(messages.Update(0, kind, 0), buffers=[payload])
            assert failures[0].error.code == "InvalidArgumentError"
            continue
        value = expected(kind, value, payload)
        caller.update(kind, 0, payload)
        np.testing.assert_array_equal(caller.read(0), value, strict=True)


# Uneven parts; rows that are scalars, narrow, wide and deep.
ROW_SHAPES = [(11,), (10, 4), (300, 5), (1, 2, 3), (40_000,), (3, 130)]
ROW_PAIRS = [
    pytest.param(t, kind, marks=[pytest.mark.slow] if (i + j) % 3 else [])
    for i, t in enumerate(TYPES)
    for j, kind in enumerate(ROWS)
]


@pytest.mark.parametrize(("dtype", "kind"), ROW_PAIRS)
def test_T87_row_updates_equal_those_of_local_variables(
    caller: Caller, dtype: str, kind: str
) -> None:
    rng = np.random.default_rng(2)
    shape = ROW_SHAPES[(TYPES.index(dtype) + ROWS.index(kind)) % len(ROW_SHAPES)]
    value = random(rng, shape, dtype)
    caller.create(0, value)
    count = rng.integers(1, shape[0] + 1)
    ids = np.sort(rng.choice(shape[0], count, replace=False)).astype(np.int32)
    rows = random(rng, (count, *shape[1:]), dtype)
    update = messages.Update(0, kind, 0)
    if dtype == "bool" and kind in NOT_FOR_BOOL:
        assert caller.push(update, buffers=[ids, rows])[0].error.code == "InvalidArgumentError"
        return
    assert caller.push(update, buffers=[ids, rows]) == []
    with jax_compat.any_dtype(value.dtype):
        slices = rx.IndexedSlices(jnp.asarray(rows), jnp.asarray(ids), shape)
        value = expected(kind, value, slices)
    if dtype.startswith("complex") and kind == "scatter_div":
        # There are several ways to divide complex numbers; they differ in the last digit.
        np.testing.assert_allclose(caller.read(0), value, rtol=1e-6)
    else:
        np.testing.assert_array_equal(caller.read(0), value, strict=True)


def test_division_of_integers_is_exact_and_defined_for_zero(caller: Caller) -> None:
    caller.create(0, np.array([7, -7, 5, -5, 0, (1 << 31) - 1], np.int32))
    ids = np.arange(6, dtype=np.int32)
    caller.update("scatter_div", 0, ids, np.array([2, 2, 0, 0, 0, 1], np.int32))
    assert caller.read(0).tolist() == [3, -3, -1, -1, -1, (1 << 31) - 1]
    large = (1 << 62) + 1
    caller.create(1, np.array([large, -large, -(1 << 63)], np.int64))
    caller.update("scatter_div", 1, ids[:3], np.array([1, -1, 1], np.int64))
    assert caller.read(1).tolist() == [large, large, -(1 << 63)]


def test_overflow_and_division_by_zero_are_silent_as_in_xla(caller: Caller) -> None:
    caller.create(0, np.array([3e38, 1.0], np.float32))
    caller.update("assign_add", 0, np.array([3e38, 1.0], np.float32))
    caller.update("scatter_div", 0, np.array([1], np.int32), np.zeros(1, np.float32))
    assert caller.read(0).tolist() == [np.inf, np.inf]


def test_no_rows_is_a_change_of_nothing(caller: Caller) -> None:
    caller.create(0, np.ones((4, 2), np.float32))
    caller.update("scatter_add", 0, np.empty(0, np.int32), np.empty((0, 2), np.float32))
    assert caller.read(0, rows=[]).shape == (0, 2)
    np.testing.assert_array_equal(caller.read(0), np.ones((4, 2)))


def test_S169_rows_are_read_in_any_order_and_repeatedly(caller: Caller) -> None:
    table = np.random.default_rng(0).standard_normal((1000, 6)).astype(np.float32)
    caller.create(0, table)
    ids = [999, 0, 5, 5, 0]
    np.testing.assert_array_equal(caller.read(0, rows=ids), table[ids])


def test_a_long_part_arrives_in_pieces(caller: Caller) -> None:
    value = np.arange(30, dtype=np.float32).reshape(10, 3)
    caller.specs[0] = ((10, 3), value.dtype)
    spec = messages.CreatePart(0, "v", (10, 3), "float32", messages.FromBuffer())
    caller.ask(spec, [octets(value[:4])])
    assert caller.read(0)[4:].tolist() == np.zeros((6, 3)).tolist()
    caller.update("write_rows", 0, value[4:7], start=4)
    caller.update("write_rows", 0, value[7:], start=7)
    np.testing.assert_array_equal(caller.read(0), value)


def test_versions_grow_and_known_values_are_not_sent(caller: Caller) -> None:
    caller.create(0, np.zeros(3, np.float32))
    before = caller.version(0)
    answer, values = caller.ask(messages.Exchange([], [messages.Read(0, before)]))
    assert answer.reads == [messages.ReadResult(before, True)] and list(values) == []
    caller.update("assign_add", 0, np.ones(3, np.float32))
    after = caller.version(0)
    assert after > before
    answer, values = caller.ask(messages.Exchange([], [messages.Read(0, before)]))
    assert answer.reads == [messages.ReadResult(after, False)] and len(values) == 1


@pytest.mark.parametrize("kind", ["assign_add", "scatter_add", "write_rows"])
def test_bar27_what_is_being_sent_does_not_change(caller: Caller, kind: str) -> None:
    shape = (1000, 64)
    caller.create(0, np.zeros(shape, np.float32))
    sent: list[Any] = []
    for step in range(5):
        answer, values = caller.ask(messages.Exchange([], [messages.Read(0)]))
        # A view of the bytes is what stays alive in a socket, not the array that was returned.
        sent.append(memoryview(np.asarray(values[0]).view(np.float32)))
        del values, answer
        if kind == "scatter_add":
            ids = np.arange(1000, dtype=np.int32)
            caller.update(kind, 0, ids, np.ones(shape, np.float32))
        else:
            number = step + 1 if kind == "write_rows" else 1
            caller.update(kind, 0, np.full(shape, number, np.float32))
    for step, view in enumerate(sent):
        assert (np.asarray(view) == step).all()
    assert (caller.read(0) == 5).all()


def test_memory_is_swapped_while_lent_and_reused_afterwards(caller: Caller) -> None:
    caller.create(0, np.zeros(100_000, np.float32))
    one = np.ones(100_000, np.float32)

    def address() -> int:
        _, values = caller.ask(messages.Exchange([], [messages.Read(0)]))
        return np.asarray(values[0]).ctypes.data

    first = address()
    caller.update("assign_add", 0, one)
    assert address() == first, "it was not read: changed in place"
    held = caller.read(0)
    caller.update("assign_add", 0, one)
    second = address()
    assert second != first and held[0] == 1
    del held
    again = caller.read(0)
    caller.update("assign_add", 0, one)
    assert address() == first, "the first block is free again"
    assert again[0] == 2 and caller.read(0)[0] == 3
    assert first % memory.ALIGNMENT == second % memory.ALIGNMENT == 0


@pytest.mark.parametrize(
    ("update", "buffers", "code"),
    [
        (messages.Update(1, "assign", 99), [np.zeros(3, np.float32)], "NotFoundError"),
        (messages.Update(1, "assign", 0), [np.zeros(2, np.float32)], "ProtocolError"),
        (messages.Update(1, "assign", 0), [np.zeros(3, np.float64)], "ProtocolError"),
        (messages.Update(1, "assign", 0), [np.zeros(0, np.float32)], "ProtocolError"),
        (messages.Update(1, "scatter_add", 0), [[3], np.zeros(1, np.float32)], "InvalidArgument"),
        (messages.Update(1, "scatter_add", 0), [[-1], np.zeros(1, np.float32)], "InvalidArgument"),
        (messages.Update(1, "scatter_add", 0), [[1, 1], np.zeros(2, np.float32)], "InvalidArg"),
        (messages.Update(1, "scatter_add", 0), [[2, 1], np.zeros(2, np.float32)], "InvalidArg"),
        (messages.Update(1, "scatter_add", 0), [[1], np.zeros(2, np.float32)], "ProtocolError"),
        (messages.Update(1, "scatter_add", 1), [[0], np.zeros(1, np.float32)], "InvalidArgument"),
        (messages.Update(1, "write_rows", 0, 2), [np.zeros(2, np.float32)], "InvalidArgument"),
        (messages.Update(1, "write_rows", 0, -1), [np.zeros(1, np.float32)], "InvalidArgument"),
        (messages.Update(1, "write_rows", 0), [np.zeros(5, np.uint8)], "ProtocolError"),
        (messages.Update(1, "write_rows", 1), [np.zeros(1, np.float32)], "InvalidArgument"),
        (messages.Apply(1, 5, []), [], "NotFoundError"),
    ],
    ids=str,
)
def test_bar17_a_bad_change_is_found_before_the_closure_changes_anything(
    caller: Caller, update: Any, buffers: list[Any], code: str
) -> None:
    caller.create(0, np.zeros(3, np.float32), name="weights")
    caller.create(1, np.float32(0))
    bad = [np.asarray(b, np.int32) if isinstance(b, list) else b for b in buffers]
    good = messages.Update(0, "assign_add", 0)
    one = np.ones(3, np.float32)
    pushes = [messages.Push(1, [good, update]), messages.Push(2, [good])]
    arrays = [octets(b) for b in [one, *bad, one]]
    answer, values = caller.ask(messages.Exchange(pushes, [messages.Read(0)]), arrays)
    (failure,) = answer.failures
    assert failure.closure == 1 and failure.error.code.startswith(code)
    assert "/job:ps/task:3" in failure.error.text
    # The second closure was not disturbed, and of the first nothing was done nor remembered.
    assert np.frombuffer(values[0], np.float32).tolist() == [1, 1, 1]
    assert caller.push(good, buffers=[one], closure=1) == []
    assert caller.read(0).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "read",
    [messages.Read(99), messages.Read(0, -1, True), messages.Read(1, -1, True)],
    ids=["unknown part", "row out of range", "rows of a scalar"],
)
def test_a_bad_read_refuses_the_question_after_its_changes(
    caller: Caller, read: messages.Read
) -> None:
    caller.create(0, np.zeros(3, np.float32))
    caller.create(1, np.float32(0))
    push = messages.Push(1, [messages.Update(0, "assign_add", 0)])
    buffers = [octets(np.ones(3, np.float32))]
    if read.is_rows:
        buffers.append(octets(np.array([0, 3])))
    question = messages.Exchange([push], [messages.Read(0), read])
    for _ in range(2):
        with pytest.raises((rx.errors.NotFoundError, rx.errors.InvalidArgumentError)):
            caller.ask(question, buffers)
    assert caller.read(0).tolist() == [1, 1, 1], "made once, although the question was refused"


@pytest.mark.parametrize("kind", ["assign", "scatter_add", "explode"])
def test_wrong_number_of_buffers_or_kind_refuses_everything(caller: Caller, kind: str) -> None:
    caller.create(0, np.zeros(3, np.float32))
    one = octets(np.ones(3, np.float32))
    pushes = [
        messages.Push(1, [messages.Update(0, "assign_add", 0)]),
        messages.Push(2, [messages.Update(0, kind, 0)]),
    ]
    buffers = [one] if kind == "assign" else [one, one]
    with pytest.raises(rx.errors.ProtocolError):
        caller.ask(messages.Exchange(pushes, []), buffers)
    assert caller.read(0).tolist() == [0, 0, 0]


def test_T83_initial_values_are_computed_on_the_server(caller: Caller) -> None:
    caller.create(0, np.float32(3))

    def initial(seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(2, jnp.int32), jnp.full((5, 4), seed, jnp.bfloat16)

    program = exported(initial, jax.ShapeDtypeStruct((), np.float32))
    caller.specs[1] = ((5, 4), jnp.dtype("bfloat16"))
    computed = messages.FromProgram([0], 1)
    spec = messages.CreatePart(1, "w", (5, 4), "bfloat16", computed)
    caller.ask(spec, [program])
    np.testing.assert_array_equal(caller.read(1), np.full((5, 4), 3, jnp.bfloat16))
    caller.update("assign_add", 1, np.ones((5, 4), jnp.bfloat16))
    assert (caller.read(1) == 4).all()
    for bad in [
        messages.CreatePart(2, "w", (5, 3), "bfloat16", computed),
        messages.CreatePart(2, "w", (5, 4), "float32", computed),
        messages.CreatePart(2, "w", (5, 4), "bfloat16", messages.FromProgram([0], 2)),
        messages.CreatePart(2, "w", (5, 4), "bfloat16", messages.FromProgram([], 1)),
    ]:
        with pytest.raises(rx.errors.InvalidArgumentError, match="part 2"):
            caller.ask(bad, [program])
    with pytest.raises(rx.errors.InvalidArgumentError, match=r"jax\.export"):
        caller.ask(messages.CreatePart(2, "w", (5, 4), "bfloat16", computed), [b"no program"])
    missing = messages.FromProgram([77], 1)
    with pytest.raises(rx.errors.NotFoundError, match="part 77"):
        caller.ask(messages.CreatePart(2, "w", (5, 4), "bfloat16", missing), [program])
    assert caller.counters()["parts"] == 2


@pytest.mark.parametrize("dtype", TYPES)
def test_filled_parts(caller: Caller, dtype: str) -> None:
    one = np.ones((), jnp.dtype(dtype))
    caller.specs[0] = ((3, 2), one.dtype)
    caller.ask(messages.CreatePart(0, "v", (3, 2), dtype, messages.Fill(one.tobytes())))
    np.testing.assert_array_equal(caller.read(0), np.ones((3, 2), one.dtype))


@pytest.mark.parametrize(
    ("shape", "dtype", "element"),
    [
        ((2,), "object", bytes(8)),
        ((2,), "U4", bytes(16)),
        ((2,), "datetime64[s]", bytes(8)),
        ((2,), "nothing", bytes(4)),
        ((-1,), "float32", bytes(4)),
        ((2,), "float32", bytes(3)),
    ],
)
def test_impossible_parts_are_refused(
    caller: Caller, shape: tuple[int, ...], dtype: str, element: bytes
) -> None:
    spec = messages.CreatePart(0, "v", shape, dtype, messages.Fill(element))
    with pytest.raises(
        (rx.errors.InvalidArgumentError, rx.errors.ProtocolError), match=r"part 0|Part 0"
    ):
        caller.ask(spec)
    assert caller.counters()["parts"] == 0


@pytest.mark.parametrize("shape", [(1 << 40,), (1 << 62, 1 << 62), (3, 1 << 50)])
def test_bar_oom_a_part_larger_than_memory_is_refused(
    caller: Caller, shape: tuple[int, ...]
) -> None:
    caller.create(0, np.ones(3, np.float32))
    huge = messages.CreatePart(1, "huge", shape, "uint8", messages.Fill(bytes(1)))
    with pytest.raises(rx.errors.ResourceExhaustedError, match=r"'huge'.*task:3.*available"):
        caller.ask(huge)
    caller.update("assign_add", 0, np.ones(3, np.float32))
    assert caller.read(0).tolist() == [2, 2, 2]


def test_bar_oom_where_the_system_tells_nothing(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    huge = messages.CreatePart(1, "huge", (1 << 60,), "uint8", messages.Fill(bytes(1)))
    with pytest.raises(rx.errors.ResourceExhaustedError, match="'huge'"):
        caller.ask(huge)
    caller.create(0, np.ones(3, np.float32))
    assert caller.read(0).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("groups", "limit", "expected_mib"),
    [
        ("0::/a/b\n", {"a/b/memory.max": 512, "a/b/memory.current": 112}, 400 + 10 - 64),
        ("0::/a/b\n", {"a/memory.max": 512, "a/memory.current": 412}, 100 + 10 - 64),
        ("0::/gone\n", {"memory.max": 300, "memory.current": 100}, 200 + 10 - 64),
        (
            "4:memory:/x\n0::/\n",
            {"memory/x/memory.limit_in_bytes": 600, "memory/x/memory.usage_in_bytes": 500},
            100 + 10 - 64,
        ),
        ("0::/a\n", {}, 1024 - 64),
    ],
)
def test_memory_that_is_left_counts_the_control_groups(
    tmp_path: Path, groups: str, limit: dict[str, int], expected_mib: int
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {1024 << 10} kB\n")
    for name, mib in limit.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{mib << 20}\n")
        cache = f"total_inactive_file {10 << 20}\ninactive_file {10 << 20}\n"
        (file.parent / "memory.stat").write_text(cache)
    found = memory.available_bytes(tmp_path / "proc", tmp_path / "cgroup")
    assert found == expected_mib << 20


def test_unused_rows_of_a_zero_filled_table_cost_no_memory() -> None:
    program = """
import numpy as np
from parameter_store_client import Caller
from replicax.ps.store import memory
caller = Caller().attach()
caller.fill(0, (8_000_000, 64))
before = memory.resident_bytes()
ids = np.sort(np.random.default_rng(0).choice(8_000_000, 500, replace=False))
rows = np.ones((500, 64), np.float32)
caller.update("scatter_add", 0, ids.astype(np.int32), rows)
assert (caller.read(0, rows=ids) == 1).all()
assert (caller.read(0, rows=[7_999_999 - (7_999_999 in ids)]) == 0).all()
assert caller.counters()["bytes"] == 8_000_000 * 64 * 4
grown = memory.resident_bytes() - before
assert grown < 32 << 20, grown
"""
    path = str(Path(__file__).parent.parent / "support")
    code = f"import sys; sys.path.insert(0, {path!r})\n{program}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250)


def test_dropped_parts_give_their_memory_back(caller: Caller) -> None:
    caller.create(0, np.ones(8 << 20, np.uint8))
    before = memory.resident_bytes()
    caller.ask(messages.DropParts([0, 17]))
    gc.collect()
    assert memory.resident_bytes() < before - (6 << 20)
    with pytest.raises(rx.errors.NotFoundError, match=r"part 0.*|task:3"):
        caller.read(0)
    caller.create(0, np.zeros(2, np.int32))
    assert caller.read(0).tolist() == [0, 0]


def test_counters(caller: Caller) -> None:
    caller.create(0, np.zeros((10, 2), np.float32))
    caller.update("scatter_add", 0, np.array([1, 2], np.int32), np.ones((2, 2), np.float32))
    update = messages.Update(0, "assign_add", 0)
    for _ in range(2):
        caller.push(update, buffers=[np.ones((10, 2), np.float32)], closure=50)
    caller.push(messages.Update(0, "assign_add", 9), buffers=[np.ones(2)], closure=51)
    caller.read(0, rows=[1, 2, 3])
    caller.ask(messages.Exchange([], [messages.Read(0, caller.version(0))]))
    found = caller.counters()
    wanted = {"bytes": 80, "slot_bytes": 0, "parts": 1, "updates": 4, "applied": 2}
    wanted |= {"duplicates": 1, "failures": 1, "reads": 3, "known_reads": 1}
    wanted |= {"rows_read": 3, "rows_written": 2, "applied_entries": 2, "newest_closure": 50}
    assert {name: found[name] for name in wanted} == wanted
    assert found["requests"] == 9 and found["rss"] > 1 << 20
    assert caller.ask(messages.Ping(0))[0].progress == 10


@pytest.mark.parametrize(
    ("sizes", "num_steps"),
    [
        ({0: 1000, 1: 50_000, 2: 1}, 60),
        pytest.param({0: 2 << 20}, 2000, marks=pytest.mark.slow),
    ],
    ids=["small", "8 MiB"],
)
def test_bar27_no_torn_reads_and_no_lost_updates_between_threads(
    sizes: dict[int, int], num_steps: int
) -> None:
    store = ParameterStore(task=0)
    Caller(store).attach()
    for part, size in sizes.items():
        Caller(store).create(part, np.zeros(size, np.float32))
    num_writers, least_reads, most_steps = 2, 20, 10_000
    is_over, counting = threading.Event(), threading.Lock()
    num_reads = num_written = 0
    problems: list[str] = []

    def write(first: int) -> None:
        nonlocal num_written
        caller = Caller(store)
        for step in range(most_steps):
            # A reader may be delayed, and must still overlap with writers.
            if step >= num_steps and num_reads >= least_reads:
                return
            changes = [messages.Update(part, "assign_add", part) for part in sizes]
            ones = [np.ones(size, np.float32) for size in sizes.values()]
            failures = caller.push(*changes, buffers=ones, closure=first + step)
            problems.extend(failure.error.text for failure in failures)
            with counting:
                num_written += 1

    def read() -> None:
        caller = Caller(store)
        caller.specs = {p: ((size,), np.dtype(np.float32)) for p, size in sizes.items()}
        last = dict.fromkeys(sizes, 0.0)
        nonlocal num_reads
        while not is_over.is_set():
            for part in sizes:
                value = caller.read(part)
                if value.min() != value.max() or value[0] < last[part]:
                    problems.append(f"torn or old: {value.min()} {value.max()} {last[part]}")
                last[part] = value[0]
                num_reads += 1

    def create() -> None:
        caller = Caller(store)
        for part in range(10, 40):
            caller.create(part, np.full(1000, part, np.int32))
            if (caller.read(part) != part).any():
                problems.append(f"part {part}")

    writers = [threading.Thread(target=write, args=(most_steps * i,)) for i in range(num_writers)]
    others = [threading.Thread(target=read), threading.Thread(target=create)]
    for thread in [*writers, *others]:
        thread.start()
    for thread in writers:
        thread.join(100)
    is_over.set()
    for thread in others:
        thread.join(60)
    assert problems == [] and num_reads >= least_reads
    caller = Caller(store)
    for part, size in sizes.items():
        caller.specs[part] = ((size,), np.dtype(np.float32))
        assert (caller.read(part) == num_written).all()


@pytest.mark.parametrize("size", [1000, 50_000])
def test_bar27_a_read_waits_for_a_change_that_is_half_made(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    caller = Caller().attach()
    caller.create(0, np.zeros(size, np.float32))
    is_half_made, may_go_on = threading.Event(), threading.Event()

    def slowly(old: np.ndarray, payload: np.ndarray, out: np.ndarray) -> None:
        half = size // 2
        np.add(old[:half], payload[:half], out=out[:half])
        is_half_made.set()
        assert may_go_on.wait(30)
        np.add(old[half:], payload[half:], out=out[half:])

    monkeypatch.setitem(store_updates._WHOLE, "assign_add", slowly)
    found: list[np.ndarray] = []
    ones = np.ones(size, np.float32)
    writer = threading.Thread(target=lambda: caller.update("assign_add", 0, ones))
    reader = threading.Thread(target=lambda: found.append(caller.read(0).copy()))
    writer.start()
    assert is_half_made.wait(30)
    reader.start()
    # A reader that does not wait for the change is through by now.
    reader.join(0.1)
    may_go_on.set()
    writer.join(30)
    reader.join(30)
    assert (found[0] == 1).all()


def test_lent_memory_is_seen_whatever_was_made_of_it() -> None:
    block = memory.Block.zeroed((1000, 16), np.dtype(np.float32), is_sparse=False)
    assert not block.is_borrowed()
    for made in (
        lambda lent: memoryview(lent),
        lambda lent: lent.view(np.float32).reshape(16, 1000)[3:5],
        lambda lent: memoryview(lent)[5:9],
        lambda lent: [np.frombuffer(memoryview(lent), np.uint8)],
    ):
        view = made(block.borrow())
        assert block.is_borrowed()
        del view
        assert not block.is_borrowed()
    with pytest.raises(ValueError, match="read-only"):
        block.borrow()[0] = 1
    assert parts.BORROWED_FROM_BYTES <= 1 << 16
