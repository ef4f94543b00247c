"""What tasks print: complete lines, logs of bounded size, full disks, and hosts of a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from vocabulary import refused

import replicax as rx
from replicax.foundation import errors
from replicax.launch.log_files import NUM_FILES, RotatingLog
from replicax.launch.ssh import read_hostfile
from replicax.launch.task_output import TaskOutput
from replicax.protocol.tasks import Task

WORKER = Task("worker", 0)


def test_the_files_of_a_log_stay_below_their_limit_and_have_the_newest_lines(
    tmp_path: Path,
) -> None:
    log = RotatingLog(tmp_path / "worker-0.log", 4000)
    lines = [f"line {i:05}\n".encode() for i in range(5000)]
    for line in lines:
        assert log.write(line)
    log.close()
    files = sorted(tmp_path.iterdir(), key=lambda path: path.suffix, reverse=True)
    assert len(files) == NUM_FILES
    assert sum(path.stat().st_size for path in files) <= 4000
    ordered = [tmp_path / f"worker-0.log.{n}" for n in (3, 2, 1)] + [tmp_path / "worker-0.log"]
    text = b"".join(path.read_bytes() for path in ordered)
    assert text == b"".join(lines)[-len(text) :] and len(text) > 3000


def test_a_log_goes_on_in_the_file_of_an_earlier_run(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.log"
    for text in (b"one\n", b"two\n"):
        log = RotatingLog(path, 1 << 20)
        log.write(text)
        log.close()
    assert path.read_bytes() == b"one\ntwo\n"


def test_a_full_disk_loses_output_says_so_and_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicax.launch.log_files._RETRY_S", 0.0)
    warnings: list[str] = []
    shown: list[str] = []
    with rx.testing.small_disk(1 << 16) as disk:
        output = TaskOutput(disk, 1 << 20, lambda task, line: shown.append(line), warnings.append)
        with rx.testing.fill(disk):
            output.take(WORKER, b"lost\n")
            output.take(WORKER, b"lost, too\n")
        assert len(warnings) == 1 and "No space left" in warnings[0]
        output.take(WORKER, b"kept\n")
        output.close()
        assert (
            (disk / "worker-0.log")
            .read_bytes()
            .endswith(b"[15 bytes are missing: no room to write]\nkept\n")
        )
    assert shown == ["lost", "lost, too", "kept"]
    assert output.tail(WORKER, 2) == "lost, too\nkept"


def test_lines_are_complete_and_progress_bars_end_as_a_terminal_shows_them(tmp_path: Path) -> None:
    shown: list[str] = []
    output = TaskOutput(tmp_path, 1 << 20, lambda task, line: shown.append(line), shown.append)
    for piece in (b"a", b"b\nc", b"\n1/2\r2/2\n", b"\xff", b"", b"last"):
        output.take(WORKER, piece)
    assert shown == ["ab", "c", "2/2"]
    output.finish(WORKER)
    output.finish(WORKER)
    assert shown == ["ab", "c", "2/2", "\ufffdlast"]
    output.close()
    assert (tmp_path / "worker-0.log").read_bytes() == b"ab\nc\n1/2\r2/2\n\xfflast\n"


def test_an_endless_line_is_printed_in_pieces(tmp_path: Path) -> None:
    shown: list[str] = []
    output = TaskOutput(tmp_path, 1 << 20, lambda task, line: shown.append(line), shown.append)
    for _ in range(10):
        output.take(WORKER, b"x" * 10_000)
    output.close()
    assert len(shown) == 5 and all(len(line) == 20_000 for line in shown)


def test_a_hostfile_names_hosts_with_slots(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# the rack\nnode1 slots=2\n\nuser@node2  # slow\n")
    assert read_hostfile(path) == ("node1", "node1", "user@node2")


@pytest.mark.parametrize("text", ["", "node1 slots=x", "node1 2", "a b c"])
def test_a_hostfile_with_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with refused(errors.InvalidArgumentError):
        read_hostfile(path)
    with refused(errors.NotFoundError):
        read_hostfile(tmp_path / "missing")
