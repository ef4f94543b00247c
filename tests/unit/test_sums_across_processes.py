"""Sums for replicas of several processes: all replicas get the same bits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from replicax.collectives import in_replica

ROWS = PartitionSpec(in_replica.AXIS)


def summed(make: Any, num_replicas: int, dtype: Any, seed: int) -> np.ndarray:
    """Returns the packed gradients of a small network, one row each, as each replica has them."""
    generator = np.random.default_rng(seed)
    weights = [generator.normal(size=shape).astype(dtype) for shape in ((8, 16), (16,))]
    axis = jax.sharding.AxisType.Auto
    devices = jax.devices()[:num_replicas]
    mesh = jax.make_mesh((num_replicas,), (in_replica.AXIS,), axis_types=(axis,), devices=devices)

    def replica(x: Any, y: Any) -> Any:
        def loss(weights: Any) -> Any:
            return (((x @ weights[0]).clip(0) @ weights[1] - y) ** 2).sum() / 16

        # With one row, the gradient of a matrix product is a plain product.
        gradients = jax.grad(loss)(weights)
        pack = jnp.concatenate([gradient.reshape(-1) for gradient in gradients])
        return make(num_replicas)(pack)[None]

    run = jax.jit(
        jax.shard_map(replica, mesh=mesh, in_specs=ROWS, out_specs=ROWS, check_vma=False),
        # As users compile: `conftest.py` turns optimizations off.
        compiler_options={
            "xla_backend_optimization_level": 3,
            "xla_cpu_use_fusion_emitters": True,
        },
    )
    data = [
        generator.normal(size=shape).astype(dtype) for shape in ((num_replicas, 8), num_replicas)
    ]
    return np.asarray(run(*(jax.device_put(d, NamedSharding(mesh, ROWS)) for d in data)))


@pytest.mark.parametrize("num_replicas", [2, 4, 8])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("make", [in_replica.doubling, in_replica.across_processes])
def test_all_replicas_get_the_same_bits(make: Any, dtype: Any, num_replicas: int) -> None:
    for seed in range(3):
        found = summed(make, num_replicas, dtype, seed)
        for other in found[1:]:
            assert other.tobytes() == found[0].tobytes()
