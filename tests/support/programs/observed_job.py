"""A parameter-server job that can be looked at: counts closures, trains, logs its loss.

Prints "ready" when closures run, and at the end the counters as JSON. Its only argument is the
number of closures.
"""

from __future__ import annotations

import json
import sys
import time

import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx
from replicax.observe import progress
from replicax.testing import LocalCluster


def main(num_closures: int) -> None:
    with LocalCluster(workers=2, ps=2, timing="fast") as cluster:
        strategy = rx.ParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            counter = rx.Variable(0, dtype=jnp.int32, name="counter")
            weights = rx.Variable(jnp.zeros((256, 64)), name="weights")
            optimizer = rx.optimizers.Optimizer(optax.sgd(0.01), [weights])
        x = np.random.default_rng(0).normal(size=(32, 256)).astype(np.float32)

        @rx.function
        def step():
            # Long enough that a worker is killed in the middle of one.
            loss, gradients = rx.value_and_grad(
                lambda: jnp.mean((x @ weights.value() - 1.0) ** 2), [weights]
            )()
            optimizer.apply_gradients(zip(gradients, [weights], strict=True))
            counter.assign_add(1)
            return loss

        def slow_step():
            time.sleep(0.005)
            return step()

        with rx.coordinator.ClusterCoordinator(strategy) as coordinator:
            for number in range(num_closures):
                result = coordinator.schedule(slow_step)
                if number % 50 == 0:
                    progress.log("loss", float(result.fetch()), number)
                if number == 50:
                    print("ready", flush=True)
            coordinator.join(timeout=240.0)
            restarts = [worker.num_restarts for worker in coordinator.status().workers]
        print(json.dumps({"counter": int(counter.numpy()), "restarts": restarts}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
