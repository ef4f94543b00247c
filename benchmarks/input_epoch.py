"""An epoch over real data: the digits of scikit-learn, global batches of 64, a small network.

A case `digitsxD` trains on D CPU devices. The peer is written by hand: the same shuffled
Grain dataset, `device_put`, and a jitted step (with `shard_map` on two devices) with donated
state. Both take the same examples in the same order. `builder` is our program with the same
data through `rx.data.Dataset`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Measured, Row, Settings, at_most, compete, main

CASES = ("digitsx1", "digitsx2")
LIMIT = 1.05
BATCH, RATE, HIDDEN = 64, 0.1, 128


def arrays() -> tuple[Any, Any]:
    import numpy as np
    from sklearn.datasets import load_digits

    digits = load_digits()
    return (digits.data / 16.0).astype(np.float32), digits.target.astype(np.int32)


def grain_dataset(seed: int) -> Any:
    import grain

    x, y = arrays()
    rows = grain.MapDataset.source([{"x": x[i], "y": y[i]} for i in range(len(x))])
    return rows.shuffle(seed=seed).batch(BATCH, drop_remainder=True)


def initial() -> list[Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    shapes = [(64, HIDDEN), (HIDDEN,), (HIDDEN, 10), (10,)]
    return [(rng.normal(size=s) * 0.1).astype(np.float32) for s in shapes]


def loss_of(parameters: Any, x: Any, y: Any) -> Any:
    import jax
    import jax.numpy as jnp

    w1, b1, w2, b2 = parameters
    logits = jax.nn.relu(x @ w1 + b1) @ w2 + b2
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1)
    return -jnp.sum(chosen) / BATCH


def best_epoch(epoch: Callable[[], Any], seconds: float) -> float:
    """Returns the best time of an epoch, in ms."""
    for _ in range(2):
        epoch()
    best, end = float("inf"), time.perf_counter() + max(seconds, 0.5)
    while time.perf_counter() < end:
        start = time.perf_counter()
        epoch()
        best = min(best, time.perf_counter() - start)
    return 1e3 * best


def train_ours(case: str, seconds: float, dataset: Any) -> dict[str, float]:
    import jax

    import replicax as rx

    count = int(case.rpartition("x")[2])
    strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(count)])
    with strategy.scope():
        parameters = [rx.Variable(value) for value in initial()]

    def replica_step(batch: Any) -> Any:
        def loss_fn() -> Any:
            return loss_of([p.value() for p in parameters], batch["x"], batch["y"])

        loss, gradients = rx.value_and_grad(loss_fn, parameters)()
        context = rx.get_replica_context()
        gradients = context.all_reduce("SUM", gradients)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            context.update(parameter, lambda p, g: p.assign_sub(RATE * g), args=(gradient,))
        return loss

    @rx.function
    def step(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, args=(batch,)), axis=None)

    distributed = strategy.experimental_distribute_dataset(dataset)

    def epoch() -> None:
        loss = None
        for batch in distributed:
            loss = step(batch)
        jax.block_until_ready(loss)

    return {"ms": best_epoch(epoch, seconds)}


def ours(case: str, seconds: float) -> dict[str, float]:
    import replicax as rx

    rx.set_virtual_cpu_devices(2)
    return train_ours(case, seconds, grain_dataset(seed=0))


def builder(case: str, seconds: float) -> dict[str, float]:
    import replicax as rx

    rx.set_virtual_cpu_devices(2)
    x, y = arrays()
    rows = rx.data.Dataset.from_tensor_slices({"x": x, "y": y}).shuffle(len(x), seed=0)
    return train_ours(case, seconds, rows.batch(BATCH, drop_remainder=True))


def handwritten(case: str, seconds: float) -> dict[str, float]:
    os.environ.setdefault("NPROC", "8")
    import grain
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_num_cpu_devices", 2)
    count = int(case.rpartition("x")[2])
    mesh = Mesh(np.array(jax.devices()[:count]), ("replica",))
    everywhere, split = PartitionSpec(), PartitionSpec("replica")

    def replica_step(state: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(state, x, y)
        if count > 1:
            gradients, loss = jax.lax.psum((gradients, loss), "replica")
        return jax.tree.map(lambda p, g: p - RATE * g, state, gradients), loss

    mapped = replica_step
    if count > 1:
        mapped = jax.shard_map(
            replica_step,
            mesh=mesh,
            in_specs=(everywhere, split, split),
            out_specs=(everywhere, everywhere),
            check_vma=False,
        )
    step = jax.jit(mapped, donate_argnums=0)
    state = jax.device_put(initial(), NamedSharding(mesh, everywhere))
    sharding = NamedSharding(mesh, split)
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    dataset = grain_dataset(seed=0).to_iter_dataset(options)

    def epoch() -> None:
        nonlocal state
        loss = None
        for batch in dataset:
            batch = jax.device_put(batch, sharding)
            state, loss = step(state, batch["x"], batch["y"])
        jax.block_until_ready(loss)

    return {"ms": best_epoch(epoch, seconds)}


CONTESTANTS = {"ours": ours, "builder": builder, "handwritten": handwritten}


def run(settings: Settings, report: Callable[[str], None]) -> tuple[Measured, list[Row]]:
    """Measures everything; returns the numbers and the lines of the table."""
    measured = compete(__name__, CONTESTANTS, CASES, settings, report)
    rows = []
    for case in CASES:
        own, peer = measured["ours", case]["ms"], measured["handwritten", case]["ms"]
        texts = f"{own:.1f} ms", f"{peer:.1f} ms"
        outcome = at_most(LIMIT, own / peer)
        rows.append(Row("epoch from Grain / hand-written", case, *texts, own / peer, *outcome))
    for case in CASES:
        own, peer = measured["builder", case]["ms"], measured["handwritten", case]["ms"]
        texts = f"{own:.1f} ms", f"{peer:.1f} ms"
        rows.append(Row("epoch from rx.data / hand-written", case, *texts, own / peer, "", None))
    return measured, rows


if __name__ == "__main__":
    main(CONTESTANTS)
