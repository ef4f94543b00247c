"""Training that is killed at random instants ends as if nothing had happened."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from programs.train_digits import STEPS_PER_EPOCH, digits

PROGRAM = Path(__file__).parent.parent / "support" / "programs" / "train_digits.py"
SAVE_EVERY = 5
# So that a save takes some 100 ms, and a kill can hit it.
BALLAST_MEBIBYTES = 48
Results = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """Where the children of this module get their examples and compiled programs."""
    home = tmp_path_factory.mktemp("shop")
    np.savez(home / "digits.npz", **digits()[0])
    return Shop(home)


class Shop:
    """What children have in common, so that they start fast."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._calm: dict[tuple[str, int], Results] = {}

    def start(self, home: Path, strategy: str, *options: str) -> Child:
        """Starts a training process that keeps its checkpoints in `home`/run."""
        examples = ("--examples", str(self._home / "digits.npz"))
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(self._home / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        return Child(home, strategy, *examples, *options, env={**os.environ, **cache})

    def calm(self, strategy: str, epochs: int) -> Results:
        """The results of a run that was never killed."""
        if (strategy, epochs) not in self._calm:
            home = self._home / f"{strategy}_{epochs}"
            with self.start(home, strategy, "--stop-at", str(epochs * STEPS_PER_EPOCH)) as child:
                self._calm[strategy, epochs] = child.results()
        return self._calm[strategy, epochs]


class Child:
    """A training process, whose lines are read one by one."""

    def __init__(self, home: Path, strategy: str, *options: str, env: dict[str, str]) -> None:
        home.mkdir(exist_ok=True)
        self._result, self._stderr = home / "result.npz", home / "stderr.txt"
        command = [sys.executable, str(PROGRAM), strategy, str(home / "run"), str(self._result)]
        command += ["--save-every", str(SAVE_EVERY), *options]
        with self._stderr.open("ab") as stderr:
            self.process = subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        self.saved = 0

    def lines(self) -> Iterator[tuple[str, ...]]:
        """What it prints, until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            # A kill may cut the last line.
            if line.endswith("\n"):
                words = tuple(line.split())
                if words[0] == "saved":
                    self.saved = int(words[1])
                yield words

    def kill(self) -> None:
        """Kills it with SIGKILL, and reads what it had still printed."""
        self.process.kill()
        for _ in self.lines():
            pass
        self.process.wait(60)

    def results(self) -> Results:
        """Waits until it ends by itself; returns what it has written."""
        for _ in self.lines():
            pass
        assert self.process.wait(60) == 0, self._stderr.read_text()
        with np.load(self._result) as file:
            return dict(file)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()


def newest(run: Path) -> tuple[str, int]:
    """Name and step of the newest checkpoint; only whole ones have such a name."""
    entries = run.iterdir() if run.exists() else ()
    steps = [int(m[1]) for e in entries if (m := re.fullmatch(r"ckpt-(\d+)", e.name))]
    return (f"ckpt-{max(steps)}", max(steps)) if steps else ("none", 0)


def leftovers(run: Path) -> list[str]:
    """What a writer that died has left behind."""
    known = re.compile(r"ckpt-\d+|\.writer\.lock")
    entries = run.iterdir() if run.exists() else ()
    return sorted(e.name for e in entries if not known.fullmatch(e.name))


@dataclasses.dataclass
class Chaos:
    """Starts a training program again and again, and kills it."""

    shop: Shop
    home: Path
    strategy: str
    options: tuple[str, ...]
    rng: np.random.Generator
    starts: int = 0
    # Kills that left a half-written checkpoint.
    hit_saves: int = 0

    def start(self) -> Child:
        """Starts the program; every second time it saves in the background."""
        self.starts += 1
        background = ("--asynchronous",) if self.starts % 2 else ()
        return self.shop.start(self.home, self.strategy, *self.options, *background)

    def kill(self, when: str, after: int = 0) -> None:
        """Runs the program up to some instant, and kills it there.

        Args:
          when: "start" is while it starts, "step" is some steps after it has saved, and
            "save" is while it writes a checkpoint.
          after: With "step", counts only what is saved after this step.
        """
        run = self.home / "run"
        before, left = newest(run), set(leftovers(run))
        with self.start() as child:
            if when == "start":
                time.sleep(self.rng.uniform(0, 3))
            else:
                self._wait(child, before, after if when == "step" else None)
            assert child.process.poll() is None, "it ended before it could be killed"
            child.kill()
            assert child.saved <= newest(run)[1], "a checkpoint that was saved is gone"
        self.hit_saves += not left.issuperset(leftovers(run))

    def _wait(self, child: Child, before: tuple[str, int], after: int | None) -> None:
        """Waits for a random step after a save that comes `after`; for a save with None."""
        steps = int(self.rng.integers(1, SAVE_EVERY))
        for words in child.lines():
            if words[0] == "resumed":
                self.check_resumed(words, before)
            elif after is None and words[0] == "saving":
                deadline = time.monotonic() + 10
                while not leftovers(self.home / "run") and time.monotonic() < deadline:
                    pass
                break
            # A kill before the first save would only show that nothing was lost.
            elif after is not None and words[0] == "step" and child.saved > after:
                steps -= 1
                if not steps:
                    break
        time.sleep(self.rng.uniform(0, 0.03))

    def check_resumed(self, words: tuple[str, ...], before: tuple[str, int]) -> None:
        """Makes sure that it took the newest checkpoint, and has cleaned up."""
        assert words[1:] == (before[0], str(before[1]))
        assert leftovers(self.home / "run") == []

    def finish(self) -> Results:
        """Lets the program run to its end."""
        before = newest(self.home / "run")
        with self.start() as child:
            words = next(w for w in child.lines() if w[0] == "resumed")
            self.check_resumed(words, before)
            return child.results()


def assert_same(found: Results, expected: Results) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in expected if not np.array_equal(found[name], expected[name])]
    assert not different, f"not bit-equal: {different}"


def assert_visited_once(results: Results) -> None:
    np.testing.assert_array_equal(results["visits"], np.ones_like(results["visits"]))


def check_kills(
    shop: Shop, home: Path, strategy: str, kills: list[str], epochs: int, seed: int
) -> None:
    """Compares a run that is killed with one that is not; the last kill is in the last epoch."""
    expected = shop.calm(strategy, epochs)
    stop_at = epochs * STEPS_PER_EPOCH
    slowly = ("--ballast", str(BALLAST_MEBIBYTES), "--pause", "0.01")
    options = ("--stop-at", str(stop_at), *slowly)
    chaos = Chaos(shop, home, strategy, options, np.random.default_rng(seed))
    for when in kills:
        chaos.kill(when)
    # A save may be over before the signal arrives: that was a kill, but not in a save.
    while chaos.hit_saves < kills.count("save"):
        chaos.kill("save")
    chaos.kill("step", after=stop_at - STEPS_PER_EPOCH)
    assert stop_at - STEPS_PER_EPOCH < newest(home / "run")[1] < stop_at
    found = chaos.finish()
    assert_same(found, expected)
    assert_visited_once(found)
    assert int(found["iterations"]) == stop_at


@pytest.mark.slow
def test_a_run_killed_three_times_ends_bit_equal(shop: Shop, tmp_path: Path) -> None:
    check_kills(shop, tmp_path, "mirrored_2", ["step", "save"], epochs=2, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_killed_twenty_times_ends_bit_equal(shop: Shop, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    kills = list(map(str, rng.permutation(["save"] * 5 + ["start"] * 3 + ["step"] * 11)))
    check_kills(shop, tmp_path, "mirrored_4", kills, epochs=12, seed=2)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["one_device", "central_2"])
def test_other_strategies_survive_kills_too(name: str, shop: Shop, tmp_path: Path) -> None:
    kills = ["step", "save", "start", "save"]
    check_kills(shop, tmp_path, name, kills, epochs=4, seed=3)


@pytest.mark.slow
def test_a_run_goes_on_under_another_strategy(shop: Shop, tmp_path: Path) -> None:
    """Two strategies, each stopped in the middle of an epoch and continued by the other."""
    names = ("mirrored_2", "one_device")
    expected = shop.calm("mirrored_2", epochs=2)

    def run_both(strategies: tuple[str, ...], stop_at: int) -> list[Results]:
        first, second = (
            shop.start(tmp_path / str(i), strategy, "--stop-at", str(stop_at))
            for i, strategy in enumerate(strategies)
        )
        with first, second:
            return [first.results(), second.results()]

    run_both(names, STEPS_PER_EPOCH + 7)
    for results in run_both(names[::-1], 2 * STEPS_PER_EPOCH):
        assert_visited_once(results)
        for name, value in expected.items():
            np.testing.assert_allclose(results[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
