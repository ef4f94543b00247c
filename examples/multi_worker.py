"""Training in lock step on several workers: one file that every worker runs.

On one machine it starts two workers by itself, kills one of them, and shows that the group goes on
from its last checkpoint:

    python examples/multi_worker.py --kill

In a cluster, start it as every task, each with its own TF_CONFIG and a directory that all of them
can reach:

    TF_CONFIG='{"cluster": {"worker": ["host1:2222", "host2:2222"]},
                "task": {"type": "worker", "index": 0}}' \\
        python examples/multi_worker.py /shared/run
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import optax
from sklearn.datasets import load_digits

import replicax as rx

# The size of a step on all workers together. Each worker gets its part of it.
GLOBAL_BATCH, STEPS_PER_EPOCH, SAVE_EVERY = 64, 22, 11


class Network(rx.Module):
    def __init__(self) -> None:
        super().__init__()
        # Every worker makes initial values; all of them get those of worker 0.
        generator = np.random.default_rng()
        self.w1 = rx.Variable(generator.normal(0, 0.15, (64, 64)).astype(np.float32))
        self.w2 = rx.Variable(generator.normal(0, 0.15, (64, 10)).astype(np.float32))

    def __call__(self, pixels: Any) -> Any:
        return (pixels @ self.w1.value()).clip(0) @ self.w2.value()


def train(directory: str, num_epochs: int) -> None:
    """The program of every worker. The workers meet where they compute: none may skip a step."""
    # First of all: it joins the other workers, and raises if one of them is missing.
    strategy = rx.MultiWorkerMirroredStrategy()
    with strategy.scope():
        network = Network()
        weights = list(network.trainable_variables)
        optimizer = rx.optimizers.Optimizer(optax.adam(3e-3), weights)

    # The whole dataset on each worker; the strategy gives each its part of every batch.
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    pixels, labels = (pixels[order] / 16).astype(np.float32), labels[order]
    dataset = rx.data.Dataset.from_tensor_slices((pixels[:-360], labels[:-360]))
    dataset = dataset.shuffle(2000, seed=0).repeat().batch(GLOBAL_BATCH)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))

    def replica_step(pixels: Any, labels: Any) -> Any:
        def loss_fn() -> Any:
            losses = optax.losses.softmax_cross_entropy_with_integer_labels(network(pixels), labels)
            return rx.nn.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH)

        loss, gradients = rx.value_and_grad(loss_fn, weights)()
        optimizer.apply_gradients(gradients)
        return loss

    @rx.function
    def train_step(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

    # All workers call `save` and `restore`; one of them writes the file, all of them read it.
    checkpoint = rx.train.Checkpoint(network=network, optimizer=optimizer, iterator=iterator)
    is_chief = strategy.cluster_resolver.task_id in (0, None)
    with rx.train.CheckpointManager(checkpoint, directory, max_to_keep=2) as manager:
        manager.restore_or_initialize()
        first = int(optimizer.iterations)
        if is_chief:
            print(f"{strategy.num_replicas_in_sync} replicas start at step {first}", flush=True)
        for step in range(first + 1, num_epochs * STEPS_PER_EPOCH + 1):
            loss = train_step(next(iterator))
            if step % SAVE_EVERY == 0:
                manager.save(checkpoint_number=step)
            if is_chief and step % STEPS_PER_EPOCH == 0:
                right = np.mean(np.argmax(network(pixels[-360:]), axis=1) == labels[-360:])
                print(f"step {step}: loss {float(loss):.3f}, accuracy {right:.3f}", flush=True)
    iterator.close()


def train_here(directory: str, num_epochs: int, kill: bool) -> None:
    """Starts two workers on this machine, as a cluster manager does on many."""
    with rx.testing.LocalCluster(workers=2, ps=0) as cluster:
        program = cluster.launch(__file__, args=(directory, num_epochs), max_restarts=1)
        if kill:
            deadline = time.monotonic() + 120
            while not list(Path(directory).glob("ckpt-*")) and time.monotonic() < deadline:
                time.sleep(0.05)
            cluster.kill("worker", 1)
        program.values(timeout=300)
        print(cluster.logs("worker", 0))
        print(f"restarted {program.num_restarts} times")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains in lock step on several workers.")
    parser.add_argument("directory", nargs="?", help="where all workers keep checkpoints")
    parser.add_argument("epochs", nargs="?", type=int, default=5)
    parser.add_argument("--kill", action="store_true", help="kill a worker of this machine once")
    options = parser.parse_args()
    if rx.cluster_resolver.TFConfigClusterResolver().task_type is not None:
        train(options.directory, options.epochs)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            train_here(options.directory or temporary, options.epochs, options.kill)
