"""Checkpoints and a hostile world: full disks, kills, flipped bits, forged manifests."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_checkpoint_manager import make, names, start_writer
from vocabulary import refused

import replicax as rx
from replicax.bundle import manifest, publishing
from replicax.bundle.manifest import CHECKPOINT

SIZE = 1 << 20


def temporary_files(directory: Path) -> list[Path]:
    return [
        p for p in directory.rglob("*") if publishing.TEMPORARY in str(p.relative_to(directory))
    ]


def check_that_the_old_one_is_whole(tmp_path: Path, manager: Any, variable: Any) -> None:
    assert names(manager) == ["ckpt-1"]
    assert temporary_files(tmp_path) == []
    variable.assign(np.zeros(SIZE // 4, np.float32))
    manager.restore_latest().assert_consumed()
    assert float(variable.read_value()[0]) == 1.0


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[tuple[Path, Any, Any]]:
    """A manager with one checkpoint of ones, and a variable that holds twos by now."""
    variable, manager = make(tmp_path, np.ones(SIZE // 4, np.float32))
    manager.save()
    variable.assign(np.full(SIZE // 4, 2, np.float32))
    yield tmp_path, manager, variable
    manager.close()


# The disk fails while a checkpoint is written.


@pytest.mark.parametrize("limit", [0, 1, 100, 1000, 4096, 65536, 300_000, 600_000, 900_000])
def test_a_disk_that_takes_no_more_bytes(saved: Any, limit: int) -> None:
    """A limit on the size of files stands for a full disk: the kernel cuts real writes."""
    tmp_path, manager, variable = saved
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    start = time.monotonic()
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with refused(rx.errors.CheckpointError, "ckpt-2"):
            manager.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert time.monotonic() - start < 20, "2 s, on a machine with nothing else to do"
    check_that_the_old_one_is_whole(tmp_path, manager, variable)
    # Training goes on, and so does saving.
    assert Path(manager.save()).name == "ckpt-2"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES])
@pytest.mark.parametrize("call", ["mkdir", "rename"])
def test_a_call_that_the_system_refuses(saved: Any, monkeypatch: Any, call: str, code: int) -> None:
    """Root may write anywhere, so the call itself is made to fail."""
    tmp_path, manager, variable = saved
    real = getattr(os, call)

    def refusing(path: Any, *args: Any, **kwargs: Any) -> Any:
        if publishing.TEMPORARY in str(path):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refusing)
        with pytest.raises(rx.errors.CheckpointError, match=os.strerror(code)) as info:
            manager.save()
    assert info.value.errno == code
    check_that_the_old_one_is_whole(tmp_path, manager, variable)


def count_syncs(monkeypatch: Any, manager: Any) -> int:
    calls: list[int] = []
    fsync = os.fsync
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (calls.append(fd), fsync(fd))[1])
        shutil.rmtree(manager.save())
    return len(calls)


def test_an_error_at_each_fsync_fails_the_save(saved: Any, monkeypatch: Any) -> None:
    tmp_path, manager, variable = saved
    total = count_syncs(monkeypatch, manager)
    assert total >= 4
    fsync = os.fsync
    for failing in range(total):
        left = iter(range(total))

        def broken(fd: int, failing: int = failing, left: Any = left) -> None:
            if next(left) == failing:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            fsync(fd)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", broken)
            with refused(rx.errors.CheckpointError, "Input/output error"):
                manager.save(checkpoint_number=2)
        # What was renamed before the last fsync failed is not reported as saved.
        check_that_the_old_one_is_whole(tmp_path, manager, variable)


def test_the_order_of_a_save(saved: Any, monkeypatch: Any) -> None:
    """Data, then manifest, then rename, then the directory: each synced before the next."""
    tmp_path, manager, _ = saved
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def noting_fsync(fd: int) -> None:
        events.append("fsync " + os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path))
        fsync(fd)

    def noting_rename(source: Any, target: Any) -> None:
        events.append("rename " + os.path.relpath(target, tmp_path))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "rename", noting_rename)
    path = Path(manager.save())
    short = [re.sub(r"\.tmp-[^/]+", ".tmp", event) for event in events]
    data = sorted(p.name for p in path.glob("*.safetensors"))
    assert data
    assert sorted(short[: len(data)]) == [f"fsync run/ckpt-2.tmp/{name}" for name in data]
    assert short[len(data) :] == [
        "fsync run/ckpt-2.tmp/manifest.json",
        "fsync run/ckpt-2.tmp",
        "rename run/ckpt-2",
        "fsync run",
    ]


# Kill -9.


def check_survivor(directory: Path, reported: int) -> int:
    """Restores the newest checkpoint bit by bit; returns its number."""
    path = rx.train.latest_checkpoint(directory)
    if path is None:
        assert reported == 0
        return 0
    number = int(path.rpartition("-")[2])
    assert number >= reported
    for name, _, _ in rx.train.list_variables(path):
        array = rx.train.load_variable(path, name)
        assert np.array_equal(array, np.full(array.shape, number, np.float32))
    return number


def kill_at_random_instants(directory: Path, times: int, mebibytes: float) -> None:
    chance = random.Random(times)
    number = 0
    for _ in range(times):
        with start_writer(directory, mebibytes, number + 1) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline().strip() == "ready"
            lines = [writer.stdout.readline() for _ in range(chance.randrange(1, 4))]
            time.sleep(chance.random() * 0.1)
            writer.kill()
            lines += writer.communicate()[0].splitlines()
        # Odd numbers are saved in the background: safe once the next save has started.
        reported = max(int(line) - int(line) % 2 for line in lines)
        number = check_survivor(directory, max(reported, number))
    assert number > 0
    variable = rx.Variable(0.0)
    rx.train.CheckpointManager(rx.train.Checkpoint(v=variable), directory).close()
    assert temporary_files(directory) == []


def test_kill_of_the_writer_at_random_instants(tmp_path: Path) -> None:
    kill_at_random_instants(tmp_path, 3, 8)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kill_of_the_writer_at_many_random_instants(tmp_path: Path) -> None:
    kill_at_random_instants(tmp_path, 25, 64)


# Bytes that are not those that were written.


def damage_everywhere(tmp_path: Path, count: int) -> None:
    """Flips single bits and cuts files; each time the damage must be noticed."""
    variable = rx.Variable(np.random.default_rng(1).random(3000).astype(np.float32))
    objects = {"v": variable, "note": "text", "w": rx.Variable(np.arange(7)), "e": np.zeros((0, 2))}
    checkpoint = rx.train.Checkpoint(**objects)
    path = Path(checkpoint.write(tmp_path / "good"))
    files = [p for p in path.rglob("*") if p.is_file()]
    chance = random.Random(count)
    for i in range(count):
        file = files[i % len(files)]
        good = file.read_bytes()
        bad = bytearray(good)
        if i % 2:
            bad = bad[: chance.randrange(len(bad))]
        else:
            bad[chance.randrange(len(bad))] ^= 1 << chance.randrange(8)
        file.write_bytes(bad)
        variable.assign(np.zeros(3000, np.float32))
        with refused(rx.errors.CheckpointError):
            checkpoint.restore(path)
        assert not np.asarray(variable).any()
        file.write_bytes(good)
    checkpoint.restore(path).assert_consumed()


def test_flipped_bits_and_cut_files_are_noticed(tmp_path: Path) -> None:
    damage_everywhere(tmp_path, 60)


@pytest.mark.slow
def test_many_flipped_bits_and_cut_files_are_noticed(tmp_path: Path) -> None:
    damage_everywhere(tmp_path, 400)


def test_files_that_are_missing_or_foreign_are_named(saved: Any) -> None:
    _, manager, _ = saved
    path = Path(manager.latest_checkpoint)
    checkpoint = manager.checkpoint
    (path / "zarr.json").write_text("{}")
    with refused(rx.errors.DataLossError, "zarr.json.*without this file"):
        checkpoint.restore(path)
    (path / "zarr.json").unlink()
    chunk = path / "data-00000.safetensors"
    moved = path.parent / "moved"
    chunk.rename(moved)
    with refused(rx.errors.DataLossError, "data-00000.*missing"):
        checkpoint.restore(path)
    chunk.symlink_to(moved)
    with refused(rx.errors.DataLossError, "not a regular file"):
        checkpoint.restore(path)
    chunk.unlink()
    moved.rename(chunk)
    (path / "manifest.json").unlink()
    with refused(rx.errors.CheckpointError, "manifest.json"):
        checkpoint.restore(path)


# Manifests that were made to harm.


def forge(path: Path, change: Any) -> None:
    """Changes a manifest and gives it a checksum that fits."""
    file = path / "manifest.json"
    document = json.loads(file.read_text())
    change(document)
    file.write_bytes(with_checksum(document))


def with_checksum(document: dict[str, Any]) -> bytes:
    document.pop("crc32", None)
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    return b'{"crc32":"%08x",' % zlib.crc32(text) + text[1:]


def rename_array(name: str) -> Any:
    return lambda d: d["arrays"][0].update(name=name)


FORGERIES = {
    "parent": rename_array("../../etc/passwd"),
    "absolute": rename_array("/etc/passwd"),
    "empty": rename_array(""),
    "control": rename_array("a\x1b[2Jb"),
    "backslash": rename_array("a\\b"),
    "object": lambda d: d["arrays"][0].update(dtype="object"),
    "record": lambda d: d["arrays"][0].update(dtype="O,O"),
    "negative": lambda d: d["arrays"][0].update(shape=[-1]),
    "fraction": lambda d: d["arrays"][0].update(shape=[1.5]),
    "truth": lambda d: d["arrays"][0].update(shape=[True]),
    "huge": lambda d: d["arrays"][0].update(shape=[1 << 40, 1 << 40]),
    "offset": lambda d: d["arrays"][0]["slices"][0].update(offset=1 << 40),
    "before": lambda d: d["arrays"][0]["slices"][0].update(offset=-4),
    "gap": lambda d: d["arrays"][0]["slices"][0].update(start=1, stop=2),
    "sums": lambda d: d["arrays"][0]["slices"][0].update(sums=""),
    "pieces": lambda d: d["arrays"][0]["slices"][0].update(piece_bytes=0),
    "size": lambda d: d["files"]["data-00000.safetensors"].update(size=1 << 50),
    "header": lambda d: d["files"]["data-00000.safetensors"].update(header_bytes=1 << 50),
    "unlisted": lambda d: d["contents"]["arrays"].clear(),
    "twice": lambda d: d["arrays"].append(d["arrays"][0]),
    "kind": lambda d: d["contents"]["values"][0].update(kind="pickle"),
    "type": lambda d: d["contents"]["values"][0]["encoded"].update(type="object", value="x"),
    "value": lambda d: d["contents"]["values"][0]["encoded"].update(type="int", value="x"),
    "step": lambda d: d["contents"].update(step="1"),
    "files": lambda d: d["files"].update(
        {"../x": {"size": 1, "header_bytes": 0, "header_crc32": 0}}
    ),
    "alias": lambda d: d["contents"]["aliases"].update({"x": "../y"}),
    "list": lambda d: d.update(arrays=None),
}


@pytest.mark.parametrize("how", FORGERIES)
def test_a_forged_manifest_is_refused(tmp_path: Path, how: str) -> None:
    checkpoint = rx.train.Checkpoint(v=rx.Variable([1.0]))
    path = Path(checkpoint.write(tmp_path / "good"))
    forge(path, lambda document: None)
    checkpoint.restore(path).assert_consumed()
    forge(path, FORGERIES[how])
    with refused(rx.errors.DataLossError):
        checkpoint.restore(path)


def test_a_newer_format_is_named(tmp_path: Path) -> None:
    path = Path(rx.train.Checkpoint().write(tmp_path / "new"))
    forge(path, lambda document: document.update(version=3))
    with refused(rx.errors.CheckpointError, "format is replicax.bundle 3.*newer replicax"):
        rx.train.Checkpoint().restore(path)


def test_a_checkpoint_of_the_format_before_is_named(tmp_path: Path) -> None:
    path = Path(rx.train.Checkpoint().write(tmp_path / "old"))
    (path / "manifest.json").write_text('{"format":1,"step":3,"crc32":1}')
    with refused(rx.errors.CheckpointError, "format is a byte stream written through Orbax 1"):
        rx.train.Checkpoint().restore(path)


def test_a_manifest_that_is_too_large_is_not_parsed(tmp_path: Path) -> None:
    path = Path(rx.train.Checkpoint().write(tmp_path / "large"))
    with (path / "manifest.json").open("wb") as file:
        file.truncate(1 << 40)
    with refused(rx.errors.DataLossError, "larger than 64 MiB"):
        rx.train.Checkpoint().restore(path)


def test_a_deep_manifest_is_refused(tmp_path: Path) -> None:
    path = Path(rx.train.Checkpoint().write(tmp_path / "deep"))
    (path / "manifest.json").write_text('{"format":' + "[" * 200_000)
    with refused(rx.errors.DataLossError, "not JSON"):
        rx.train.Checkpoint().restore(path)


def mutated(text: bytes, chance: random.Random) -> bytes:
    data = bytearray(text)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(data))
        kind = chance.randrange(4)
        if kind == 0:
            data[at] = chance.randrange(256)
        elif kind == 1:
            del data[at : at + chance.randrange(1, 20)]
        elif kind == 2:
            data[at:at] = data[at : at + chance.randrange(1, 40)]
        else:
            data[at:at] = chance.choice([b"9999999999", b"null", b"[[[[", b"-", b'"..', b"1e999"])
        if not data:
            break
    return bytes(data)


def fuzz_manifest(tmp_path: Path, count: int) -> None:
    checkpoint = rx.train.Checkpoint(
        v=rx.Variable([1.0, 2.0]), n=1, f=0.5, key=np.zeros(2, np.uint32), t=("a", b"c")
    )
    path = Path(checkpoint.write(tmp_path / "good"))
    good = (path / "manifest.json").read_bytes()
    chance = random.Random(count)
    for _ in range(count):
        bad = mutated(good, chance)
        if bad == good:
            continue
        # Both as damage, and with a checksum that fits, as an attacker would have it.
        with refused(rx.errors.CheckpointError):
            manifest.parse(bad, path / "manifest.json", CHECKPOINT)
        try:
            text = with_checksum(json.loads(bad))
        except (ValueError, AttributeError, RecursionError):
            continue
        (path / "manifest.json").write_bytes(text)
        # A name or number may have changed into another good one; anything else is refused.
        with contextlib.suppress(rx.errors.CheckpointError, rx.errors.InvalidArgumentError):
            checkpoint.restore(path)


def test_mutated_manifests_are_refused(tmp_path: Path) -> None:
    fuzz_manifest(tmp_path, 500)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_mutated_manifests_are_refused(tmp_path: Path) -> None:
    fuzz_manifest(tmp_path, 10_000)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """Audit hooks cannot be removed, so this runs in a process of its own."""
    code = f"""
import sys
import numpy as np, jax
import replicax as rx
rx.train.Checkpoint(warm=rx.Variable(1.0)).write({str(tmp_path / "warm")!r})
seen = []
sys.addaudithook(lambda event, args: seen.append(args) if event == "pickle.find_class" else None)
objects = dict(v=rx.Variable([1.0]), k=jax.random.key(1), n=3, a=np.arange(3), t=(1, "x"))
path = rx.train.Checkpoint(**objects).write({str(tmp_path / "one")!r})
rx.train.Checkpoint(**objects).restore(path).assert_consumed()
rx.train.load_variable(path, "v")
assert seen == [], seen
import pickle
pickle.loads(pickle.dumps(print))
assert seen, "the hook does not see pickles"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250)


def _can_mount() -> bool:
    """Tells whether this machine lets a process have a file system of its own."""
    try:
        done = subprocess.run(["unshare", "-rm", "true"], capture_output=True, timeout=250)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


if _can_mount():

    @pytest.mark.parametrize(
        "megabytes",
        [pytest.param(1, marks=pytest.mark.slow), 12, pytest.param(30, marks=pytest.mark.slow)],
    )
    def test_a_disk_that_is_really_full(tmp_path: Path, megabytes: int) -> None:
        program = Path(__file__).parent.parent / "support" / "programs" / "checkpoint_full_disk.py"
        done = subprocess.run(
            ["unshare", "-rm", sys.executable, str(program), str(tmp_path), str(megabytes)],
            capture_output=True,
            text=True,
            timeout=250,
            check=True,
        )
        found = json.loads(done.stdout.splitlines()[-1])
        assert len(found["raised"]) == 2
        assert all("No space left" in text and "ckpt-" in text for text in found["raised"])
        assert found["left"] == [found["first"]]
        assert found["is_whole"] and "large" in found["report"]
