"""One compiled training step on two CPU devices.

A case `HxLxB` is a network of L layers of HxH weights with bias and relu, the mean square of
its output as loss, plain SGD, and a global batch of B examples split over two replicas.
Peers: the step written by hand as `jit(shard_map)` with donated state; the step of one device under
`jit` with a `NamedSharding` of the batch, for which XLA chooses the collectives; and
`tf.distribute.MirroredStrategy`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Measured, Row, Settings, at_least, at_most, best_time, compete, main

CASES = ("64x4x64", "512x4x256", "1024x8x256", "32x50x16")
LIMITS = {"64x4x64": 1.15, "512x4x256": 1.05, "1024x8x256": 1.05, "32x50x16": 0.75}
TENSORFLOW_LIMIT = 1.5
RATE = 0.01


def sizes(case: str) -> tuple[int, int, int, float]:
    """Returns width, depth and batch of a case, and the first value of its weights.

    With these weights activations neither vanish nor explode: arithmetic on denormal
    numbers is slow, and would measure just that.
    """
    width, depth, batch = map(int, case.split("x"))
    return width, depth, batch, 1.0 / width


def ours(case: str, seconds: float) -> dict[str, float]:
    import replicax as rx

    rx.set_virtual_cpu_devices(2)
    import jax
    import jax.numpy as jnp

    width, depth, batch, scale = sizes(case)
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        weights = [rx.Variable(jnp.full((width, width), scale)) for _ in range(depth)]
        biases = [rx.Variable(jnp.zeros(width)) for _ in range(depth)]
    variables = weights + biases

    def replica_step(inputs: Any) -> Any:
        def loss_of_replica() -> Any:
            hidden = inputs
            for weight, bias in zip(weights, biases, strict=True):
                hidden = jax.nn.relu(hidden @ weight.value() + bias.value())
            return jnp.mean(hidden * hidden)

        loss, gradients = rx.value_and_grad(loss_of_replica, variables)()
        context = rx.get_replica_context()
        gradients = context.all_reduce("SUM", gradients)
        for variable, gradient in zip(variables, gradients, strict=True):
            context.update(variable, lambda v, g: v.assign_sub(RATE * g), args=(gradient,))
        return loss

    @rx.function
    def step(inputs: Any) -> Any:
        return strategy.reduce("MEAN", strategy.run(replica_step, args=(inputs,)), axis=None)

    inputs = strategy.experimental_distribute_values_from_function(
        lambda context: jnp.ones((batch // 2, width))
    )
    return {"ms": 1e3 * best_time(lambda: step(inputs), jax.block_until_ready, seconds)}


def handwritten(case: str, seconds: float) -> dict[str, float]:
    # XLA's CPU client starves on collectives in flight if its pool has few threads.
    os.environ.setdefault("NPROC", "8")
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_num_cpu_devices", 2)
    width, depth, batch, scale = sizes(case)
    mesh = Mesh(np.array(jax.devices()), ("replica",))
    everywhere, split = PartitionSpec(), PartitionSpec("replica")

    def replica_step(state: Any, inputs: Any) -> Any:
        def loss_of_replica(state: Any) -> Any:
            hidden = inputs
            for weight, bias in state:
                hidden = jax.nn.relu(hidden @ weight + bias)
            return jnp.mean(hidden * hidden)

        loss, gradients = jax.value_and_grad(loss_of_replica)(state)
        gradients = jax.lax.psum(gradients, "replica")
        state = jax.tree.map(lambda v, g: v - RATE * g, state, gradients)
        return state, jax.lax.pmean(loss, "replica")

    sharded = jax.shard_map(
        replica_step,
        mesh=mesh,
        in_specs=(everywhere, split),
        out_specs=(everywhere, everywhere),
        check_vma=False,
    )
    compiled = jax.jit(sharded, donate_argnums=0)
    initial = [(np.full((width, width), scale, np.float32), np.zeros(width, np.float32))] * depth
    place: Callable[..., Any] = jax.jit(
        lambda tree: jax.tree.map(jnp.array, tree), out_shardings=NamedSharding(mesh, everywhere)
    )
    state = place(initial)
    inputs = jax.device_put(np.ones((batch, width), np.float32), NamedSharding(mesh, split))

    def step() -> Any:
        nonlocal state
        state, loss = compiled(state, inputs)
        return loss

    return {"ms": 1e3 * best_time(step, jax.block_until_ready, seconds)}


def sharded(case: str, seconds: float) -> dict[str, float]:
    os.environ.setdefault("NPROC", "8")
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_num_cpu_devices", 2)
    width, depth, batch, scale = sizes(case)
    mesh = Mesh(np.array(jax.devices()), ("replica",))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def step_of_batch(state: Any, inputs: Any) -> Any:
        def loss_of_batch(state: Any) -> Any:
            hidden = inputs
            for weight, bias in state:
                hidden = jax.nn.relu(hidden @ weight + bias)
            return jnp.mean(hidden * hidden)

        loss, gradients = jax.value_and_grad(loss_of_batch)(state)
        # The others sum the gradients of two means.
        return jax.tree.map(lambda v, g: v - 2 * RATE * g, state, gradients), loss

    compiled = jax.jit(step_of_batch, donate_argnums=0, out_shardings=everywhere)
    initial = [(np.full((width, width), scale, np.float32), np.zeros(width, np.float32))] * depth
    place: Callable[..., Any] = jax.jit(
        lambda tree: jax.tree.map(jnp.array, tree), out_shardings=everywhere
    )
    state = place(initial)
    split = NamedSharding(mesh, PartitionSpec("replica"))
    inputs = jax.device_put(np.ones((batch, width), np.float32), split)

    def step() -> Any:
        nonlocal state
        state, loss = compiled(state, inputs)
        return loss

    return {"ms": 1e3 * best_time(step, jax.block_until_ready, seconds)}


def tensorflow(case: str, seconds: float) -> dict[str, float]:
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    width, depth, batch, scale = sizes(case)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        weights = [tf.Variable(tf.fill([width, width], scale)) for _ in range(depth)]
        biases = [tf.Variable(tf.zeros([width])) for _ in range(depth)]
        optimizer = tf.keras.optimizers.SGD(RATE)
        optimizer.build(weights + biases)
    variables = weights + biases

    def replica_step(inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            hidden = inputs
            for weight, bias in zip(weights, biases, strict=True):
                hidden = tf.nn.relu(hidden @ weight + bias)
            loss = tf.reduce_mean(hidden * hidden)
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    @tf.function
    def step(inputs: Any) -> Any:
        return strategy.reduce("MEAN", strategy.run(replica_step, args=(inputs,)), axis=None)

    inputs = strategy.experimental_distribute_values_from_function(
        lambda context: tf.ones([batch // 2, width])
    )
    return {"ms": 1e3 * best_time(lambda: step(inputs), lambda loss: loss.numpy(), seconds)}


PEERS = ("tensorflow",)
CONTESTANTS = {
    "ours": ours,
    "handwritten": handwritten,
    "sharded": sharded,
    "tensorflow": tensorflow,
}


def run(settings: Settings, report: Callable[[str], None]) -> tuple[Measured, list[Row]]:
    """Measures everything; returns the numbers and the lines of the table."""
    names = [n for n in CONTESTANTS if n != "tensorflow" or "tensorflow" in settings.peers]
    measured = compete(__name__, names, CASES, settings, report)
    rows: list[Row] = []
    for case in CASES:
        own = measured["ours", case]["ms"]
        peer = measured["handwritten", case]["ms"]
        outcome = at_most(LIMITS[case], own / peer)
        texts = f"{own:.3f} ms", f"{peer:.3f} ms"
        rows.append(Row("compiled step / hand-written", case, *texts, own / peer, *outcome))
    for case in CASES:
        own = measured["ours", case]["ms"]
        peer = measured["sharded", case]["ms"]
        texts = f"{own:.3f} ms", f"{peer:.3f} ms"
        what = "compiled step / jit + NamedSharding"
        rows.append(Row(what, case, *texts, own / peer, "", None))
    for case in CASES if "tensorflow" in settings.peers else ():
        own = measured["ours", case]["ms"]
        peer = measured["tensorflow", case]["ms"]
        outcome = at_least(TENSORFLOW_LIMIT, peer / own)
        texts = f"{own:.3f} ms", f"{peer:.3f} ms"
        rows.append(Row("TF MirroredStrategy / compiled step", case, *texts, peer / own, *outcome))
    return measured, rows


if __name__ == "__main__":
    main(CONTESTANTS)
