"""`replicax run --kubernetes`: manifests that fit the schemas and each other; keys in none."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from replicax.foundation import errors
from replicax.launch import certificates, kubernetes_manifests, kubernetes_pod
from replicax.launch.job import JobSpec, PythonProgram
from replicax.launch.kubernetes import KubernetesLauncher
from replicax.protocol.tasks import Task
from replicax.transport import keys

# The first release with all fields that are used, one in between, and the newest of the package.
RELEASES = ("1.31", "1.34", "1.37")
SOURCE = 'import sys\n\nprint("a: |", sys.argv)\n'
JOBS = {
    "sync": {"workers": 4},
    "evaluator": {"workers": 2, "evaluator": True, "devices_per_worker": 2},
    "ps": {"workers": 3, "ps": 2, "cpus_per_worker": 2, "env": {"A": "b"}},
}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train_model.py"
    path.write_text(SOURCE)
    return path


def job_of(script: Path, kind: str) -> JobSpec:
    return JobSpec(PythonProgram(str(script), ("--steps", "3")), **JOBS[kind])


def write(script: Path, kind: str, **options: Any) -> list[dict[str, Any]]:
    output = script.with_name("out.yaml")
    launcher = KubernetesLauncher("registry/image:1", output=output, **options)
    assert launcher.launch(job_of(script, kind)) == 0
    return list(yaml.safe_load_all(output.read_text()))


def of_kind(found: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in found if each["kind"] == kind}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("kind", JOBS)
def test_manifests_fit_the_schemas_of_released_versions(
    script: Path, kind: str, release: str
) -> None:
    for each in write(script, kind, namespace="research"):
        kubernetes_validate.validate(each, release, strict=True)


def test_the_strict_schemas_reject_an_unknown_field(script: Path) -> None:
    job = of_kind(write(script, "sync"), "Job")["train-model-worker"]
    job["spec"]["backoffLimits"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, RELEASES[0], strict=True)


@pytest.mark.parametrize("kind", JOBS)
def test_names_ports_volumes_and_secrets_refer_to_each_other(script: Path, kind: str) -> None:
    found, job = write(script, kind), job_of(script, kind)
    (service,) = of_kind(found, "Service").values()
    (policy,) = of_kind(found, "NetworkPolicy").values()
    claims, programs = of_kind(found, "PersistentVolumeClaim"), of_kind(found, "ConfigMap")
    jobs = of_kind(found, "Job")
    assert set(jobs) == {f"train-model-{task.job}" for task in job.tasks}
    secrets_of_roles = {
        kubernetes_manifests.secret_name("train-model", role)
        for role in kubernetes_manifests.roles_of(job)
    }
    used: set[str] = set()
    for name, each in jobs.items():
        spec, pod = each["spec"], each["spec"]["template"]["spec"]
        labels = each["spec"]["template"]["metadata"]["labels"]
        (container,) = pod["containers"]
        tasks = [task for task in job.tasks if name == f"train-model-{task.job}"]
        assert spec["completions"] == spec["parallelism"] == len(tasks)
        # The service and the policy select every pod.
        assert service["spec"]["selector"].items() <= labels.items()
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
        (source,) = policy["spec"]["ingress"][0]["from"]
        assert source["podSelector"] == policy["spec"]["podSelector"]
        # One port, in the service, the container and the arguments.
        (port,) = service["spec"]["ports"]
        assert [port["targetPort"]] == [each["containerPort"] for each in container["ports"]]
        # Each volume is mounted once, and refers to an object of this job.
        mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert len(mounts) == len(container["volumeMounts"])
        assert set(mounts) == set(volumes)
        assert volumes["checkpoints"]["persistentVolumeClaim"]["claimName"] in claims
        assert volumes["program"]["configMap"]["name"] in programs
        # What the process in the pod is told.
        task = kubernetes_pod.parse(container["args"], index=0)
        assert task.port == port["port"]
        assert pod["subdomain"] == task.service == service["metadata"]["name"]
        assert task.task == tasks[0]
        # The name of a pod of an indexed Job is that of the Job, and the index.
        assert task.host(task.task) == f"{name}-0.{service['metadata']['name']}"
        assert {Task(j, i) for j, n in task.counts.items() for i in range(n)} == set(job.tasks)
        assert str(task.shared) == mounts["checkpoints"]["mountPath"]
        assert task.is_leader == (task.task.job == ("worker" if job.is_sync else "chief"))
        if task.task.job != "evaluator":
            assert str(task.keys) == mounts["keys"]["mountPath"]
            used.add(volumes["keys"]["secret"]["secretName"])
        for rule in spec["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes", {"containerName": container["name"]})
            assert codes["containerName"] == container["name"]
        if job.serves(task.task):
            assert task.command[:4] == ("python", "-m", "replicax", "serve")
        else:
            directory, file = os.path.split(task.command[1])
            assert directory == mounts["program"]["mountPath"]
            assert programs[volumes["program"]["configMap"]["name"]]["data"] == {file: SOURCE}
            assert task.command[2:] == ("--steps", "3")
        assert spec["backoffLimit"] == job.max_restarts * len(tasks)
        assert {e["name"]: e["value"] for e in container["env"]} == job.env
    assert used == secrets_of_roles


def test_the_rules_of_restarts_are_the_documented_exit_codes(script: Path) -> None:
    (job,) = of_kind(write(script, "sync"), "Job").values()
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"

    def action(code: int) -> str:
        for rule in job["spec"]["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes")
            if codes and (code in codes["values"]) == (codes["operator"] == "In"):
                return rule["action"]
        return "Count"

    actions = {code: action(code) for code in (1, 2, 42, 75, 137, 143)}
    assert actions == {
        1: "FailJob",
        2: "FailJob",
        42: "Ignore",
        75: "Count",
        137: "Count",
        143: "Count",
    }
    assert [code for code in actions if kubernetes_pod.is_final(code)] == [1, 2]


FAKE_KUBECTL = """#!/bin/sh
echo "$@" >> {log}
after() {{ echo "$words" | sed "s/.*$1 \\([^ ]*\\).*/\\1/"; }}
words="$*"
case "$words" in
  *"get secret"*) grep "secret/$(after 'get secret')$" {secrets} 2>/dev/null ;;
  *"create secret"*)
    echo "secret/$(after generic)" >> {secrets}
    for word in "$@"; do
      file=${{word#--from-file=}}
      [ "$file" = "$word" ] && continue
      stat -c %a "$file" >> {modes}
      cp "$file" {copies}/"$(echo "$file" | tr / _)"
    done ;;
esac
true
"""


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program `kubectl` that keeps what it gets, first in PATH."""
    directory = tmp_path / "bin"
    directory.mkdir()
    (tmp_path / "copies").mkdir()
    path = directory / "kubectl"
    names = {name: tmp_path / name for name in ("log", "secrets", "modes", "copies")}
    path.write_text(FAKE_KUBECTL.format(**names))
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    return tmp_path


def test_apply_creates_the_secrets_from_private_files_and_no_manifest_has_a_key(
    script: Path, kubectl: Path
) -> None:
    shown: list[str] = []
    write(script, "ps", apply=True, show=shown.append)
    calls = (kubectl / "log").read_text().splitlines()
    created = [call for call in calls if "create secret" in call]
    assert [call.split()[3] for call in created] == [
        "train-model-keys-coordinator",
        "train-model-keys-worker",
        "train-model-keys-ps",
    ]
    assert calls[-1] == f"apply -f {script.with_name('out.yaml')}"
    assert set((kubectl / "modes").read_text().split()) == {"600"}
    # Each role gets its own secret key only.
    assert [call.count("tls.key") for call in created] == [1, 1, 1]
    copied = [path.read_text().strip() for path in (kubectl / "copies").iterdir()]
    assert len(copied) == 9
    written = script.with_name("out.yaml").read_text()
    for secret in copied:
        assert secret not in written
        assert all(secret not in line for line in [*shown, *calls])
    # The keys that the Secrets were made of are gone.
    assert not Path(created[0].split("--from-file=")[1].split()[0]).exists()
    # Applied again, the Secrets stay: running tasks have their keys.
    write(script, "ps", apply=True, show=shown.append)
    assert (kubectl / "log").read_text().count("create secret") == 3


def test_secrets_of_which_some_are_missing_are_an_error(script: Path, kubectl: Path) -> None:
    (kubectl / "secrets").write_text("secret/train-model-keys-worker\n")
    with pytest.raises(errors.ContextError, match="train-model-keys-worker, and not the others"):
        write(script, "ps", apply=True)


def test_an_error_of_kubectl_is_shown(script: Path, kubectl: Path) -> None:
    (kubectl / "bin" / "kubectl").write_text("#!/bin/sh\necho no such host >&2\nexit 3\n")
    with pytest.raises(errors.UnavailableError, match="exit code 3: no such host"):
        write(script, "sync", apply=True)


def test_apply_without_kubectl_says_so(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(script.parent))
    launcher = KubernetesLauncher("i", output=script.with_name("o.yaml"), apply=True)
    assert not launcher.detect() and "no kubectl" in launcher.explain()
    with pytest.raises(errors.MissingDependencyError, match="kubectl"):
        launcher.launch(job_of(script, "sync"))


@pytest.mark.parametrize(
    ("options", "fields", "text"),
    [
        ({"image": ""}, {}, "--image"),
        ({"name": "Train"}, {}, "small letters"),
        ({"name": "a" * 41}, {}, "up to 40"),
        ({"volume_size": "ten"}, {}, "10Gi"),
        ({}, {"workers": 4, "min_workers": 2}, "--elastic"),
    ],
)
def test_what_kubernetes_cannot_run_is_an_error(
    script: Path, options: dict[str, Any], fields: dict[str, Any], text: str
) -> None:
    job = JobSpec(PythonProgram(str(script)), **fields)
    launcher = KubernetesLauncher(**{"image": "i", **options})
    with pytest.raises(errors.DistributeError, match=text):
        launcher.launch(job)


def test_keys_of_a_secret_are_copied_to_a_private_directory(tmp_path: Path) -> None:
    made = keys.make(tmp_path / "made")
    mounted, data = tmp_path / "mounted", tmp_path / "mounted" / "..2026"
    data.mkdir(parents=True)
    for path in certificates.of_role(made, "worker"):
        (data / path.name).write_bytes(path.read_bytes())
        (data / path.name).chmod(0o444)
        (mounted / path.name).symlink_to(data / path.name)
    mounted.chmod(0o777)
    with pytest.raises(errors.PermissionDeniedError):
        keys.load(mounted, "worker")
    copied = kubernetes_pod.copy_keys(mounted, tmp_path)
    assert stat.S_IMODE(copied.stat().st_mode) == 0o700
    assert keys.load(copied, "worker").identity == keys.load(made, "worker").identity
