"""The pods of the manifests, run as Kubernetes would run them, in namespaces of this machine.

Each pod is a process with a host name and an `/etc/hosts` of its own; its mounts are directories.
The controller of Jobs is a few lines: it replaces failed pods by the rules of the manifest.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import launched_training as training
import pytest
import yaml

from replicax.launch.job import JobSpec, PythonProgram
from replicax.launch.kubernetes import KubernetesLauncher
from replicax.transport import keys

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        os.getuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"
    ),
]
ENTER = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'


class Pods:
    """A node and a controller for the Jobs of some manifests."""

    def __init__(self, manifests: list[dict[str, Any]], directory: Path) -> None:
        self._directory = directory
        self._config_maps = {
            each["metadata"]["name"]: each["data"]
            for each in manifests
            if each["kind"] == "ConfigMap"
        }
        self.jobs = {m["metadata"]["name"]: m["spec"] for m in manifests if m["kind"] == "Job"}
        self.names = [
            f"{name}-{index}"
            for name, spec in self.jobs.items()
            for index in range(spec["completions"])
        ]
        self._service = next(m["metadata"]["name"] for m in manifests if m["kind"] == "Service")
        self._made = keys.make(directory / "made")
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.codes: dict[str, list[int]] = {name: [] for name in self.names}
        self.failed: list[str] = []
        hosts = ["127.0.0.1 localhost"]
        for number, name in enumerate(self.names):
            hosts.append(f"127.0.1.{number + 1} {name}.{self._service} {name}")
        (directory / "hosts").write_text("\n".join(hosts) + "\n")

    def start(self, name: str) -> None:
        job, _, index = name.rpartition("-")
        pod = self.jobs[job]["template"]["spec"]
        (container,) = pod["containers"]
        root = self._directory / "pods" / f"{name}.{len(self.codes[name])}"
        words = [*container["command"], *container["args"]]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for mount in container["volumeMounts"]:
            path = self._mount(volumes[mount["name"]], root / mount["name"])
            # In place of a mount, which would need the directory in the image.
            words = [word.replace(mount["mountPath"], str(path)) for word in words]
        words = [sys.executable if word == "python" else word for word in words]
        env = {**training.ENV, "JOB_COMPLETION_INDEX": index}
        env |= {each["name"]: each["value"] for each in container["env"]}
        with (self._directory / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                ["unshare", "--mount", "--uts", "sh", "-c", ENTER, "sh", name]
                + [str(self._directory / "hosts"), *words],
                env=env,
                stdout=log,
                stderr=log,
            )

    def _mount(self, volume: dict[str, Any], path: Path) -> Path:
        if "persistentVolumeClaim" in volume:
            path = self._directory / volume["persistentVolumeClaim"]["claimName"]
            path.mkdir(exist_ok=True)
            return path
        path.mkdir(parents=True)
        if "configMap" in volume:
            for name, text in self._config_maps[volume["configMap"]["name"]].items():
                (path / name).write_text(text)
        else:
            role = volume["secret"]["secretName"].rpartition("-")[2]
            for name in (f"{role}.secret", "coordinator.public", "worker.public", "ps.public"):
                shutil.copyfile(self._made / name, path / name)
                (path / name).chmod(volume["secret"]["defaultMode"])
            path.chmod(0o777)
        return path

    def run(self, timeout: float, kill: str | None = None) -> None:
        """Runs all Jobs to their end; kills the program of a pod when step 50 was printed."""
        for name in self.names:
            self.start(name)
        deadline = time.monotonic() + timeout
        while self.running and time.monotonic() < deadline:
            for name, process in list(self.running.items()):
                code = process.poll()
                if code is None:
                    continue
                del self.running[name]
                self.codes[name].append(code)
                job = name.rpartition("-")[0]
                if code and self._action(job, code) == "FailJob":
                    self.failed.append(name)
                elif code:
                    self.start(name)
            if kill is not None and "step 50:" in self.log(self.names[0]):
                # Of the program in the pod: the process around it sees the signal.
                job, _, index = kill.rpartition("-")
                directory = self._directory / "train-checkpoints" / "digits"
                os.kill(training.pid_of("worker", int(index), directory), signal.SIGKILL)
                kill = None
            time.sleep(0.1)
        assert not self.running, {name: self.log(name)[-2000:] for name in self.running}
        assert kill is None

    def _action(self, job: str, code: int) -> str:
        for rule in self.jobs[job]["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes")
            if codes and (code in codes["values"]) == (codes["operator"] == "In"):
                return rule["action"]
        return "Count"

    def log(self, name: str) -> str:
        path = self._directory / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def close(self) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=20)


def pods_of(directory: Path, **fields: Any) -> Pods:
    arguments = training.arguments(Path("/checkpoints/digits"))
    job = JobSpec(PythonProgram(str(training.TRAIN), tuple(arguments)), **fields)
    output = directory / "train.yaml"
    assert KubernetesLauncher("image", output=output).launch(job) == 0
    return Pods(list(yaml.safe_load_all(output.read_text())), directory)


def test_the_pods_of_a_group_train_and_restart_by_the_rules_of_the_manifest(tmp_path: Path) -> None:
    pods = pods_of(tmp_path, workers=2)
    try:
        pods.run(300, kill="train-worker-1")
    finally:
        pods.close()
    output = pods.log("train-worker-0")
    assert pods.codes == {"train-worker-0": [75, 0], "train-worker-1": [137, 0]}, pods.codes
    assert "starts at step 0" in output and "starts at step 50" in output
    assert training.result_in(output)[1] == pytest.approx(training.plain_result()[1], rel=1e-4)


def test_workers_and_servers_end_when_the_chief_has_finished(tmp_path: Path) -> None:
    pods = pods_of(tmp_path, workers=2, ps=1)
    try:
        pods.run(300)
    finally:
        pods.close()
    assert set(map(tuple, pods.codes.values())) == {(0,)}, pods.codes
    output = pods.log("train-chief-0")
    assert training.result_in(output)[1] == pytest.approx(training.plain_result()[1], rel=1e-4)
    # The same manifest again: the run is over.
    again = pods.names[0]
    pods.start(again)
    assert pods.running.pop(again).wait(timeout=60) == 0
    assert "is over" in pods.log(again)
