"""TFRecord files and Examples: what TensorFlow wrote, what we write, and damage."""

from __future__ import annotations

import base64
import copy
import gzip
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import replicax as rx
from replicax.tensorflow_files import wire
from replicax.tensorflow_files.example_parsing import (
    FixedLenFeature,
    FixedLenSequenceFeature,
    SparseParts,
    VarLenFeature,
    decode_raw,
    parse_example,
    parse_single_example,
    parse_single_sequence_example,
)
from replicax.tensorflow_files.examples import (
    BytesList,
    Example,
    Feature,
    FeatureList,
    FeatureLists,
    Features,
    FloatList,
    Int64List,
    SequenceExample,
)
from replicax.tensorflow_files.records import RecordWriter, framed, read_records

FILES = Path(__file__).parent.parent / "fixtures" / "tensorflow"
EXPECTED: dict[str, np.ndarray] = dict(np.load(FILES / "expected.npz"))
FACTS: dict[str, Any] = json.loads((FILES / "expected.json").read_text())
EXAMPLES = [base64.b64decode(one) for one in FACTS["examples"]]
SEQUENCES = [base64.b64decode(one) for one in FACTS["sequences"]]
KINDS = [("plain", None), ("plain", ""), ("gzip", "GZIP"), ("zlib", "ZLIB")]


# Files.


@pytest.mark.parametrize(("name", "compression"), KINDS)
def test_files_of_tensorflow_are_read(name: str, compression: str | None) -> None:
    path = FILES / "records" / f"{name}.tfrecord"
    assert list(read_records(path, compression)) == EXAMPLES
    assert list(rx.data.TFRecordDataset(path, compression)) == EXAMPLES


def test_a_file_of_ours_has_the_bytes_of_tensorflow(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "a") as writer:
        for one in EXAMPLES:
            writer.write(one)
    written = (tmp_path / "a").read_bytes()
    assert written == (FILES / "records" / "plain.tfrecord").read_bytes()
    for name, decompress in (("GZIP", gzip.decompress), ("ZLIB", zlib.decompress)):
        with RecordWriter(tmp_path / name, name, level=9) as writer:
            for one in EXAMPLES:
                writer.write(one)
                writer.flush()
        assert decompress((tmp_path / name).read_bytes()) == written
        assert list(read_records(tmp_path / name, name)) == EXAMPLES


def test_every_changed_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a"
    good = b"".join(map(framed, [b"abc", b"", b"\x00" * 10]))
    for offset in range(len(good)):
        path.write_bytes(good[:offset] + bytes([good[offset] ^ 1]) + good[offset + 1 :])
        with pytest.raises(rx.errors.DataLossError, match="checksum"):
            list(read_records(path))


@pytest.mark.parametrize(("name", "compression"), KINDS[1:])
def test_every_cut_is_found(tmp_path: Path, name: str, compression: str) -> None:
    good = (FILES / "records" / f"{name}.tfrecord").read_bytes()
    path = tmp_path / "a"
    whole: list[int] = [0]
    for one in EXAMPLES:
        whole.append(whole[-1] + len(framed(one)))
    for size in range(1, len(good)):
        path.write_bytes(good[:size])
        if not compression and size in whole:
            assert list(read_records(path)) == EXAMPLES[: whole.index(size)]
        else:
            with pytest.raises(rx.errors.DataLossError):
                list(read_records(path, compression))


def test_mistakes_with_files_are_explained(tmp_path: Path) -> None:
    with pytest.raises(rx.errors.NotFoundError, match="does not exist"):
        list(read_records(tmp_path / "nothing"))
    with pytest.raises(rx.errors.InvalidArgumentError, match="BZ2"):
        RecordWriter(tmp_path / "a", "BZ2")
    with pytest.raises(rx.errors.InvalidArgumentError, match="from 0 to 9"):
        RecordWriter(tmp_path / "a", "GZIP", level=10)
    assert not (tmp_path / "a").exists()
    writer = RecordWriter(tmp_path / "a")
    with pytest.raises(rx.errors.ArgumentTypeError, match="SerializeToString"):
        writer.write("text")  # type: ignore[arg-type]
    writer.close()
    writer.close()
    with pytest.raises(rx.errors.ContextError, match="closed"):
        writer.write(b"")
    with pytest.raises(rx.errors.DataLossError, match='pass "GZIP"'):
        list(read_records(FILES / "records" / "gzip.tfrecord"))
    with pytest.raises(rx.errors.DataLossError, match="decompressed"):
        list(read_records(FILES / "records" / "plain.tfrecord", "GZIP"))


# Messages.


def example_like(index: int) -> Example:
    """The example of `make_fixtures.py`."""
    return Example(
        features=Features(
            feature={
                "image": Feature(bytes_list=BytesList(value=[bytes([index]) * 5])),
                "label": Feature(int64_list=Int64List(value=[index - 1])),
                "box": Feature(float_list=FloatList(value=[0.5, index, -1.25, 1e-3])),
                "words": Feature(
                    bytes_list=BytesList(value=[f"w{i}".encode() for i in range(index)])
                ),
                "big": Feature(int64_list=Int64List(value=[-(2**63), 2**63 - 1])),
                "nothing": Feature(),
            }
        )
    )


@pytest.mark.parametrize("index", range(4))
def test_examples_have_the_bytes_of_tensorflow(index: int) -> None:
    made = example_like(index)
    assert made.SerializeToString() == EXAMPLES[index]
    read = Example.FromString(EXAMPLES[index])
    assert read == made and read.ByteSize() == len(EXAMPLES[index])
    features = read.features.feature
    assert features["label"].int64_list.value == [index - 1]
    assert features["big"].int64_list.value == [-(2**63), 2**63 - 1]
    assert features["box"].float_list.value[3] == np.float32(1e-3)
    assert features["nothing"].WhichOneof("kind") is None
    assert features["words"].WhichOneof("kind") == "bytes_list"
    assert pickle.loads(pickle.dumps(read)) == read == copy.deepcopy(read)


def test_sequence_examples_have_the_bytes_of_tensorflow() -> None:
    steps = [Feature(float_list=FloatList(value=[i, i + 0.5])) for i in range(2)]
    tokens = [Feature(int64_list=Int64List(value=range(i))) for i in range(2)]
    lists = {"steps": FeatureList(feature=steps), "tokens": FeatureList(feature=tokens)}
    made = SequenceExample(
        context=Features(feature={"id": Feature(int64_list=Int64List(value=[2]))}),
        feature_lists=FeatureLists(feature_list=lists),
    )
    assert made.SerializeToString() == SEQUENCES[2]
    read = SequenceExample.FromString(SEQUENCES[2])
    assert read == made
    assert len(read.feature_lists.feature_list["steps"].feature) == 2
    assert read.feature_lists.feature_list["steps"].feature[1].float_list.value == [1.0, 1.5]
    assert read.context.feature["id"].int64_list.value == [2]


def test_messages_are_filled_in_place() -> None:
    example = Example()
    example.features.feature["x"].int64_list.value.append(np.int32(3))
    example.features.feature["x"].int64_list.value.extend(np.array([4, 5]))
    example.features.feature["x"].int64_list.value[0] = True
    example.features.feature["y"].CopyFrom(Feature(bytes_list=BytesList(value=[b"a"])))
    again = Example.FromString(example.SerializeToString())
    assert again.features.feature["x"].int64_list.value == [1, 4, 5]
    assert again.features.feature["y"].bytes_list.value == [b"a"]
    assert "z" not in again.features.feature
    sequence = SequenceExample()
    sequence.feature_lists.feature_list["s"].feature.add().float_list.value.append(2)
    assert sequence.feature_lists.feature_list["s"].feature[0].HasField("float_list")
    sequence.Clear()
    assert sequence.SerializeToString() == b""


def test_the_last_kind_of_a_feature_counts() -> None:
    feature = Feature(int64_list=Int64List(value=[1]))
    feature.bytes_list.value.append(b"x")
    assert Feature.FromString(feature.SerializeToString()).WhichOneof("kind") == "bytes_list"
    both = Feature(int64_list=Int64List(value=[1])).SerializeToString()
    both += Feature(float_list=FloatList(value=[1])).SerializeToString()
    assert Feature.FromString(both).WhichOneof("kind") == "float_list"


def test_lists_that_are_not_packed_are_read() -> None:
    numbers = wire.number(1, 7) + wire.number(1, -7)
    floats = wire.single(1, 0.5) + wire.single(1, 1.5)
    entries = [
        wire.octets(1, wire.text(1, "i") + wire.octets(2, wire.octets(3, numbers))),
        wire.octets(1, wire.text(1, "f") + wire.octets(2, wire.octets(2, floats))),
    ]
    data = wire.octets(1, b"".join(entries))
    read = Example.FromString(data).features.feature
    assert read["i"].int64_list.value == [7, -7] and read["f"].float_list.value == [0.5, 1.5]
    parsed = parse_single_example(
        data, {"i": FixedLenFeature([2], np.int64), "f": FixedLenFeature([2], np.float32)}
    )
    assert parsed["i"].tolist() == [7, -7] and parsed["f"].tolist() == [0.5, 1.5]


def test_mistakes_with_messages_are_explained() -> None:
    with pytest.raises(rx.errors.ArgumentTypeError, match="encode"):
        BytesList(value=["text"])  # type: ignore[list-item]
    with pytest.raises(rx.errors.ArgumentTypeError, match="must be a list"):
        BytesList(value=b"text")  # type: ignore[arg-type]
    with pytest.raises(rx.errors.ArgumentTypeError, match="Convert it"):
        Int64List(value=[1.5])  # type: ignore[list-item]
    with pytest.raises(rx.errors.ArgumentTypeError, match="64 bits"):
        Int64List(value=[2**63])
    with pytest.raises(rx.errors.ArgumentTypeError, match="flatten"):
        FloatList(value=np.zeros((2, 2)))  # type: ignore[arg-type]
    with pytest.raises(rx.errors.ArgumentTypeError, match=r"Int64List\(value="):
        Feature(int64_list=FloatList(value=[1]))  # type: ignore[arg-type]
    with pytest.raises(rx.errors.UnsupportedError, match="CopyFrom"):
        Features().feature["x"] = Feature()
    for data in (EXAMPLES[1][:-1], b"\xff" * 20, b"\x0f"):
        with pytest.raises(rx.errors.InvalidArgumentError, match="serialized Example"):
            Example.FromString(data)
        with pytest.raises(rx.errors.InvalidArgumentError, match="serialized Example"):
            parse_single_example(data, {})
    with pytest.raises(rx.errors.ArgumentTypeError, match="must be bytes"):
        Example.FromString("text")  # type: ignore[arg-type]


# Parsing.

FEATURES = {
    "image": FixedLenFeature([], "string"),
    "label": FixedLenFeature([1], np.int64),
    "box": FixedLenFeature([2, 2], np.float32),
    "words": VarLenFeature(str),
    "absent": FixedLenFeature([2], np.float32, default_value=[1.5, 2.5]),
    "nothing": FixedLenFeature([], np.int64, default_value=-7),
    "padded": FixedLenSequenceFeature([], np.float32, allow_missing=True),
}


def test_a_batch_parses_as_in_tensorflow() -> None:
    parsed = parse_example(np.array(EXAMPLES, object), FEATURES)
    for name in ("label", "box", "absent", "nothing", "padded"):
        expected = EXPECTED[f"examples|{name}"]
        assert parsed[name].dtype == expected.dtype and parsed[name].shape == expected.shape
        np.testing.assert_array_equal(parsed[name], expected)
    assert parsed["image"].tolist() == [base64.b64decode(one) for one in FACTS["examples|image"]]
    words = parsed["words"]
    np.testing.assert_array_equal(words.indices, EXPECTED["examples|words indices"])
    assert words.dense_shape == tuple(EXPECTED["examples|words dense_shape"])
    assert [one.decode() for one in words.values] == FACTS["examples|words"]
    padded = parse_example(EXAMPLES, {"words": FixedLenSequenceFeature([], str, True, "-")})
    assert [[w.decode() for w in row] for row in padded["words"]] == FACTS["examples|padded words"]


def test_one_example_parses_as_one_of_a_batch() -> None:
    features = {**FEATURES, "words_in_a_row": FixedLenSequenceFeature([], str, True)}
    for index, data in enumerate(EXAMPLES):
        parsed = parse_single_example(data, features)
        assert parsed["image"] == bytes([index]) * 5
        assert parsed["label"].tolist() == [index - 1] and parsed["box"].shape == (2, 2)
        assert parsed["nothing"].shape == () and int(parsed["nothing"]) == -7
        assert isinstance(parsed["words"], SparseParts)
        assert parsed["words"].dense_shape == (index,)
        assert parsed["words"].indices.tolist() == [[i] for i in range(index)]
        assert parsed["padded"].shape == (0,)


def test_the_result_of_a_var_len_feature_can_be_a_sparse_tensor() -> None:
    parsed = parse_single_example(EXAMPLES[3], {"big": VarLenFeature("int64")}, rx.SparseTensor)
    assert isinstance(parsed["big"], rx.SparseTensor) and parsed["big"].shape == (2,)


@pytest.mark.parametrize("index", range(3))
def test_sequences_parse_as_in_tensorflow(index: int) -> None:
    context, lists = parse_single_sequence_example(
        SEQUENCES[index],
        {"id": FixedLenFeature([], np.int64)},
        {"steps": FixedLenSequenceFeature([2], np.float32), "tokens": VarLenFeature(np.int64)},
    )
    assert int(context["id"]) == EXPECTED[f"sequence {index}|id"]
    np.testing.assert_array_equal(lists["steps"], EXPECTED[f"sequence {index}|steps"])
    assert lists["steps"].shape == EXPECTED[f"sequence {index}|steps"].shape
    tokens = lists["tokens"]
    for name in ("indices", "values", "dense_shape"):
        expected = EXPECTED[f"sequence {index}|tokens {name}"]
        np.testing.assert_array_equal(getattr(tokens, name), expected)


def test_decode_raw_as_in_tensorflow() -> None:
    raw = [b"\x01\x02\x03\x04", b"\x05\x06\x07\x08"]
    np.testing.assert_array_equal(decode_raw(raw, np.uint8), EXPECTED["decode_raw|uint8"])
    np.testing.assert_array_equal(
        decode_raw(np.array(raw, object), "int16", little_endian=False),
        EXPECTED["decode_raw|int16 big"],
    )
    np.testing.assert_array_equal(
        decode_raw([b"\x01", b"\x02\x03\x04\x05\x06"], np.uint8, fixed_length=4),
        EXPECTED["decode_raw|fixed"],
    )
    assert decode_raw(b"\x01\x02", "uint8").tolist() == [1, 2]
    with pytest.raises(rx.errors.InvalidArgumentError, match="one length"):
        decode_raw([b"a", b"bc"], np.uint8)
    with pytest.raises(rx.errors.InvalidArgumentError, match="3 bytes"):
        decode_raw(b"abc", np.int16)


@pytest.mark.parametrize(
    ("features", "match"),
    [
        ({"gone": FixedLenFeature([], np.int64)}, "is required"),
        ({"nothing": FixedLenFeature([], np.int64)}, "is required"),
        ({"box": FixedLenFeature([3], np.float32)}, "the example has 4"),
        ({"words": FixedLenFeature([], str)}, "the example has 2"),
        ({"box": FixedLenFeature([4], np.int64)}, "holds float32"),
        ({"box": FixedLenFeature([None], np.float32)}, "shape of a feature must be known"),
        ({"x": FixedLenFeature([2], np.float32, [1.0])}, "it has 1"),
        ({"x": FixedLenFeature([2], np.float64)}, "float32, int64 or string"),
        ({"x": FixedLenSequenceFeature([], np.float32)}, "allow_missing=True"),
        ({"box": FixedLenSequenceFeature([3], np.float32, True)}, "multiple of 3"),
    ],
)
def test_examples_that_do_not_fit_are_refused(features: Any, match: str) -> None:
    with pytest.raises(rx.errors.InvalidArgumentError, match=match):
        parse_single_example(EXAMPLES[2], features)
    with pytest.raises(rx.errors.InvalidArgumentError, match=match):
        parse_example([EXAMPLES[2]], features)


def test_descriptions_that_are_refused() -> None:
    with pytest.raises(rx.errors.ArgumentTypeError, match="parse_single_example"):
        parse_example(EXAMPLES[0], FEATURES)  # type: ignore[arg-type]
    with pytest.raises(rx.errors.UnsupportedError, match="VarLenFeature"):
        parse_single_example(EXAMPLES[0], {"x": object()})  # type: ignore[dict-item]
    steps: Any = [
        ({"steps": FixedLenFeature([2], np.float32)}, "FixedLenSequenceFeature"),
        ({"steps": FixedLenSequenceFeature([3], np.float32)}, "item 0 has 2"),
        ({"gone": FixedLenSequenceFeature([3], np.float32)}, "is required"),
    ]
    for features, match in steps:
        with pytest.raises(rx.errors.InvalidArgumentError, match=match):
            parse_single_sequence_example(SEQUENCES[2], None, features)
    gone = {"gone": FixedLenSequenceFeature([3], np.float32, allow_missing=True)}
    _, lists = parse_single_sequence_example(SEQUENCES[2], None, gone)
    assert lists["gone"].shape == (0, 3)


def test_a_dataset_parses_records() -> None:
    dataset = rx.data.TFRecordDataset(FILES / "records" / "plain.tfrecord").map(
        lambda record: parse_single_example(record, {"label": FixedLenFeature([], np.int64)})
    )
    assert [int(one["label"]) for one in dataset] == [-1, 0, 1, 2]
    batched = next(iter(dataset.batch(4)))
    assert batched["label"].tolist() == [-1, 0, 1, 2]
