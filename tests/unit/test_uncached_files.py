"""Long files that are written past the cache."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replicax.foundation import uncached_files
from replicax.foundation.uncached_files import BLOCK_BYTES


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uncached_files, "_BUFFER_BYTES", 4 * BLOCK_BYTES)


@pytest.mark.parametrize("seed", range(20))
def test_bar36_what_is_written_is_there_and_what_is_skipped_is_zero(
    tmp_path: Path, seed: int
) -> None:
    """Forwards with gaps, then back to the first blocks: as a header that is known last."""
    rng = np.random.default_rng(seed)
    first = int(rng.integers(1, 6)) * BLOCK_BYTES
    model = bytearray(first)
    path = tmp_path / "file"
    with uncached_files.synced(path) as file:
        file.seek(first)
        for _ in range(rng.integers(0, 30)):
            if rng.random() < 0.5:
                model += bytes(int(rng.choice([1, 100, BLOCK_BYTES, 9 * BLOCK_BYTES + 5])))
                file.seek(len(model))
            data = rng.bytes(int(rng.choice([0, 1, 333, BLOCK_BYTES, 50_001])))
            model += data
            file.write(data)
        file.truncate(len(model))
        header = rng.bytes(int(rng.integers(1, first + 1)))
        file.seek(0)
        file.write(header)
        model[: len(header)] = header
    assert path.read_bytes() == model
    assert path.stat().st_mode & 0o777 == 0o600


def test_all_that_reaches_the_disk_is_whole_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0
    pwrite = os.pwrite

    def check(descriptor: int, data: memoryview, place: int) -> int:
        nonlocal written
        address = np.frombuffer(data, np.uint8).ctypes.data
        assert [n % BLOCK_BYTES for n in (address, len(data), place)] == [0, 0, 0]
        written += len(data)
        return pwrite(descriptor, data, place)

    monkeypatch.setattr(os, "pwrite", check)
    with uncached_files.synced(tmp_path / "file") as file:
        for size in (1, 5000, 20 * BLOCK_BYTES, 7):
            file.write(bytes(size))
        file.truncate(3)
    assert written >= 20 * BLOCK_BYTES
    assert (tmp_path / "file").stat().st_size == 3


@pytest.mark.parametrize("refused", ["flag", "write"])
def test_a_file_system_that_cannot_do_without_its_cache_uses_it(
    tmp_path: Path, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl_, pwrite = fcntl.fcntl, os.pwrite

    def set_flags(descriptor: int, command: int, argument: int = 0) -> int:
        if refused == "flag" and command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return fcntl_(descriptor, command, argument)

    def write(descriptor: int, data: Any, place: int) -> int:
        if fcntl_(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        # The system may also write less than it was asked to.
        return pwrite(descriptor, data[:1000], place)

    monkeypatch.setattr(fcntl, "fcntl", set_flags)
    monkeypatch.setattr(os, "pwrite", write)
    content = np.random.default_rng(0).bytes(50_001)
    with uncached_files.synced(tmp_path / "file") as file:
        file.write(content)
        file.truncate(len(content))
    assert (tmp_path / "file").read_bytes() == content


def test_errors_of_the_disk_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "pwrite", fail)
    with (
        pytest.raises(OSError, match="Invalid argument"),
        uncached_files.synced(tmp_path / "file") as file,
    ):
        file.write(b"x")
    with pytest.raises(FileExistsError), uncached_files.synced(tmp_path / "file"):
        pass
