"""Functions of saved models: what they take and return, gradients, and what is refused."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from vocabulary import refused

import replicax as rx

ROW = rx.TensorSpec((None,))
Pair = namedtuple("Pair", "left right")


def through(folder: Path, fn: Any, *specs: Any) -> Any:
    """Saves a function, and returns it as it is loaded."""
    rx.saved_model.save({}, folder, signatures=(fn, list(specs)))
    return rx.saved_model.load(folder).signatures["serving_default"]


def test_structures_of_arguments_and_results(tmp_path: Path) -> None:
    def fn(batch: Any, others: Any) -> Any:
        total = batch["x"] + others[0] + others[1][0]
        return Pair(total, [{"a": total.sum(), 2: None}, "text", 1.5, ()])

    loaded = through(tmp_path, fn, {"x": ROW}, [ROW, (rx.TensorSpec(()),)])
    left, right = loaded({"x": [1.0, 2.0]}, [np.ones(2, np.float32), (3,)])
    np.testing.assert_array_equal(left, [5.0, 6.0])
    assert right == [{"a": 11.0, 2: None}, "text", 1.5, ()]
    by_name = loaded(others=[jnp.ones(1), (0.0,)], batch={"x": jnp.ones(1)})
    np.testing.assert_array_equal(by_name[0], [2.0])
    assert loaded.input_signature == ({"x": ROW}, [ROW, (rx.TensorSpec(()),)])


def test_arguments_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    loaded = through(tmp_path, lambda x, y: x["a"] + y, {"a": ROW}, ROW)
    with refused(ValueError):
        loaded({"b": jnp.ones(2)}, jnp.ones(2))
    with refused(ValueError, "type"):
        loaded({"a": jnp.ones(2, jnp.int32)}, jnp.ones(2))
    with refused(TypeError, "2 arguments"):
        loaded({"a": jnp.ones(2)})
    with refused(ValueError, "size 'b'"):
        loaded({"a": jnp.ones(2)}, jnp.ones(3))


def test_a_function_without_arguments(tmp_path: Path) -> None:
    v = rx.Variable(2.0, name="hidden")
    loaded = through(tmp_path, lambda: v.assign_add(1.0))
    assert [float(loaded()), float(loaded())] == [3.0, 4.0]
    assert float(v) == 2.0


def test_a_variable_that_only_a_function_knows_is_kept(tmp_path: Path) -> None:
    v = rx.Variable([1.0], name="hidden")
    rx.saved_model.save({}, tmp_path, signatures={"f": (lambda x: x * v, [ROW])})
    model = rx.saved_model.load(tmp_path)
    assert [u.name for u in model.variables] == ["hidden"]
    model.variables[0].assign([5.0])
    np.testing.assert_array_equal(model.signatures["f"](jnp.ones(2)), [5.0, 5.0])


def test_the_only_signed_function_is_the_default_signature(tmp_path: Path) -> None:
    class Scale(rx.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = rx.Variable(3.0)

        @rx.function(input_signature=[ROW])
        def scaled(self, x: Any) -> Any:
            return x * self.w

        @rx.function
        def unsigned(self, x: Any) -> Any:
            return x

    class Two(Scale):
        @rx.function(input_signature=[ROW])
        def halved(self, x: Any) -> Any:
            return x / 2.0

    rx.saved_model.save(Scale(), tmp_path / "one")
    one = rx.saved_model.load(tmp_path / "one")
    assert list(one.signatures) == ["serving_default"]
    assert one.signatures["serving_default"] is one.scaled
    assert one.scaled(jnp.ones(2)).tolist() == [3.0, 3.0]
    model = Scale()
    for name, obj, signatures, wanted in (
        ("two", Two(), None, []),
        ("dict", {"f": model.scaled, "again": model.scaled}, None, ["serving_default"]),
        ("named", model, {"serve": model.scaled}, ["serve"]),
        ("none", model, {}, []),
    ):
        rx.saved_model.save(obj, tmp_path / name, signatures=signatures)
        assert list(rx.saved_model.load(tmp_path / name).signatures) == wanted


def test_one_function_under_two_signatures(tmp_path: Path) -> None:
    def double(x: Any) -> Any:
        return x * 2

    whole = rx.TensorSpec((3,), jnp.int32)
    rx.saved_model.save({}, tmp_path, {"float": (double, [ROW]), "int": (double, whole)})
    found = rx.saved_model.load(tmp_path).signatures
    assert found["float"](jnp.ones(5)).dtype == jnp.float32
    assert found["int"](jnp.ones(3, jnp.int32)).dtype == jnp.int32


def test_open_sizes(tmp_path: Path) -> None:
    table = rx.TensorSpec((None, None))
    loaded = through(tmp_path, lambda a, b: (a.sum(1) * b.sum(1), a.shape[1] * a), table, table)
    summed, scaled = loaded(jnp.ones((2, 3)), jnp.ones((2, 7)))
    np.testing.assert_array_equal(summed, [21.0, 21.0])
    np.testing.assert_array_equal(scaled, np.full((2, 3), 3.0))


def test_named_sizes_are_equal(tmp_path: Path) -> None:
    specs: list[Any] = [rx.TensorSpec(("rows", "time")), rx.TensorSpec(("rows", "time"))]  # type: ignore[arg-type]
    loaded = through(tmp_path, lambda a, b: a + b, *specs)
    assert loaded(jnp.ones((2, 3)), jnp.ones((2, 3))).shape == (2, 3)
    with refused(ValueError, "size 'time'"):
        loaded(jnp.ones((2, 3)), jnp.ones((2, 4)))
    table = rx.TensorSpec((None, None))
    with refused(ValueError, "every size"):
        through(tmp_path, lambda a, b: a + b, table, table)


def test_python_that_needs_a_size_is_refused(tmp_path: Path) -> None:
    with refused(ValueError, "every size"):
        through(tmp_path, lambda x: x if x.shape[0] > 5 else -x, ROW)
    with refused(TypeError, "compiler can follow"):
        through(tmp_path, lambda x: float(x.sum()), ROW)
    with refused(ValueError, "TensorSpec with a shape"):
        through(tmp_path, lambda x: x, rx.TensorSpec(None))


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    def calls_back(x: Any) -> Any:
        return jax.pure_callback(np.sin, x, x)

    with refused(NotImplementedError, "calls_back"):
        through(tmp_path, calls_back, rx.TensorSpec((2,)))
    with refused(TypeError, "must return arrays"):
        through(tmp_path, lambda x: object(), ROW)
    with refused(TypeError, "Keys of exported dicts"):
        through(tmp_path, lambda x: {(1, 2): x}, ROW)
    with refused(ValueError, "must exist before"):
        through(tmp_path, lambda x: x + rx.Variable(1.0), ROW)
    assert not rx.saved_model.contains_saved_model(tmp_path)


def test_bad_objects_and_signatures_are_refused(tmp_path: Path) -> None:
    for bad in (rx.Variable(1.0), 3, rx.function(lambda: 1)):
        with refused(TypeError, "object with attributes"):
            rx.saved_model.save(bad, tmp_path)
    with refused(ValueError, "names of attributes"):
        rx.saved_model.save({"not a name": rx.Variable(1.0)}, tmp_path)
    with refused(TypeError, "must be a function"):
        rx.saved_model.save({}, tmp_path, signatures={"f": 3})
    with refused(TypeError, "map names"):
        rx.saved_model.save({}, tmp_path, signatures={1: lambda x: x})


def test_an_error_of_the_users_own_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="mine"):
        through(tmp_path, lambda x: {}["mine"], ROW)


def test_an_empty_batch_gives_empty_results(tmp_path: Path) -> None:
    w = rx.Variable(jnp.ones((3, 2)))
    loaded = through(tmp_path, lambda x: {"y": x @ w, "x": x}, rx.TensorSpec((None, 3)))
    found = loaded(jnp.zeros((0, 3)))
    assert found["y"].shape == (0, 2)
    assert found["x"].shape == (0, 3)
    inside = rx.function(lambda x: loaded(x)["y"])(jnp.zeros((0, 3)))
    assert inside.shape == (0, 2)


def test_an_empty_batch_is_refused_where_values_would_be_made_up(tmp_path: Path) -> None:
    mean = through(tmp_path / "mean", lambda x: x.mean(), ROW)
    with refused(ValueError, "no rows"):
        mean(jnp.zeros(0))
    v = rx.Variable(0.0, name="count")
    write = through(tmp_path / "write", lambda x: (v.assign_add(x.sum()), x)[1], ROW)
    with refused(ValueError, "no rows.*'count'"):
        write(jnp.zeros(0))


@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2")
def test_an_empty_share_of_a_batch(strategy: Any, tmp_path: Path) -> None:
    """T66: the last batch may leave a replica without rows; `fn` still runs on it."""
    square = through(tmp_path, lambda x: x * x, ROW)
    parts = [jnp.full(1, 5.0), jnp.zeros(0)]
    x = strategy.experimental_distribute_values_from_function(
        lambda ctx: parts[ctx.replica_id_in_sync_group]
    )
    found = strategy.experimental_local_results(strategy.run(square, args=(x,)))
    assert [np.asarray(f).tolist() for f in found] == [[25.0], []]


def test_gradients_of_variables_and_arguments(tmp_path: Path) -> None:
    model = {"w": rx.Variable([1.0, 2.0]), "n": rx.Variable(3, trainable=False)}

    def loss(x: Any, labels: Any) -> Any:
        return jnp.sum(model["w"] ** 2 * x) * model["n"] + labels.sum(), labels

    rx.saved_model.save(
        model, tmp_path, {"loss": (loss, [rx.TensorSpec((2,)), rx.TensorSpec((None,), jnp.int32)])}
    )
    again = rx.saved_model.load(tmp_path)
    call = again.signatures["loss"]
    labels = jnp.arange(4)
    grad, aux = rx.grad(lambda: call(jnp.ones(2), labels), again.w, has_aux=True)()
    np.testing.assert_allclose(grad, [6.0, 12.0])
    np.testing.assert_array_equal(aux, labels)
    by_x = jax.grad(lambda x: call(x, labels)[0])
    np.testing.assert_allclose(by_x(jnp.ones(2)), [3.0, 12.0])
    each = jax.vmap(by_x)(jnp.ones((3, 2)))
    np.testing.assert_allclose(each, [[3.0, 12.0]] * 3)


def test_a_gradient_that_could_not_be_saved_is_refused(tmp_path: Path) -> None:
    w = rx.Variable(2.0)

    def halve(x: Any) -> Any:
        return jax.lax.while_loop(lambda y: y > 1.0, lambda y: y / 2, x * w)

    rx.saved_model.save({"w": w}, tmp_path, {"halve": (halve, [rx.TensorSpec(())])})
    again = rx.saved_model.load(tmp_path)
    assert float(again.signatures["halve"](5.0)) == 0.625
    with refused(NotImplementedError, "halve"):
        rx.grad(lambda: again.signatures["halve"](5.0), again.w)()


def test_a_loaded_function_is_compiled_once_per_shape(tmp_path: Path) -> None:
    loaded = through(tmp_path, lambda x: x + 1, ROW)
    for size in (2, 2, 3, 2):
        loaded(jnp.ones(size))
    assert loaded.experimental_get_tracing_count() == 2


def test_objects_that_share_and_contain_each_other(tmp_path: Path) -> None:
    class Node(rx.Module):
        pass

    parent, child = Node(), Node()
    child.v = rx.Variable(1.0)  # type: ignore[attr-defined]
    child.parent = parent  # type: ignore[attr-defined]
    parent.children = (child, child, None, object())  # type: ignore[attr-defined]
    parent.size, parent.unsaved = 3, object()  # type: ignore[attr-defined]
    rx.saved_model.save(parent, tmp_path)
    again = rx.saved_model.load(tmp_path)
    assert again.children[0] is again.children[1]
    assert again.children[0].parent is again
    assert again.children[2:] == (None, None)
    assert again.size == 3
    assert not hasattr(again, "unsaved")
    assert not callable(again)


def test_an_object_that_is_no_module(tmp_path: Path) -> None:
    class Plain:
        def __init__(self) -> None:
            self.v = rx.Variable(4.0)

        @rx.function(input_signature=[ROW])
        def scale(self, x: Any) -> Any:
            return x * self.v

    rx.saved_model.save(Plain(), tmp_path)
    np.testing.assert_array_equal(rx.saved_model.load(tmp_path).scale([2.0]), [8.0])


def test_an_open_size_can_be_counted(tmp_path: Path) -> None:
    class Counter(rx.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = rx.Variable(0, name="rows")

        @rx.function(input_signature=[rx.TensorSpec((None, 2))])
        def count(self, x: Any) -> Any:
            self.rows.assign_add(x.shape[0])
            return x.sum()

    rx.saved_model.save(Counter(), tmp_path / "counter")
    loaded = rx.saved_model.load(tmp_path / "counter")
    for rows in (3, 4):
        loaded.count(np.ones((rows, 2), np.float32))
    assert int(loaded.rows) == 7
