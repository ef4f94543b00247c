"""Batches of a torch DataLoader, each split over the replicas.

The loader is passed to the strategy as it is. Its tensors become arrays, and its last, partial
batch is split exactly. Needs the package torch; a build for the CPU is enough.
"""

from __future__ import annotations

from typing import Any

import replicax as rx

rx.set_virtual_cpu_devices(2)

import numpy as np
import optax
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

GLOBAL_BATCH, EPOCHS = 64, 5
strategy = rx.MirroredStrategy()

data = load_digits()
rows = TensorDataset(torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target))
order = torch.Generator().manual_seed(0)
loader = DataLoader(rows, batch_size=GLOBAL_BATCH, shuffle=True, generator=order)
distributed = strategy.experimental_distribute_dataset(loader)

with strategy.scope():
    weight = rx.Variable(np.zeros((64, 10), np.float32), name="weight")
    bias = rx.Variable(np.zeros(10, np.float32), name="bias")
    optimizer = rx.optimizers.Optimizer(optax.adam(0.02), [weight, bias])
    accuracy = rx.metrics.SparseCategoricalAccuracy()


def replica_step(pixels: Any, digits: Any) -> Any:
    def loss_fn() -> Any:
        logits = pixels @ weight.value() + bias.value()
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, digits)
        return losses.sum() / GLOBAL_BATCH, logits

    (loss, logits), gradients = rx.value_and_grad(loss_fn, [weight, bias], has_aux=True)()
    optimizer.apply_gradients(gradients)
    accuracy.update_state(digits, logits)
    return loss


@rx.function
def train_step(batch: Any) -> Any:
    return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)


for epoch in range(EPOCHS):
    accuracy.reset_state()
    for batch in distributed:
        loss = train_step(batch)
    print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy.result():.3f}")
