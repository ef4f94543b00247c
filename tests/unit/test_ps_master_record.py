"""The master record outlives its server process (RELIABILITY bar 30)."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
from vocabulary import refused

from replicax.foundation import errors
from replicax.protocol import messages
from replicax.ps.process.master_record import FILE_NAME, MasterRecordFile
from replicax.ps.process.snapshot_files import SnapshotDirectory
from replicax.ps.store.jobs import Master
from replicax.ps.store.service import ParameterStore

OLD, NEW, OTHER = 11, 22, 33


class Host:
    """The disk of a server, and the processes that use it one after the other."""

    def __init__(self, path: Path) -> None:
        self.directory = SnapshotDirectory(path)
        self.path = path / FILE_NAME
        self.start()

    def start(self) -> None:
        """Begins a process, as after SIGKILL."""
        record = MasterRecordFile(self.path.parent)
        record.read()
        self.store = ParameterStore(0, is_saved=True, master_record=record)
        self.directory.load(self.store.restore)

    def save(self) -> None:
        cut = self.store.snapshot()
        assert cut is not None
        self.directory.save(cut)
        cut.close()

    def ask(self, life: int, epoch: int, body: messages.Body) -> Any:
        return self.store.handle("coordinator", life, body, job="job", epoch=epoch, now=0.0)[0]

    def attach(self, life: int, epoch: int, parts: list[int] | None = None) -> Any:
        return self.ask(life, epoch, messages.Attach([], {}, parts))


@pytest.fixture
def host(tmp_path: Path) -> Any:
    host = Host(tmp_path / "ps-0")
    host.attach(OLD, 1)
    host.ask(OLD, 1, messages.CreatePart(0, "v", (2,), "float32", messages.Fill(bytes(4))))
    host.save()
    yield host
    host.directory.close()


def test_bar30_a_replaced_coordinator_does_not_get_a_server_back(host: Host) -> None:
    """The server is killed before it has saved that another one has taken it over."""
    host.attach(NEW, 2, [])
    host.start()
    found = host.ask(NEW, 3, messages.QueryJob())
    assert (found.job, found.epoch, found.parts) == ("job", 2, [0])
    for body in (messages.Attach([], {}, [0]), messages.Attach([], {})):
        with refused(errors.FencedError, "accepts epoch 2 of job 'job'"):
            host.ask(OLD, 1, body)
    with refused(errors.PermissionDeniedError, "another process holds it in epoch 2"):
        host.attach(OTHER, 2, [0])
    assert host.attach(NEW, 2, [0]) == messages.Attached(is_saved=True, is_restored=True)
    assert host.ask(NEW, 2, messages.Ping(0)).counters["parts"] == 1


def test_bar30_the_next_coordinator_resumes_after_the_last_one(host: Host) -> None:
    host.attach(NEW, 2, [])
    host.start()
    assert host.attach(OTHER, 3, []).is_restored
    host.start()
    with refused(errors.FencedError, "accepts epoch 3"):
        host.attach(NEW, 2, [0])


def test_a_job_that_starts_again_is_not_bound_by_the_master_of_the_last(host: Host) -> None:
    host.attach(NEW, 2, [])
    host.ask(NEW, 2, messages.Detach())
    assert not host.path.exists()
    # The same name, from the beginning; no snapshot has been removed yet.
    host.attach(OLD, 1)
    host.save()
    host.start()
    assert host.attach(OLD, 1, []).is_restored


def test_a_master_record_of_another_job_is_ignored(host: Host) -> None:
    MasterRecordFile(host.path.parent).write(Master("other", 7, NEW))
    host.start()
    assert host.attach(OLD, 1, [0]).is_restored


@pytest.mark.parametrize("content", [b"", b"{", b'{"job": 1}', b"[" * 100_000, b"\xff"])
def test_bar38_a_damaged_master_record_is_ignored(
    host: Host, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    host.path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        host.start()
    assert "cannot be read, and is ignored" in caplog.text
    assert host.attach(OLD, 1, [0]).is_restored


def test_bar37_without_disk_space_for_the_master_record_the_job_continues(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with caplog.at_level(logging.WARNING):
        host.attach(NEW, 2, [])
    monkeypatch.undo()
    assert "No space left on device" in caplog.text
    with refused(errors.FencedError, "accepts epoch 2"):
        host.ask(OLD, 1, messages.Ping(0))
    # There is the older one, and nothing in the way of the next.
    host.attach(OTHER, 3, [])
    host.start()
    assert host.ask(NEW, 4, messages.QueryJob()).epoch == 3


def test_bar36_the_master_record_is_durable_before_the_reply(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def rename(source: Path, target: Path) -> None:
        events.append(f"→ {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    host.attach(NEW, 2, [])
    assert events == [".master.json.new", "→ master.json", "ps-0"]
    host.attach(NEW, 2, [0])
    assert len(events) == 3, "it is recorded already"
