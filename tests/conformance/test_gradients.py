"""`rx.value_and_grad`: the same gradients as `jax.grad`, in every executor (S34, S46, S48, T40)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from vocabulary import copies
from worker_groups import replica_results

import replicax as rx

SUM, MEAN = rx.VariableAggregation.SUM, rx.VariableAggregation.MEAN
ON_READ = rx.VariableSynchronization.ON_READ
SOME = ("one_device", "mirrored_2", "virtual_2", "central_2")
FEW = ("mirrored_2", "virtual_2")
TWO = ("mirrored_2", "virtual_2", "central_2", "tpu_2", "minimal_2")


def per_replica(strategy: Any, make: Any) -> Any:
    return strategy.experimental_distribute_values_from_function(
        lambda c: make(c.replica_id_in_sync_group)
    )


def local(strategy: Any, value: Any) -> list[Any]:
    """Returns the value of each replica, also where all returned one object."""
    found = replica_results(strategy, value)
    return list(found) * (strategy.num_replicas_in_sync // len(found))


def loss_of(w: Any, b: Any, x: Any) -> Any:
    return jnp.sum(jnp.tanh(x @ w + b) ** 2)


def inputs(i: int) -> Any:
    return jnp.linspace(-1.0, 1.0 + i, 6).reshape(2, 3)


W = jnp.linspace(-0.5, 0.7, 12).reshape(3, 4)
B = jnp.linspace(0.1, 0.4, 4)


@pytest.mark.every_strategy
@pytest.mark.strategies("default", "mirrored_4", "virtual_2", "central_2")
def test_gradients_equal_jax_grad(strategy: Any, run: Any) -> None:
    with strategy.scope():
        w, b = rx.Variable(W), rx.Variable(B)

    def fn(x: Any) -> Any:
        return rx.value_and_grad(lambda x: loss_of(w.value(), b.value(), x), [w, {"b": b}])(x)

    value, (grad_w, grads) = run(strategy, fn, args=(per_replica(strategy, inputs),))
    for i in range(strategy.num_replicas_in_sync):
        expected, (dw, db) = jax.value_and_grad(loss_of, (0, 1))(W, B, inputs(i))
        np.testing.assert_allclose(local(strategy, value)[i], expected, rtol=1e-5)
        np.testing.assert_allclose(local(strategy, grad_w)[i], dw, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(local(strategy, grads["b"])[i], db, rtol=1e-5, atol=1e-6)


class Params(NamedTuple):
    w: Any
    b: Any


def test_structures_of_variables_give_structures_of_gradients() -> None:
    w, b = rx.Variable(W), rx.Variable(B)
    loss = lambda: loss_of(w.value(), b.value(), inputs(0))  # noqa: E731
    assert rx.grad(loss, w)().shape == (3, 4)
    named = rx.grad(loss, Params(w, b))()
    assert isinstance(named, Params) and named.b.shape == (4,)
    assert rx.grad(loss, [])() == []
    assert rx.grad(loss, (w, [b]))()[1][0].shape == (4,)
    twice = rx.grad(loss, [w, w])()
    np.testing.assert_allclose(twice[0], named.w, rtol=1e-6)
    np.testing.assert_allclose(twice[1], named.w, rtol=1e-6)


@pytest.mark.strategies(*FEW)
def test_has_aux(strategy: Any, run: Any) -> None:
    with strategy.scope():
        w = rx.Variable(3.0)

    def fn(x: Any) -> Any:
        def loss(x: Any, scale: Any = 1.0) -> Any:
            y = w * x * scale
            return y * y, {"y": y, "note": "text", "w": w.value()}

        (value, aux), grad = rx.value_and_grad(loss, w, has_aux=True)(x, scale=2.0)
        grad_again, aux_again = rx.grad(loss, w, has_aux=True)(x, scale=2.0)
        return value, aux["y"], aux["note"], aux_again["w"], grad, grad_again

    value, y, note, held, grad, again = run(strategy, fn, args=(jnp.asarray(2.0),))
    assert float(local(strategy, value)[-1]) == 144.0
    assert float(local(strategy, y)[-1]) == 12.0
    assert note == "text"
    assert float(local(strategy, held)[-1]) == 3.0
    assert float(local(strategy, grad)[-1]) == 96.0
    assert float(local(strategy, again)[-1]) == 96.0


def test_a_variable_as_loss_and_as_aux() -> None:
    w = rx.Variable(3.0)
    value, grad = rx.value_and_grad(lambda: w, w)()
    assert (float(value), float(grad)) == (3.0, 1.0)
    (_, aux), _ = rx.value_and_grad(lambda: (w * w, w), w, has_aux=True)()
    assert float(aux) == 3.0


@pytest.mark.strategies(*FEW)
def test_unused_variables_have_zero_gradients(strategy: Any, run: Any) -> None:
    with strategy.scope():
        used, unused = rx.Variable(3.0), rx.Variable(jnp.ones((2, 3)))
    grads = run(strategy, lambda: rx.grad(lambda: used * used, [used, unused])())
    for i in range(strategy.num_replicas_in_sync):
        assert float(local(strategy, grads[0])[i]) == 6.0
        np.testing.assert_array_equal(local(strategy, grads[1])[i], np.zeros((2, 3)))


def test_variables_that_are_not_named_are_constants() -> None:
    w, v = rx.Variable(3.0), rx.Variable(5.0)
    assert float(rx.grad(lambda: w * v, w)()) == 5.0
    assert float(rx.grad(lambda: w * v, v)()) == 3.0


def test_dtypes_of_gradients() -> None:
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
        w = rx.Variable(jnp.ones(3, dtype))
        assert rx.grad(lambda w=w: (w * w).sum(), w)().dtype == dtype


def test_integer_variables_are_refused() -> None:
    for value in (1, True):
        v = rx.Variable(value, name="count")
        with pytest.raises(ValueError, match=r"floating type, but variable 'count'.*Leave it out"):
            rx.value_and_grad(lambda: 1.0, [v])
    with pytest.raises(TypeError, match=r"need variables.*jax\.value_and_grad"):
        rx.grad(lambda: 1.0, [jnp.ones(())])
    with pytest.raises(TypeError, match="need variables"):
        rx.grad(lambda: 1.0)


@pytest.mark.strategies(*FEW)
def test_non_scalar_loss_is_refused(strategy: Any, run: Any) -> None:
    with strategy.scope():
        w = rx.Variable(jnp.ones(3), aggregation=SUM)

    def fn() -> Any:
        w.assign_add(jnp.ones(3)) if run.executor != "threaded" else None
        return rx.grad(lambda: w * 2.0, w)()

    with pytest.raises(ValueError, match=r"scalar.*\(3,\).*Sum or average"):
        run(strategy, fn)
    np.testing.assert_array_equal(np.asarray(w), np.ones(3))
    grad = run(strategy, lambda: rx.grad(lambda: (w * 2.0).sum(), w)())
    np.testing.assert_array_equal(local(strategy, grad)[0], np.full(3, 2.0))


def test_losses_that_are_no_numbers_are_refused() -> None:
    w = rx.Variable(1.0)
    for loss in (None, "text", (w * 1.0, w * 2.0)):
        with pytest.raises((TypeError, ValueError)):
            rx.grad(lambda loss=loss: loss, w)()
    with pytest.raises((TypeError, ValueError)):
        rx.grad(lambda: jnp.asarray(3), w)()
    assert float(rx.grad(lambda: w * w, w)()) == 2.0


# Writes inside.


@pytest.mark.one_strategy
@pytest.mark.strategies(*SOME)
def test_batch_norm_statistics_inside_the_loss(strategy: Any, run: Any) -> None:
    with strategy.scope():
        w = rx.Variable(2.0)
        mean = rx.Variable(0.0, trainable=False, synchronization=ON_READ, aggregation=MEAN)

    def fn(x: Any) -> Any:
        def loss() -> Any:
            y = w * x
            mean.assign(0.9 * mean + 0.1 * jnp.mean(y))
            return jnp.sum((y - mean) ** 2)

        return rx.value_and_grad(loss, w)()

    def reference(w: Any, x: Any, mean: Any) -> Any:
        y = w * x
        mean = 0.9 * mean + 0.1 * jnp.mean(y)
        return jnp.sum((y - mean) ** 2), mean

    n = strategy.num_replicas_in_sync
    x = per_replica(strategy, lambda i: jnp.arange(3.0) + i)
    kept = [0.0] * n
    for _ in range(2):
        value, grad = run(strategy, fn, args=(x,))
        for i in range(n):
            (loss, new), dw = jax.value_and_grad(reference, has_aux=True)(
                2.0, jnp.arange(3.0) + i, kept[i]
            )
            kept[i] = float(new)
            np.testing.assert_allclose(local(strategy, value)[i], loss, rtol=1e-5)
            np.testing.assert_allclose(local(strategy, grad)[i], dw, rtol=1e-5)
        found = copies(strategy, mean)
        np.testing.assert_allclose(found, kept[: len(found)], rtol=1e-5)
        np.testing.assert_allclose(float(mean), np.mean(kept), rtol=1e-5)


@pytest.mark.every_strategy
@pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
@pytest.mark.strategies(*FEW, "central_2")
def test_aggregated_writes_inside_the_loss(strategy: Any, run: Any, aggregation: str) -> None:
    with strategy.scope():
        w = rx.Variable(2.0)
        total = rx.Variable(1.0, trainable=False, aggregation=rx.VariableAggregation[aggregation])

    def fn(x: Any) -> Any:
        def loss() -> Any:
            y = w * x
            total.assign_add(y)
            return y * y

        grad = rx.grad(loss, w)()
        return grad, total * 1.0

    n = strategy.num_replicas_in_sync
    x = per_replica(strategy, lambda i: jnp.asarray(1.0 + i))
    grad, seen = run(strategy, fn, args=(x,))
    ys = [2.0 * (1 + i) for i in range(n)]
    added = {"SUM": sum(ys), "MEAN": sum(ys) / n, "ONLY_FIRST_REPLICA": ys[0]}[aggregation]
    assert float(total) == 1.0 + added
    for i in range(n):
        assert float(local(strategy, grad)[i]) == 4.0 * (1 + i) ** 2
        assert float(local(strategy, seen)[i]) == 1.0 + added
    for copy in replica_results(strategy, total):
        assert float(copy) == 1.0 + added


def test_writing_the_differentiated_variable_inside_the_loss() -> None:
    w = rx.Variable(3.0)

    def loss() -> Any:
        before = w * w
        w.assign(w * 2.0)
        return before + w

    for fn in (rx.value_and_grad(loss, w), rx.function(rx.value_and_grad(loss, w))):
        w.assign(3.0)
        value, grad = fn()
        assert (float(value), float(grad)) == (15.0, 8.0)
        assert float(w) == 6.0


@pytest.mark.strategies("default", "mirrored_2", "virtual_2")
def test_an_exception_in_the_loss_writes_nothing(strategy: Any, run: Any) -> None:
    with strategy.scope():
        w = rx.Variable(3.0)
        count = rx.Variable(0.0, synchronization=ON_READ, aggregation=SUM)

    def fn() -> Any:
        def loss() -> Any:
            count.assign_add(1.0)
            raise KeyError("in loss")

        return rx.grad(loss, w)()

    with pytest.raises(KeyError, match="in loss"):
        run(strategy, fn)
    assert float(count) == 0.0
    run(strategy, lambda: count.assign_add(1.0))
    assert float(count) == strategy.num_replicas_in_sync


def test_creating_a_variable_inside_an_eager_loss() -> None:
    w = rx.Variable(3.0)
    made: list[Any] = []

    def loss(x: Any) -> Any:
        if not made:
            made.append(rx.Variable(2.0, name="late"))
        return w * made[0] * x

    assert float(rx.grad(loss, w)(1.0)) == 2.0
    assert float(made[0]) == 2.0


# Collectives inside.


@pytest.mark.strategies(*SOME)
def test_s48_the_gradient_of_an_all_reduce_is_an_all_reduce(strategy: Any, run: Any) -> None:
    with strategy.scope():
        w = rx.Variable(2.0)

    def fn(x: Any) -> Any:
        context = rx.get_replica_context()

        def loss() -> Any:
            total = context.all_reduce("SUM", w * x)
            mean = context.all_reduce("MEAN", w * x * x)
            return total * x + mean

        return rx.value_and_grad(loss, w)()

    n = strategy.num_replicas_in_sync
    x = per_replica(strategy, lambda i: jnp.asarray(1.0 + i))
    value, grad = run(strategy, fn, args=(x,))
    xs = np.arange(1.0, n + 1)
    for i in range(n):
        np.testing.assert_allclose(
            local(strategy, value)[i], 2 * xs.sum() * xs[i] + 2 * (xs**2).mean(), rtol=1e-6
        )
        # Each replica's own loss counts: the cotangents are summed over replicas.
        np.testing.assert_allclose(
            local(strategy, grad)[i], xs.sum() * xs[i] + xs[i] ** 2, rtol=1e-6
        )


@pytest.mark.strategies("one_device", *FEW)
def test_t41_the_gradient_of_an_all_gather(strategy: Any, run: Any) -> None:
    with strategy.scope():
        w = rx.Variable(jnp.asarray([[2.0], [3.0]]))
    n = strategy.num_replicas_in_sync

    def fn(factor: Any) -> Any:
        gathered = lambda: rx.get_replica_context().all_gather(w.value(), axis=0)  # noqa: E731
        return rx.grad(lambda: jnp.sum(gathered() * factor), w)()

    factors = per_replica(strategy, lambda i: jnp.asarray(1.0 + i))
    grad = run(strategy, fn, args=(factors,))
    for i in range(n):
        expected = np.full((2, 1), n * (n + 1) / 2)
        np.testing.assert_allclose(local(strategy, grad)[i], expected, rtol=1e-6)


@pytest.mark.one_strategy
@pytest.mark.strategies(*FEW, "central_2")
def test_all_reduced_gradients_train_like_one_device(strategy: Any, run: Any) -> None:
    with strategy.scope():
        w = rx.Variable(W, aggregation=MEAN)

    def fn(x: Any) -> None:
        grad = rx.grad(lambda: loss_of(w.value(), B, x), w)()
        total = rx.get_replica_context().all_reduce("SUM", grad)
        w.assign_sub(0.1 * total)

    expected = W
    for _ in range(3):
        run(strategy, fn, args=(per_replica(strategy, inputs),))
        grads = [jax.grad(loss_of)(expected, B, inputs(i)) for i in range(2)]
        expected = expected - 0.1 * (grads[0] + grads[1])
    np.testing.assert_allclose(np.asarray(w), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.strategies(*FEW)
def test_gradients_through_scan_and_second_order(strategy: Any, run: Any) -> None:
    with strategy.scope():
        w = rx.Variable(0.5)

    def unrolled(w: Any, x: Any) -> Any:
        for _ in range(3):
            x = jnp.tanh(w * x)
        return x

    def fn(x: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            return jnp.tanh(w * carry), None

        # The read in the body is differentiated as well.
        loss = lambda: jax.lax.scan(body, x, None, length=3)[0]  # noqa: E731
        once = lambda: w * w * w * x  # noqa: E731
        return rx.grad(loss, w)(), rx.grad(lambda: rx.grad(once, w)(), w)()

    first, second = run(strategy, fn, args=(jnp.asarray(2.0),))
    expected = jax.grad(unrolled)(0.5, 2.0)
    for i in range(strategy.num_replicas_in_sync):
        np.testing.assert_allclose(local(strategy, first)[i], expected, rtol=1e-5)
        np.testing.assert_allclose(local(strategy, second)[i], 6.0, rtol=1e-6)


def test_second_order_in_eager_code() -> None:
    w = rx.Variable(3.0)
    cube = lambda: w * w * w  # noqa: E731
    assert float(rx.grad(lambda: rx.grad(cube, w)(), w)()) == 18.0
    assert float(rx.grad(lambda: rx.grad(lambda: rx.grad(cube, w)(), w)(), w)()) == 6.0


def test_jax_grad_inside_rx_grad() -> None:
    w = rx.Variable(3.0)
    loss = lambda: jax.grad(lambda x: w.value() * x**3)(2.0)  # noqa: E731
    assert float(rx.grad(loss, w)()) == 12.0
    assert float(rx.function(rx.grad(loss, w))()) == 12.0


def test_sync_on_read_variables_can_be_differentiated() -> None:
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        v = rx.Variable(2.0, synchronization=ON_READ, aggregation=SUM, trainable=True)

    def fn(x: Any) -> Any:
        return rx.grad(lambda: v * v * x, v)()

    x = per_replica(strategy, lambda i: jnp.asarray(1.0 + i))
    for run in (fn, rx.function(fn)):
        assert [float(g) for g in strategy.run(run, args=(x,)).values] == [4.0, 8.0]


@pytest.mark.strategies(*TWO)
def test_gradient_in_cross_replica_context(strategy: Any) -> None:
    with strategy.scope():
        w = rx.Variable(3.0)
        grad = rx.grad(lambda: w * w, w)()
        compiled = rx.function(rx.grad(lambda: w * w, w))()
    assert (float(grad), float(compiled)) == (6.0, 6.0)
    assert float(rx.grad(lambda: w * w, w)()) == 6.0


# Rows.

TABLE = jnp.arange(15.0).reshape(5, 3)


def dense_of(grad: Any) -> Any:
    return grad.to_dense() if isinstance(grad, rx.IndexedSlices) else grad


def test_indexed_slices_to_dense() -> None:
    slices = rx.IndexedSlices(jnp.ones((3, 2)), jnp.asarray([0, 2, 0]), dense_shape=(4, 2))
    np.testing.assert_array_equal(slices.to_dense(), [[2, 2], [0, 0], [1, 1], [0, 0]])
    assert slices.shape == (4, 2) and slices.dtype == jnp.float32
    with pytest.raises(ValueError, match=r"dense_shape"):
        rx.IndexedSlices(jnp.ones((1, 2)), jnp.asarray([0])).to_dense()
    empty = rx.IndexedSlices(jnp.ones((0, 2)), jnp.zeros(0, jnp.int32), dense_shape=(4, 2))
    np.testing.assert_array_equal(empty.to_dense(), np.zeros((4, 2)))


def lookups_once(table: Any, lookup: Any, ids: Any) -> Any:
    return jnp.sum(lookup(table, ids) ** 2)


def lookups_twice(table: Any, lookup: Any, ids: Any) -> Any:
    return jnp.sum(lookup(table, ids) ** 2) + jnp.sum(jnp.sin(lookup(table, ids + 1)))


def lookups_same_ids(table: Any, lookup: Any, ids: Any) -> Any:
    return jnp.sum(lookup(table, ids) * lookup(table, ids) * lookup(table, jnp.stack([ids, ids])))


def lookups_unused(table: Any, lookup: Any, ids: Any) -> Any:
    lookup(table, ids)
    return jnp.sum(ids) * 1.0


@pytest.mark.one_strategy
@pytest.mark.strategies("mirrored_2")
@pytest.mark.parametrize(
    "loss",
    [lookups_once, lookups_twice, lookups_same_ids, lookups_unused],
    ids=lambda f: f.__name__,
)
def test_lookups_differentiate_to_rows(strategy: Any, run: Any, loss: Any) -> None:
    with strategy.scope():
        table = rx.Variable(TABLE)

    def fn(ids: Any) -> Any:
        return rx.value_and_grad(lambda: loss(table, rx.nn.embedding_lookup, ids), table)()

    def ids_of(i: int) -> Any:
        return jnp.asarray([[0, 2], [2, (i + 1) % 4]])

    value, grad = run(strategy, fn, args=(per_replica(strategy, ids_of),))
    take = lambda table, ids: jnp.take(table, ids, axis=0)  # noqa: E731
    for i, own in enumerate(local(strategy, grad)):
        assert isinstance(own, rx.IndexedSlices)
        assert own.dense_shape == (5, 3)
        assert own.values.shape[1:] == (3,) and own.indices.ndim == 1
        expected, dense = jax.value_and_grad(lambda t, i=i: loss(t, take, ids_of(i)))(TABLE)
        np.testing.assert_allclose(local(strategy, value)[i], expected, rtol=1e-5)
        np.testing.assert_allclose(own.to_dense(), dense, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.strategies("virtual_2", "central_2")
def test_tied_embeddings_are_dense(strategy: Any, run: Any) -> None:
    with strategy.scope():
        table = rx.Variable(TABLE)

    def fn(ids: Any) -> Any:
        def loss() -> Any:
            hidden = rx.nn.embedding_lookup(table, ids)
            return jnp.sum(jax.nn.log_softmax(hidden @ table.value().T))

        return rx.grad(loss, table)()

    ids = jnp.asarray([1, 1, 4])
    grad = run(strategy, fn, args=(ids,))
    expected = jax.grad(lambda t: jnp.sum(jax.nn.log_softmax(t[ids] @ t.T)))(TABLE)
    for own in local(strategy, grad):
        np.testing.assert_allclose(dense_of(own), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.strategies("mirrored_2")
@pytest.mark.parametrize("where", ["scan", "checkpoint", "cond", "vmap"])
def test_lookups_inside_nested_code(strategy: Any, run: Any, where: str) -> None:
    with strategy.scope():
        table = rx.Variable(TABLE)

    def compute(lookup: Any, ids: Any) -> Any:
        if where == "scan":
            body = lambda c, i: (c + jnp.sum(lookup(i) ** 2), None)  # noqa: E731
            return jax.lax.scan(body, 0.0, ids)[0]
        if where == "checkpoint":
            return jax.checkpoint(lambda i: jnp.sum(lookup(i) ** 2))(ids)
        if where == "cond":
            zero = lambda i: 0.0  # noqa: E731
            return jax.lax.cond(ids[0] > 0, lambda i: jnp.sum(lookup(i) ** 2), zero, ids)
        return jnp.sum(jax.vmap(lambda i: jnp.sum(lookup(i) ** 2))(ids))

    def fn(ids: Any) -> Any:
        return rx.grad(lambda: compute(lambda i: rx.nn.embedding_lookup(table, i), ids), table)()

    ids = jnp.asarray([1, 3, 1])
    grad = run(strategy, fn, args=(ids,))
    expected = jax.grad(lambda t: compute(lambda i: jnp.take(t, i, axis=0), ids))(TABLE)
    for own in local(strategy, grad):
        np.testing.assert_allclose(dense_of(own), expected, rtol=1e-5)


def test_a_direct_lookup_and_one_inside_scan_add_up() -> None:
    table = rx.Variable(TABLE)

    def loss(take: Any, ids: Any) -> Any:
        body = lambda c, i: (c + jnp.sum(take(i)), None)  # noqa: E731
        return jnp.sum(take(ids) ** 2) + jax.lax.scan(body, 0.0, ids)[0]

    ids = jnp.asarray([0, 3])
    grad = rx.function(
        rx.grad(lambda: loss(lambda i: rx.nn.embedding_lookup(table, i), ids), table)
    )()
    expected = jax.grad(lambda t: loss(lambda i: jnp.take(t, i, axis=0), ids))(TABLE)
    np.testing.assert_allclose(dense_of(grad), expected, rtol=1e-5)


def test_lookup_after_a_write_inside_the_loss() -> None:
    table = rx.Variable(TABLE)
    ids = jnp.asarray([1])

    def loss() -> Any:
        table.assign(table * 2.0)
        return jnp.sum(rx.nn.embedding_lookup(table, ids))

    value, grad = rx.value_and_grad(loss, table)()
    assert float(value) == float(2 * TABLE[1].sum())
    np.testing.assert_array_equal(dense_of(grad)[1], np.full(3, 2.0))
    assert float(jnp.sum(dense_of(grad))) == 6.0


def test_second_order_of_a_lookup() -> None:
    table = rx.Variable(TABLE)
    ids = jnp.asarray([1, 2])

    def inner() -> Any:
        grad = rx.grad(lambda: jnp.sum(rx.nn.embedding_lookup(table, ids) ** 3), table)()
        return jnp.sum(dense_of(grad))

    expected = jax.grad(lambda t: jnp.sum(jax.grad(lambda u: jnp.sum(u[ids] ** 3))(t)))(TABLE)
    np.testing.assert_allclose(dense_of(rx.grad(inner, table)()), expected, rtol=1e-5)


@pytest.mark.strategies(*SOME)
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_sparse_all_reduce_equals_dense(strategy: Any, run: Any, op: str) -> None:
    with strategy.scope():
        table = rx.Variable(TABLE)

    def fn(ids: Any) -> Any:
        grad = rx.grad(lambda: jnp.sum(rx.nn.embedding_lookup(table, ids) ** 2), table)()
        context = rx.get_replica_context()
        dense = context.all_reduce(op, grad.to_dense())
        sparse = context.all_reduce(op, grad)
        assert isinstance(sparse, rx.IndexedSlices)
        return sparse.to_dense(), dense

    ids = per_replica(strategy, lambda i: jnp.asarray([0, i, i + 1]))
    sparse, dense = run(strategy, fn, args=(ids,))
    for one, other in zip(local(strategy, sparse), local(strategy, dense), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
        assert float(jnp.sum(one)) > 0


@pytest.mark.strategies("virtual_2", "central_2")
def test_sparse_updates_of_a_table(strategy: Any, run: Any) -> None:
    with strategy.scope():
        table = rx.Variable(TABLE, aggregation=SUM)
    n = strategy.num_replicas_in_sync

    def fn(ids: Any) -> None:
        grad = rx.grad(lambda: jnp.sum(rx.nn.embedding_lookup(table, ids) ** 2), table)()
        table.scatter_sub(rx.IndexedSlices(0.1 * grad.values, grad.indices, grad.dense_shape))

    ids_of = lambda i: jnp.asarray([0, i, i + 1])  # noqa: E731
    run(strategy, fn, args=(per_replica(strategy, ids_of),))
    grads = [jax.grad(lambda t, i=i: jnp.sum(t[ids_of(i)] ** 2))(TABLE) for i in range(n)]
    np.testing.assert_allclose(np.asarray(table), TABLE - 0.1 * sum(grads), rtol=1e-5)


def test_lookup_of_plain_arrays_and_bad_ids() -> None:
    np.testing.assert_array_equal(rx.nn.embedding_lookup(TABLE, [1]), TABLE[1:2])
    table = rx.Variable(TABLE)
    np.testing.assert_array_equal(
        rx.nn.embedding_lookup([table], [[4, 0]])[0], TABLE[jnp.asarray([4, 0])]
    )
    with pytest.raises(ValueError, match=r"integers.*float32.*Convert"):
        rx.nn.embedding_lookup(table, jnp.asarray([1.0]))
    assert rx.nn.embedding_lookup(table, jnp.zeros((0,), jnp.int32)).shape == (0, 3)


def test_no_dense_gradient_of_the_table_is_made() -> None:
    table = rx.Variable(jnp.ones((100_003, 2)))

    @rx.function
    def step(ids: Any) -> Any:
        loss = lambda: jnp.sum(rx.nn.embedding_lookup(table, ids) ** 2)  # noqa: E731
        grad = rx.grad(loss, table)()
        assert grad.values.shape == (4, 2)
        return grad

    grad = step(jnp.asarray([5, 5, 100_002, 0]))
    np.testing.assert_array_equal(grad.values, np.full((4, 2), 2.0))
    np.testing.assert_array_equal(grad.indices, [5, 5, 100_002, 0])


@pytest.mark.strategies("mirrored_1", "mirrored_2", "mirrored_4", "virtual_2", "central_2")
@pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_s110_gradient_of_an_on_read_variable_from_outside(
    strategy: Any, aggregation: str, is_compiled: bool
) -> None:
    with strategy.scope():
        v = rx.Variable(
            jnp.zeros(3),
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation[aggregation],
        )
    v.assign([1.0, 2.0, 3.0])

    def gradients() -> Any:
        with strategy.scope():
            whole = rx.grad(lambda: jnp.sum(v.read_value() ** 2), v)()
            rows = rx.grad(lambda: jnp.sum(rx.nn.embedding_lookup(v, [2, 0]) ** 2), v)()
            return whole, rows.to_dense() if isinstance(rows, rx.IndexedSlices) else rows

    whole, rows = rx.function(gradients)() if is_compiled else gradients()
    np.testing.assert_allclose(whole, [2.0, 4.0, 6.0], rtol=1e-6)
    np.testing.assert_allclose(rows, [2.0, 0.0, 6.0], rtol=1e-6)
