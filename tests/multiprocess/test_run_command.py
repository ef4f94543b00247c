"""`replicax run` on this machine: real launches of small programs, and faults of all kinds."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launched import RUN, becomes, has_ended, of_directory, run, running, script

import replicax as rx

SLEEPING = 'open(here / f"up-{index}", "w").close(); time.sleep(100)'


def is_up(directory: Path, count: int) -> bool:
    return len(list(directory.glob("up-*"))) == count


def test_the_launcher_does_not_import_jax() -> None:
    code = "import sys, replicax.cli.main, replicax.cli.run; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_task_has_its_name_its_arguments_and_its_log(tmp_path: Path) -> None:
    program = script(tmp_path, 'print("I am", index, *sys.argv[1:]); print("no newline", end="")')
    done = run(tmp_path, "--workers", 3, "--logs", "logs", program, "--workers", 7)
    assert done.returncode == 0, done.stdout
    for index in range(3):
        assert f"worker {index} | I am {index} --workers 7\n" in done.stdout
        text = f"I am {index} --workers 7\nno newline\n"
        assert (tmp_path / "logs" / f"worker-{index}.log").read_text() == text
    assert "\x1b" not in done.stdout


def test_a_module_runs_and_shows_only_the_chief(tmp_path: Path) -> None:
    script(tmp_path, 'print("I am", index)')
    done = run(
        tmp_path, "--workers", 2, "--show", "chief", "-m", "program", PYTHONPATH=str(tmp_path)
    )
    assert done.returncode == 0
    assert "worker 0 | I am 0" in done.stdout and "worker 1" not in done.stdout


def test_the_first_failure_gives_the_exit_code_and_its_last_lines(tmp_path: Path) -> None:
    text = 'print("\\n".join(map(str, range(50)))); sys.exit(7 if index else 75)'
    done = run(tmp_path, "--workers", 2, "--show", "none", script(tmp_path, text))
    assert done.returncode == 7
    assert "/job:worker/task:1 ended with exit code 7. It printed last:" in done.stdout
    shown = re.findall(r"replicax \|   (\d+)", done.stdout)
    assert shown == [str(number) for number in range(30, 50)]


def test_a_program_that_cannot_be_found_is_one_clear_line(tmp_path: Path) -> None:
    done = run(tmp_path, "--workers", 2, "missing.py")
    assert done.returncode == 1 and len(done.stdout.splitlines()) == 1
    assert "there is no file 'missing.py'" in done.stdout
    done = run(tmp_path, "--elastic", "2", "missing.py")
    assert done.returncode == 2 and "MIN:MAX" in done.stdout


def test_a_crash_loop_has_pauses_a_limit_and_the_last_lines(tmp_path: Path) -> None:
    program = script(tmp_path, 'print("about to crash", flush=True); os.kill(os.getpid(), 11)')
    begun_s = time.monotonic()
    done = run(tmp_path, "--workers", 1, "--max-restarts", 2, program)
    assert done.returncode == 128 + signal.SIGSEGV
    assert (tmp_path / "runs-0").read_text() == "xxx"
    assert time.monotonic() - begun_s > 0.6
    assert "Restarted the group 2 times within 600 s: giving up." in done.stdout
    assert "  about to crash" in done.stdout


def test_bar52_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    # A grandchild in the group of its task, too.
    text = 'child = subprocess.Popen(["sleep", "100"]); print(child.pid); ' + SLEEPING
    with running(tmp_path, "--workers", 2, script(tmp_path, text)) as launcher:
        assert becomes(lambda: is_up(tmp_path, 2))
        pids = [process.pid for process in of_directory(tmp_path)]
        assert len(pids) >= 5
        launcher.kill()
        assert becomes(lambda: all(map(has_ended, pids)), seconds=3)
    assert becomes(lambda: not of_directory(tmp_path), seconds=3)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bar52_100_launchers_are_killed_at_any_time_and_leave_nothing(tmp_path: Path) -> None:
    text = 'subprocess.Popen(["sleep", "100"]); ' + SLEEPING
    program = script(tmp_path, text)
    for number in range(100):
        with running(tmp_path, "--workers", 3, "--logs", "logs", program) as launcher:
            # From the import of the launcher to tasks that run.
            time.sleep(number * 0.008)
            launcher.kill()
            launcher.wait(10)
        assert becomes(lambda: not of_directory(tmp_path), seconds=3), number


def test_bar52_ctrl_c_stops_all_tasks_and_a_second_one_kills_them(tmp_path: Path) -> None:
    stubborn = "signal.signal(signal.SIGINT, lambda *_: print('not yet', flush=True)); " + SLEEPING
    with running(tmp_path, "--workers", 2, script(tmp_path, stubborn)) as launcher:
        assert becomes(lambda: is_up(tmp_path, 2))
        launcher.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert launcher.poll() is None
        begun_s = time.monotonic()
        launcher.send_signal(signal.SIGINT)
        out, _ = launcher.communicate(timeout=10)
        assert time.monotonic() - begun_s < 3
    assert launcher.returncode == 130
    assert "worker 0 | not yet" in out and "Interrupt again to kill" in out
    assert not of_directory(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bar52_50_interrupts_end_all_tasks_in_time(tmp_path: Path) -> None:
    program = script(tmp_path, SLEEPING)
    for number in range(50):
        for path in tmp_path.glob("up-*"):
            path.unlink()
        with running(tmp_path, "--workers", 3, "--logs", "logs", program) as launcher:
            assert becomes(lambda: is_up(tmp_path, 3))
            begun_s = time.monotonic()
            launcher.send_signal(signal.SIGINT)
            launcher.communicate(timeout=15)
        assert time.monotonic() - begun_s < 15
        assert launcher.returncode == 130, number
        assert not of_directory(tmp_path)


def test_a_killed_worker_restarts_the_group_and_an_elastic_one_shrinks(tmp_path: Path) -> None:
    text = """
        print("run", number, "of", len(config["cluster"]["worker"]))
        if number == 0:
            os.kill(os.getpid(), 9) if index == 1 else sys.exit(75)
    """
    program = script(tmp_path, text)
    done = run(tmp_path, "--workers", 3, program)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("run 1 of 3") == 3
    assert "finished, 1 restart" in done.stdout
    for path in tmp_path.glob("runs-*"):
        path.unlink()
    done = run(tmp_path, "--elastic", "1:3", program)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("run 0 of 3") == 3 and done.stdout.count("run 1 of 2") == 2


@pytest.mark.slow
def test_a_hung_child_is_killed_and_the_group_restarts(tmp_path: Path) -> None:
    text = """
        if number == 0 and index == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif number == 0:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline and not (here / "up-9").exists():
                time.sleep(0.1)
            sys.exit(75)
    """
    program = script(tmp_path, text)
    begun_s = time.monotonic()
    with running(tmp_path, "--workers", 2, program) as launcher:
        # The other worker leaves when it notices; here, when it would.
        time.sleep(3)
        (tmp_path / "up-9").touch()
        out, _ = launcher.communicate(timeout=40)
    assert launcher.returncode == 0, out
    assert "[stopped for 10 s: killed by its launcher]" in out
    # The time after which tasks count as dead, and two seconds.
    assert time.monotonic() - begun_s < 14


def test_a_full_disk_for_logs_does_not_stop_the_job(tmp_path: Path) -> None:
    program = script(tmp_path, 'print("x" * 1000 + "\\n", end="")\nprint("done")')
    with rx.testing.small_disk(1 << 20) as disk, rx.testing.fill(disk):
        done = run(tmp_path, "--workers", 2, "--logs", disk, program)
    assert done.returncode == 0
    assert "No space left on device. The job goes on." in done.stdout
    assert done.stdout.count("| done") == 2


def test_the_logs_of_a_job_that_prints_for_ever_stay_below_their_limit(tmp_path: Path) -> None:
    program = script(tmp_path, 'for i in range(100_000): print("a line of output", i)')
    done = run(tmp_path, "--show", "none", "--log-megabytes", 1, "--logs", "logs", program)
    assert done.returncode == 0
    files = list((tmp_path / "logs").glob("worker-0.log*"))
    assert len(files) == 4 and sum(file.stat().st_size for file in files) <= 1 << 20
    assert (tmp_path / "logs" / "worker-0.log").read_text().endswith("line of output 99999\n")


def test_a_port_in_use_is_not_given_to_a_task(tmp_path: Path) -> None:
    # Every task listens on its port at once, while others ask the kernel for any.
    text = """
        import socket
        host, port = config["cluster"]["worker"][index].split(":")
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, int(port)))
        listening.listen()
        others = [socket.socket() for _ in range(200)]
        for other in others:
            other.bind(("127.0.0.1", 0))
            assert other.getsockname()[1] != int(port)
        print("ports", sorted(a.split(":")[1] for a in config["cluster"]["worker"]))
        time.sleep(0.2)
    """
    done = run(tmp_path, "--workers", 4, script(tmp_path, text))
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("| ports") == 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bar53_200_concurrent_launches_have_different_ports_and_leave_nothing(
    tmp_path: Path,
) -> None:
    text = """
        import socket
        host, port = config["cluster"]["worker"][index].split(":")
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, int(port)))
        listening.listen()
        print("port", port, flush=True)
        while not (here / "go").exists():
            time.sleep(0.2)
    """
    program = script(tmp_path, text)
    launchers: list[subprocess.Popen[bytes]] = []
    for number in range(200):
        with (tmp_path / f"out-{number}").open("wb") as out:
            command = [*RUN, "--workers", "2", "--logs", f"logs-{number}", program]
            launchers.append(
                subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT)
            )
    try:

        def ports() -> list[str]:
            texts = [(tmp_path / f"out-{number}").read_text() for number in range(200)]
            return [port for text in texts for port in re.findall(r"\| port (\d+)", text)]

        # All of them run at the same time.
        assert becomes(lambda: len(ports()) == 400, seconds=600)
        assert len(set(ports())) == 400
        (tmp_path / "go").touch()
        codes = [launcher.wait(120) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait(10)
    assert codes == [0] * 200
    assert not of_directory(tmp_path)


def test_a_terminal_has_colours_and_a_line_of_status(tmp_path: Path) -> None:
    program = script(tmp_path, 'print("hello"); time.sleep(0.8)')
    controller, terminal = pty.openpty()
    command = [*RUN, "--workers", "2", program]
    seen = b""
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, stdin=terminal, stdout=terminal, stderr=terminal
    ) as process:
        os.close(terminal)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if not select.select([controller], [], [], 0.1)[0]:
                if process.poll() is not None:
                    break
                continue
            try:
                seen += os.read(controller, 4096)
            except OSError:
                break
    os.close(controller)
    text = seen.decode()
    assert process.returncode == 0
    assert "worker 2/2" in text and "\x1b[36mworker 0 | \x1b[0mhello" in text
    # The status is gone at the end.
    assert text.rstrip().endswith("finished") or "\x1b[2K" in text


def test_cores_and_threads_are_shared(tmp_path: Path) -> None:
    text = 'print("threads", os.environ["OMP_NUM_THREADS"], len(os.sched_getaffinity(0)))'
    program = script(tmp_path, text)
    cores = len(os.sched_getaffinity(0))
    done = run(tmp_path, "--workers", 2, program)
    assert done.stdout.count(f"threads {max(1, cores // 2)} {cores}") == 2, done.stdout
    if cores >= 2:
        done = run(tmp_path, "--workers", 2, "--cpus-per-worker", 1, program)
        assert done.stdout.count("threads 1 1") == 2


def test_the_environment_reaches_the_tasks_and_no_cluster_of_the_launcher(tmp_path: Path) -> None:
    program = script(tmp_path, 'print("has", os.environ["A"], os.environ["B"], config["task"])')
    config = '{"cluster": {"worker": ["x:1"]}, "task": {"type": "worker", "index": 5}}'
    done = run(tmp_path, "--env", "A=1=2", program, B="3", TF_CONFIG=config)
    assert "has 1=2 3 {'type': 'worker', 'index': 0}" in done.stdout


def test_a_reader_that_leaves_does_not_end_the_job(tmp_path: Path) -> None:
    text = 'for i in range(2000): print("line", i)\n(here / "finished").touch()'
    with running(tmp_path, script(tmp_path, text)) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        launcher.stdout.close()
        assert launcher.wait(30) == 0
    assert (tmp_path / "finished").exists()


def test_a_child_that_has_left_its_task_and_prints_for_ever_does_not_hold_the_job(
    tmp_path: Path,
) -> None:
    text = """
        child = subprocess.Popen(["yes"], start_new_session=True)
        (here / "child").write_text(str(child.pid))
        time.sleep(0.2)
    """
    done = run(tmp_path, "--show", "none", script(tmp_path, text))
    assert done.returncode == 0
    # No one reads what it prints any more.
    child = int((tmp_path / "child").read_text())
    assert becomes(lambda: has_ended(child), seconds=5)


def test_output_in_another_encoding_than_that_of_the_terminal_is_shown(tmp_path: Path) -> None:
    program = script(tmp_path, 'sys.stdout.buffer.write("é ✓\\n".encode()); print("done")')
    done = run(tmp_path, program, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "worker 0 | \\xe9 \\u2713\n" in done.stdout
    assert "worker 0 | done\n" in done.stdout and "finished" in done.stdout


def test_children_of_a_task_that_crashed_end_with_it(tmp_path: Path) -> None:
    text = 'print("child", subprocess.Popen(["sleep", "100"]).pid, flush=True); sys.exit(3)'
    done = run(tmp_path, script(tmp_path, text))
    assert done.returncode == 3
    (pid,) = re.findall(r"worker 0 \| child (\d+)", done.stdout)
    assert has_ended(int(pid)) or psutil.Process(int(pid)).name() != "sleep"
