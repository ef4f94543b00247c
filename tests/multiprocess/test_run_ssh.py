"""`replicax run --hosts` over a real sshd on the loopback interface (`make test-ssh`)."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launched import EXAMPLES, becomes, has_ended, of_directory, run, running, script

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not os.path.exists("/usr/sbin/sshd") or shutil.which("ssh") is None,
        reason="there is no sshd: `make test-ssh` installs it",
    ),
]

SERVICE = Path(__file__).parents[1] / "services" / "sshd.sh"
TRAIN = EXAMPLES / "train.py"
SLEEPING = 'open(here / f"up-{index}", "w").close(); time.sleep(100)'
HOSTS = ["--workers", 2, "--hosts", "127.0.0.1,127.0.0.2", "--ssh-config"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("sshd") / "own"
    subprocess.run([str(SERVICE), "up", str(directory)], check=True, timeout=60)
    try:
        yield directory / "ssh_config"
    finally:
        subprocess.run([str(SERVICE), "down", str(directory)], check=True, timeout=60)


def result(text: str) -> str:
    (found,) = re.findall(r"[\d.]+% of unseen digits.*", text)
    return found


@pytest.mark.parametrize("options", [(), ("--ps", 1)], ids=["lock step", "parameter server"])
def test_the_same_program_has_the_same_result_on_other_hosts(
    tmp_path: Path, config: Path, options: tuple[object, ...]
) -> None:
    here = run(tmp_path, "--workers", 2, TRAIN, seconds=300)
    there = run(tmp_path, *HOSTS, config, *options, TRAIN, seconds=300)
    assert here.returncode == there.returncode == 0, there.stdout
    assert result(here.stdout) == result(there.stdout)


def test_tasks_are_on_their_hosts_and_get_environment_and_arguments(
    tmp_path: Path, config: Path
) -> None:
    text = 'print(config["cluster"]["worker"][index].split(":")[0], os.environ["A"], sys.argv[1:])'
    options = [*HOSTS, config, "--env", "A=b c", script(tmp_path, text), "x y"]
    done = run(tmp_path, *options)
    assert done.returncode == 0, done.stdout
    for index, host in enumerate(("127.0.0.1", "127.0.0.2")):
        assert f"worker {index} | {host} b c ['x y']" in done.stdout
    assert (next((tmp_path / "replicax-logs").iterdir()) / "worker-1.log").exists()


def test_an_unknown_host_key_is_refused(tmp_path: Path, config: Path) -> None:
    other = tmp_path / "ssh_config"
    unknown = config.read_text().replace("known_hosts", "missing_hosts")
    other.write_text(unknown)
    done = run(tmp_path, *HOSTS, other, script(tmp_path, ""))
    assert done.returncode == 1
    assert "Host key verification failed" in done.stdout
    assert not list(tmp_path.glob("runs-*"))


def test_a_host_that_cannot_be_reached_is_named(tmp_path: Path, config: Path) -> None:
    options = ["--hosts", "127.0.0.1,127.0.0.9", "--ssh-config", config, script(tmp_path, "")]
    done = run(tmp_path, *options)
    assert done.returncode == 1
    assert "127.0.0.9 cannot be reached by ssh" in done.stdout and "refused" in done.stdout


def test_the_code_and_last_lines_of_a_failure_come_back(tmp_path: Path, config: Path) -> None:
    text = 'print("the reason"); sys.exit(5 if index == 1 else 75)'
    done = run(tmp_path, *HOSTS, config, "--show", "none", script(tmp_path, text))
    assert done.returncode == 5
    assert "replicax |   the reason" in done.stdout


def test_a_program_that_is_not_on_the_host_says_so(tmp_path: Path, config: Path) -> None:
    program = script(tmp_path, "")
    done = run(tmp_path, *HOSTS, config, "--python", "/usr/bin/no-python", program)
    assert done.returncode == 1 and "no-python" in done.stdout


@pytest.mark.parametrize("how", ["launcher", "connection"])
def test_tasks_end_when_the_launcher_or_the_connection_is_lost(
    tmp_path: Path, config: Path, how: str
) -> None:
    program = script(tmp_path, SLEEPING)
    with running(tmp_path, *HOSTS, config, "--max-restarts", 0, program) as launcher:
        assert becomes(lambda: len(list(tmp_path.glob("up-*"))) == 2)
        pids = [p.pid for p in of_directory(tmp_path) if "TF_CONFIG" in _environ(p)]
        assert len(pids) == 2
        clients = [p for p in psutil.Process(launcher.pid).children() if p.name() == "ssh"]
        assert len(clients) == 2
        if how == "launcher":
            launcher.kill()
        else:
            for client in clients:
                client.kill()
        assert becomes(lambda: all(map(has_ended, pids)), seconds=5)
        out, _ = launcher.communicate(timeout=60)
    if how == "connection":
        assert launcher.returncode == 128 + signal.SIGHUP
        assert "Lost 127.0.0.1: the connection has ended" in out


def test_a_lost_connection_restarts_the_group(tmp_path: Path, config: Path) -> None:
    text = 'print("run", number, flush=True)\nif number == 0: ' + SLEEPING
    with running(tmp_path, *HOSTS, config, script(tmp_path, text)) as launcher:
        assert becomes(lambda: len(list(tmp_path.glob("up-*"))) == 2)
        client = next(p for p in psutil.Process(launcher.pid).children() if p.name() == "ssh")
        client.kill()
        out, _ = launcher.communicate(timeout=90)
    assert launcher.returncode == 0, out
    assert out.count("| run 1") == 2


def test_no_secret_is_in_a_command_line_or_a_log(tmp_path: Path, config: Path) -> None:
    text = """
        keys = pathlib.Path(os.environ["REPLICAX_KEYS"])
        assert keys.stat().st_mode & 0o777 == 0o700
        found = sorted(keys.glob("*/tls.key"))
        assert not any(p.stat().st_mode & 0o077 for p in found)
        (here / f"secrets-{index}").write_text("\\n".join(p.read_text() for p in found))
        print("has keys", flush=True)
        (here / f"up-{index}").touch()
        time.sleep(100)
    """
    with running(tmp_path, *HOSTS, config, script(tmp_path, text)) as launcher:
        assert becomes(lambda: len(list(tmp_path.glob("up-*"))) == 2)
        lines = (tmp_path / "secrets-0").read_text().splitlines()
        assert (tmp_path / "secrets-1").read_text().splitlines() == lines
        # Without those that frame a key.
        words = [line for line in lines if len(line) > 40]
        assert len(words) == 9
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                line = path.read_bytes().decode(errors="replace")
                assert not [word for word in words if word in line], line
        launcher.send_signal(signal.SIGTERM)
        out, _ = launcher.communicate(timeout=30)
    logs = "".join(p.read_text() for p in (tmp_path / "replicax-logs").rglob("*.log"))
    assert "has keys" in logs and not [word for word in words if word in logs + out]
    assert not of_directory(tmp_path)


def _environ(process: psutil.Process) -> dict[str, str]:
    with contextlib.suppress(psutil.Error):
        return process.environ()
    return {}
