"""Parameter servers that users write by hand: on `torch.distributed.rpc`, and on Ray actors.

The cases of `parameter_server.py`, with 2 servers and 2 workers, each a process of its own. Both
peers are the simplest program that is fast: no closures are scheduled, every worker runs its share
of the steps in a loop; a step sends each server one request, which applies the updates and returns
the new values. Nothing is counted once, fenced, saved or repeated, and a lost process ends the
program. Torch computes with torch; the workers of Ray compute with a jitted JAX function.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import parameter_server
from benchmarks.harness import Measured, Row, Settings, at_least, compete, main
from benchmarks.parameter_server import (
    BURSTS,
    CASES,
    NUM_IDS,
    NUM_SERVERS,
    NUM_WORKERS,
    ROWS,
    WIDTH,
)

LIMIT = 3.0
PEERS = ("torch",)
RATE = 0.01
NUM_BURSTS = 4

# Runs a burst of steps on all workers, and waits for them.
Burst = Callable[[int], Any]


def best_burst(case: str, burst: Burst) -> dict[str, float]:
    """Returns microseconds per step, in the best of several bursts."""
    burst(20)
    best = float("inf")
    for _ in range(NUM_BURSTS):
        start = time.perf_counter()
        burst(BURSTS[case] // NUM_WORKERS)
        best = min(best, time.perf_counter() - start)
    return {"us": 1e6 * best / BURSTS[case]}


class Server:
    """The state of one server, in NumPy arrays; the same for both peers.

    It holds every second layer of the MLP, and half of the table.
    """

    def __init__(self, case: str, index: int) -> None:
        import numpy as np

        self.arrays: list[Any] = []
        if case == "assign_add":
            self.arrays = [np.zeros((), np.float32)] if index == 0 else []
        elif case == "embedding":
            self.arrays = [np.zeros((ROWS // NUM_SERVERS, WIDTH), np.float32)]
        else:
            width, depth, _ = sizes(case)
            own = range(index, depth, NUM_SERVERS)
            self.arrays = [np.full((width, width), 0.01, np.float32) for _ in own]

    def add(self) -> None:
        """Adds one to the counter."""
        self.arrays[0] += 1.0

    def subtract_and_read(self, updates: Sequence[Any]) -> list[Any]:
        """Applies updates of all arrays, if there are any; returns the arrays."""
        for array, update in zip(self.arrays, updates, strict=bool(updates)):
            array -= update
        return self.arrays

    def rows(self, ids: Any) -> Any:
        """Returns rows of the table."""
        return self.arrays[0][ids]

    def subtract_rows(self, ids: Any, updates: Any) -> None:
        """Changes rows of the table, each as often as it is given."""
        import numpy as np

        np.subtract.at(self.arrays[0], ids, updates)


def sizes(case: str) -> tuple[int, int, int]:
    """Returns width, depth and batch of an MLP."""
    width, depth, batch = map(int, case.split()[1].split("x"))
    return width, depth, batch


def ids_of_servers() -> Any:
    """Returns the rows that a step changes, by server."""
    import numpy as np

    shape = (NUM_SERVERS, NUM_IDS // NUM_SERVERS)
    return np.random.default_rng(0).integers(0, ROWS // NUM_SERVERS, shape)


class Worker:
    """A worker; each peer says how it asks servers and how it computes."""

    def __init__(self, case: str, num_servers: int = NUM_SERVERS) -> None:
        self.case = case
        self.updates: list[list[Any]] = [[] for _ in range(num_servers)]
        self.ids = ids_of_servers() if case == "embedding" else None

    def ask(self, method: str, args: Sequence[Sequence[Any]]) -> list[Any]:
        """Calls a method of all servers at the same time; returns the results."""
        raise NotImplementedError

    def updates_of_layers(self, layers: list[Any]) -> list[Any]:
        """Returns learning rate times gradient of each layer."""
        raise NotImplementedError

    def updates_of_rows(self, rows: Any) -> Any:
        """Returns learning rate times gradient of each row."""
        raise NotImplementedError

    def run(self, count: int) -> None:
        """Runs steps."""
        step = {"assign_add": self.add, "embedding": self.look_up}.get(self.case, self.train)
        for _ in range(count):
            step()

    def add(self) -> None:
        self.ask("add", [()])

    def look_up(self) -> None:
        import numpy as np

        assert self.ids is not None
        rows = np.concatenate(self.ask("rows", [(ids,) for ids in self.ids]))
        updates = np.split(np.asarray(self.updates_of_rows(rows)), NUM_SERVERS)
        pairs = zip(self.ids, updates, strict=True)
        self.ask("subtract_rows", [(ids, update) for ids, update in pairs])

    def train(self) -> None:
        # The updates of the last step travel with the request for this step's values.
        parts = self.ask("subtract_and_read", [(updates,) for updates in self.updates])
        layers = [parts[i % NUM_SERVERS][i // NUM_SERVERS] for i in range(sizes(self.case)[1])]
        updates = self.updates_of_layers(layers)
        self.updates = [updates[i::NUM_SERVERS] for i in range(NUM_SERVERS)]


# torch.distributed.rpc. Functions and objects travel by name, so they are at the top level.


class _TorchProcess:
    server: Server
    worker: Worker


class TorchServer(Server):
    """A server that changes rows with torch, which is faster than NumPy's `subtract.at`."""

    def subtract_rows(self, ids: Any, updates: Any) -> None:
        import torch

        table = torch.from_numpy(self.arrays[0])
        table.index_add_(0, torch.from_numpy(ids), torch.from_numpy(updates), alpha=-1)


def _torch_make_server(case: str, index: int) -> None:
    _TorchProcess.server = TorchServer(case, index)


def _torch_call(method: str, args: Sequence[Any]) -> Any:
    return _as_tensors(getattr(_TorchProcess.server, method)(*_as_arrays(args)))


def _torch_make_worker(case: str) -> None:
    _TorchProcess.worker = TorchWorker(case)


def _torch_run(count: int) -> None:
    _TorchProcess.worker.run(count)


def _as_arrays(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_arrays(each) for each in value]
    return value.numpy()


def _as_tensors(value: Any) -> Any:
    import torch

    if isinstance(value, list | tuple):
        return [_as_tensors(each) for each in value]
    return None if value is None else torch.as_tensor(value)


class TorchWorker(Worker):
    """A worker that asks by `rpc_async`, which sends tensors without pickling their content."""

    def ask(self, method: str, args: Sequence[Sequence[Any]]) -> list[Any]:
        import torch
        from torch.distributed import rpc

        futures = [
            rpc.rpc_async(f"ps{i}", _torch_call, (method, _as_tensors(each)))
            for i, each in enumerate(args)
        ]
        results = torch.futures.wait_all(futures)
        return _as_arrays(results) if method == "rows" else results

    def updates_of_layers(self, layers: list[Any]) -> list[Any]:
        import torch

        width, _, batch = sizes(self.case)
        layers = [layer.requires_grad_() for layer in layers]
        hidden = torch.ones(batch, width)
        for layer in layers:
            hidden = torch.relu(hidden @ layer)
        gradients = torch.autograd.grad((hidden * hidden).mean(), layers)
        return [RATE * gradient for gradient in gradients]

    def updates_of_rows(self, rows: Any) -> Any:
        import torch

        tensor = torch.from_numpy(rows).requires_grad_()
        loss = ((tensor - 1.0) ** 2).mean()
        return 0.1 * torch.autograd.grad(loss, [tensor])[0].numpy()


def torch_process(name: str, rank: int, port: int) -> None:
    """One process of the peer; it ends when the coordinator shuts down."""
    from torch.distributed import rpc

    _join_rpc(name, rank, port)
    rpc.shutdown()


def _join_rpc(name: str, rank: int, port: int) -> None:
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    world_size = 1 + NUM_SERVERS + NUM_WORKERS
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)


def torch(case: str, seconds: float) -> dict[str, float]:
    from torch.distributed import rpc

    del seconds
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    servers = [f"ps{i}" for i in range(NUM_SERVERS)]
    workers = [f"worker{i}" for i in range(NUM_WORKERS)]
    command = [sys.executable, "-m", __spec__.name, "--torch-process"]
    processes = [
        subprocess.Popen([*command, name, str(rank), str(port)])
        for rank, name in enumerate([*servers, *workers], 1)
    ]
    try:
        _join_rpc("coordinator", 0, port)
        for i, name in enumerate(servers):
            rpc.rpc_sync(name, _torch_make_server, (case, i))
        for name in workers:
            rpc.rpc_sync(name, _torch_make_worker, (case,))

        def burst(count: int) -> None:
            futures = [rpc.rpc_async(name, _torch_run, (count,), timeout=0) for name in workers]
            for future in futures:
                future.wait()

        found = best_burst(case, burst)
        rpc.shutdown()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return found


# Ray actors.


def ray(case: str, seconds: float) -> dict[str, float]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray as ray_library

    del seconds

    class RayWorker(Worker):
        def __init__(self, case: str, servers: list[Any]) -> None:
            super().__init__(case)
            self.servers = servers
            self.layer_updates, self.row_updates = _jax_programs(case)

        def ask(self, method: str, args: Sequence[Sequence[Any]]) -> list[Any]:
            pairs = zip(self.servers, args, strict=False)
            return ray_library.get([getattr(s, method).remote(*each) for s, each in pairs])

        def updates_of_layers(self, layers: list[Any]) -> list[Any]:
            import numpy as np

            return [np.asarray(update) for update in self.layer_updates(layers)]

        def updates_of_rows(self, rows: Any) -> Any:
            return self.row_updates(rows)

    here = {"env_vars": {"PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"}}
    cores = 2 * (1 + NUM_SERVERS + NUM_WORKERS)
    ray_library.init(num_cpus=cores, include_dashboard=False, log_to_driver=False, runtime_env=here)
    try:
        make_server, make_worker = ray_library.remote(ray_server()), ray_library.remote(RayWorker)
        servers = [make_server.remote(case, i) for i in range(NUM_SERVERS)]
        workers = [make_worker.remote(case, servers) for _ in range(NUM_WORKERS)]
        return best_burst(case, lambda n: ray_library.get([w.run.remote(n) for w in workers]))
    finally:
        ray_library.shutdown()


def ray_server() -> type[Server]:
    """Returns a server whose results are copies: Ray may serialize them while they change."""

    class RayServer(Server):
        def subtract_and_read(self, updates: Sequence[Any]) -> list[Any]:
            return [array.copy() for array in super().subtract_and_read(updates)]

    return RayServer


def _jax_programs(case: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    import jax
    import jax.numpy as jnp

    def loss_of_layers(layers: list[Any]) -> Any:
        width, _, batch = sizes(case)
        hidden = jnp.ones((batch, width))
        for layer in layers:
            hidden = jnp.maximum(hidden @ layer, 0.0)
        return jnp.mean(hidden * hidden)

    def layer_updates(layers: list[Any]) -> Any:
        return [RATE * gradient for gradient in jax.grad(loss_of_layers)(layers)]

    def row_updates(rows: Any) -> Any:
        return 0.1 * jax.grad(lambda rows: jnp.mean((rows - 1.0) ** 2))(rows)

    return jax.jit(layer_updates), jax.jit(row_updates)


CONTESTANTS = {"ours": parameter_server.ours, "torch": torch, "ray": ray}


def run(settings: Settings, report: Callable[[str], None]) -> tuple[Measured, list[Row]]:
    """Measures everything; returns the numbers and the lines of the table."""
    names = ["ours", "ray", *(["torch"] if "torch" in settings.peers else [])]
    found = compete(__name__, names, CASES, settings, report)
    rows = []
    for name, what in (("torch", "torch.distributed.rpc"), ("ray", "Ray actors")):
        for case in CASES if name in names else ():
            own, peer = 1e6 / found["ours", case]["us"], 1e6 / found[name, case]["us"]
            texts = f"{own:,.0f}/s", f"{peer:,.0f}/s"
            outcome = at_least(LIMIT, own / peer)
            rows.append(Row(f"closures/s, ours / {what}", case, *texts, own / peer, *outcome))
    return found, rows


if __name__ == "__main__":
    if sys.argv[1] == "--torch-process":
        torch_process(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main(CONTESTANTS)
