"""Training in sync by two processes on one machine, one thread of computation each.

TensorFlow runs with its default number of threads, as its users run it, and with one.

A case `HxLxB` is a network of L layers of HxH weights with bias and relu, the mean square of its
output as loss, plain SGD, and a global batch of B examples split over two workers. Contestants:
this project; the step written by hand with `jax.distributed`, its gradients in packs (the limit)
or one by one; tf.distribute.MultiWorkerMirroredStrategy; and DistributedDataParallel of torch
over Gloo. Ours and the step by hand sum the loss together with the gradients (`packed`), TF by
`strategy.reduce`, in a message of its own (`reduce`), as its programs do, and torch not at all;
lines without a target compare TF and ours with the same program. The two processes of each
contestant live for the whole run and wait at a pipe; one contestant runs a short burst at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from benchmarks import multi_worker_contestants
from benchmarks.harness import ROOT, ContestantFailed, Measured, Row, Settings, at_least, at_most

CASES = ("64x4x64", "32x50x16", "512x4x256", "1024x8x256")
# The number of steps in a burst.
STEPS = {"64x4x64": 50, "32x50x16": 30, "512x4x256": 8, "1024x8x256": 3}
EAGER_STEPS = 20
BURSTS_PER_ROUND = 8
HANDWRITTEN_LIMIT = 0.97
TENSORFLOW_LIMITS = {"64x4x64": 4.0, "32x50x16": 2.0, "512x4x256": 1.5, "1024x8x256": 1.8}
TORCH_LIMITS = {"64x4x64": 1.5, "32x50x16": 3.0, "512x4x256": 1.0, "1024x8x256": 1.0}
EAGER_LIMIT = 3.0
FIRST_CALL_LIMIT = 1.5

PEERS = ("tensorflow", "torch")
# The environment of a contestant, if it is not named like it.
ENVIRONMENTS = {"tensorflow_one_thread": "tensorflow"}
PACKED = ("swap", "psum", "gather")
# The variants whose steps are measured, and those whose first call is.
VARIANTS = {
    "ours": ("packed", "reduce"),
    "handwritten": PACKED,
    "tensorflow": ("packed", "reduce"),
    "tensorflow_one_thread": ("reduce",),
    "torch": ("",),
}
FIRST = {"ours": "packed", "handwritten": "leaf"}


@dataclasses.dataclass
class Pair:
    """The two processes of a contestant.

    Attributes:
      name: The contestant.
      workers: Its processes.
      log: Where they write what goes wrong.
      seconds: The longest time of one command.
    """

    name: str
    workers: list[subprocess.Popen[str]]
    log: IO[bytes]
    seconds: float

    def ask(self, *command: Any) -> float:
        """Lets both processes run a command; returns the milliseconds of the slower one."""
        watchdog = threading.Timer(self.seconds, self.kill)
        watchdog.start()
        try:
            for worker in self.workers:
                assert worker.stdin is not None
                worker.stdin.write(json.dumps(command) + "\n")
                worker.stdin.flush()
            return max(self._answer_of(worker) for worker in self.workers)
        except (BrokenPipeError, EOFError) as error:
            raise self._failed(command) from error
        finally:
            watchdog.cancel()
            watchdog.join()

    def _answer_of(self, worker: subprocess.Popen[str]) -> float:
        assert worker.stdout is not None
        for line in worker.stdout:
            if line.startswith('{"ms"'):
                return json.loads(line)["ms"]
        raise EOFError

    def _failed(self, command: Sequence[Any]) -> ContestantFailed:
        self.kill()
        self.log.seek(0)
        tail = "\n".join(self.log.read().decode(errors="replace").splitlines()[-15:])
        statuses = [worker.poll() for worker in self.workers]
        return ContestantFailed(
            f"multi_worker {self.name} {command}: exit statuses {statuses}\n{tail}"
        )

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()


@contextlib.contextmanager
def pair_of(name: str, settings: Settings) -> Iterator[Pair]:
    """Starts the two processes of a contestant; yields them when they have met."""
    addresses = free_addresses()
    command = [
        settings.peers.get(ENVIRONMENTS.get(name, name), sys.executable),
        "-m",
        multi_worker_contestants.__name__,
        name,
    ]
    environment = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
        # The number of threads of XLA's pool.
        "NPROC": "1",
    }
    with tempfile.TemporaryFile() as log, contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, str(rank), *addresses],
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            )
            for rank in range(multi_worker_contestants.NUM_WORKERS)
        ]
        pair = Pair(name, workers, log, settings.timeout)
        try:
            pair.ask("ready")
            yield pair
        finally:
            pair.kill()


def free_addresses() -> list[str]:
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.socket())
            for _ in range(multi_worker_contestants.NUM_WORKERS)
        ]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def run(settings: Settings, report: Callable[[str], None]) -> tuple[Measured, list[Row]]:
    """Measures everything; returns the numbers and the lines of the table."""
    names = [
        name
        for name in multi_worker_contestants.CONTESTANTS
        if (peer := ENVIRONMENTS.get(name, name)) not in PEERS or peer in settings.peers
    ]
    measured: Measured = {}

    def note(name: str, variant: str, case: str, found: float) -> None:
        numbers = measured.setdefault((f"{name} {variant}".strip(), case), {"ms": found})
        numbers["ms"] = min(numbers["ms"], found)

    with contextlib.ExitStack() as stack:
        pairs = {name: stack.enter_context(pair_of(name, settings)) for name in names}
        first_calls(pairs, settings.rounds, note)
        steps(pairs, settings.rounds * BURSTS_PER_ROUND, note)
        eager_runs(pairs, settings.rounds * BURSTS_PER_ROUND, note)
    for (who, case), numbers in measured.items():
        report(f"{__name__} {case} {who}: {numbers['ms']:.4g} ms")
    return measured, rows_of(measured, settings)


Note = Callable[[str, str, str, float], None]


def first_calls(pairs: dict[str, Pair], rounds: int, note: Note) -> None:
    for pair in pairs.values():
        if pair.name in FIRST:
            # What a process does once: not a part of a program's first call.
            pair.ask("first", FIRST[pair.name], CASES[0])
    for _ in range(rounds):
        for case in CASES:
            for name, variant in FIRST.items():
                note(f"{name}, first call", variant, case, pairs[name].ask("first", variant, case))


def steps(pairs: dict[str, Pair], bursts: int, note: Note) -> None:
    for case in CASES:
        turns = [(pair, variant) for pair in pairs.values() for variant in VARIANTS[pair.name]]
        for pair, variant in turns:
            pair.ask("step", variant, case, 1)
        for _ in range(bursts):
            for pair, variant in turns:
                note(pair.name, variant, case, pair.ask("step", variant, case, STEPS[case]))


def eager_runs(pairs: dict[str, Pair], bursts: int, note: Note) -> None:
    turns = [pair for pair in pairs.values() if pair.name in ("ours", "tensorflow")]
    for _ in range(bursts):
        for pair in turns:
            note(pair.name, "eager", "10 tensors", pair.ask("eager", EAGER_STEPS))


def rows_of(measured: Measured, settings: Settings) -> list[Row]:
    """Returns the lines of the table: peer / ours, except for the first call."""

    def ms(who: str, case: str) -> float:
        return measured[who, case]["ms"]

    def row(what: str, case: str, own: str, peer: float, limit: float | None) -> Row:
        ratio = peer / ms(own, case)
        outcome = ("", None) if limit is None else at_least(limit, ratio)
        return Row(what, case, f"{ms(own, case):.3f} ms", f"{peer:.3f} ms", ratio, *outcome)

    def packed(case: str) -> float:
        return min(ms(f"handwritten {variant}", case) for variant in PACKED)

    rows: list[Row] = []
    what = "2 workers: best packed by hand / ours"
    rows += [row(what, c, "ours packed", packed(c), HANDWRITTEN_LIMIT) for c in CASES]
    for variant in PACKED:
        what = f"2 workers: packs, {variant}, by hand / ours"
        rows += [row(what, c, "ours packed", ms(f"handwritten {variant}", c), None) for c in CASES]
    if "tensorflow" in settings.peers:
        theirs = "tensorflow reduce"
        what, limits = "TF MultiWorkerMirroredStrategy / ours", TENSORFLOW_LIMITS
        rows += [row(what, c, "ours packed", ms(theirs, c), limits[c]) for c in CASES]
        what, theirs_alone = "… TF with one thread / ours", "tensorflow_one_thread reduce"
        rows += [row(what, c, "ours packed", ms(theirs_alone, c), None) for c in CASES]
        what = "… TF with its loss in the pack / ours"
        rows += [row(what, c, "ours packed", ms("tensorflow packed", c), None) for c in CASES]
        what = "… TF / ours with strategy.reduce"
        rows += [row(what, c, "ours reduce", ms(theirs, c), None) for c in CASES]
    if "torch" in settings.peers:
        what, limits = "torch DDP (gloo) / ours", TORCH_LIMITS
        rows += [row(what, c, "ours packed", ms("torch", c), limits[c]) for c in CASES]
    if "tensorflow" in settings.peers:
        case = "10 tensors"
        peer = ms("tensorflow eager", case)
        rows.append(row("TF / ours, eager all_reduce", case, "ours eager", peer, EAGER_LIMIT))
    return rows + [first_call_row(measured, case) for case in CASES]


def first_call_row(measured: Measured, case: str) -> Row:
    own = measured["ours, first call packed", case]["ms"]
    peer = measured["handwritten, first call leaf", case]["ms"]
    outcome = at_most(FIRST_CALL_LIMIT, own / peer)
    texts = f"{own:.0f} ms", f"{peer:.0f} ms"
    return Row("first call: ours / one by one by hand", case, *texts, own / peer, *outcome)
