"""Sums over replicas of transposed values: summed first, and the same numbers as ever."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax.foundation import jax_compat


def test_a_program_sums_before_it_transposes() -> None:
    def summed(x: Any) -> Any:
        turned = jnp.transpose(x, (2, 0, 1))
        return jax.lax.psum(turned, "replica"), turned * 2, jax.lax.psum(x, "replica")

    closed = jax.make_jaxpr(summed, axis_env=[("replica", 2)])(jnp.ones((2, 3, 4)))
    changed = jax_compat.transposes_after_sums(closed.jaxpr)
    sums = [e for e in changed.eqns if e.primitive.name == "psum"]
    assert [e.invars for e in sums] == [closed.jaxpr.invars, closed.jaxpr.invars]
    x = np.arange(48.0, dtype=np.float32).reshape((2, 2, 3, 4))
    found = jax.vmap(
        lambda x: jax_compat.eval_jaxpr(changed, closed.consts, x), axis_name="replica"
    )(x)
    expected = jax.vmap(summed, axis_name="replica")(x)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), list(expected), found))


@pytest.mark.strategies("mirrored_2")
def test_gradients_of_products_are_summed(strategy: Any, run: Any) -> None:
    with strategy.scope():
        w = rx.Variable(np.arange(6.0, dtype=np.float32).reshape(2, 3))
    x = np.arange(10.0, dtype=np.float32).reshape(5, 2)

    def replica_fn() -> Any:
        scale = 1.0 + rx.get_replica_context().replica_id_in_sync_group
        gradient = rx.grad(lambda: jnp.sum((scale * x @ w.value()) ** 2), [w])()[0]
        return rx.get_replica_context().all_reduce("SUM", gradient)

    found = strategy.experimental_local_results(run(strategy, replica_fn))
    expected = (1 + 4) * 2 * x.T @ (x @ np.arange(6.0).reshape(2, 3))
    for value in found:
        np.testing.assert_allclose(np.asarray(value), expected, rtol=1e-6)
