"""Resolvers that need no service: Simple, TF_CONFIG, Union and Slurm."""

from __future__ import annotations

import json
import os
import pickle
from typing import Any

import pytest

import replicax as rx
from replicax import cluster_resolver as resolvers
from replicax.cluster_resolver.slurm import expand_counts, expand_hosts
from replicax.foundation import devices
from replicax.train import ClusterSpec

X = "\N{MULTIPLICATION SIGN}"
SEED = {
    "cluster": {
        "chief": ["chief.example.com:2222"],
        "ps": ["ps0.example.com:2222", "ps1.example.com:2222"],
        "worker": [f"worker{i}.example.com:2222" for i in range(3)],
    },
    "task": {"type": "ps", "index": 1},
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("TF_CONFIG", "SLURM_", "CUDA_VISIBLE")):
            monkeypatch.delenv(name)


@pytest.fixture
def tf_config(monkeypatch: pytest.MonkeyPatch) -> Any:
    def write(config: Any) -> None:
        text = config if isinstance(config, str) else json.dumps(config)
        monkeypatch.setenv("TF_CONFIG", text)

    return write


# The interface.


def test_S207_the_interface_is_abstract_and_its_default_is_the_own_task() -> None:
    with pytest.raises(TypeError):
        resolvers.ClusterResolver()  # type: ignore[abstract]

    class Own(resolvers.ClusterResolver):
        def cluster_spec(self) -> ClusterSpec:
            return ClusterSpec({"worker": ["a:1", "b:1"]})

        def master(self, task_type: Any = None, task_id: Any = None, rpc_layer: Any = None) -> str:
            return super().master(task_type, task_id, rpc_layer)

    own = Own()
    assert (own.task_type, own.task_id, own.environment, own.master()) == (None, None, "", "")
    own.task_type, own.task_id, own.rpc_layer = "worker", 1, "grpc"
    assert own.master() == "grpc://b:1"
    assert own.explain() == f"Own: task worker/1, jobs worker{X}2"
    own.task_id = 7
    assert "/job:worker/task:7 is not among them" in own.explain()


def test_accelerators_are_counted_in_the_own_task_only(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ClusterSpec({"worker": ["a:1", "b:1"]})
    resolver = resolvers.SimpleClusterResolver(spec, task_type="worker", task_id=1)
    assert resolver.num_accelerators() == {} and resolver.num_accelerators()["GPU"] == 0
    monkeypatch.setattr(devices, "devices_of_kind", lambda kind: [0, 1] * (kind == "GPU"))
    assert resolver.num_accelerators("worker", 1) == {"GPU": 2}
    with pytest.raises(NotImplementedError, match="worker/0"):
        resolver.num_accelerators("worker", 0)
    told = resolvers.SimpleClusterResolver(spec, num_accelerators={"TPU": 8})
    assert told.num_accelerators("worker", 0) == {"TPU": 8}


# Simple.


def test_S207_simple_resolver_answers_with_its_arguments() -> None:
    spec = ClusterSpec({"worker": ["a:1", "b:1"], "ps": {1: "c:1"}})
    resolver = resolvers.SimpleClusterResolver(
        spec, master="m:1", task_type="worker", task_id=1, environment="cloud", rpc_layer="grpc"
    )
    assert resolver.cluster_spec() is spec
    assert (resolver.task_type, resolver.task_id, resolver.environment) == ("worker", 1, "cloud")
    assert resolver.master() == "grpc://m:1"
    assert resolver.master("ps", 1) == "grpc://c:1"
    assert resolver.master("ps", 1, rpc_layer="zmq") == "zmq://c:1"
    assert resolver.master("ps") == "grpc://m:1"
    with pytest.raises(ValueError, match="'ps'"):
        resolver.master("ps", 0)
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "ps", 1, None
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("ps", 1, "m:1")
    assert (
        resolver.explain()
        == f"SimpleClusterResolver (arguments): task ps/1, jobs ps{X}1, worker{X}2"
    )


@pytest.mark.parametrize(
    "arguments",
    [({"worker": ["a:1"]},), (ClusterSpec({}), 3), (ClusterSpec({}), "", None, None, "", 8)],
)
def test_simple_resolver_refuses_wrong_types(arguments: Any) -> None:
    with pytest.raises(TypeError):
        resolvers.SimpleClusterResolver(*arguments)


# TF_CONFIG.


def test_S199_the_sample_of_the_reference(tf_config: Any) -> None:
    tf_config(SEED)
    resolver = resolvers.TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id) == ("ps", 1)
    assert resolver.cluster_spec().as_dict() == SEED["cluster"]
    assert resolver.master() == "ps1.example.com:2222"
    assert resolver.explain() == (
        f"TF_CONFIG (environment): task ps/1, jobs chief{X}1, ps{X}2, worker{X}3"
    )


def test_S200_the_variable_is_read_at_each_question(tf_config: Any) -> None:
    resolver = resolvers.TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)
    assert (resolver.cluster_spec(), resolver.master()) == (ClusterSpec({}), "")
    assert resolver.num_accelerators() == {}
    assert "not set" in resolver.explain()
    tf_config(SEED)
    assert resolver.task_type == "ps"
    tf_config({**SEED, "task": {"type": "worker", "index": 0}})
    assert resolver.task_type == "worker"


@pytest.mark.parametrize("task_type", ["chief", "worker", "ps"])
def test_S201_S202_one_program_branches_on_its_role(tf_config: Any, task_type: str) -> None:
    tf_config({**SEED, "task": {"type": task_type, "index": 0}})
    resolver = resolvers.TFConfigClusterResolver()
    role = "coordinator" if resolver.task_type == "chief" else "server"
    assert (role == "coordinator") == (task_type == "chief")
    assert resolver.master() == SEED["cluster"][task_type][0]  # type: ignore[index]


def test_T124_types_and_precedence(tf_config: Any) -> None:
    cluster = {"worker": ["a:1", "b:1"], "123456": ["c:1"]}
    resolver = resolvers.TFConfigClusterResolver()
    tf_config({"cluster": cluster, "task": {"type": 123456, "index": "0"}, "rpc_layer": "grpc"})
    assert (resolver.task_type, resolver.task_id) == ("123456", 0)
    assert resolver.master() == "grpc://c:1"
    assert resolver.master("worker", 1) == "grpc://b:1"
    assert resolver.master("worker", 1, rpc_layer="zmq") == "zmq://b:1"
    tf_config({"cluster": cluster, "session_master": "m:1", "rpc_layer": "grpc"})
    assert (resolver.master(), resolver.master("worker", 0)) == ("m:1", "m:1")
    tf_config({"cluster": cluster})
    assert (resolver.master(), resolver.task_id) == ("", None)
    tf_config({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}})
    assert (resolver.master(), resolver.master("worker", 0)) == ("", "a:1")


def test_T124_arguments_and_setters_win(tf_config: Any) -> None:
    tf_config({**SEED, "rpc_layer": "grpc", "environment": "cloud", "model_dir": "s3cret"})
    resolver = resolvers.TFConfigClusterResolver("worker", 2, "zmq", "lab")
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 2, "zmq")
    assert resolver.environment == "lab"
    assert resolver.master() == "zmq://worker2.example.com:2222"
    assert resolver.explain().splitlines()[1:] == [
        "ignored: type 'ps' of the task; task_type was set to 'worker'",
        "ignored: index 1 of the task; task_id was set to 2",
        "ignored: 'model_dir'; not used here",
    ]
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "chief", 0, "x"
    assert resolver.master() == "x://chief.example.com:2222"
    assert resolvers.TFConfigClusterResolver().environment == "cloud"


@pytest.mark.parametrize("text", ["{nope", "", '{"cluster": {"worker": ["a:1"]}', "\ufeff{}"])
def test_bad_json_is_both_a_typed_and_a_json_error(tf_config: Any, text: str) -> None:
    tf_config(text)
    resolver = resolvers.TFConfigClusterResolver()
    with pytest.raises(json.JSONDecodeError, match="TF_CONFIG must be JSON"):
        resolver.cluster_spec()
    with pytest.raises(rx.errors.InvalidArgumentError):
        _ = resolver.task_type
    assert resolver.explain().startswith("TF_CONFIG (environment): cannot be used. ")


def test_bad_json_shows_the_place_and_never_the_whole(tf_config: Any) -> None:
    tf_config(
        '{"token": "s3cret-at-the-start", "cluster": {},\n'
        ' "task": {"type": worker}, "k": "s3cret-2"}'
    )
    with pytest.raises(rx.errors.InvalidArgumentError, match="line 2, column 19") as caught:
        resolvers.TFConfigClusterResolver().cluster_spec()
    error = caught.value
    assert "worker}" in str(error)
    assert "s3cret" not in str(error) + repr(error) + error.doc  # type: ignore[attr-defined]
    assert error.__cause__ is None and error.__context__ is None
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.lineno, again.colno) == (str(error), 2, 19)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ([], "TF_CONFIG must be a JSON object"),
        ({"cluster": ["a:1"]}, "'cluster' in TF_CONFIG"),
        ({"cluster": {"ps": ["a:1", "a:1"]}}, "TF_CONFIG: .*/job:ps/task:0 and /job:ps/task:1"),
        ({"cluster": {"ps": "a:1"}}, "TF_CONFIG: .*'ps'"),
        ("[" * 100_000, "TF_CONFIG must be a JSON object"),
    ],
)
def test_bad_clusters_of_TF_CONFIG_are_refused(tf_config: Any, config: Any, names: str) -> None:
    tf_config(config)
    with pytest.raises(rx.errors.DistributeError, match=names):
        resolvers.TFConfigClusterResolver().cluster_spec()


@pytest.mark.parametrize("index", ["x", -1, 1.5, True, "-1", [0]])
def test_bad_task_indices_of_TF_CONFIG_are_refused(tf_config: Any, index: Any) -> None:
    tf_config({"cluster": SEED["cluster"], "task": {"type": "ps", "index": index}})
    with pytest.raises(ValueError, match="index of the task in TF_CONFIG"):
        _ = resolvers.TFConfigClusterResolver().task_id


# Union.


def simple(cluster: Any, **options: Any) -> resolvers.SimpleClusterResolver:
    return resolvers.SimpleClusterResolver(ClusterSpec(cluster), **options)


def test_union_joins_lists_in_order_and_dicts_by_index() -> None:
    a = simple({"worker": ["w0:1"], "ps": ["p0:1"]})
    b = simple({"worker": ["w1:1", "w2:1"]})
    c = simple({"worker": {4: "w4:1"}})
    assert resolvers.UnionResolver(a, b).cluster_spec().as_dict() == {
        "worker": ["w0:1", "w1:1", "w2:1"],
        "ps": ["p0:1"],
    }
    joined = resolvers.UnionResolver(a, c).cluster_spec()
    assert joined.as_dict() == {"worker": {0: "w0:1", 4: "w4:1"}, "ps": ["p0:1"]}
    assert resolvers.UnionClusterResolver is resolvers.UnionResolver


def test_union_takes_the_rest_from_the_first() -> None:
    a = simple(
        {"ps": ["p0:1"]},
        master="m:1",
        task_type="ps",
        task_id=0,
        environment="cloud",
        num_accelerators={"GPU": 8},
        rpc_layer="grpc",
    )
    b = simple({"worker": ["w0:1"]}, task_type="worker", task_id=0, rpc_layer="http")
    union = resolvers.UnionResolver(a, b)
    assert (union.task_type, union.task_id, union.environment) == ("ps", 0, "cloud")
    assert (union.rpc_layer, union.num_accelerators()) == ("grpc", {"GPU": 8})
    assert (union.master(), union.master("worker", 0)) == ("grpc://m:1", "grpc://w0:1")
    union.task_type, union.task_id, union.rpc_layer = "worker", 0, "zmq"
    assert (union.task_type, union.task_id, union.master()) == ("worker", 0, "zmq://m:1")
    union = resolvers.UnionResolver(b, a, task_type="ps", task_id=0, rpc_layer="x")
    assert (union.task_type, union.task_id, union.rpc_layer) == ("ps", 0, "x")
    assert union.num_accelerators("ps", 0) == {}
    assert union.explain().splitlines() == [
        f"UnionResolver (of 2): task ps/0, jobs ps{X}1, worker{X}1",
        f"  1. SimpleClusterResolver (arguments): task worker/0, jobs worker{X}1",
        f"  2. SimpleClusterResolver (arguments): task ps/0, jobs ps{X}1",
    ]


def test_union_refuses_what_cannot_be_joined() -> None:
    a, b = simple({"worker": ["w0:1"]}), simple({"worker": {0: "other:1", 2: "w2:1"}})
    with pytest.raises(KeyError) as caught:
        resolvers.UnionResolver(a, b).cluster_spec()
    assert isinstance(caught.value, rx.errors.InvalidArgumentError)
    assert str(caught.value).startswith("No task may be") and "/job:worker/task:0" in str(
        caught.value
    )
    with pytest.raises(ValueError, match="/job:worker/task:0 and /job:worker/task:1"):
        resolvers.UnionResolver(a, a).cluster_spec()
    with pytest.raises(ValueError, match="at least one"):
        resolvers.UnionResolver()
    with pytest.raises(ValueError, match="'speed'"):
        resolvers.UnionResolver(a, speed=1)
    with pytest.raises(TypeError, match="ClusterSpec"):
        resolvers.UnionResolver(a, ClusterSpec({}))  # type: ignore[arg-type]


# Slurm.


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Any:
    def step(rank: int, nodes: str, per_node: str, **more: Any) -> None:
        variables = {
            "SLURM_PROCID": rank,
            "SLURM_STEP_NODELIST": nodes,
            "SLURM_STEP_TASKS_PER_NODE": per_node,
            "SLURM_STEP_NUM_TASKS": sum(expand_counts(per_node)),
            "SLURM_GPUS_ON_NODE": 0,
            **more,
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return step


def test_slurm_step_of_workers(slurm: Any) -> None:
    slurm(3, "t02n13,t02n[41-43,45]", "1(x5)", SLURM_NODEID=3)
    resolver = resolvers.SlurmClusterResolver()
    assert resolver.get_task_info() == ("worker", 3)
    assert resolver.cluster_spec().as_dict() == {
        "worker": [f"t02n{n}:8888" for n in (13, 41, 42, 43, 45)]
    }
    assert resolver.master() == "grpc://t02n43:8888"
    assert resolver.master("worker", 0, rpc_layer="x") == "x://t02n13:8888"
    assert (resolver.environment, resolver.num_accelerators()) == ("", {})
    assert resolver.explain().splitlines() == [
        f"Slurm (environment): task worker/3, jobs worker{X}5",
        "5 nodes from SLURM_STEP_NODELIST, tasks per node from SLURM_STEP_TASKS_PER_NODE, "
        "rank 3 from SLURM_PROCID",
        "0 of 0 GPUs per node for each task",
    ]


def test_slurm_explains_a_step_that_is_no_more(slurm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm(0, "a", "1")
    resolver = resolvers.SlurmClusterResolver()
    monkeypatch.delenv("SLURM_PROCID")
    assert "cannot be used" in resolver.explain() and "SLURM_PROCID" in resolver.explain()


def test_slurm_jobs_share_nodes_at_consecutive_ports(slurm: Any) -> None:
    slurm(2, "n[1-2]", "3,2")
    resolver = resolvers.SlurmClusterResolver({"chief": 1, "ps": 2, "worker": 2}, port_base=9000)
    assert resolver.cluster_spec().as_dict() == {
        "chief": ["n1:9000"],
        "ps": ["n1:9001", "n1:9002"],
        "worker": ["n2:9000", "n2:9001"],
    }
    assert (resolver.task_type, resolver.task_id) == ("ps", 1)
    resolver.task_type, resolver.task_id = "worker", 0
    assert resolver.master() == "grpc://n2:9000"


@pytest.mark.parametrize(
    ("given", "count"),
    [("0,1,2,3", 4), ("GPU-a,GPU-b", 2), ("0", 1), ("", 0), ("-1", 0), ("0,-1,2", 1)],
)
def test_slurm_counts_the_visible_gpus(
    slurm: Any, monkeypatch: pytest.MonkeyPatch, given: str, count: int
) -> None:
    slurm(0, "n1,n2", "1(x2)")
    monkeypatch.delenv("SLURM_GPUS_ON_NODE")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    resolver = resolvers.SlurmClusterResolver(auto_set_gpu=False)
    assert resolver.num_accelerators("", 0) == ({"GPU": count} if count else {})
    assert resolver.num_accelerators()["GPU"] == count
    assert resolver.master("", 1) == resolver.master("worker", 1)


@pytest.mark.parametrize(
    ("given", "expected"), [(None, "2,3"), ("4,5,6,7", "6,7"), ("1,3", "1,3"), ("", "")]
)
def test_slurm_narrows_the_visible_gpus(
    slurm: Any, monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
) -> None:
    slurm(1, "n1,n2", "2(x2)", SLURM_GPUS_ON_NODE=4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given or "")
    if given is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    resolver = resolvers.SlurmClusterResolver()
    resolver.explain()
    resolvers.SlurmClusterResolver(auto_set_gpu=False).cluster_spec()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before
    resolver.cluster_spec()
    resolver.cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
    assert resolver.num_accelerators() == {"GPU": 2}


@pytest.mark.parametrize(
    ("arguments", "more", "names"),
    [
        ({"jobs": {"worker": 9}}, {}, "9 tasks"),
        ({"gpus_per_node": 1, "gpus_per_task": 1}, {}, "a node has 1 GPUs"),
        ({"tasks_per_node": 3}, {}, None),
        ({"tasks_per_node": 0}, {}, "one task or more"),
        ({}, {"SLURM_STEP_NODELIST": "a,b,c"}, "3 nodes"),
        ({}, {"SLURM_PROCID": "4"}, "rank 4"),
        ({}, {"SLURM_PROCID": "x"}, "SLURM_PROCID"),
        ({}, {"SLURM_NODEID": "1"}, "distribution=block"),
    ],
)
def test_slurm_refuses_steps_that_do_not_fit(
    slurm: Any, arguments: Any, more: Any, names: str | None
) -> None:
    slurm(1, "a,b", "2(x2)", **more)
    if names is None:
        assert resolvers.SlurmClusterResolver(**arguments).cluster_spec().num_tasks("worker") == 6
        return
    with pytest.raises(RuntimeError, match=names) as caught:
        resolvers.SlurmClusterResolver(**arguments)
    assert isinstance(caught.value, rx.errors.ContextError)


def test_slurm_refuses_to_work_outside_a_step() -> None:
    with pytest.raises(RuntimeError, match="SLURM_STEP_NODELIST is not set"):
        resolvers.SlurmClusterResolver()


def test_slurm_lists_are_written_out() -> None:
    assert expand_hosts("n[09-10,8]-x[1-2]") == [
        f"n{n}-x{x}" for n in ("09", "10", "8") for x in (1, 2)
    ]
    assert expand_counts("2(x2),1") == [2, 2, 1]
    for text in ("", "a,", "n[1-2", "n]1", "n[2-1]", "n[a-b]", "n[1-999999999]", "n[[1]]", "a b"):
        with pytest.raises(ValueError, match="list of nodes"):
            expand_hosts(text)
    for text in ("", "x", "2(x)", "1(x999999999)", "-1"):
        with pytest.raises(ValueError, match="tasks per node"):
            expand_counts(text)


def test_resolvers_print_what_they_know_without_asking_anybody() -> None:
    spec = ClusterSpec({"worker": ["a:1", "b:1"]})
    assert repr(resolvers.SimpleClusterResolver(spec, task_type="worker", task_id=1)) == (
        "<SimpleClusterResolver: task worker/1, jobs worker\N{MULTIPLICATION SIGN}2>"
    )
    assert repr(resolvers.TFConfigClusterResolver()).startswith("<TFConfigClusterResolver: task")
    assert repr(resolvers.TPUClusterResolver("grpc://10.0.0.1:8470")).startswith(
        "<TPUClusterResolver: "
    )

    class Own(resolvers.ClusterResolver):
        def cluster_spec(self) -> ClusterSpec:
            raise AssertionError

        def master(self, *_: Any) -> str:
            raise AssertionError

    assert repr(Own()) == "<Own: task unknown>"
