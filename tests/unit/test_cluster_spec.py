"""Clusters: addresses, names of tasks, ClusterSpec, and the check for parameter servers."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

import replicax as rx
from replicax.cluster import address, parameter_servers
from replicax.protocol.tasks import Task
from replicax.train import ClusterSpec

SEED = {
    "chief": ["chief.example.com:2222"],
    "ps": ["ps0.example.com:2222", "ps1.example.com:2222"],
    "worker": [f"worker{i}.example.com:2222" for i in range(3)],
}


def test_ClusterSpec_answers_as_its_lists_and_dicts_say() -> None:
    spec = ClusterSpec({"worker": ["a:1", "b:2"], "ps": {3: "d:1", 1: "c:1"}, "chief": ("x:1",)})
    assert spec.jobs == ["worker", "ps", "chief"]
    assert spec.as_dict() == {
        "worker": ["a:1", "b:2"],
        "ps": {1: "c:1", 3: "d:1"},
        "chief": ["x:1"],
    }
    assert spec.num_tasks("ps") == 2
    assert spec.task_indices("ps") == [1, 3]
    assert spec.task_address("ps", 3) == "d:1"
    assert spec.job_tasks("ps") == [None, "c:1", None, "d:1"]
    assert spec.job_tasks("worker") == ["a:1", "b:2"]
    assert repr(spec) == (
        "ClusterSpec({'chief': ['x:1'], 'ps': {1: 'c:1', 3: 'd:1'}, 'worker': ['a:1', 'b:2']})"
    )


def test_ClusterSpec_makes_a_list_of_a_dict_without_gaps() -> None:
    assert ClusterSpec({"ps": {1: "b:1", "0": "a:1"}}).as_dict() == {"ps": ["a:1", "b:1"]}


def test_ClusterSpec_equality_truth_and_copies() -> None:
    spec = ClusterSpec(SEED)
    assert spec and not ClusterSpec({})
    assert ClusterSpec(spec) == spec and hash(ClusterSpec(spec)) == hash(spec)
    assert spec == ClusterSpec(dict(reversed(SEED.items())))
    assert spec != ClusterSpec({"ps": SEED["ps"]})
    assert spec != SEED
    assert pickle.loads(pickle.dumps(spec)) == spec
    spec.as_dict()["ps"].clear()
    assert spec.as_dict() == SEED


def test_ClusterSpec_definition_goes_through_json() -> None:
    spec = ClusterSpec({**SEED, "evaluator": {2: "e:1"}})
    text = json.dumps(spec.as_cluster_def())
    assert json.loads(text) == spec.as_cluster_def()
    assert ClusterSpec(json.loads(text)) == spec


@pytest.mark.parametrize(
    ("cluster", "error", "names"),
    [
        (None, TypeError, "NoneType"),
        ("a:1", TypeError, "str"),
        (["a:1"], TypeError, "list"),
        ({1: ["a:1"]}, TypeError, "int"),
        ({"chief": "a:1"}, TypeError, "'chief'"),
        ({"ps": [1]}, TypeError, "/job:ps/task:0"),
        ({"ps": {"x": "a:1"}}, TypeError, "'ps'"),
        ({"ps": {True: "a:1"}}, TypeError, "'ps'"),
        ({"ps": {1.5: "a:1"}}, TypeError, "'ps'"),
        ({"ps": {-1: "a:1"}}, ValueError, "'ps'"),
        ({"ps": {10**12: "a:1"}}, ValueError, "'ps'"),
        ({"ps": {0: "a:1", "0": "b:1"}}, ValueError, "/job:ps/task:0"),
        ({"": ["a:1"]}, ValueError, "''"),
        ({"a/b": ["a:1"]}, ValueError, "'a/b'"),
        ([{"name": "ps", "tasks": {}}, {"name": "ps", "tasks": {}}], ValueError, "'ps'"),
    ],
)
def test_ClusterSpec_refuses_bad_input(cluster: Any, error: type[Exception], names: str) -> None:
    with pytest.raises(error, match=names) as caught:
        ClusterSpec(cluster)
    assert isinstance(caught.value, rx.errors.DistributeError)


def test_ClusterSpec_refuses_unknown_jobs_and_tasks() -> None:
    spec = ClusterSpec(SEED)
    with pytest.raises(ValueError, match="Did you mean 'worker'"):
        spec.num_tasks("workers")
    with pytest.raises(ValueError, match="its tasks are 0 to 2"):
        spec.task_address("worker", 3)
    for ask in (spec.num_tasks, spec.task_indices, spec.job_tasks):
        with pytest.raises(rx.errors.InvalidArgumentError, match="'gpu'"):
            ask("gpu")


@pytest.mark.parametrize(
    "text",
    [
        "host",
        "host:",
        ":2222",
        "host:port",
        "host:65536",
        "host:-1",
        "host:٣",
        "::1:2222",
        "[::g]:1",
        "300.1.1.1:1",
        "a b:1",
        "a/b:1",
        "user@host:1",
        "grpc://",
        "ipc://",
        "*:1",
        "",
    ],
)
def test_malformed_addresses_are_refused_with_the_name_of_the_task(text: str) -> None:
    with pytest.raises(rx.errors.InvalidArgumentError, match="/job:ps/task:1"):
        ClusterSpec({"ps": ["good:1", text]})


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("localhost:0", "localhost", 0),
        ("10.0.0.1:65535", "10.0.0.1", 65535),
        ("[fe80::0:1]:80", "fe80::1", 80),
        ("grpc://my_host-1.example.com:2222", "my_host-1.example.com", 2222),
        ("ipc:///tmp/a b/ps0", "/tmp/a b/ps0", None),
        ("inproc://ps0", "ps0", None),
    ],
)
def test_addresses_are_taken_apart(text: str, host: str, port: int | None) -> None:
    found = address.parse(text, "/job:ps/task:0")
    assert (found.host, found.port) == (host, port)
    assert ClusterSpec({"ps": [text]}).task_address("ps", 0) == text


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a:1", "a:1"),
        ("a:1", "A:1"),
        ("grpc://a:1", "tcp://a:1"),
        ("[::1]:1", "[0::1]:1"),
        ("ipc:///tmp/x", "ipc:///tmp/x"),
    ],
)
def test_duplicate_addresses_are_refused_with_both_tasks(first: str, second: str) -> None:
    with pytest.raises(rx.errors.InvalidArgumentError) as caught:
        ClusterSpec({"ps": ["x:1", first], "worker": [second]})
    assert "/job:ps/task:1 and /job:worker/task:0" in str(caught.value)


@pytest.mark.parametrize("text", ["localhost:0", "ipc://*", "ipc:///tmp/cluster/"])
def test_addresses_that_the_server_completes_may_repeat(text: str) -> None:
    assert ClusterSpec({"ps": [text, text], "worker": [text]}).num_tasks("ps") == 2


def test_task_names_are_written_and_read() -> None:
    task = Task("worker", 1)
    assert str(task) == "/job:worker/task:1"
    assert task.full_name == "/job:worker/replica:0/task:1"
    assert Task("ps", 0).device("cpu", 0) == "/job:ps/replica:0/task:0/device:CPU:0"
    for text in (str(task), task.full_name, task.device("GPU", 3)):
        assert Task.parse(text) == task
    for text in ("/job:worker", "/task:1", "worker", "/job:a/replica:1/task:0", "/job:a/task:x"):
        with pytest.raises(ValueError, match="name"):
            Task.parse(text)


PS, WORKERS = ["p0:1", "p1:1"], ["w0:1", "w1:1"]


@pytest.mark.parametrize(
    ("cluster", "task_type", "task_id"),
    [
        (SEED, "chief", 0),
        (SEED, "ps", 1),
        (SEED, "worker", 2),
        ({"ps": PS, "worker": WORKERS}, None, None),
        ({"ps": PS, "worker": WORKERS}, "chief", 0),
        ({"ps": PS, "worker": WORKERS}, "chief", None),
        ({"ps": PS, "worker": WORKERS, "evaluator": ["e:1"]}, "evaluator", 0),
    ],
)
def test_T126_good_clusters_pass(cluster: Any, task_type: str, task_id: int) -> None:
    parameter_servers.check(ClusterSpec(cluster), task_type, task_id)


@pytest.mark.parametrize(
    ("cluster", "task_type", "task_id", "names"),
    [
        ({}, None, None, "the cluster is empty"),
        ({"worker": WORKERS}, None, None, "no parameter server"),
        ({"ps": [], "worker": WORKERS}, None, None, "no parameter server"),
        ({"ps": PS}, None, None, "no worker"),
        ({"ps": PS, "worker": WORKERS, "trainer": ["t:1"]}, None, None, "'trainer'"),
        ({"ps": PS, "worker": WORKERS, "chief": ["c:1", "d:1"]}, None, None, "'chief' has 2"),
        ({"ps": PS, "worker": WORKERS, "evaluator": ["c:1", "d:1"]}, None, None, "'evaluator'"),
        ({"ps": PS, "worker": WORKERS}, "master", 0, "'master'"),
        ({"ps": PS, "worker": WORKERS}, "ps", 2, "/job:ps/task:2"),
        ({"ps": PS, "worker": WORKERS}, "worker", -1, "/job:worker/task:-1"),
        ({"ps": PS, "worker": WORKERS}, "worker", None, "no index"),
        ({"ps": PS, "worker": WORKERS}, "chief", 1, "/job:chief/task:1"),
        ({"ps": {0: "a:1", 2: "b:1"}, "worker": WORKERS}, None, None, "/job:ps/task:1 is missing"),
    ],
)
def test_T126_bad_clusters_are_refused_by_name(
    cluster: Any, task_type: str | None, task_id: int | None, names: str
) -> None:
    with pytest.raises(ValueError, match=names) as caught:
        parameter_servers.check(ClusterSpec(cluster), task_type, task_id)
    assert isinstance(caught.value, rx.errors.InvalidArgumentError)
