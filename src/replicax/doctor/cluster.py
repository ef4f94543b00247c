"""The cluster of this process: who describes it, its keys, the own port, and the peers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

from replicax.cluster.spec import ClusterSpec
from replicax.cluster_resolver import (
    ClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TPUClusterResolver,
)
from replicax.doctor.findings import Check, Finding, Level, problem
from replicax.foundation import errors, settings
from replicax.protocol.tasks import Role, Task
from replicax.transport import addresses, authority
from replicax.transport import keys as key_files
from replicax.transport.addresses import Location
from replicax.transport.keys import Keys

# The seconds for a connection to a peer, and how many are tried at a time.
_CONNECT_S = 2.0
_MOST_AT_ONCE = 32
_MOST_SHOWN = 5
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Hosts answer, and nothing listens.
_REFUSED = (errno.ECONNREFUSED, errno.ENOENT)


def checks() -> list[Check]:
    """Returns the checks of the cluster that the environment describes."""
    return [
        Check("cluster", check_resolver, 30.0),
        Check("keys", check_keys),
        Check("port", check_port),
        Check("peers", check_peers, 60.0),
    ]


def check_resolver() -> Iterator[Finding]:
    """Tells which resolver describes the cluster, and why."""
    resolver = TFConfigClusterResolver()
    others = list(_other_resolvers())
    if settings.TF_CONFIG.is_set:
        resolver.cluster_spec()
        text = resolver.explain().replace("\n", "; ")
        yield Finding("cluster", Level.OK, f"{text}. Strategies read TF_CONFIG by default")
        spec, task, _ = _cluster()
        if spec and (task is None or not _has(spec, task)):
            text = f"TF_CONFIG names no task of its cluster: {task or 'none'}"
            advice = 'Set "task": {"type": "worker", "index": 0} to the job and index of this task.'
            yield Finding("cluster", Level.PROBLEM, text, advice)
    elif not others:
        text = "TF_CONFIG is not set, and there are no variables of Slurm or a TPU"
        yield Finding("cluster", Level.OK, f"{text}: programs run in this process alone")
    for name, found in others:
        if isinstance(found, errors.DistributeError):
            yield problem("cluster", found)
            continue
        text = found.explain().replace("\n", "; ")
        if settings.TF_CONFIG.is_set:
            yield Finding("cluster", Level.NOTE, f"{text}; not used, since TF_CONFIG is set")
        else:
            advice = f"Pass cluster_resolver=rx.cluster_resolver.{name}() to the strategy."
            yield Finding("cluster", Level.NOTE, text, advice)


def _other_resolvers() -> Iterator[tuple[str, ClusterResolver | errors.DistributeError]]:
    """Yields resolvers whose variables are set, or the error of one that cannot be made."""
    if settings.SLURM_PROCID.is_set and settings.SLURM_STEP_NODELIST.is_set:
        try:
            yield "SlurmClusterResolver", SlurmClusterResolver(auto_set_gpu=False)
        except errors.DistributeError as error:
            yield "SlurmClusterResolver", error
    if settings.TPU_NAME.is_set or settings.TPU_WORKER_HOSTNAMES.is_set:
        try:
            yield "TPUClusterResolver", TPUClusterResolver()
        except errors.DistributeError as error:
            yield "TPUClusterResolver", error


def check_keys() -> Iterator[Finding]:
    """Reads the certificates that this host has."""
    directory, own = settings.REPLICAX_KEYS.read(), settings.REPLICAX_TLS_CERT.read()
    if not directory and not own:
        text = "REPLICAX_KEYS is not set: tasks use sockets of this host, not TCP"
        yield Finding("keys", Level.OK, text)
        return
    paths = [Path(own)] if own else []
    if directory:
        paths += sorted(Path(directory).glob(f"*/{key_files.CERTIFICATE}"))
        paths += Path(directory).glob(key_files.CERTIFICATE)
    found: list[str] = []
    for path in paths:
        identity, _ = authority.read(path)
        if own and path == Path(own):
            key_files.from_environment(identity.role, identity.index)
        else:
            ca, key = path.with_name(key_files.CA), path.with_name(key_files.KEY)
            key_files.load_files(ca, path, key, identity.role, identity.index)
        found.append(str(identity))
    if not found:
        text = f"{directory!r} has no certificate of any task"
        advice = "Make them with `replicax keys make DIR`, and copy them to each host."
        yield Finding("keys", Level.PROBLEM, text, advice)
    else:
        yield Finding("keys", Level.OK, f"{directory or own}: {', '.join(found)}")


def _own_keys(task: Task | None) -> Keys | None:
    """Returns the keys with which this task would talk to others."""
    role: Role = "coordinator"
    if task is not None and task.job in ("worker", "ps"):
        role = task.role
    return key_files.from_environment(role)


def _cluster() -> tuple[ClusterSpec, Task | None, str | None]:
    resolver = TFConfigClusterResolver()
    spec, job, index = resolver.cluster_spec(), resolver.task_type, resolver.task_id
    task = None if job is None or index is None else Task(job, index)
    return spec, task, resolver.rpc_layer


def _has(spec: ClusterSpec, task: Task) -> bool:
    return task.job in spec.jobs and task.index in spec.task_indices(task.job)


def _listens(spec: ClusterSpec, task: Task) -> bool:
    """Returns whether other tasks connect to this one: to all that serve, or to the chief."""
    if "ps" in spec.jobs:
        return task.job in ("ps", "worker")
    chief = Task("chief", 0) if "chief" in spec.jobs else Task("worker", 0)
    return task == chief


def _location(spec: ClusterSpec, task: Task, layer: str | None, keys: Keys | None) -> Location:
    return addresses.resolve(spec.task_address(task.job, task.index), layer, keys)


def check_port() -> Iterator[Finding]:
    """Checks that the own address is one of this host, and free."""
    spec, task, layer = _cluster()
    if task is None or not _has(spec, task):
        yield Finding("port", Level.OK, "no address: ports are chosen when tasks start")
        return
    location = _location(spec, task, layer, _own_keys(task))
    if location.scheme != "tcp":
        is_served = location.scheme == "ipc" and _connect_error(location) is None
        state = "in use: the task runs" if is_served else "free"
        yield Finding("port", Level.OK, f"{task} at {location}: {state} (a socket of this host)")
        return
    yield _bind(task, location)
    low, high = map(int, _PORT_RANGE.read_text().split()) if _PORT_RANGE.exists() else (0, -1)
    port = int(location.address.rpartition(":")[2])
    if low <= port <= high:
        yield Finding(
            "port",
            Level.WARNING,
            f"port {port} is in the range {low}-{high} that the kernel gives to connections",
            f"Choose a port below {low}: any program of this host may get it first.",
        )


def _bind(task: Task, location: Location) -> Finding:
    target = addresses.numeric(location)
    port = target[1]
    family = socket.AF_INET6 if ":" in target[0] else socket.AF_INET
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(target)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and _is_own_task(target):
                text = f"{task} at {location}: in use by a task of replicax, which runs already"
                return Finding("port", Level.NOTE, text)
            is_used = error.errno == errno.EADDRINUSE
            advice = (
                f"End the program that listens there (`ss -ltnp 'sport = :{port}'`), or choose "
                "another port."
                if is_used
                else "Correct the address of this task in the cluster, or the name service."
            )
            text = f"{task} cannot listen at {location}: {error.strerror}"
            return Finding("port", Level.PROBLEM, text, advice)
    return Finding("port", Level.OK, f"{task} at {location}: free")


def _is_own_task(target: tuple[str, int]) -> bool:
    """Returns whether what listens there has a certificate of a task."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with (
        contextlib.suppress(OSError),
        socket.create_connection(target, timeout=_CONNECT_S) as plain,
        context.wrap_socket(plain) as connection,
    ):
        # The name of the task is among the alternative names, as text.
        return b"replicax://" in (connection.getpeercert(binary_form=True) or b"")
    return False


def check_peers() -> Iterator[Finding]:
    """Connects to all other tasks of the cluster."""
    spec, own, layer = _cluster()
    tasks = [Task(job, index) for job in spec.jobs for index in spec.task_indices(job)]
    others = [task for task in tasks if task != own]
    if not others:
        yield Finding("peers", Level.OK, "no other tasks")
        return
    keys = _own_keys(own)
    locations = {task: _location(spec, task, layer, keys) for task in others}
    with concurrent.futures.ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        found = dict(zip(others, pool.map(_connect_error, locations.values()), strict=True))
    refused = [t for t, error in found.items() if error is not None and error.errno in _REFUSED]
    silent = [task for task in refused if _listens(spec, task)]
    num_reached = sum(error is None for error in found.values()) + len(refused)
    if num_reached:
        text = f"{num_reached} of {len(others)} other tasks can be reached"
        yield Finding("peers", Level.OK, text)
    if silent:
        text = f"nothing listens at {_places(silent, locations)}"
        advice = "Start these tasks; their hosts can be reached."
        yield Finding("peers", Level.WARNING, text, advice)
    for task, error in found.items():
        if error is not None and error.errno not in _REFUSED:
            yield Finding(
                "peers",
                Level.PROBLEM,
                f"{task} at {locations[task]} cannot be reached: {error.strerror or error}",
                "Check its name, the route and the firewall, in both directions.",
            )


def _places(tasks: list[Task], locations: dict[Task, Location]) -> str:
    shown = ", ".join(f"{locations[task]} ({task})" for task in tasks[:_MOST_SHOWN])
    more = len(tasks) - _MOST_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _connect_error(location: Location) -> OSError | None:
    """Connects to a task; returns None, or why it cannot."""
    try:
        if location.scheme == "ipc":
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(_CONNECT_S)
                connection.connect(location.path)
        else:
            host, _, port = location.address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        return error
    return None
