"""A training step of the digits program under CentralStorageStrategy and MirroredStrategy.

A hidden layer of 64 between 64 pixels and 10 digits, adam, a mean and an accuracy, a global
batch of 64 on two CPU devices. The variables of the first lie on one device, those of the
second on both. The two take turns within one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.harness import Measured, Row, Settings, at_most, compete, main, taking_turns

CASES = ("digits",)
LIMIT = 1.5
STEPS_IN_A_BLOCK = 50


def step_of(strategy: Any) -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import replicax as rx

    random = np.random.default_rng(0)
    with strategy.scope():
        weights = [rx.Variable(random.normal(0, 0.1, s).astype(np.float32)) for s in SHAPES]
        optimizer = rx.optimizers.Optimizer(optax.adam(5e-3), weights)
        mean, accuracy = rx.metrics.Mean(), rx.metrics.SparseCategoricalAccuracy()

    def replica_step(pixels: Any, digits: Any) -> Any:
        def loss_of_replica() -> Any:
            w1, b1, w2, b2 = (w.value() for w in weights)
            logits = jax.nn.relu(pixels @ w1 + b1) @ w2 + b2
            losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, digits)
            return jnp.sum(losses) / 64, (losses, logits)

        (loss, (losses, logits)), gradients = rx.value_and_grad(
            loss_of_replica, weights, has_aux=True
        )()
        optimizer.apply_gradients(gradients)
        mean.update_state(losses)
        accuracy.update_state(digits, logits)
        return loss

    @rx.function
    def step(pixels: Any, digits: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, args=(pixels, digits)), axis=None)

    distribute = strategy.experimental_distribute_values_from_function
    pixels = distribute(lambda context: jnp.asarray(random.random((32, 64), np.float32)))
    digits = distribute(lambda context: jnp.asarray(random.integers(0, 10, 32)))
    return lambda: step(pixels, digits)


SHAPES = ((64, 64), (64,), (64, 10), (10,))


def both(case: str, seconds: float) -> dict[str, float]:
    del case
    import replicax as rx

    rx.set_virtual_cpu_devices(2)
    import jax

    names = ["CPU:0", "CPU:1"]
    steps = {
        "central": step_of(rx.CentralStorageStrategy(names)),
        "mirrored": step_of(rx.MirroredStrategy(names)),
    }
    return taking_turns(steps, jax.block_until_ready, seconds, STEPS_IN_A_BLOCK)


CONTESTANTS = {"both": both}


def run(settings: Settings, report: Callable[[str], None]) -> tuple[Measured, list[Row]]:
    """Measures everything; returns the numbers and the lines of the table."""
    measured = compete(__name__, CONTESTANTS, CASES, settings, report)
    found = measured["both", CASES[0]]
    own, peer = found["central_ms"], found["mirrored_ms"]
    texts = f"{own:.3f} ms", f"{peer:.3f} ms"
    outcome = at_most(LIMIT, own / peer)
    return measured, [Row("central storage / mirrored", CASES[0], *texts, own / peer, *outcome)]


if __name__ == "__main__":
    main(CONTESTANTS)
