"""Four threads run programs with collectives on the same eight CPU devices.

    python docs/claims/overlapping_programs.py plain       # jit(shard_map): aborts after a minute
    python docs/claims/overlapping_programs.py replicax    # ends, with the right sum

XLA's CPU client makes the devices of one program meet at a rendezvous. Programs that overlap can
hold each other's threads; XLA waits for 40 seconds, and then aborts the process. replicax runs
programs with collectives one after the other, whichever threads call them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import numpy as np

THREADS, STEPS, DEVICES = 4, 2000, 8


def plain() -> None:
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_num_cpu_devices", DEVICES)
    mesh, split = Mesh(np.array(jax.devices()), ("replica",)), PartitionSpec("replica")

    def work() -> None:
        step = jax.jit(
            jax.shard_map(
                lambda x: jax.lax.psum(jnp.tanh(x), "replica"),
                mesh=mesh,
                in_specs=split,
                out_specs=PartitionSpec(),
            )
        )
        x = jax.device_put(np.ones((DEVICES, 64), np.float32), NamedSharding(mesh, split))
        for _ in range(STEPS):
            result = step(x)
        check(result)

    in_threads(work)


def replicax() -> None:
    import replicax as rx

    rx.set_virtual_cpu_devices(DEVICES)
    import jax.numpy as jnp

    strategy = rx.MirroredStrategy()

    def work() -> None:
        @rx.function
        def step(x):
            def replica_fn(x):
                return rx.get_replica_context().all_reduce("SUM", jnp.tanh(x))

            return strategy.run(replica_fn, args=(x,))

        x = strategy.experimental_distribute_values_from_function(
            lambda context: jnp.ones((1, 64), jnp.float32)
        )
        for _ in range(STEPS):
            result = step(x)
        check(strategy.experimental_local_results(result)[0])

    in_threads(work)


def check(result) -> None:
    np.testing.assert_allclose(np.asarray(result), DEVICES * np.tanh(1.0), rtol=1e-5)


def in_threads(work: Callable[[], None]) -> None:
    errors = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    print(f"{THREADS * STEPS} steps of {THREADS} threads on {DEVICES} devices")


if __name__ == "__main__":
    {"plain": plain, "replicax": replicax}[sys.argv[1]]()
