"""A decoder-only transformer that learns to write Python, with what large ones need.

AdamW with warm-up, cosine decay and clipping by the global norm; gradients accumulated over two
batches; matrix products in bfloat16 with weights in float32; blocks whose activations are computed
again in the backward pass (remat). The text is the source of a module of Python's own library.
"""

from __future__ import annotations

import argparse as text_to_learn
import inspect
import time
from typing import Any

import replicax as rx

rx.set_virtual_cpu_devices(2)

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

WIDTH, HEADS, LAYERS, LENGTH, VOCABULARY = 64, 4, 2, 64, 128
BATCH, ACCUMULATED, STEPS = 32, 2, 240
strategy = rx.MirroredStrategy()


class Block(nnx.Module):
    """Attention to what came before, then two dense layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        options: dict[str, Any] = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.norm_1, self.norm_2 = nnx.RMSNorm(WIDTH, **options), nnx.RMSNorm(WIDTH, **options)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, **options)
        self.up, self.down = (
            nnx.Linear(WIDTH, 4 * WIDTH, **options),
            nnx.Linear(4 * WIDTH, WIDTH, **options),
        )

    @nnx.remat
    def __call__(self, x: Any) -> Any:
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm_1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        x = x.astype(jnp.bfloat16)
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x.astype(jnp.float32)))


schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 20, STEPS // ACCUMULATED)
transformation = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
with strategy.scope():
    model = rx.models.from_nnx(Transformer(nnx.Rngs(0)))
    weights = model.trainable_variables
    optimizer = rx.optimizers.Optimizer(
        transformation, weights, gradient_accumulation_steps=ACCUMULATED
    )
    mean_loss = rx.metrics.Mean()


def replica_step(text: Any) -> None:
    def loss_fn() -> Any:
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(
            model(text[:, :-1]), text[:, 1:]
        )
        return losses.sum() / (BATCH * LENGTH), losses.mean()

    (_, mean), gradients = rx.value_and_grad(loss_fn, weights, has_aux=True)()
    optimizer.apply_gradients(gradients)
    mean_loss.update_state(mean)


@rx.function
def train_step(text: Any) -> None:
    strategy.run(replica_step, args=(text,))


source = inspect.getsource(text_to_learn).encode("ascii", "replace")
characters = np.frombuffer(source, np.uint8).astype(np.int32)
starts = np.random.default_rng(0).integers(0, len(source) - LENGTH - 1, (STEPS, BATCH))
rows = characters[starts[..., None] + np.arange(LENGTH + 1)]
dataset = rx.data.Dataset.from_tensor_slices(rows.reshape(-1, LENGTH + 1)).batch(BATCH)
begun = time.perf_counter()
for step, text in enumerate(strategy.experimental_distribute_dataset(dataset), start=1):
    train_step(text)
    if step % 40 == 0:
        per_step = (time.perf_counter() - begun) / step * 1e3
        print(f"step {step}: loss {mean_loss.result():.3f}, {per_step:.0f} ms per step")
        mean_loss.reset_state()
print(f"{STEPS} batches, {int(optimizer.iterations)} updates, weights in {weights[0].dtype}")
