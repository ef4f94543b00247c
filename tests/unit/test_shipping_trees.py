"""Results as trees of nodes: what goes in comes out, and nothing else is let in."""

from __future__ import annotations

import collections
import math
import random
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import msgspec
import numpy as np
import pytest
from vocabulary import refused

from replicax.foundation import errors
from replicax.protocol import trees
from replicax.protocol.trees import DTYPES, Array, Dict, Integer, Items, NamedTuple, Node

Point = collections.namedtuple("Point", ["x", "y"])


def travel(value: Any, **hooks: Any) -> Any:
    encoded = trees.encode(value, hooks.get("encode_other"))
    assert len(encoded.tree) <= encoded.header_bytes
    buffers = [memoryview(b).tobytes() for b in encoded.buffers]
    return trees.decode(encoded.tree, buffers, hooks.get("decode_other"))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a).__name__ != type(b).__name__:
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def random_tree(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(15 if depth else 11)
    if kind == 0:
        return rng.choice([None, True, False, math.inf, math.nan, -0.0])
    if kind == 1:
        return rng.choice([-1, 1]) * rng.getrandbits(rng.choice([1, 63, 64, 200, 60_000]))
    if kind == 2:
        return complex(rng.random(), rng.random())
    if kind == 3:
        return "".join(rng.choices("aé漢\0", k=rng.choice([0, 3, 5_000])))
    if kind == 4:
        return rng.randbytes(rng.choice([0, 3, 5_000]))
    if kind < 11:
        shape = tuple(rng.choices([0, 1, 2, 3], k=rng.randrange(4)))
        dtype = rng.choice(list(DTYPES.values()))
        data = np.frombuffer(rng.randbytes(math.prod(shape) * dtype.itemsize), np.uint8)
        return np.array(data).view(dtype).reshape(shape)
    items = [random_tree(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 11:
        return items
    if kind == 12:
        return tuple(items)
    if kind == 13:
        return Point(items, None)
    keys = rng.sample(["a", 7, None, 2.5, ("b", (1, None)), False], len(items))
    return dict(zip(keys, items, strict=True))


def test_T115_random_structures_come_back_as_they_were() -> None:
    rng = random.Random(4)
    for _ in range(300):
        value = random_tree(rng, 4)
        assert same(value, travel(value)), value


def test_arrays_of_jax_and_scalars_become_arrays_of_numpy() -> None:
    came = travel([jnp.ones((2, 3), jnp.bfloat16), np.float32(2), np.arange(4)[::2], np.str_("s")])
    assert [type(c) for c in came] == [np.ndarray, np.ndarray, np.ndarray, str]
    assert came[0].dtype == ml_dtypes.bfloat16 and came[0].shape == (2, 3)
    assert came[1].shape == () and came[1] == 2 and came[2].tolist() == [0, 2]
    big_endian = np.arange(3, dtype=">i4")
    assert travel(big_endian).tolist() == [0, 1, 2]


def test_results_are_snapshots_and_their_own() -> None:
    mine = np.zeros(3)
    encoded = trees.encode(mine)
    mine[:] = 1
    came = trees.decode(encoded.tree, encoded.buffers)
    came += 5
    assert came.tolist() == [5, 5, 5]
    assert trees.decode(encoded.tree, encoded.buffers).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [1, 2, object()]}, r"the result at \['a'\]\[2\] is a <class 'object'>"),
        (Point(1, {2}), r"at \.y is a <class 'set'>"),
        ([np.array(["a"])], r"at \[0\] is a <class 'numpy.ndarray'> of type <U1"),
        ([np.array([object()])], r"of type object"),
        ({Point(1, 2): 3}, r"a dict with a key of <class '.*Point'>"),
        ("\ud800", "no valid Unicode"),
        (lambda: 0, r"the result is a <class 'function'>"),
        ([jax.random.key(0)], r"at \[0\] is a .* that does not become an array"),
    ],
)
def test_bad_result_is_named_with_its_place(value: Any, words: str) -> None:
    with pytest.raises(errors.ArgumentTypeError, match=words):
        trees.encode(value)


def test_bounds_of_depth_and_number() -> None:
    deep: Any = 0
    for _ in range(trees.DEEPEST):
        deep = [deep]
    assert travel(deep)
    with pytest.raises(errors.ResourceExhaustedError, match="levels"):
        trees.encode([deep])
    with pytest.raises(errors.ResourceExhaustedError, match="100,000 values"):
        trees.encode([0] * (trees.MOST_NODES + 1))
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(errors.ResourceExhaustedError):
        trees.encode(endless)


@pytest.mark.parametrize(
    ("node", "buffers"),
    [
        (Array("float32", (2,)), [b"1234567"]),
        (Array("float32", (2,)), []),
        (None, [b""]),
        (Array("float32", (-1, -2)), [b"12345678"]),
        (Array("float32", (0, 2**63)), [b""]),
        (Array("float32", (1,) * 70), [b"1234"]),
        (Array("O", (1,)), [b"12345678"]),
        (Array("int32", (2**31, 2**31, 2**31)), [b"1234"]),
        (Integer("__import__('os')"), []),
        (Integer("9" * 5000), []),
        (Array("str", (2,)), [b"\xff\xff"]),
        (Array("bytes", (1, 2)), [b"x"]),
        (Dict(["a"], []), []),
        (Dict(["a"] * 2, [None] * 2), []),
        (Dict([Items("list", [])], [None]), []),
        (Dict([Array("uint8", ())], [None]), [b"x"]),
        (NamedTuple("os.system", ("a",), [None]), []),
        (NamedTuple("A", ("a, b=1",), [None]), []),
        (NamedTuple("A", ("_a",), [None]), []),
        (NamedTuple("A", ("class",), [None]), []),
        (NamedTuple("A", (), [None]), []),
        (Items("pickle", ["cos\nsystem\n."]), []),
        (Items("variable", [1]), []),
    ],
)
def test_bar43_malformed_trees_are_refused(node: Node, buffers: list[bytes]) -> None:
    with pytest.raises(errors.ProtocolError):
        trees.decode(msgspec.msgpack.encode(node), buffers)


@pytest.mark.parametrize(
    "value",
    [
        ["Pickle", "cos\nsystem\n."],
        ["Complex", 1.0],
        ["Integer", 7],
        ["Array", "float32", [1.5]],
        ["Array", "float32", None],
        ["Items", "list", {}],
        ["Items", "list", [{}]],
        ["Items", "list", [b"x"]],
        [],
        {},
        b"x",
    ],
)
def test_bar43_what_is_no_tree_is_refused(value: Any) -> None:
    with pytest.raises(errors.ProtocolError):
        trees.decode(msgspec.msgpack.encode(value), [])


@pytest.mark.parametrize("wire", [b"", b"\xc1", b"\xc0\xc0", b"\x93\xa5Items\xa4list" * 50_000])
def test_bar43_what_is_no_msgpack_is_refused(wire: bytes) -> None:
    with pytest.raises(errors.ProtocolError):
        trees.decode(wire, [])


def test_bar43_deep_trees_are_refused() -> None:
    node: Node = None
    for _ in range(trees.DEEPEST + 1):
        node = Items("list", [node])
    with pytest.raises(errors.ProtocolError):
        trees.decode(msgspec.msgpack.encode(node), [])


def test_a_result_that_is_too_large_is_refused_with_its_size_before_it_is_copied() -> None:
    # Takes no memory until somebody writes to it, or copies it.
    half = np.broadcast_to(np.zeros((), np.uint8), (3 << 29,))
    text = r"2,147,483,648 bytes \(2 GiB\), but it has 3,221,225,472 \(3.0 GiB, "
    with refused(errors.ResourceExhaustedError, text + r"3,221,225,472 of them at \['b'\]"):
        trees.encode({"a": 1, "b": np.broadcast_to(half, (2, 3 << 29))})


def test_named_tuples_of_one_kind_share_a_type() -> None:
    a, b = travel([Point(1, 2), Point(3, 4)])
    assert type(a) is type(b) and a.x == 1 and a._fields == ("x", "y")


def test_hooks_carry_objects_of_higher_layers() -> None:
    class Pair:
        def __init__(self, *items: Any) -> None:
            self.items = items

    came = travel(
        {"p": Pair(np.arange(2), "x")},
        encode_other=lambda v: ("pair", v.items) if isinstance(v, Pair) else None,
        decode_other=lambda kind, items: (kind, items),
    )
    assert came["p"][0] == "pair" and came["p"][1][1] == "x"
