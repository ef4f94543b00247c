"""A training step of a small decoder-only transformer on one and on two CPU devices.

Two layers of width 64, sequences of 48 tokens, a global batch of 16, adamw with a warm-up
schedule and clipping by the global norm, gradients accumulated over two steps, and a mean of
the loss. The peer is the plain twin of the program: the same model under `jax.jit`, its state
replicated and its batch split by `NamedSharding`. The cases `step` use one batch that lies on
the devices; `data` reads another batch each time, through `experimental_distribute_dataset`
and through `jax.device_put`.

The two take turns within one process, because two processes differ by more than the two do. The
last row counts the lines of both programs, without the model, the data and the transformation,
which they share.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Measured, Row, Settings, at_most, compete, main, taking_turns

# What is measured, and on how many devices.
LIMITS = {"step x1": 1.05, "step x2": 1.03, "data x1": 1.05, "data x2": 1.05}
CASES = tuple(LIMITS)
WIDTH, HEADS, LAYERS, LENGTH, BATCH, VOCABULARY = 64, 4, 2, 48, 16, 256
STEPS_IN_A_BLOCK = 20
NUM_BATCHES = 32


def parameters() -> dict[str, Any]:
    import numpy as np

    random = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return (random.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)

    def layer() -> dict[str, Any]:
        return {
            "norm_1": np.ones(WIDTH, np.float32),
            "qkv": normal(WIDTH, 3 * WIDTH),
            "out": normal(WIDTH, WIDTH),
            "norm_2": np.ones(WIDTH, np.float32),
            "up": normal(WIDTH, 4 * WIDTH),
            "up_bias": np.zeros(4 * WIDTH, np.float32),
            "down": normal(4 * WIDTH, WIDTH),
            "down_bias": np.zeros(WIDTH, np.float32),
        }

    return {
        "embedding": normal(VOCABULARY, WIDTH),
        "position": normal(LENGTH, WIDTH),
        "layers": [layer() for _ in range(LAYERS)],
        "norm": np.ones(WIDTH, np.float32),
        "head": normal(WIDTH, VOCABULARY),
    }


def losses(p: Any, tokens: Any) -> Any:
    """The loss of each predicted token."""
    import jax
    import jax.numpy as jnp
    import optax

    def normalized(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale

    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    length = inputs.shape[1]
    x = p["embedding"][inputs] + p["position"][:length]
    mask = jnp.tril(jnp.ones((length, length), bool))
    for layer in p["layers"]:
        heads = normalized(x, layer["norm_1"]) @ layer["qkv"]
        heads = heads.reshape(*heads.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (WIDTH // HEADS) ** 0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        x = x + mixed @ layer["out"]
        hidden = jax.nn.gelu(normalized(x, layer["norm_2"]) @ layer["up"] + layer["up_bias"])
        x = x + hidden @ layer["down"] + layer["down_bias"]
    logits = normalized(x, p["norm"]) @ p["head"]
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, targets)


def transformation() -> Any:
    import optax

    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 100, 10_000)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


def batches() -> list[Any]:
    import numpy as np

    random = np.random.default_rng(1)
    shape = (BATCH, LENGTH + 1)
    return [random.integers(0, VOCABULARY, shape).astype(np.int32) for _ in range(NUM_BATCHES)]


def our_program(num_devices: int) -> tuple[Any, Callable[[Any], Any]]:
    """Returns the strategy, and the step."""
    import jax
    import jax.numpy as jnp

    import replicax as rx

    strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(num_devices)])
    with strategy.scope():
        variables = rx.make_variables(jax.tree.map(jnp.asarray, parameters()))
        optimizer = rx.optimizers.Optimizer(
            transformation(), variables, gradient_accumulation_steps=2
        )
        mean = rx.metrics.Mean()

    def replica_step(tokens: Any) -> Any:
        def loss_of_replica() -> Any:
            found = losses(rx.read_variables(variables), tokens)
            return jnp.sum(found) / (BATCH * LENGTH)

        loss, gradients = rx.value_and_grad(loss_of_replica, variables)()
        optimizer.apply_gradients(gradients)
        mean.update_state(loss)
        return loss

    @rx.function
    def step(tokens: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, args=(tokens,)), axis=None)

    return strategy, step


def our_step(what: str, num_devices: int) -> Callable[[], Any]:
    import jax.numpy as jnp
    import numpy as np

    import replicax as rx

    strategy, step = our_program(num_devices)
    if what == "step":
        parts = np.split(batches()[0], num_devices)
        tokens = strategy.experimental_distribute_values_from_function(
            lambda context: jnp.asarray(parts[context.replica_id_in_sync_group])
        )
        return lambda: step(tokens)
    dataset = rx.data.Dataset.from_tensor_slices(np.concatenate(batches())).repeat().batch(BATCH)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    return lambda: step(next(iterator))


def twin_program(num_devices: int) -> tuple[Any, Callable[[Any], Any]]:
    """Returns the sharding of batches, and the step."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec("data"))
    optimizer = optax.MultiSteps(transformation(), 2)

    def train(params: Any, state: Any, mean: Any, tokens: Any) -> Any:
        def loss_of_batch(params: Any) -> Any:
            return jnp.sum(losses(params, tokens)) / (BATCH * LENGTH)

        loss, gradients = jax.value_and_grad(loss_of_batch)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, (mean[0] + loss, mean[1] + 1), loss

    compiled = jax.jit(train, donate_argnums=(0, 1, 2))
    place: Callable[..., Any] = jax.jit(
        lambda tree: jax.tree.map(jnp.array, tree), out_shardings=everywhere
    )
    params = place(parameters())
    state = place(optimizer.init(params))
    mean = place((np.float32(0), np.float32(0)))

    def step(tokens: Any) -> Any:
        nonlocal params, state, mean
        params, state, mean, loss = compiled(params, state, mean, tokens)
        return loss

    return split, step


def twin_step(what: str, num_devices: int) -> Callable[[], Any]:
    import itertools

    import jax

    split, step = twin_program(num_devices)
    if what == "step":
        tokens = jax.device_put(batches()[0], split)
        return lambda: step(tokens)
    endless = itertools.cycle(batches())
    return lambda: step(jax.device_put(next(endless), split))


def lines_of_code(program: Callable[..., Any]) -> int:
    """Counts the lines between the imports and the end of a program that are not empty."""
    lines = [line.strip() for line in inspect.getsource(program).splitlines()[2:-1]]
    return sum(bool(line) and not line.startswith(("import ", "from ")) for line in lines)


def both(case: str, seconds: float) -> dict[str, float]:
    # XLA's CPU client starves on collectives in flight if its pool has few threads.
    os.environ.setdefault("NPROC", "8")
    import replicax as rx

    what, _, devices = case.partition(" x")
    rx.set_virtual_cpu_devices(int(devices))
    import jax

    steps = {"ours": our_step(what, int(devices)), "twin": twin_step(what, int(devices))}
    return taking_turns(steps, jax.block_until_ready, 6 * seconds, STEPS_IN_A_BLOCK)


CONTESTANTS = {"both": both}


def run(settings: Settings, report: Callable[[str], None]) -> tuple[Measured, list[Row]]:
    """Measures everything; returns the numbers and the lines of the table."""
    measured = compete(__name__, CONTESTANTS, CASES, settings, report)
    rows: list[Row] = []
    for case in CASES:
        found = measured["both", case]
        own, peer = found["ours_ms"], found["twin_ms"]
        outcome = at_most(LIMITS[case], own / peer)
        texts = f"{own:.3f} ms", f"{peer:.3f} ms"
        rows.append(Row("transformer / jit + NamedSharding", case, *texts, own / peer, *outcome))
    own, peer = lines_of_code(our_program), lines_of_code(twin_program)
    texts = f"{own} lines", f"{peer} lines"
    rows.append(Row("transformer / jit + NamedSharding", "code", *texts, own / peer, "", None))
    return measured, rows


if __name__ == "__main__":
    main(CONTESTANTS)
