"""Secret keys: where they must never be seen."""

from __future__ import annotations

import logging
import os
import pickle
import stat
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import psutil
import pytest
from hostile_partners import WatchedTask
from rich.console import Console
from rich.traceback import Traceback
from transport_partners import Place

import replicax as rx
from replicax.protocol import messages
from replicax.protocol.tasks import ROLES
from replicax.transport import keys as key_files


def _secrets(directory: Path) -> list[str]:
    """A part of each private key, which no other file has."""
    return [(directory / role / "tls.key").read_text().splitlines()[1] for role in ROLES]


def _visible(pid: int) -> str:
    """What any user of the machine, or of a crash report, sees of a process."""
    process = psutil.Process(pid)
    every = [process, *process.children(recursive=True)]
    lines = ["\0".join(p.cmdline()) for p in every]
    lines += [f"{k}={v}" for p in every for k, v in p.environ().items()]
    return "\n".join(lines)


def test_bar48_secrets_are_in_no_command_line_and_no_environment(watched_ps: WatchedTask) -> None:
    assert watched_ps.keys is not None
    with watched_ps.channel() as channel:
        channel.job = "job"
        channel.request(messages.Attach([], {}), timeout=60)
        channel.request(messages.Detach(), timeout=60)
    text = _visible(watched_ps.process.pid) + watched_ps.log()
    assert str(watched_ps.keys) in text, "the directory is named"
    for secret in _secrets(watched_ps.keys):
        assert secret not in text


def _serve(keys: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "replicax", "serve", "--keys", str(keys)]
        + ["--cluster", '{"ps": ["127.0.0.1:0"]}', "--job", "ps", "--index", "0"],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.mark.parametrize(
    "damage", ["readable", *(pytest.param(d, marks=pytest.mark.slow) for d in ("swapped", "torn"))]
)
def test_bar48_a_task_with_bad_keys_says_so_without_showing_them(
    tmp_path: Path, damage: str
) -> None:
    keys = key_files.make(tmp_path / "keys")
    secrets = _secrets(keys)
    mine = keys / "ps" / "tls.key"
    if damage == "readable":
        mine.chmod(0o644)
    elif damage == "swapped":
        mine.write_bytes((keys / "worker" / "tls.key").read_bytes())
    else:
        mine.write_text(secrets[2][:30] + "\n")
        secrets.append(secrets[2][:30])
    done = _serve(keys)
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert f"{keys}/ps" in said and ", but " in said
    assert not [s for s in secrets if s in said]


def test_bar48_files_of_keys_are_for_their_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        directory = key_files.make(tmp_path / "keys")
    finally:
        os.umask(before)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(f.stat().st_mode) for f in directory.glob("*/*")} == {0o600}


def test_bar48_a_key_that_is_a_link_to_another_users_file_is_refused(tmp_path: Path) -> None:
    directory = key_files.make(tmp_path / "keys")
    shared = tmp_path / "shared"
    own = directory / "ps" / "tls.key"
    shared.write_bytes(own.read_bytes())
    shared.chmod(0o644)
    own.unlink()
    own.symlink_to(shared)
    with pytest.raises(rx.errors.PermissionDeniedError):
        key_files.load(directory, "ps")


def test_bar48_tracebacks_with_local_variables_show_no_secret(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As rich, a debugger or a crash reporter prints them."""
    place = Place("tcp", tmp_path)
    assert place.keys is not None
    caplog.set_level(logging.DEBUG)
    caught: Any = None
    with place.serve() as service, place.channel() as channel:
        try:
            channel.request(messages.ShipFunction("0" * 64), timeout=60)
        except rx.errors.PermissionDeniedError as error:
            caught = error
            console = Console(width=1_000, record=True, quiet=True)
            console.print(
                Traceback.from_exception(
                    type(error),
                    error,
                    error.__traceback__,
                    show_locals=True,
                    locals_max_length=None,
                    locals_max_string=None,
                )
            )
        seen = [channel, service, vars(channel), vars(service), vars(service._listener)]
        text = "".join(map(repr, seen))
    assert caught is not None
    captured = traceback.TracebackException.from_exception(caught, capture_locals=True)
    text += "".join(captured.format()) + console.export_text() + caplog.text
    assert "role='coordinator'" in text, "the keys were among what is shown"
    for secret in _secrets(place.keys):
        assert secret not in text


def test_bar48_keys_are_never_pickled(tmp_path: Path) -> None:
    """A closure that captured them would carry them to every worker."""
    keys = key_files.load(key_files.make(tmp_path / "keys"), "coordinator")
    with pytest.raises(rx.errors.ArgumentTypeError, match="those of a coordinator"):
        pickle.dumps(keys)


def test_bar48_private_keys_are_read_by_openssl_alone() -> None:
    """One module names the file of a key, one writes it, and OpenSSL reads it."""
    source = Path(rx.__file__).parent
    users = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if "load_cert_chain" in path.read_text() or "private_bytes(" in path.read_text()
    }
    assert users == {"transport/keys.py", "transport/authority.py"}
