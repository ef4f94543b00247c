"""`replicax serve`: runs one task of a cluster in this process."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Annotated

import jax
import typer

# Logs, and the errors that a worker reports, then have the public names of the library.
import replicax.public_api  # noqa: F401
from replicax.cli.failures import errors_in_one_line
from replicax.cluster.spec import ClusterSpec
from replicax.cluster_resolver import TFConfigClusterResolver
from replicax.foundation import devices, errors
from replicax.process import roles, shutdown, system_limits
from replicax.process.server import Server
from replicax.protocol.tasks import Task
from replicax.ps.process.snapshots import DEFAULT_EVERY_S, LAST_SAVE_S
from replicax.transport import keys as key_files
from replicax.transport.keys import Keys

_log = logging.getLogger(__name__)

# The seconds that a running closure may take after a signal to exit.
_ENDING_SECONDS = 8.0
# The seconds after which a worker that was declared dead drops its closure.
_GIVEN_UP_SECONDS = 1.0
# The exit code for an invalid cluster or task: a restart will not help.
_BAD_CONFIGURATION = 2

_Cluster = Annotated[
    str | None,
    typer.Option(metavar="JSON", help="The cluster; that of TF_CONFIG by default."),
]
_Job = Annotated[str | None, typer.Option(help="The job of this task: ps or worker.")]
_Index = Annotated[int | None, typer.Option(help="The index of this task.")]
_KeyDirectory = Annotated[
    Path | None,
    typer.Option("--keys", metavar="DIR", help="The certificates of the cluster, for TCP."),
]
_TlsCa = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The certificates of the authority, instead of --keys."),
]
_TlsCert = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The certificate of this task.")
]
_TlsKey = Annotated[Path | None, typer.Option(metavar="FILE", help="Its private key.")]
_Protocol = Annotated[str | None, typer.Option(help="ipc, tcp, or grpc for either.")]
_CpuDevices = Annotated[int, typer.Option(help="The number of devices of the CPU.")]
_Snapshots = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Where a ps saves its variables, and restores them from."),
]
_SnapshotEvery = Annotated[
    float, typer.Option(metavar="SECONDS", help="The time between two snapshots.")
]
_ReadyFd = Annotated[int | None, typer.Option(hidden=True)]
_Parent = Annotated[int | None, typer.Option("--die-with-parent", hidden=True)]


def serve(
    cluster: _Cluster = None,
    job: _Job = None,
    index: _Index = None,
    keys: _KeyDirectory = None,
    tls_ca: _TlsCa = None,
    tls_cert: _TlsCert = None,
    tls_key: _TlsKey = None,
    protocol: _Protocol = None,
    cpu_devices: _CpuDevices = 1,
    snapshots: _Snapshots = None,
    snapshot_every: _SnapshotEvery = DEFAULT_EVERY_S,
    ready_fd: _ReadyFd = None,
    parent: _Parent = None,
) -> None:
    """Run a parameter server or a worker, until SIGTERM or Ctrl-C.

    A task whose coordinator is gone for too long exits by itself, with exit code 75.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("replicax").setLevel(logging.INFO)
    with errors_in_one_line(_BAD_CONFIGURATION):
        spec, name, layer = _which_task(cluster, job, index)
        roles.require_snapshots_fit(name, snapshots, snapshot_every)
        _configure_devices(name, cpu_devices)
    with errors_in_one_line():
        if parent is not None:
            shutdown.die_with_parent(parent)
        system_limits.tune_for_serving()
        server = Server(
            spec,
            name.job,
            name.index,
            protocol=protocol or layer,
            start=False,
            keys=_certificates(name, keys, tls_ca, tls_cert, tls_key),
            snapshots=snapshots,
            snapshot_every=snapshot_every,
            on_ending=lambda _: shutdown.end_soon(shutdown.START_AGAIN, seconds=_GIVEN_UP_SECONDS),
        )
        seconds = _ENDING_SECONDS + (LAST_SAVE_S if snapshots is not None else 0.0)
        # Installed before the task listens: from then on it shuts down in order.
        with shutdown.ended_by_signals(server.interrupt, seconds=seconds), server:
            server.start()
            _report(server, name, ready_fd)
            server.join()
    if server.ending is not None:
        _log.warning("%s ends: %s", name, server.ending)
        raise typer.Exit(shutdown.START_AGAIN)


def _certificates(name: Task, directory: Path | None, *files: Path | None) -> Path | Keys | None:
    """Returns the certificates of the options; None without any."""
    ca, certificate, key = files
    if ca is None and certificate is None and key is None:
        return directory
    if ca is None or certificate is None or key is None or directory is not None:
        raise errors.InvalidArgumentError(
            "`--tls-ca`, `--tls-cert` and `--tls-key` belong together, and replace `--keys`",
            "other options were given",
            "Pass all three, or only `--keys`.",
        )
    return key_files.load_files(ca, certificate, key, name.role, name.index)


def _which_task(
    cluster: str | None, job: str | None, index: int | None
) -> tuple[ClusterSpec, Task, str | None]:
    """Returns the cluster, this task, and the protocol if TF_CONFIG has one."""
    resolver = TFConfigClusterResolver(job, index)
    layer: str | None = None
    if cluster is not None:
        spec = ClusterSpec(_parsed(cluster))
    else:
        spec, layer = resolver.cluster_spec(), resolver.rpc_layer
        job, index = resolver.task_type, resolver.task_id
    if not spec:
        raise errors.InvalidArgumentError(
            "`replicax serve` needs a cluster",
            "TF_CONFIG is not set, or contains none, and there is no --cluster",
            "Set TF_CONFIG, or pass --cluster, --job and --index.",
        )
    definition = Server(spec, job, index, start=False).server_def
    name = Task(definition["job_name"], definition["task_index"])
    if name.job not in roles.SERVING:
        raise errors.InvalidArgumentError(
            f"`replicax serve` runs a task of the jobs {' and '.join(roles.SERVING)}",
            f"this is {name}",
            "Run your own program as this task.",
        )
    return spec, name, layer


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise errors.InvalidArgumentError(
            "--cluster must be JSON",
            f"it is not ({error})",
            """Write '{"ps": ["localhost:2222"], "worker": ["localhost:2223"]}'.""",
        ) from None


def _configure_devices(name: Task, cpu_devices: int) -> None:
    if name.job == "ps":
        # Its arrays are in memory: it must not take an accelerator from a worker.
        jax.config.update("jax_platforms", "cpu")
    elif cpu_devices != 1:
        devices.set_virtual_cpu_devices(cpu_devices)


def _report(server: Server, name: Task, ready_fd: int | None) -> None:
    """Reports the address of the task, on stdout and to the parent process."""
    typer.echo(f"{name.job} {name.index} serves at {server.address}")
    if ready_fd is not None:
        with os.fdopen(ready_fd, "w") as pipe:
            pipe.write(json.dumps({"address": server.address}) + "\n")
