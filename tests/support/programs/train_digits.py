"""Trains a classifier of digits with checkpoints, and can be killed at any time.

Prints a line for all that happens, so that a parent can time its kills:

    ready                   the program is set up; nothing is restored yet
    resumed ckpt-14 14      goes on from this checkpoint at this step; "resumed none 0" without
    step 15                 so many steps are done
    saving 21               the checkpoint of this step begins ...
    saved 21                ... and is on disk
    done 69
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import replicax as rx

GLOBAL_BATCH, HIDDEN, NUM_TRAIN = 64, 32, 1437
STEPS_PER_EPOCH = -(-NUM_TRAIN // GLOBAL_BATCH)
# For each name: how many devices there are, and the strategy that uses them.
STRATEGIES: dict[str, tuple[int, Callable[[], Any]]] = {
    "one_device": (1, lambda: rx.OneDeviceStrategy("CPU:0")),
    "mirrored_2": (2, lambda: rx.MirroredStrategy(["CPU:0", "CPU:1"])),
    "mirrored_4": (4, lambda: rx.MirroredStrategy([f"CPU:{i}" for i in range(4)])),
    "central_2": (2, lambda: rx.CentralStorageStrategy(["CPU:0", "CPU:1"])),
}


Examples = dict[str, np.ndarray]


def digits() -> tuple[Examples, Examples]:
    """Returns examples to train with and examples to test with, each with an id."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    columns = {
        "pixels": (data.data[order] / 16).astype(np.float32),
        "digit": data.target[order].astype(np.int32),
        "id": np.arange(len(order), dtype=np.int32),
    }
    train = {name: column[:NUM_TRAIN] for name, column in columns.items()}
    test = {name: column[NUM_TRAIN:] for name, column in columns.items()}
    return train, test


def load(file: str | None) -> Examples:
    """Returns the examples to train with; importing scikit-learn takes longer than a file."""
    if file is None:
        return digits()[0]
    with np.load(file) as content:
        return dict(content)


class Training:
    """Model, optimizer, metric and visit counts of one run under a strategy."""

    def __init__(self, strategy: Any, *, is_compiled: bool = True) -> None:
        import jax
        import optax

        self.strategy = strategy
        rng = np.random.default_rng(1)
        with strategy.scope():
            self.model = rx.Module()
            shapes = {"hidden": (64, HIDDEN), "bias": (HIDDEN,), "out": (HIDDEN, 10)}
            for name, shape in shapes.items():
                setattr(self.model, name, rx.Variable((rng.normal(size=shape) * 0.1).astype("f4")))
            self.parameters = list(self.model.trainable_variables)
            self.optimizer = rx.optimizers.Optimizer(optax.adam(1e-2), self.parameters)
            self.accuracy = rx.metrics.SparseCategoricalAccuracy()
            self.visits = rx.Variable(
                np.zeros(NUM_TRAIN, np.int32),
                trainable=False,
                synchronization=rx.VariableSynchronization.ON_READ,
                aggregation=rx.VariableAggregation.SUM,
            )
        self._jax = jax
        self.train_step = rx.function(self._train_step) if is_compiled else self._train_step
        self.test_step = rx.function(self._test_step)

    def _logits(self, pixels: Any) -> Any:
        model = self.model
        hidden = self._jax.nn.relu(pixels @ model.hidden.value() + model.bias.value())
        return hidden @ model.out.value()

    def _train_replica(self, batch: Any, noise: Any) -> None:
        import optax

        pixels = batch["pixels"] + noise[batch["id"]]

        def loss_fn() -> Any:
            logits = self._logits(pixels)
            cross_entropy = optax.losses.softmax_cross_entropy_with_integer_labels
            return cross_entropy(logits, batch["digit"]).sum() / GLOBAL_BATCH, logits

        (_, logits), gradients = rx.value_and_grad(loss_fn, self.parameters, has_aux=True)()
        self.optimizer.apply_gradients(gradients)
        self.accuracy.update_state(batch["digit"], logits)
        self.visits.assign_add(self._jax.numpy.zeros(NUM_TRAIN, "i4").at[batch["id"]].add(1))

    def _train_step(self, batch: Any, noise: Any) -> None:
        self.strategy.run(self._train_replica, args=(batch, noise))

    def _test_replica(self, batch: Any) -> None:
        self.accuracy.update_state(batch["digit"], self._logits(batch["pixels"]))

    def _test_step(self, batch: Any) -> None:
        self.strategy.run(self._test_replica, args=(batch,))

    def train(self, batch: Any, key: Any) -> None:
        """One step; the key makes the noise on the pixels.

        There is noise for all examples, whichever come: so strategies train alike however
        they split a batch.
        """
        self.train_step(batch, 0.1 * self._jax.random.normal(key, (NUM_TRAIN, 64)))

    def start_epoch(self) -> None:
        """Resets the counts of visits and hits."""
        self.accuracy.reset_state()
        with self.strategy.scope():
            self.visits.assign(np.zeros(NUM_TRAIN, np.int32))

    def result(self) -> dict[str, np.ndarray]:
        """Returns all that training has changed, by name."""
        found = {f"parameter_{i}": v.numpy() for i, v in enumerate(self.parameters)}
        found |= {f"optimizer_{i}": v.numpy() for i, v in enumerate(self.optimizer.variables)}
        found["iterations"] = self.optimizer.iterations.numpy()
        found["accuracy"] = np.asarray(self.accuracy.result())
        found["visits"] = self.visits.numpy()
        return found


def batches(strategy: Any, examples: Examples) -> Any:
    """Returns the examples in another order in each epoch, the last batch being smaller."""
    dataset = rx.data.Dataset.from_tensor_slices(examples).shuffle(NUM_TRAIN, seed=3)
    return strategy.experimental_distribute_dataset(dataset.batch(GLOBAL_BATCH).repeat())


class Saver:
    """Saves every k steps and says so; in the background on request."""

    def __init__(self, manager: rx.train.CheckpointManager, asynchronous: bool) -> None:
        self._manager = manager
        self._asynchronous = asynchronous
        self._unfinished: int | None = None

    def save(self, step: int) -> None:
        self.finish()
        say("saving", step)
        self._manager.save(checkpoint_number=step, asynchronous=self._asynchronous)
        self._unfinished = step
        if not self._asynchronous:
            self.finish()

    def finish(self) -> None:
        if self._unfinished is not None:
            self._manager.wait()
            say("saved", self._unfinished)
            self._unfinished = None


def say(*words: Any) -> None:
    print(*words, flush=True)


def main() -> None:
    import jax

    options = parsed()
    num_devices, make_strategy = STRATEGIES[options.strategy]
    rx.set_virtual_cpu_devices(num_devices)
    strategy = make_strategy()
    training = Training(strategy)
    iterator = iter(batches(strategy, load(options.examples)))
    checkpoint = rx.train.Checkpoint(
        model=training.model,
        optimizer=training.optimizer,
        accuracy=training.accuracy,
        visits=training.visits,
        iterator=iterator,
        key=jax.random.key(5),
        # Makes a save take long enough to be hit.
        ballast=rx.Variable(np.zeros(options.ballast << 18, np.float32), trainable=False),
    )
    say("ready")
    with rx.train.CheckpointManager(checkpoint, options.directory, max_to_keep=2) as manager:
        path = manager.restore_or_initialize()
        first = int(training.optimizer.iterations)
        say("resumed", Path(path).name if path else "none", first)
        saver = Saver(manager, options.asynchronous)
        for step in range(first, options.stop_at):
            if step % STEPS_PER_EPOCH == 0:
                training.start_epoch()
            checkpoint.key, own = jax.random.split(checkpoint.key)
            training.train(next(iterator), own)
            say("step", step + 1)
            if (step + 1) % options.save_every == 0 or step + 1 == options.stop_at:
                saver.save(step + 1)
            time.sleep(options.pause)
        saver.finish()
    iterator.close()
    found = training.result() | {"key": np.asarray(jax.random.key_data(checkpoint.key))}
    np.savez(options.result, **found)
    say("done", options.stop_at)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("strategy", choices=sorted(STRATEGIES))
    parser.add_argument("directory")
    parser.add_argument("result", help="where to write the .npz with what came out")
    parser.add_argument("--examples", help="an .npz with digits; by default scikit-learn's")
    parser.add_argument("--stop-at", type=int, default=3 * STEPS_PER_EPOCH, help="step")
    parser.add_argument("--save-every", type=int, default=7, help="steps")
    parser.add_argument("--asynchronous", action="store_true", help="save in the background")
    parser.add_argument("--ballast", type=int, default=0, help="MiB more in each checkpoint")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
