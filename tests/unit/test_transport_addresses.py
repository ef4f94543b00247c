"""Where tasks listen, and with which keys: places, permissions, files."""

from __future__ import annotations

import datetime
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
from transport_partners import PS, Place, echo

from replicax import errors
from replicax.protocol import messages
from replicax.protocol.tasks import Task
from replicax.transport import addresses, authority
from replicax.transport import keys as key_files
from replicax.transport.service import Service


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of this test for the sockets of its user."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "replicax"


@pytest.mark.parametrize(
    "address",
    ["localhost:2222", "127.0.0.1:2222", "[::1]:2222", "grpc://localhost:2222", "127.1.2.3:2222"],
)
@pytest.mark.parametrize("protocol", [None, "grpc", "ipc"])
def test_tasks_on_one_host_meet_in_a_directory_of_their_user(
    runtime: Path, address: str, protocol: str | None
) -> None:
    location = addresses.resolve(address, protocol)
    assert location.scheme == "ipc"
    assert location.url == f"ipc://{runtime}/port-2222.sock"
    assert str(location) == address
    assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
    assert addresses.resolve(location.url).url == location.url


def test_without_a_runtime_directory_the_temporary_one_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    location = addresses.resolve("localhost:1")
    assert location.path == f"{tmp_path}/replicax-{os.getuid()}/port-1.sock"


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o770])
def test_a_directory_that_others_can_enter_is_refused(runtime: Path, mode: int) -> None:
    runtime.mkdir()
    runtime.chmod(mode)
    with pytest.raises(errors.PermissionDeniedError, match="private to its user"):
        addresses.resolve("localhost:2222")
    with pytest.raises(errors.PermissionDeniedError, match="private to its user"):
        addresses.resolve(f"ipc://{runtime}/x")


def test_a_directory_of_somebody_else_is_refused(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: runtime.stat().st_uid + 1)
    with pytest.raises(errors.PermissionDeniedError, match="belongs to user"):
        addresses.resolve("localhost:2222")


def test_a_link_in_place_of_the_directory_is_refused(runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir(mode=0o700)
    runtime.symlink_to(tmp_path / "other")
    with pytest.raises(errors.PermissionDeniedError):
        addresses.resolve("localhost:2222")


@pytest.mark.parametrize(
    "address",
    [
        "",
        "localhost",
        "localhost:x",
        "localhost:99999",
        "a b:1:2",
        "http://localhost:1",
        "localhost:1/x",
    ]
    + ["ipc://relative", "ipc:///" + "x" * 200, "u@localhost:1", "[::1:1"],
)
def test_malformed_addresses_are_refused(runtime: Path, address: str) -> None:
    with pytest.raises(errors.InvalidArgumentError):
        addresses.resolve(address)


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "[::]", "[0:0:0:0:0:0:0:0]", ""])
def test_bar40_no_task_listens_on_every_interface(tmp_path: Path, host: str) -> None:
    keys = key_files.load(key_files.make(tmp_path / "k"), "ps")
    with pytest.raises(errors.InvalidArgumentError):
        addresses.resolve(f"{host}:2222", None, keys)


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="'carrier pigeon'"):
        addresses.resolve("localhost:1", "carrier pigeon")


@pytest.mark.parametrize(
    ("address", "protocol"),
    [
        ("10.0.0.5:2222", None),
        ("example.org:2222", "grpc"),
        ("localhost:2222", "tcp"),
        ("tcp://localhost:1", None),
    ],
)
def test_bar41_tcp_needs_keys(address: str, protocol: str | None) -> None:
    with pytest.raises(errors.PermissionDeniedError, match=r"keys make DIR.*REPLICAX_KEYS"):
        addresses.resolve(address, protocol)
    location = addresses.Location("tcp", "tcp://127.0.0.1:0", "127.0.0.1:0")
    before = _listening()
    with pytest.raises(errors.PermissionDeniedError, match="certificate"):
        Service(location, PS, echo)
    assert _listening() == before


def test_keys_of_another_role_cannot_listen(tmp_path: Path) -> None:
    keys = key_files.load(key_files.make(tmp_path / "k"), "worker")
    with pytest.raises(errors.PermissionDeniedError, match=r"replicax://.*/worker/"):
        Service(addresses.resolve("127.0.0.1:0", None, keys), PS, echo, keys)


def test_keys_choose_tcp_also_on_one_host(tmp_path: Path, runtime: Path) -> None:
    keys = key_files.load(key_files.make(tmp_path / "k"), "ps")
    assert addresses.resolve("localhost:2222", None, keys).url == "tcp://localhost:2222"
    assert addresses.resolve("[::1]:2222", None, keys).url == "tcp://[::1]:2222"
    assert addresses.resolve("localhost:2222", "ipc", keys).scheme == "ipc"


def _listening() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections("inet")
    return {(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("scheme", ["inproc", "ipc", "tcp"])
def test_bar40_nothing_listens_on_a_routable_address(tmp_path: Path, scheme: str) -> None:
    before = _listening()
    with Place(scheme, tmp_path).serve() as service:
        new = _listening() - before
    if scheme == "tcp":
        assert {ip for ip, _ in new} == {"127.0.0.1"}
        assert {f"127.0.0.1:{port}" for _, port in new} == {service.address}
    else:
        assert new == set()


def test_any_port_is_reported(runtime: Path) -> None:
    place = "localhost:0"
    with (
        Service(addresses.resolve(place), PS, echo) as one,
        Service(addresses.resolve(place), PS, echo) as two,
    ):
        assert one.address != two.address
        for service in (one, two):
            assert addresses.resolve(service.address).url == service.url
            assert service.url.startswith(f"ipc://{runtime}/")
    assert list(runtime.iterdir()) == []


@pytest.mark.parametrize("scheme", ["inproc", "ipc", "tcp"])
def test_a_taken_place_is_refused_and_stays_taken(tmp_path: Path, scheme: str) -> None:
    place = Place(scheme, tmp_path)
    with place.serve(), place.channel() as channel:
        for _ in range(2):
            with pytest.raises(errors.AddressInUseError) as caught:
                Service(place.resolve("ps"), PS, echo, place.key("ps"))
            assert scheme == "tcp" or f"process {os.getpid()} " in str(caught.value)
        assert channel.request(messages.Ping(1), timeout=60)[0] == messages.Ping(1)


def test_addresses_of_other_hosts_cannot_be_bound(tmp_path: Path) -> None:
    keys = key_files.load(key_files.make(tmp_path / "k"), "ps")
    with pytest.raises(errors.InvalidArgumentError, match="of this host"):
        Service(addresses.resolve("192.0.2.1:2222", None, keys), PS, echo, keys)
    with pytest.raises(errors.InvalidArgumentError, match="not known"):
        Service(addresses.resolve("host.invalid:2222", None, keys), PS, echo, keys)


# Keys.


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_bar48_keys_are_files_of_their_user_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        directory = key_files.make(tmp_path / "deep" / "keys", counts={"worker": 2})
    finally:
        os.umask(old)
    found = [path for path in directory.rglob("*") if path.is_dir()]
    assert sorted(path.name for path in found) == [
        "authority",
        "coordinator",
        "ps",
        "worker-0",
        "worker-1",
    ]
    assert {stat.S_IMODE(path.stat().st_mode) for path in [directory, *found]} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in _files(directory)} == {0o600}
    assert len({path.read_bytes() for path in directory.glob("*/tls.key")}) == 5


def test_certificates_name_their_job_role_and_index(tmp_path: Path) -> None:
    directory = key_files.make(tmp_path / "keys", "lab", {"worker": 2}, days=3)
    assert str(key_files.load(directory, "worker", 1).identity) == "replicax://lab/worker/1"
    assert str(key_files.load(directory, "ps", 1).identity) == "replicax://lab/ps/*"
    with pytest.raises(errors.NotFoundError):
        key_files.load(directory, "worker", 2)
    with pytest.raises(errors.InvalidArgumentError, match="worker/0"):
        key_files.load(directory / "worker-0", "worker", 1)
    _, end = authority.read(directory / "ps" / "tls.crt")
    left = end - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=2.9) < left < datetime.timedelta(days=3.1)


@pytest.mark.parametrize("job", ["a/b", "x" * 64, "job name", "ä"])
def test_jobs_have_plain_names(tmp_path: Path, job: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="JOB/ROLE/INDEX"):
        key_files.make(tmp_path / "keys", job)


def test_keys_are_not_overwritten(tmp_path: Path) -> None:
    directory = key_files.make(tmp_path / "keys")
    before = {path: path.read_bytes() for path in _files(directory)}
    with pytest.raises(errors.InvalidArgumentError, match="authority"):
        key_files.make(directory)
    assert {path: path.read_bytes() for path in _files(directory)} == before


def test_a_host_needs_only_the_certificates_of_its_tasks(tmp_path: Path) -> None:
    directory = key_files.make(tmp_path / "keys")
    shutil.rmtree(directory / "coordinator")
    shutil.rmtree(directory / "authority")
    assert key_files.load(directory, "worker", 3).role == "worker"
    with pytest.raises(errors.NotFoundError, match="keys make DIR"):
        key_files.load(directory, "coordinator")
    # As a Kubernetes secret is mounted: three files, without a directory per role.
    assert key_files.load(directory / "worker", "worker", 3).role == "worker"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o755])
def test_bar48_keys_that_others_can_read_are_refused(tmp_path: Path, mode: int) -> None:
    directory = key_files.make(tmp_path / "keys")
    (directory / "worker" / "tls.key").chmod(mode)
    with pytest.raises(errors.PermissionDeniedError, match="their user alone"):
        key_files.load(directory, "worker")


def test_damaged_and_expired_certificates_are_refused(tmp_path: Path) -> None:
    directory = key_files.make(tmp_path / "keys")
    other = (directory / "worker" / "tls.crt").read_bytes()
    mine = directory / "ps" / "tls.crt"
    mine.write_bytes(other)
    with pytest.raises(errors.InvalidArgumentError, match=r"certificate of replicax://.*/worker"):
        key_files.load(directory, "ps")
    mine.write_bytes(b"\0" * 40)
    with pytest.raises(errors.InvalidArgumentError, match=r"tls\.crt"):
        key_files.load(directory, "ps")
    (directory / "worker" / "tls.key").write_bytes(b"torn")
    with pytest.raises(errors.InvalidArgumentError, match="cannot be used"):
        key_files.load(directory, "worker")
    with pytest.raises(errors.InvalidArgumentError, match="'chief'"):
        key_files.load(directory, "chief")  # type: ignore[arg-type]
    expired = key_files.make(tmp_path / "expired", days=-1)
    with pytest.raises(errors.PermissionDeniedError, match=r"certificate .* has expired on"):
        key_files.load(expired, "ps")


def test_keys_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REPLICAX_KEYS", raising=False)
    assert key_files.from_environment("ps") is None
    monkeypatch.setenv("REPLICAX_KEYS", str(key_files.make(tmp_path / "k")))
    found = key_files.from_environment("ps")
    assert found is not None and found.role == "ps"
    monkeypatch.setenv("REPLICAX_KEYS", str(tmp_path / "nowhere"))
    with pytest.raises(errors.NotFoundError, match="REPLICAX_KEYS"):
        key_files.from_environment("ps")


def test_three_files_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REPLICAX_KEYS", raising=False)
    own = key_files.make(tmp_path / "k") / "ps"
    for name, file in (("CA", "ca.crt"), ("CERT", "tls.crt")):
        monkeypatch.setenv(f"REPLICAX_TLS_{name}", str(own / file))
    with pytest.raises(errors.InvalidArgumentError, match="belong together"):
        key_files.from_environment("ps")
    monkeypatch.setenv("REPLICAX_TLS_KEY", str(own / "tls.key"))
    found = key_files.from_environment("ps", 4)
    assert found is not None and found.role == "ps"


def test_bar48_secrets_are_never_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = Place("tcp", tmp_path)
    assert place.keys is not None
    secrets = [path.read_text().split()[3] for path in place.keys.glob("*/tls.key")]
    shown: list[Any] = [place.key("ps"), place.key("worker")]
    caplog.set_level(logging.DEBUG)
    with place.serve() as service, place.channel(Task("worker", 0)) as channel:
        with pytest.raises(errors.PermissionDeniedError) as caught:
            channel.request(messages.Ping(0), timeout=60)
        shown += [service, channel, caught.value, vars(service), vars(channel)]
    text = caplog.text + "".join(f"{s!r}{s!s}" for s in shown)
    assert len(secrets) == 4 and all(secret not in text for secret in secrets)
    assert "role='ps'" in repr(shown[0])
