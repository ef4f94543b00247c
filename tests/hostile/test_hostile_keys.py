"""Keys that are renewed while tasks run, and keys that are good no more."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner
from vocabulary import refused

import replicax as rx
from replicax import errors
from replicax.cli.main import app
from replicax.coordinator.scheduling.timing import Timing
from replicax.protocol import messages
from replicax.protocol.tasks import Task
from replicax.transport import addresses
from replicax.transport import keys as key_files
from replicax.transport.channel import Channel
from replicax.transport.service import Service

PS = Task("ps", 0)
PING = messages.Ping(0)


class Server:
    """A parameter server that answers, at one port, with the keys of a directory."""

    def __init__(self, directory: Path, address: str = "127.0.0.1:0") -> None:
        keys = key_files.load(directory, "ps")
        where = addresses.resolve(address, "tcp", keys)
        self.service = Service(where, PS, lambda *_: (messages.Done(), ()), keys, incarnation=5)
        self.service.start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.service.close()


def channel(directory: Path, server: Server) -> Channel:
    keys = key_files.load(directory, "coordinator")
    where = addresses.resolve(server.service.address, "tcp", keys)
    return Channel(where, Task("coordinator", 0), keys, peer=PS)


def is_answered(one: Channel) -> bool:
    return one.request(PING, timeout=60)[0] == messages.Done()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return key_files.make(tmp_path / "keys")


@pytest.fixture
def short_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where sockets of this test lie; the name is short, as theirs must be."""
    with tempfile.TemporaryDirectory(prefix="rx-") as made:
        monkeypatch.setenv("XDG_RUNTIME_DIR", made)
        yield


def test_keys_of_another_cluster_are_named_at_once(directory: Path, tmp_path: Path) -> None:
    other = key_files.make(tmp_path / "other")
    with (
        Server(directory) as server,
        channel(other, server) as raw_peer,
        # Long before the time is over, or nothing would be said of keys.
        refused(errors.PermissionDeniedError, "certificate"),
    ):
        raw_peer.request(PING, timeout=60)


def test_missing_keys_are_named_at_once(directory: Path, short_directory: None) -> None:
    with Server(directory) as server:
        where = addresses.resolve(server.service.address)
        assert where.scheme == "ipc"
        with (
            Channel(where, Task("coordinator", 0), peer=PS) as raw_peer,
            refused(errors.PermissionDeniedError, "this process has none"),
        ):
            raw_peer.request(PING, timeout=60)


def test_keys_that_only_the_peer_has_are_named_at_once(
    directory: Path, short_directory: None
) -> None:
    # Nothing listens at the port itself.
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    keys = key_files.load(directory, "coordinator")
    with (
        Service(addresses.resolve(address), PS, lambda *_: (messages.Done(), ())) as service,
        Channel(
            addresses.resolve(address, "tcp", keys), Task("coordinator", 0), keys, peer=PS
        ) as raw_peer,
    ):
        service.start()
        with refused(errors.PermissionDeniedError, "it was started without"):
            raw_peer.request(PING, timeout=60)


def test_bar50_certificates_are_renewed_while_tasks_run(directory: Path, tmp_path: Path) -> None:
    former = Path(shutil.copytree(directory, tmp_path / "former"))
    with Server(directory) as server, channel(directory, server) as running:
        assert is_answered(running)
        key_files.renew(directory)
        with channel(directory, server) as new, channel(former, server) as old:
            # The server presents its new certificate: the former authority is not enough any more.
            assert is_answered(new) and is_answered(running)
            with pytest.raises(errors.PermissionDeniedError, match="certificate"):
                is_answered(old)
        (former / "coordinator" / "ca.crt").write_bytes((directory / "ps" / "ca.crt").read_bytes())
        with channel(former, server) as old:
            assert is_answered(old)
        key_files.retire(directory)
        old = channel(former, server)
        with old, pytest.raises(errors.PermissionDeniedError, match="certificate"):
            is_answered(old)
        running.close()  # it opens a new connection, with the new files, when it is used again
        assert is_answered(running)


def test_bar50_files_that_are_unsafe_or_torn_change_nothing(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Server(directory) as server:
        own = directory / "coordinator"
        keys = key_files.load(directory, "coordinator")
        where = addresses.resolve(server.service.address, "tcp", keys)
        for name in ("tls.crt", "tls.key", "ca.crt"):
            file = own / name
            content = file.read_bytes()
            for damage in (b"", content[:20], None):
                if damage is None:
                    file.unlink()
                else:
                    file.write_bytes(damage)
                with Channel(where, Task("coordinator", 0), keys, peer=PS) as one:
                    assert is_answered(one)
            file.write_bytes(content)
            file.chmod(0o600)
        (own / "tls.key").chmod(0o644)
        with Channel(where, Task("coordinator", 0), keys, peer=PS) as one:
            assert is_answered(one)
    assert "Keeping the old certificates" in caplog.text
    assert (own / "tls.key").read_text().split()[3] not in caplog.text


def test_bar50_files_that_could_not_be_read_are_read_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process without free descriptors cannot read its new certificate when it is renewed."""
    keys = key_files.load(directory, "ps")
    old = keys.server_context()
    key_files.renew(directory)
    with monkeypatch.context() as patch:
        patch.setattr(key_files, "_new_context", lambda *_: os.open("/nowhere", os.O_RDONLY))
        for _ in range(3):
            assert keys.server_context() is old
    assert len(caplog.messages) == 1
    assert keys.server_context() is not old


def test_bar50_keys_are_renewed_and_retired_by_command(directory: Path) -> None:
    runner = CliRunner()
    before = {path: path.read_text() for path in directory.glob("*/*")}
    result = runner.invoke(app, ["keys", "renew", str(directory), "--days", "30"])
    assert result.exit_code == 0 and "ca.crt" in result.output
    assert not [path for path, text in before.items() if path.read_text() == text]
    assert (directory / "worker" / "ca.crt").read_text().count("BEGIN CERTIFICATE") == 2
    assert (directory / "worker" / "tls.key").stat().st_mode & 0o777 == 0o600
    assert runner.invoke(app, ["keys", "retire", str(directory)]).exit_code == 0
    assert (directory / "worker" / "ca.crt").read_text().count("BEGIN CERTIFICATE") == 1
    assert (directory / "worker" / "tls.key").read_text().split()[3] not in result.output
    shown = runner.invoke(app, ["keys", "show", str(directory)])
    assert shown.output.count("valid until") == 3 and "/worker/*" in shown.output
    assert {path for path in directory.glob("*/*")} == set(before)
    shutil.rmtree(directory / "authority")
    assert runner.invoke(app, ["keys", "renew", str(directory)]).exit_code == 1


def test_bar50_certificates_for_more_tasks_are_added_by_command(directory: Path) -> None:
    runner = CliRunner()
    result = runner.invoke(app, ["keys", "add", str(directory), "worker", "7"])
    assert result.exit_code == 0, result.output
    found = key_files.load(directory, "worker", 7)
    assert found.identity.index == 7
    assert found.identity.job == key_files.load(directory, "ps").identity.job
    assert runner.invoke(app, ["keys", "add", str(directory), "worker", "7"]).exit_code == 1


def test_bar50_a_coordinator_whose_key_was_retired_leaves_in_order(
    directory: Path,
) -> None:
    spec = {"ps": ["127.0.0.1:0", "127.0.0.1:0"]}
    servers = [rx.Server(spec, "ps", i, protocol="tcp", keys=directory) for i in range(2)]
    found = rx.train.ClusterSpec({"worker": ["127.0.0.1:1"], "ps": [s.address for s in servers]})
    resolver = rx.cluster_resolver.SimpleClusterResolver(found, task_type="chief", task_id=0)
    strategy = rx.ParameterServerStrategy(resolver, keys=directory)
    with strategy.scope():
        for _ in servers:
            rx.Variable(1.0)
    # The servers accept another authority only; the coordinator has the files of the former one.
    kept = {path: path.read_bytes() for path in (directory / "coordinator").iterdir()}
    key_files.renew(directory)
    key_files.retire(directory)
    for path, content in kept.items():
        path.write_bytes(content)
    channels = strategy.extended.cluster.channels
    for one in channels:
        one.close()  # it opens a new connection when it is used again
    with pytest.raises(errors.PermissionDeniedError, match="certificate"):
        is_answered(channels[0])
    strategy.close()
    for server in servers:
        server.stop()


@pytest.mark.slow
def test_bar50_no_closure_is_dropped_while_keys_are_renewed() -> None:
    with rx.testing.LocalCluster(workers=2, ps=1, protocol="tcp", timing="fast") as cluster:
        assert cluster.keys_directory is not None
        strategy = rx.ParameterServerStrategy(cluster.resolver, keys=cluster.keys_directory)
        coordinator = rx.coordinator.ClusterCoordinator(strategy, timing=Timing.fast())
        with strategy.scope():
            count = rx.Variable(0, dtype="int32")
        done = threading.Event()
        scheduled = 0

        def renew() -> None:
            key_files.renew(cluster.keys_directory)  # type: ignore[arg-type]
            for index in range(2):
                cluster.restart("worker", index)
            key_files.retire(cluster.keys_directory)  # type: ignore[arg-type]
            done.set()

        thread = threading.Thread(target=renew)
        thread.start()
        while not done.is_set() or scheduled < 500:
            coordinator.schedule(lambda: count.assign_add(1))
            scheduled += 1
            if scheduled % 100 == 0:
                coordinator.join(timeout=60)
        coordinator.join(timeout=60)
        thread.join()
        assert int(count.read_value()) == scheduled
        assert cluster.alive("worker", 0) and cluster.alive("worker", 1)
        coordinator.close()
        strategy.close()
