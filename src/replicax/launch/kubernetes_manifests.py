"""The objects of Kubernetes that run a job. Pure: a description in, plain dicts out.

Note [What restarts what on Kubernetes]
    Every job of the cluster (worker, ps, chief) is an indexed Job, whose controller replaces a pod
    that has failed by one with the same name. The exit codes of docs/reference/exit_codes.md are
    the rules of its `podFailurePolicy`: 75 and signals are restarted and counted, 42 and evictions
    are restarted and not counted, and everything else ends the Job. The tasks of a sync group that
    lose one of them all end with 75, and meet again at the same names.

Note [Keys are never in a manifest]
    The manifests refer to Secrets by name. `kubectl create secret --from-file` reads the keys from
    private files, so that they are in no file that is committed, no command line and no output.
    There is a Secret for each role: a worker does not get the key of the coordinator.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import PurePosixPath
from typing import Any

from replicax.foundation import errors
from replicax.group import exit_codes
from replicax.launch.job import JobSpec
from replicax.protocol.tasks import Role, Task

PORT = 2222
# Where the parts of a pod are mounted.
PROGRAM_DIRECTORY = PurePosixPath("/replicax/program")
KEYS_DIRECTORY = PurePosixPath("/replicax/keys")
DEFAULT_CHECKPOINTS = PurePosixPath("/checkpoints")

Manifest = dict[str, Any]

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([KMGTPE]i?)?")
_CONTAINER = "task"
_LABEL = "replicax-job"
# The exit codes of a container that a signal has ended: HUP, ABRT, BUS, KILL, SEGV, TERM.
SIGNAL_CODES = (129, 134, 135, 137, 139, 143)
_ROLE_OF: dict[str, Role] = {"chief": "coordinator", "worker": "worker", "ps": "ps"}
# Beyond the time that tasks get to end, for the process around them.
_GRACE_SLACK_S = 10


@dataclasses.dataclass(frozen=True)
class KubernetesOptions:
    """What is special about a job on Kubernetes.

    Attributes:
      name: The name of the job, from which those of all objects begin.
      image: The image of the containers, with Python and replicax.
      run: A text that no other run has; see `kubernetes_pod`.
      namespace: The namespace; None for that of the current context.
      claim: The volume claim for checkpoints; None creates one.
      volume_size: The size of a new claim.
    """

    name: str
    image: str
    run: str
    namespace: str | None = None
    claim: str | None = None
    volume_size: str = "10Gi"

    def __post_init__(self) -> None:
        for what, value in (
            ("job", self.name),
            ("namespace", self.namespace),
            ("claim", self.claim),
        ):
            if value is not None and not _NAME.fullmatch(value):
                raise errors.InvalidArgumentError(
                    f"The name of a {what} on Kubernetes has up to 40 small letters, digits and "
                    "hyphens, and begins with a letter",
                    f"it is {value!r}",
                    "Choose another one.",
                )
        if not _QUANTITY.fullmatch(self.volume_size):
            raise errors.InvalidArgumentError(
                "The size of a volume must be a quantity of Kubernetes",
                f"it is {self.volume_size!r}",
                "Write 10Gi, for example.",
            )


def roles_of(job: JobSpec) -> list[Role]:
    """Returns the roles whose keys the tasks of a job need.

    >>> from replicax.launch.job import PythonProgram
    >>> roles_of(JobSpec(PythonProgram("train.py"), workers=2))
    ['worker']
    """
    jobs = {task.job for task in job.tasks}
    return [role for name, role in _ROLE_OF.items() if name in jobs]


def secret_name(name: str, role: Role) -> str:
    """Returns the name of the Secret with the keys of a role."""
    return f"{name}-keys-{role}"


def manifests(job: JobSpec, options: KubernetesOptions, source: str | None) -> list[Manifest]:
    """Returns all objects of a job, in the order in which they are created.

    Args:
      job: The job.
      options: What is special about Kubernetes.
      source: The text of the program; None if the image contains it.
    """
    found = [_network_policy(options), _service(options)]
    if options.claim is None:
        found.append(_claim(options))
    if source is not None:
        found.append(_config_map(job, options, source))
    counts: dict[str, int] = {}
    for task in job.tasks:
        counts[task.job] = counts.get(task.job, 0) + 1
    return [
        *found,
        *(_indexed_job(job, options, name, counts, source is not None) for name in counts),
    ]


def _object(
    options: KubernetesOptions, api: str, kind: str, name: str, **content: object
) -> Manifest:
    metadata: Manifest = {"name": name, "labels": {_LABEL: options.name}}
    if options.namespace is not None:
        metadata["namespace"] = options.namespace
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **content}


def _network_policy(options: KubernetesOptions) -> Manifest:
    """Lets the pods of the job alone connect to each other: JAX's collectives have no keys."""

    def own() -> Manifest:
        return {"podSelector": {"matchLabels": {_LABEL: options.name}}}

    spec = {**own(), "policyTypes": ["Ingress"], "ingress": [{"from": [own()]}]}
    return _object(options, "networking.k8s.io/v1", "NetworkPolicy", options.name, spec=spec)


def _service(options: KubernetesOptions) -> Manifest:
    """Gives every pod a name: `train-worker-0.train`."""
    spec = {
        "clusterIP": "None",
        # Tasks look each other up before they are ready.
        "publishNotReadyAddresses": True,
        "selector": {_LABEL: options.name},
        "ports": [{"name": "task", "port": PORT, "targetPort": PORT}],
    }
    return _object(options, "v1", "Service", options.name, spec=spec)


def _claim_name(options: KubernetesOptions) -> str:
    return options.claim or f"{options.name}-checkpoints"


def _claim(options: KubernetesOptions) -> Manifest:
    spec = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": options.volume_size}},
    }
    return _object(options, "v1", "PersistentVolumeClaim", _claim_name(options), spec=spec)


def _config_map(job: JobSpec, options: KubernetesOptions, source: str) -> Manifest:
    data = {PurePosixPath(job.program.target).name: source}
    return _object(options, "v1", "ConfigMap", f"{options.name}-program", data=data)


def _indexed_job(
    job: JobSpec, options: KubernetesOptions, name: str, counts: dict[str, int], has_source: bool
) -> Manifest:
    count = counts[name]
    template = {
        "metadata": {"labels": {_LABEL: options.name, "replicax-task": name}},
        "spec": _pod(job, options, name, counts, has_source),
    }
    spec = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        # The loss of one task of a sync group ends the pods of all of them.
        "backoffLimit": job.max_restarts * count,
        "podFailurePolicy": {"rules": _failure_rules()},
        "template": template,
    }
    return _object(options, "batch/v1", "Job", f"{options.name}-{name}", spec=spec)


def _failure_rules() -> list[Manifest]:
    """See Note [What restarts what on Kubernetes]."""
    restarted = [exit_codes.PREEMPTED, exit_codes.RESTART_GROUP, *SIGNAL_CODES]
    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": _codes("In", [exit_codes.PREEMPTED])},
        {"action": "FailJob", "onExitCodes": _codes("NotIn", restarted)},
    ]


def _codes(operator: str, values: list[int]) -> Manifest:
    return {"containerName": _CONTAINER, "operator": operator, "values": values}


def _pod(
    job: JobSpec, options: KubernetesOptions, name: str, counts: dict[str, int], has_source: bool
) -> Manifest:
    checkpoints = PurePosixPath(str(job.checkpoints or DEFAULT_CHECKPOINTS))
    volumes: list[Manifest] = [
        {"name": "checkpoints", "persistentVolumeClaim": {"claimName": _claim_name(options)}}
    ]
    mounts: list[Manifest] = [{"name": "checkpoints", "mountPath": str(checkpoints)}]
    role = _ROLE_OF.get(name)
    if role is not None:
        # Readable by the group alone, which is that of the pod, whatever user the image has.
        secret = {"secretName": secret_name(options.name, role), "defaultMode": 0o440}
        volumes.append({"name": "keys", "secret": secret})
        mounts.append({"name": "keys", "mountPath": str(KEYS_DIRECTORY), "readOnly": True})
    if has_source:
        volumes.append({"name": "program", "configMap": {"name": f"{options.name}-program"}})
        mounts.append({"name": "program", "mountPath": str(PROGRAM_DIRECTORY), "readOnly": True})
    container: Manifest = {
        "name": _CONTAINER,
        "image": options.image,
        "command": ["python", "-m", "replicax.launch.kubernetes_pod"],
        "args": _arguments(job, options, name, counts, has_source, checkpoints),
        "env": [{"name": key, "value": value} for key, value in job.env.items()],
        "ports": [{"name": "task", "containerPort": PORT}],
        "volumeMounts": mounts,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    if name == "worker" and job.cpus_per_worker is not None:
        cpus = str(job.cpus_per_worker)
        container["resources"] = {"requests": {"cpu": cpus}, "limits": {"cpu": cpus}}
    return {
        # A failed pod is replaced, by the rules above.
        "restartPolicy": "Never",
        # With the index of the pod, which Kubernetes appends: its name in the service.
        "subdomain": options.name,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": round(job.stop_s) + _GRACE_SLACK_S,
        "securityContext": {
            "fsGroup": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }


def _arguments(
    job: JobSpec,
    options: KubernetesOptions,
    name: str,
    counts: dict[str, int],
    has_source: bool,
    checkpoints: PurePosixPath,
) -> list[str]:
    found = [
        f"--service={options.name}",
        f"--job={name}",
        f"--tasks={','.join(f'{each}={count}' for each, count in counts.items())}",
        f"--port={PORT}",
        f"--run={options.run}",
        f"--shared={checkpoints}",
        f"--stop-seconds={job.stop_s:g}",
    ]
    if name in _ROLE_OF:
        found.append(f"--keys={KEYS_DIRECTORY}")
    if name == "worker" and job.cpus_per_worker is not None:
        found.append(f"--cores={job.cpus_per_worker}")
    if name == "worker" and job.devices_per_worker is not None:
        found.append(f"--devices={job.devices_per_worker}")
    return [*found, "--", *_command(job, name, has_source)]


def _command(job: JobSpec, name: str, has_source: bool) -> list[str]:
    program = job.program
    if has_source:
        program = dataclasses.replace(
            program, target=str(PROGRAM_DIRECTORY / PurePosixPath(program.target).name)
        )
    return dataclasses.replace(job, program=program).command(Task(name, 0), "python")
