"""One compiled training step on an embedding table, by rows and with a dense gradient.

A case `NxDxI` is a table of N rows of D numbers, I ids looked up in each step, split over two
replicas on two CPU devices, and adagrad. Contestants: this project's optimizer as it is, on two
replicas and on one device; the same step with `sparse="dense"`, which makes a gradient of the
size of the table; and torch's `Embedding(sparse=True)` with its Adagrad, on two threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.harness import Measured, Row, Settings, at_least, at_most, best_time, compete, main

CASES = ("1000000x64x256", "1000000x64x4096")
LIMIT = 0.1
TORCH_LIMIT = 1.0


def step_time(case: str, seconds: float, sparse: str, replicas: int = 2) -> dict[str, float]:
    import replicax as rx

    rx.set_virtual_cpu_devices(2)
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    rows, width, num_ids = map(int, case.split("x"))
    strategy: Any = rx.OneDeviceStrategy("CPU:0")
    if replicas > 1:
        strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    with strategy.scope():
        table = rx.Variable(jnp.zeros((rows, width)))
        optimizer = rx.optimizers.Optimizer(optax.adagrad(0.1), [table], sparse=sparse)

    def replica_step(ids: Any) -> Any:
        def loss_of_replica() -> Any:
            looked_up = rx.nn.embedding_lookup(table, ids)
            return jnp.mean((looked_up - 1.0) ** 2)

        loss, gradients = rx.value_and_grad(loss_of_replica, [table])()
        optimizer.apply_gradients(gradients)
        return loss

    @rx.function
    def step(ids: Any) -> Any:
        return strategy.reduce("MEAN", strategy.run(replica_step, args=(ids,)), axis=None)

    random = np.random.default_rng(0)
    ids = strategy.experimental_distribute_values_from_function(
        lambda context: jnp.asarray(random.integers(0, rows, num_ids // replicas))
    )
    return {"ms": 1e3 * best_time(lambda: step(ids), jax.block_until_ready, seconds)}


def ours(case: str, seconds: float) -> dict[str, float]:
    return step_time(case, seconds, "auto")


def dense(case: str, seconds: float) -> dict[str, float]:
    return step_time(case, seconds, "dense")


def one_device(case: str, seconds: float) -> dict[str, float]:
    return step_time(case, seconds, "auto", replicas=1)


def torch(case: str, seconds: float) -> dict[str, float]:
    import numpy as np
    import torch

    torch.set_num_threads(2)
    rows, width, num_ids = map(int, case.split("x"))
    table = torch.nn.Embedding(rows, width, sparse=True, _weight=torch.zeros(rows, width))
    optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1, initial_accumulator_value=0.1)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, rows, num_ids))

    def step() -> Any:
        optimizer.zero_grad()
        loss = torch.mean((table(ids) - 1.0) ** 2)
        loss.backward()
        optimizer.step()
        return loss

    return {"ms": 1e3 * best_time(step, lambda loss: loss.item(), seconds)}


PEERS = ("torch",)
CONTESTANTS = {"ours": ours, "one_device": one_device, "dense": dense, "torch": torch}


def run(settings: Settings, report: Callable[[str], None]) -> tuple[Measured, list[Row]]:
    """Measures everything; returns the numbers and the lines of the table."""
    names = [n for n in CONTESTANTS if n != "torch" or "torch" in settings.peers]
    measured = compete(__name__, names, CASES, settings, report)
    rows: list[Row] = []
    for case in CASES:
        own, peer = measured["ours", case]["ms"], measured["dense", case]["ms"]
        texts = f"{own:.3f} ms", f"{peer:.3f} ms"
        outcome = at_most(LIMIT, own / peer)
        rows.append(Row("sparse step / dense gradient", case, *texts, own / peer, *outcome))
    for name in ("ours", "one_device") if "torch" in settings.peers else ():
        what = "two replicas" if name == "ours" else "one device"
        for case in CASES:
            own, peer = measured[name, case]["ms"], measured["torch", case]["ms"]
            texts = f"{own:.3f} ms", f"{peer:.3f} ms"
            outcome = at_least(TORCH_LIMIT, peer / own)
            rows.append(Row(f"torch / sparse step, {what}", case, *texts, peer / own, *outcome))
    return measured, rows


if __name__ == "__main__":
    main(CONTESTANTS)
