"""TensorFlow checkpoints, read without TensorFlow: values, names, places, damage."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax.tensorflow_files import checksums, slice_keys, sstable, wire
from replicax.tensorflow_files.checkpoint_paths import find_prefix, latest_prefix
from replicax.tensorflow_files.object_graph import ObjectGraph
from replicax.tensorflow_files.tensor_bundle import TensorBundle

FILES = Path(__file__).parent.parent / "fixtures" / "tensorflow"
EXPECTED: dict[str, np.ndarray] = dict(np.load(FILES / "expected.npz"))
FACTS: dict[str, Any] = json.loads((FILES / "expected.json").read_text())
PREFIXES = sorted(key.partition("|")[0] for key in FACTS if key.endswith("|variables"))
KERNEL = "model/dense/kernel/.ATTRIBUTES/VARIABLE_VALUE"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The prefix of a checkpoint that a test may damage."""
    shutil.copytree(FILES / "module", tmp_path / "module")
    return tmp_path / "module" / "ckpt-2"


def change(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x40
    path.write_bytes(data)


# Values.


def test_all_fixtures_are_known() -> None:
    assert len(PREFIXES) == 12


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_tensor_is_what_tensorflow_reads(prefix: str) -> None:
    loaded = rx.train.load_tf_checkpoint(FILES / prefix)
    listed = [(name, tuple(shape), dtype) for name, shape, dtype in FACTS[f"{prefix}|variables"]]
    assert rx.train.list_variables(FILES / prefix) == listed
    assert list(loaded) == [name for name, _, _ in listed] and len(loaded) == len(listed)
    for name, shape, dtype in listed:
        value = loaded[name]
        assert value.shape == shape
        if dtype == "string":
            texts = [base64.b64decode(one) for one in FACTS[f"{prefix}|{name}"]]
            assert value.ravel().tolist() == texts
        else:
            expected = EXPECTED[f"{prefix}|{name}"]
            assert value.dtype.name == dtype
            np.testing.assert_array_equal(value.astype(expected.dtype), expected)
        np.testing.assert_array_equal(rx.train.load_variable(FILES / prefix, name), value)


def test_bfloat16_and_bool_keep_their_types() -> None:
    loaded = rx.train.load_tf_checkpoint(FILES / "dtypes/all")
    assert loaded["bfloat16"].dtype == jnp.bfloat16
    assert loaded["bool"].tolist() == [[False, True, True], [True, True, True]]
    assert loaded["empty"].shape == (0, 3) and loaded["no_text"].shape == (0,)


def test_an_index_of_several_blocks() -> None:
    loaded = rx.train.load_tf_checkpoint(FILES / "many/many")
    assert [float(loaded[name]) for name in sorted(loaded)] == list(range(120))


def test_parts_of_a_variable_become_one_array() -> None:
    rows = rx.train.load_variable(FILES / "sliced/parts", "rows")
    assert rows.shape == (5, 3) and rows[2, 0] == 20.0 and rows[4, 0] == 40.0


def test_arrays_can_be_written_to() -> None:
    value = rx.train.load_variable(FILES / "module/ckpt-1", KERNEL)
    value += 1


# Names.


def test_names_are_tensors_or_object_paths() -> None:
    loaded = rx.train.load_tf_checkpoint(FILES / "module/ckpt-2")
    for name in (KERNEL, "model/dense/kernel"):
        assert name in loaded
        np.testing.assert_array_equal(loaded[name], EXPECTED[f"module/ckpt-2|{KERNEL}"])
    # An object with several paths is stored under one of them.
    np.testing.assert_array_equal(loaded["model/blocks/0/kernel"], loaded["model/shared"])
    assert loaded.object_paths["model/dense/kernel"] == KERNEL
    assert loaded.object_paths["step"] == "step/.ATTRIBUTES/VARIABLE_VALUE"
    assert set(loaded.object_paths.values()) == set(loaded)


def test_slot_variables_have_object_paths() -> None:
    loaded = rx.train.load_tf_checkpoint(FILES / "keras2/legacy_adam-1")
    path = "model/layer_with_weights-0/kernel/.OPTIMIZER_SLOT/optimizer/m"
    assert loaded[path].shape == (4, 3)
    assert set(loaded.object_paths.values()) == set(loaded)


def test_a_name_that_is_absent_is_explained() -> None:
    loaded = rx.train.load_tf_checkpoint(FILES / "module/ckpt-2")
    assert "model/dense/w" not in loaded and 3 not in loaded
    with pytest.raises(rx.errors.NotFoundError, match="model/blocks/0/bias"):
        loaded["model/dense/w"]


def test_the_methods_of_a_checkpoint_reader() -> None:
    loaded = rx.train.load_tf_checkpoint(FILES / "sharded/merged")
    assert loaded.get_variable_to_shape_map() == {
        "v0": [2, 2], "v1": [2, 2], "w0": [3], "w1": [3]
    }  # fmt: skip
    assert loaded.get_variable_to_dtype_map()["w0"] == "int32"
    assert loaded.has_tensor("v0") and not loaded.has_tensor("v2")
    assert loaded.get_tensor("w1").tolist() == [10, 10, 10]


# Places.


def test_directories_and_saved_models_are_places_of_checkpoints() -> None:
    assert rx.train.latest_checkpoint(FILES / "module") == str(FILES / "module" / "ckpt-2")
    assert int(rx.train.load_variable(FILES / "module", "step")) == 42
    for place in ("saved_model", "saved_model/variables", "saved_model/variables/variables"):
        assert rx.train.load_variable(FILES / place, "factor").tolist() == [2.0, 2.125, 2.25]
    assert find_prefix(FILES) is None and find_prefix(FILES / "nothing") is None


def test_a_state_file_from_another_place(copied: Path) -> None:
    state = copied.parent / "checkpoint"
    state.write_text('model_checkpoint_path: "/old/place/ckpt-1"\n')
    assert latest_prefix(copied.parent) == copied.parent / "ckpt-1"
    state.write_text(f'model_checkpoint_path: "{copied}"\n')
    assert latest_prefix(copied.parent) == copied
    for text in ("", 'model_checkpoint_path: "ckpt-9"', 'model_checkpoint_path: "\\x"', "\xff"):
        state.write_text(text, encoding="latin-1")
        assert latest_prefix(copied.parent) is None
        assert rx.train.latest_checkpoint(copied.parent) is None


def test_own_checkpoints_come_before_those_of_tensorflow(copied: Path) -> None:
    path = rx.train.Checkpoint(v=rx.Variable(1.0)).save(copied.parent / "own")
    assert rx.train.latest_checkpoint(copied.parent) == path


def test_a_path_without_a_checkpoint_is_explained(tmp_path: Path) -> None:
    with pytest.raises(rx.errors.NotFoundError, match=r"a prefix has no `\.index`"):
        rx.train.load_tf_checkpoint(tmp_path)
    with pytest.raises(rx.errors.NotFoundError, match=r"without `\.index`"):
        TensorBundle(tmp_path / "ckpt-1")


# Damage.


def test_every_changed_byte_of_the_index_is_found(copied: Path) -> None:
    index = copied.with_name("ckpt-2.index")
    good = index.read_bytes()
    for offset in range(len(good)):
        change(index, offset)
        # The footer is not in a checksum: it has padding, and handles of blocks that are.
        if not len(good) - 48 <= offset < len(good) - 8:
            with pytest.raises(rx.errors.DataLossError):
                rx.train.load_tf_checkpoint(copied)
        index.write_bytes(good)
    rx.train.load_tf_checkpoint(copied)


def test_every_cut_of_the_index_is_found(copied: Path) -> None:
    index = copied.with_name("ckpt-2.index")
    good = index.read_bytes()
    for size in range(0, len(good), 7):
        index.write_bytes(good[:size])
        with pytest.raises(rx.errors.DataLossError):
            rx.train.load_tf_checkpoint(copied)


def test_every_changed_byte_of_the_data_is_found(copied: Path) -> None:
    data = copied.with_name("ckpt-2.data-00000-of-00001")
    good = data.read_bytes()
    bundle = TensorBundle(copied)
    assert sum(entry.size for entry in bundle.entries.values()) == len(good)
    for name, entry in bundle.entries.items():
        for offset in {0, entry.size // 2, entry.size - 1}:
            change(data, entry.offset + offset)
            with pytest.raises(rx.errors.DataLossError, match="checksum"):
                bundle.read(name)
            data.write_bytes(good)
        bundle.read(name)


def test_damaged_texts_are_found(tmp_path: Path) -> None:
    for name in ("all.index", "all.data-00000-of-00001"):
        shutil.copy(FILES / "dtypes" / name, tmp_path / name)
    data = tmp_path / "all.data-00000-of-00001"
    good = data.read_bytes()
    bundle = TensorBundle(tmp_path / "all")
    (name,) = (name for name in bundle.entries if name.startswith("text/"))
    entry = bundle.entries[name]
    for offset in range(entry.size):
        change(data, entry.offset + offset)
        with pytest.raises(rx.errors.DataLossError):
            bundle.read(name)
        data.write_bytes(good)


def test_a_data_file_that_is_cut_or_missing(copied: Path) -> None:
    data = copied.with_name("ckpt-2.data-00000-of-00001")
    data.write_bytes(data.read_bytes()[:-1])
    v = rx.Variable(0, name="step")
    with pytest.raises(rx.errors.DataLossError, match="ends within"):
        rx.train.Checkpoint(step=v).restore(copied)
    data.unlink()
    with pytest.raises(rx.errors.DataLossError, match="missing"):
        rx.train.load_variable(copied, KERNEL)
    with pytest.raises(rx.errors.DataLossError, match=r"ckpt-2\.data-00000-of-00001"):
        rx.train.Checkpoint(step=v).restore(copied)
    assert int(v) == 0


def test_a_shard_that_is_missing(tmp_path: Path) -> None:
    shutil.copytree(FILES / "sharded", tmp_path / "sharded")
    (tmp_path / "sharded" / "merged.data-00001-of-00002").unlink()
    loaded = rx.train.load_tf_checkpoint(tmp_path / "sharded" / "merged")
    assert loaded["v0"].shape == (2, 2)
    with pytest.raises(rx.errors.DataLossError, match="data-00001-of-00002"):
        loaded["v1"]


# Indices that TensorFlow does not write, but could: made here.


def table(entries: list[tuple[bytes, bytes]], compression: int = 0) -> bytes:
    """A sorted string table with one block, and keys that share prefixes."""

    def block(items: list[tuple[bytes, bytes]]) -> bytes:
        out, before = b"", b""
        for key, value in items:
            shared = len(key) - len(key.removeprefix(before)) if key.startswith(before) else 0
            rest = key[shared:]
            out += b"".join(map(wire.varint, (shared, len(rest), len(value)))) + rest + value
            before = key
        return out + bytes(4) + (1).to_bytes(4, "little")

    def written(content: bytes, kind: int) -> bytes:
        data = content + bytes([kind])
        return data + checksums.masked(checksums.crc32c(data)).to_bytes(4, "little")

    first = written(block(entries), compression)
    handle = wire.varint(0) + wire.varint(len(first) - 5)
    second = written(block([(b"\xff", handle)]), 0)
    index = wire.varint(len(first)) + wire.varint(len(second) - 5)
    third = written(block([]), 0)
    metadata = wire.varint(len(first + second)) + wire.varint(len(third) - 5)
    footer = (metadata + index).ljust(40, b"\0")
    return first + second + third + footer + bytes.fromhex("57fb808b247547db")


def test_a_table_of_our_own_is_read() -> None:
    entries = [(b"", b"h"), (b"a", b"1"), (b"ab", b"2"), (b"abc", b""), (b"b", b"3")]
    assert list(sstable.read_table(table(entries))) == entries


HEADER = wire.number(1, 1)


@pytest.mark.parametrize(
    ("data", "kind", "match"),
    [
        (table([(b"", HEADER)], compression=1), rx.errors.UnsupportedError, "snappy"),
        (table([(b"a", b"")]), rx.errors.DataLossError, "no header"),
        (table([(b"", HEADER + wire.number(2, 1))]), rx.errors.UnsupportedError, "little-endian"),
        (
            table([(b"", HEADER + wire.octets(3, wire.number(2, 9)))]),
            rx.errors.UnsupportedError,
            "version 9",
        ),
        (table([(b"", b"\xff")]), rx.errors.DataLossError, "header"),
        (table([(b"", HEADER), (b"a", b"\x0b")]), rx.errors.DataLossError, "not readable"),
        (table([(b"", HEADER), (b"\xff", b"")]), rx.errors.DataLossError, "UTF-8"),
    ],
)
def test_an_index_that_is_refused(
    tmp_path: Path, data: bytes, kind: type[Exception], match: str
) -> None:
    (tmp_path / "a.index").write_bytes(data)
    with pytest.raises(kind, match=match):
        TensorBundle(tmp_path / "a")


def test_types_without_arrays_and_sizes_that_differ_are_refused(tmp_path: Path) -> None:
    resource = wire.number(1, 20)
    too_long = wire.number(1, 1) + wire.number(5, 8)
    hole = (
        wire.number(1, 1)
        + wire.octets(2, wire.octets(2, wire.number(1, 4)))
        + wire.octets(7, wire.octets(1, wire.number(2, 2)))
    )
    part = wire.number(1, 1) + wire.octets(2, wire.octets(2, wire.number(1, 2)))
    part += wire.number(5, 8) + wire.varint(6 << 3 | wire.FIXED32)
    part += checksums.masked(checksums.crc32c(bytes(8))).to_bytes(4, "little")
    key = slice_keys.key_of_slice("hole", ((0, 2),))
    entries = [
        (b"", HEADER), (key, part), (b"hole", hole), (b"long", too_long), (b"res", resource)
    ]  # fmt: skip
    (tmp_path / "a.index").write_bytes(table(entries))
    (tmp_path / "a.data-00000-of-00001").write_bytes(bytes(8))
    bundle = TensorBundle(tmp_path / "a")
    assert list(bundle.entries) == ["hole", "long", "res"]
    with pytest.raises(rx.errors.UnsupportedError, match="resource"):
        bundle.read("res")
    with pytest.raises(rx.errors.DataLossError, match="has 8 bytes"):
        bundle.read("long")
    with pytest.raises(rx.errors.DataLossError, match="2 of 4 values"):
        bundle.read("hole")


@pytest.mark.parametrize("value", [0, 63, -64, 64, -65, 8191, 8192, 2**31, -(2**40), 2**62])
def test_numbers_in_keys_sort_as_numbers(value: int) -> None:
    keys = [slice_keys.key_of_slice("v", ((n, 1),)) for n in (value - 1, value, value + 1)]
    assert keys == sorted(keys) and len(set(keys)) == 3


def test_an_object_graph_that_refers_to_nothing_is_refused() -> None:
    node = wire.octets(1, wire.octets(1, wire.number(1, 5) + wire.text(2, "a")))
    with pytest.raises(wire.WireError, match="does not have"):
        ObjectGraph(node)
    assert ObjectGraph(b"").paths() == {}
