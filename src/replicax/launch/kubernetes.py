"""Launches a job on Kubernetes: writes its manifests, and applies them if asked to."""

from __future__ import annotations

import logging
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from replicax.foundation import errors, lazy, settings
from replicax.launch import kubernetes_manifests
from replicax.launch.job import JobSpec
from replicax.launch.kubernetes_manifests import KubernetesOptions
from replicax.protocol.tasks import Role
from replicax.transport.keys import CA, CERTIFICATE, KEY

yaml = lazy.module("yaml", "replicax[kubernetes]")

_log = logging.getLogger(__name__)

_KUBECTL_S = 60.0
# An object of Kubernetes may have a megabyte.
_MAX_SOURCE_BYTES = 900_000


class KubernetesLauncher:
    """Writes the manifests of a job, and applies them with `kubectl`.

    Kubernetes itself restarts tasks: see Note [What restarts what on Kubernetes].

    Args:
      image: The image of the containers, with Python and replicax.
      name: The name of the job; that of the program by default.
      namespace: The namespace; that of the current context by default.
      claim: The volume claim for checkpoints; a new one by default.
      volume_size: The size of a new claim.
      output: The file of the manifests; `<name>.yaml` by default.
      apply: Whether to create the Secrets and to apply the manifests.
      show: Prints a line for the user.
    """

    name = "kubernetes"

    def __init__(
        self,
        image: str | None = None,
        *,
        name: str | None = None,
        namespace: str | None = None,
        claim: str | None = None,
        volume_size: str = "10Gi",
        output: Path | None = None,
        apply: bool = False,
        show: Callable[[str], None] = _log.info,
    ) -> None:
        self._image = image
        self._name = name
        self._namespace = namespace
        self._claim = claim
        self._volume_size = volume_size
        self._output = output
        self._apply = apply
        self._show = show

    def detect(self) -> bool:
        """Returns whether this is a pod, or there is a `kubectl`."""
        return settings.KUBERNETES_SERVICE_HOST.is_set or shutil.which("kubectl") is not None

    def explain(self) -> str:
        """Returns what was found of Kubernetes."""
        if settings.KUBERNETES_SERVICE_HOST.is_set:
            return f"kubernetes: this is a pod ({settings.KUBERNETES_SERVICE_HOST} is set)"
        found = shutil.which("kubectl")
        if found is None:
            return "kubernetes: there is no kubectl in PATH; manifests can be written"
        return f"kubernetes: {found} applies manifests"

    def launch(self, job: JobSpec) -> int:
        """Writes the manifests of a job, and applies them if that was asked for.

        Returns:
          0: the tasks run on when this returns.
        """
        options = self._options(job)
        source = _source(job)
        found = kubernetes_manifests.manifests(job, options, source)
        path = self._output or Path(f"{options.name}.yaml")
        path.write_text(_as_yaml(found))
        kinds = ", ".join(f"{each['kind']} {each['metadata']['name']}" for each in found)
        self._show(f"wrote {path}: {kinds}")
        if self._apply:
            self._create(job, options, path)
        else:
            self._tell(job, options, path)
        return 0

    def _options(self, job: JobSpec) -> KubernetesOptions:
        if not self._image:
            raise errors.InvalidArgumentError(
                "A job on Kubernetes needs an image",
                "none was given",
                "Pass --image, an image with Python and replicax.",
            )
        if job.min_workers is not None or job.hosts:
            raise errors.UnsupportedError(
                "On Kubernetes, a job has a fixed number of workers, and the scheduler places them",
                "an elastic job or hosts were asked for",
                "Leave --elastic and --hosts out.",
            )
        name = self._name or job.program.name.lower().replace("_", "-").replace(".", "-")
        return KubernetesOptions(
            name,
            self._image,
            secrets.token_hex(4),
            self._namespace,
            self._claim,
            self._volume_size,
        )

    # Applying.

    def _create(self, job: JobSpec, options: KubernetesOptions, path: Path) -> None:
        if shutil.which("kubectl") is None:
            raise errors.MissingDependencyError(
                "--apply needs kubectl",
                "there is none in PATH",
                f"Install it, or apply {path} on a machine that has it.",
            )
        roles = kubernetes_manifests.roles_of(job)
        names = {role: kubernetes_manifests.secret_name(options.name, role) for role in roles}
        existing = [role for role in roles if self._has_secret(options, names[role])]
        if existing and existing != roles:
            raise errors.ContextError(
                "The Secrets of a job must be made together",
                f"there is {', '.join(names[role] for role in existing)}, and not the others",
                "Delete it, and run the command again.",
            )
        if existing:
            self._show(f"kept the Secrets {', '.join(names.values())}")
        else:
            with tempfile.TemporaryDirectory(prefix="rx-keys-") as directory:
                keys = job.keys or _make_keys(Path(directory) / "keys")
                for role in roles:
                    self._kubectl(options, _create_secret(names[role], role, keys))
            self._show(f"created the Secrets {', '.join(names.values())}")
        self._kubectl(options, ["apply", "-f", str(path)])
        leader = f"job/{options.name}-{'worker' if job.is_sync else 'chief'}"
        self._show(f"applied {path}; follow it with `kubectl logs -f {leader}`")

    def _has_secret(self, options: KubernetesOptions, name: str) -> bool:
        found = self._kubectl(options, ["get", "secret", name, "--ignore-not-found", "-o", "name"])
        return bool(found.strip())

    def _kubectl(self, options: KubernetesOptions, words: Sequence[str]) -> str:
        where = [] if options.namespace is None else ["--namespace", options.namespace]
        try:
            done = subprocess.run(
                ["kubectl", *where, *words],
                capture_output=True,
                text=True,
                timeout=_KUBECTL_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise errors.DeadlineExceededError(
                f"`kubectl {words[0]}` did not end within {_KUBECTL_S:g} s. Check the current "
                "context (kubectl cluster-info)."
            ) from None
        if done.returncode:
            raise errors.UnavailableError(
                f"`kubectl {' '.join(words[:2])}` failed with exit code {done.returncode}: "
                f"{done.stderr.strip()[:500]}. Correct it, and run the command again."
            )
        return done.stdout

    # Without applying.

    def _tell(self, job: JobSpec, options: KubernetesOptions, path: Path) -> None:
        """Prints the commands that start the job."""
        where = "" if options.namespace is None else f" --namespace {options.namespace}"
        keys = job.keys or Path("keys")
        if job.keys is None:
            self._show(f"replicax keys make {keys}   # private: do not commit it")
        for role in kubernetes_manifests.roles_of(job):
            name = kubernetes_manifests.secret_name(options.name, role)
            self._show(f"kubectl{where} {' '.join(_create_secret(name, role, keys))}")
        self._show(f"kubectl{where} apply -f {path}")


def _as_yaml(found: Sequence[kubernetes_manifests.Manifest]) -> str:
    class Dumper(yaml.SafeDumper):
        """Writes a text of several lines, such as the program, as it is."""

    def write_text(dumper: Any, text: str) -> Any:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, write_text)
    return yaml.dump_all(found, Dumper=Dumper, sort_keys=False, width=100)


def _create_secret(name: str, role: Role, directory: Path) -> list[str]:
    """Returns the words after `kubectl` that create the Secret of a role, from files."""
    files = [f"--from-file={directory / role / name}" for name in (CA, CERTIFICATE, KEY)]
    return ["create", "secret", "generic", name, *files]


def _make_keys(directory: Path) -> Path:
    from replicax.transport import keys  # noqa: PLC0415 - slow to import, and not always needed

    return keys.make(directory)


def _source(job: JobSpec) -> str | None:
    """Returns the text of a script; None if the image must have the program."""
    if job.program.is_module:
        return None
    path = Path(job.program.target)
    if not path.is_file():
        raise errors.NotFoundError(
            "The program must be a Python script that exists",
            f"there is no file {str(path)!r}",
            "Correct the path, or pass -m and a module of the image.",
        )
    if path.stat().st_size > _MAX_SOURCE_BYTES:
        raise errors.InvalidArgumentError(
            f"A script on Kubernetes may have {_MAX_SOURCE_BYTES} bytes",
            f"{path} has {path.stat().st_size}",
            "Put it into the image, and pass -m and its module.",
        )
    return path.read_text()
