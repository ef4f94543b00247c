"""The contestants of multi_worker.py; each process reads commands and prints milliseconds."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

NUM_WORKERS = 2
EAGER_TENSORS, EAGER_SIZE = 10, 16
RATE = 0.01
MB = 1 << 20

# Runs a number of steps, and waits for the last one.
Go = Callable[[int], None]


def sizes(case: str) -> tuple[int, int, int, float]:
    """Returns width, depth and batch of a case, and weights that keep activations normal."""
    width, depth, batch = map(int, case.split("x"))
    return width, depth, batch, 1.0 / width


class Contestant:
    """One process of a contestant: its two processes make and run the same programs."""

    def __init__(self, rank: int, addresses: Sequence[str]) -> None:
        raise NotImplementedError

    def step(self, variant: str, case: str) -> Go:
        """Makes the training step of a variant and a case."""
        raise NotImplementedError

    def eager(self, count: int) -> None:
        """Runs an all-reduce of ten tensors in uncompiled replica code."""
        raise NotImplementedError


class Ours(Contestant):
    """This project; the loss is summed with the gradients (`packed`) or by `strategy.reduce`."""

    def __init__(self, rank: int, addresses: Sequence[str]) -> None:
        os.environ["TF_CONFIG"] = tf_config(rank, addresses)
        import jax.numpy as jnp

        import replicax as rx

        self.strategy = rx.MultiWorkerMirroredStrategy()
        self.values = [
            self.strategy.experimental_distribute_values_from_function(
                lambda context: jnp.ones(EAGER_SIZE)
            )
            for _ in range(EAGER_TENSORS)
        ]

    def step(self, variant: str, case: str) -> Go:
        import jax
        import jax.numpy as jnp

        import replicax as rx

        strategy = self.strategy
        width, depth, batch, scale = sizes(case)
        with strategy.scope():
            weights = [rx.Variable(jnp.full((width, width), scale)) for _ in range(depth)]
            biases = [rx.Variable(jnp.zeros(width)) for _ in range(depth)]
        # Workers agree on initial values when one is read: a part of making variables.
        biases[0].numpy()
        replica_step = our_replica_step(weights, biases, is_packed=variant == "packed")

        @rx.function
        def step(inputs: Any) -> Any:
            loss = strategy.run(replica_step, args=(inputs,))
            return loss if variant == "packed" else strategy.reduce("MEAN", loss, axis=None)

        inputs = strategy.experimental_distribute_values_from_function(
            lambda context: jnp.ones((batch // NUM_WORKERS, width))
        )

        def go(count: int) -> None:
            for _ in range(count - 1):
                step(inputs)
            jax.block_until_ready(strategy.experimental_local_results(step(inputs)))

        return go

    def eager(self, count: int) -> None:
        import jax

        import replicax as rx

        def replica_code(*values: Any) -> Any:
            return rx.get_replica_context().all_reduce("SUM", list(values))

        for _ in range(count):
            results = self.strategy.run(replica_code, args=self.values)
            jax.block_until_ready([self.strategy.experimental_local_results(r) for r in results])


def our_replica_step(weights: list[Any], biases: list[Any], is_packed: bool) -> Callable[..., Any]:
    import jax
    import jax.numpy as jnp

    import replicax as rx

    variables = weights + biases

    def replica_step(inputs: Any) -> Any:
        def loss_of_replica() -> Any:
            hidden = inputs
            for weight, bias in zip(weights, biases, strict=True):
                hidden = jax.nn.relu(hidden @ weight.value() + bias.value())
            return jnp.mean(hidden * hidden)

        loss, gradients = rx.value_and_grad(loss_of_replica, variables)()
        context = rx.get_replica_context()
        if is_packed:
            *gradients, loss = context.all_reduce("SUM", [*gradients, loss])
        else:
            gradients = context.all_reduce("SUM", gradients)
        for variable, gradient in zip(variables, gradients, strict=True):
            context.update(variable, lambda v, g: v.assign_sub(RATE * g), args=(gradient,))
        return loss

    return replica_step


class Handwritten(Contestant):
    """The step by hand: gradients one by one (`leaf`), or in packs by one of three sums."""

    def __init__(self, rank: int, addresses: Sequence[str]) -> None:
        import jax
        import numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(addresses[0], NUM_WORKERS, rank)
        self.mesh = Mesh(np.array(jax.devices()), ("worker",))
        self.everywhere, self.split = PartitionSpec(), PartitionSpec("worker")
        self.replicated = NamedSharding(self.mesh, self.everywhere)
        self.sharded = NamedSharding(self.mesh, self.split)

    def step(self, variant: str, case: str) -> Go:
        import jax
        import jax.numpy as jnp
        import numpy as np

        width, depth, batch, scale = sizes(case)

        def replica_step(state: Any, inputs: Any) -> Any:
            def loss_of_replica(state: Any) -> Any:
                hidden = inputs
                for weight, bias in state:
                    hidden = jax.nn.relu(hidden @ weight + bias)
                return jnp.mean(hidden * hidden)

            found = jax.value_and_grad(loss_of_replica)(state)
            leaves, structure = jax.tree.flatten(found)
            loss, gradients = jax.tree.unflatten(structure, summed(variant, leaves))
            return jax.tree.map(lambda v, g: v - RATE * g, state, gradients), loss

        sharded = jax.shard_map(
            replica_step,
            mesh=self.mesh,
            in_specs=(self.everywhere, self.split),
            out_specs=(self.everywhere, self.everywhere),
            check_vma=False,
        )
        compiled = jax.jit(sharded, donate_argnums=0)
        state = [
            (
                self.everywhere_of(np.full((width, width), scale, np.float32)),
                self.everywhere_of(np.zeros(width, np.float32)),
            )
            for _ in range(depth)
        ]
        own = np.ones((batch // NUM_WORKERS, width), np.float32)
        inputs = jax.make_array_from_process_local_data(self.sharded, own)

        def go(count: int) -> None:
            nonlocal state
            for _ in range(count):
                state, loss = compiled(state, inputs)
            jax.block_until_ready(loss)

        return go

    def everywhere_of(self, array: Any) -> Any:
        import jax

        return jax.make_array_from_callback(array.shape, self.replicated, lambda i: array[i])


def summed(variant: str, leaves: list[Any]) -> list[Any]:
    """Sums the arrays of both workers in one of the ways to do so by hand."""
    import jax

    def psum(array: Any) -> Any:
        return jax.lax.psum(array, "worker")

    def gather(array: Any) -> Any:
        both = jax.lax.all_gather(array, "worker")
        return both[0] + both[1]

    def swap(array: Any) -> Any:
        return array + jax.lax.ppermute(array, "worker", [(0, 1), (1, 0)])

    if variant == "leaf":
        return [psum(leaf) for leaf in leaves]
    return in_packs(leaves, {"psum": psum, "gather": gather, "swap": swap}[variant])


def in_packs(leaves: list[Any], array_sum: Callable[[Any], Any]) -> list[Any]:
    import jax.numpy as jnp

    packs: list[list[int]] = [[]]
    for i in reversed(range(len(leaves))):
        if leaves[i].nbytes >= 2 * MB:
            packs.insert(0, [i])
            continue
        if sum(leaves[j].nbytes for j in packs[-1]) + leaves[i].nbytes > 8 * MB:
            packs.append([])
        packs[-1].append(i)
    results: dict[int, Any] = {}
    for pack in packs:
        if len(pack) == 1:
            results[pack[0]] = array_sum(leaves[pack[0]])
            continue
        joined = array_sum(jnp.concatenate([leaves[i].ravel() for i in pack]))
        start = 0
        for i in pack:
            end = start + leaves[i].size
            results[i] = joined[start:end].reshape(leaves[i].shape)
            start = end
    return [results[i] for i in range(len(leaves))]


class TensorFlow(Contestant):
    """tf.distribute.MultiWorkerMirroredStrategy as it comes; variants as those of `Ours`."""

    # The number of threads of one operation; 0 for TensorFlow's default.
    threads = 0

    def __init__(self, rank: int, addresses: Sequence[str]) -> None:
        os.environ["TF_CONFIG"] = tf_config(rank, addresses)
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(self.threads)
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy()
        self.values = [
            self.strategy.experimental_distribute_values_from_function(
                lambda context: tf.ones([EAGER_SIZE])
            )
            for _ in range(EAGER_TENSORS)
        ]

    def step(self, variant: str, case: str) -> Go:
        import tensorflow as tf

        width, depth, batch, scale = sizes(case)
        with self.strategy.scope():
            weights = [tf.Variable(tf.fill([width, width], scale)) for _ in range(depth)]
            biases = [tf.Variable(tf.zeros([width])) for _ in range(depth)]
        variables = weights + biases
        inputs = tf.ones([batch // NUM_WORKERS, width])

        def update(strategy: Any, gradients: Any) -> None:
            for variable, gradient in zip(variables, gradients, strict=True):
                strategy.extended.update(
                    variable, lambda v, g: v.assign_sub(RATE * g), args=(gradient,)
                )

        def replica_step() -> Any:
            with tf.GradientTape() as tape:
                hidden = inputs
                for weight, bias in zip(weights, biases, strict=True):
                    hidden = tf.nn.relu(hidden @ weight + bias)
                loss = tf.reduce_mean(hidden * hidden)
            context = tf.distribute.get_replica_context()
            gradients = tape.gradient(loss, variables)
            if variant == "packed":
                *gradients, loss = context.all_reduce("SUM", [*gradients, loss])
            else:
                gradients = context.all_reduce("SUM", gradients)
            context.merge_call(update, args=(gradients,))
            return loss

        @tf.function
        def step() -> Any:
            loss = self.strategy.run(replica_step)
            return loss if variant == "packed" else self.strategy.reduce("MEAN", loss, axis=None)

        def go(count: int) -> None:
            for _ in range(count - 1):
                step()
            self.strategy.experimental_local_results(step())[0].numpy()

        return go

    def eager(self, count: int) -> None:
        import tensorflow as tf

        def replica_code(*values: Any) -> Any:
            return tf.distribute.get_replica_context().all_reduce("SUM", list(values))

        for _ in range(count):
            for result in self.strategy.run(replica_code, args=self.values):
                for part in self.strategy.experimental_local_results(result):
                    part.numpy()


class TensorFlowOneThread(TensorFlow):
    """The same with one thread of computation per process, as all the others."""

    threads = 1


class Torch(Contestant):
    """DistributedDataParallel of torch over Gloo."""

    def __init__(self, rank: int, addresses: Sequence[str]) -> None:
        import torch
        import torch.distributed as distributed

        host, port = addresses[0].rsplit(":", 1)
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
        torch.set_num_threads(1)
        distributed.init_process_group("gloo", rank=rank, world_size=NUM_WORKERS)

    def step(self, variant: str, case: str) -> Go:
        import torch

        del variant
        width, depth, batch, scale = sizes(case)
        layers: list[Any] = []
        for _ in range(depth):
            layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
            torch.nn.init.constant_(layers[-2].weight, scale)
            torch.nn.init.zeros_(layers[-2].bias)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        inputs = torch.ones(batch // NUM_WORKERS, width)

        def go(count: int) -> None:
            for _ in range(count):
                optimizer.zero_grad()
                hidden = model(inputs)
                (hidden * hidden).mean().backward()
                optimizer.step()

        return go


CONTESTANTS: dict[str, type[Contestant]] = {
    "ours": Ours,
    "handwritten": Handwritten,
    "tensorflow": TensorFlow,
    "tensorflow_one_thread": TensorFlowOneThread,
    "torch": Torch,
}


def serve(name: str, rank: int, addresses: Sequence[str]) -> None:
    contestant = CONTESTANTS[name](rank, addresses)
    ready: dict[tuple[str, str], Go] = {}

    def burst(go: Go, count: int) -> float:
        start = time.perf_counter()
        go(count)
        return 1e3 * (time.perf_counter() - start) / count

    def answer(what: str, *args: Any) -> float:
        if what == "ready":
            return 0.0
        if what == "first":
            return burst(contestant.step(*args), 1)
        *program, count = args
        go = contestant.eager
        if what == "step":
            variant, case = program
            if (variant, case) not in ready:
                ready[variant, case] = contestant.step(variant, case)
            go = ready[variant, case]
        go(1)
        return burst(go, count)

    for line in sys.stdin:
        print(json.dumps({"ms": answer(*json.loads(line))}), flush=True)
    # Without the farewells of all the libraries: the other process leaves as well.
    os._exit(0)


def tf_config(rank: int, addresses: Sequence[str]) -> str:
    cluster = {"worker": list(addresses)}
    return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
