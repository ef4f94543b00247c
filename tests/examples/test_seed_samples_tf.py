"""The code samples of the reference texts run with their import line changed, and nothing else.

Each test has the code of one sample as its text has it, from the line that its name says. The texts
leave out some code, as `...` or a comment: the test fills it in. GPUs and TPUs are CPUs here.
"""

from __future__ import annotations

import ast
import itertools
import json
import linecache
import logging
import os
import re
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from parameter_servers import kept_cluster

import replicax as rx
import replicax.tf as tf
from replicax.foundation import device_names, devices
from replicax.strategies import multi_worker

SEEDS = Path(__file__).parents[3] / "shared" / "seeds"
V2 = "import replicax.tf as tf"
V1 = "import replicax.tf.compat.v1 as tf"
TASK = "/job:localhost/replica:0/task:0/device:"

_numbers = itertools.count()


def text_of(seed: int) -> list[str]:
    """The lines of a text; none where the texts are not beside this clone."""
    found = sorted(SEEDS.glob(f"{seed:03}_*.txt"))
    return found[0].read_text().splitlines() if found else []


def require_lines_of(seed: int, line: int, code: str) -> None:
    """Fails unless the lines of a sample are lines of the text, in order, from a line on."""
    rest = [" ".join(found.strip("> ").split()) for found in text_of(seed)[line - 1 :]]
    wanted = [" ".join(c.split()) for c in code.splitlines() if c.strip()]
    if rest:
        assert rest[0] == wanted[0], f"line {line} is {rest[0]!r}"
        for one in wanted:
            assert one in rest, f"the text has no {one!r} there"
            rest = rest[rest.index(one) + 1 :]


def run_sample(
    seed: int,
    line: int,
    code: str,
    *,
    fill: dict[str, str] | None = None,
    imports: str = V2,
    **given: Any,
) -> SimpleNamespace:
    """Runs a sample.

    Args:
      seed: The number of the text.
      line: The line of the text at which the sample begins.
      code: Lines of the text.
      fill: What takes the place of code that the text leaves out.
      imports: The import line.
      **given: The names that the sample takes for granted.

    Returns:
      The names of the sample, and `shown`: what an interactive session would print.
    """
    code = textwrap.dedent(code).strip("\n")
    require_lines_of(seed, line, code)
    for left_out, filled in (fill or {}).items():
        assert left_out in code, left_out
        code = code.replace(left_out, filled, 1)
    source = f"{imports}\n{code}\n"
    # `tf.function` reads the source of what it compiles.
    name = f"<seed {seed:03} line {line} sample {next(_numbers)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    shown: list[str] = []
    names: dict[str, Any] = {"__name__": "sample", "np": np, "os": os, **given}
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Expr):
            value = eval(compile(ast.Expression(statement.value), name, "eval"), names)
            if value is not None:
                shown.append(repr(value))
        else:
            exec(compile(ast.Module([statement], []), name, "exec"), names)
    return SimpleNamespace(**{**names, "shown": shown})


def stated(text: str) -> str:
    """Returns what a text prints; here, without x64, integers of datasets have 32 bits."""
    return re.sub(
        r"dtype=int64, numpy=array\((.*?)\)>",
        r"dtype=int32, numpy=array(\1, dtype=int32)>",
        textwrap.dedent(text).strip(),
    )


@pytest.fixture(autouse=True)
def accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the eight CPU devices, the second to fifth count as GPUs, and the last ones as TPUs."""
    cpus = jax.devices("cpu")
    kinds = {"CPU": cpus[:1], "GPU": cpus[1:5], "TPU": cpus[5:]}
    found = {d: (kind, i) for kind, members in kinds.items() for i, d in enumerate(members)}

    def name_of(device: Any) -> str:
        kind, index = found[device]
        return str(device_names.DeviceSpec(kind=kind, index=index))

    monkeypatch.setattr(devices, "devices_of_kind", lambda kind: kinds[kind.upper()])
    monkeypatch.setattr(devices, "name_of", name_of)


def floats(values: Any) -> list[float]:
    return [float(np.asarray(value)) for value in values]


# 000 and 001: the glossary of tf.compat.v1.distribute, whose code is a call or two in a sentence.


@pytest.fixture
def v1_strategy() -> Any:
    return tf.compat.v1.distribute.MirroredStrategy(["GPU:0", "GPU:1"])


def test_seed_000_line_61_run_unwraps_arguments_and_merges_results(v1_strategy: Any) -> None:
    strategy = v1_strategy
    same = object()
    ran: list[tuple[float, str]] = []

    def fn(w: Any) -> Any:
        ran.append((float(w), w.device))
        return same, w * 2

    w = strategy.run(lambda: tf.distribute.get_replica_context().replica_id_in_sync_group + 1)
    first, second = strategy.run(fn, args=[w])
    assert ran == [(1.0, TASK + "GPU:0"), (2.0, TASK + "GPU:1")]
    assert first is same
    assert isinstance(second, tf.distribute.DistributedValues)
    assert floats(strategy.experimental_local_results(second)) == [2.0, 4.0]


def test_seed_000_line_63_mirrored_and_line_66_sync_on_read_variables(v1_strategy: Any) -> None:
    strategy = v1_strategy
    with strategy.scope():
        mirrored = tf.Variable(1.0, synchronization=tf.VariableSynchronization.ON_WRITE)
        on_read = tf.Variable(
            1.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    def fn() -> None:
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        on_read.assign_add(tf.cast(index, tf.float32))

    strategy.run(fn)
    mirrored.assign(5.0)
    assert floats(strategy.experimental_local_results(mirrored)) == [5.0, 5.0]
    assert floats(strategy.experimental_local_results(on_read)) == [1.0, 2.0]
    assert on_read.numpy() == 3.0


def test_seed_000_line_87_contexts(v1_strategy: Any) -> None:
    strategy, distribute = v1_strategy, tf.compat.v1.distribute
    seen: list[Any] = []

    def fn() -> None:
        seen.append(distribute.in_cross_replica_context())
        assert isinstance(distribute.get_replica_context(), distribute.ReplicaContext)

    assert isinstance(distribute.get_replica_context(), distribute.ReplicaContext)
    assert not distribute.in_cross_replica_context()
    assert not distribute.has_strategy()
    with strategy.scope():
        assert distribute.get_replica_context() is None
        assert distribute.in_cross_replica_context()
        assert distribute.get_strategy() is strategy
        strategy.run(fn)
    assert seen == [False, False]


# Seed 001, an older page, does not list RunOptions.
LISTED_BY_BOTH = """
    CrossDeviceOps HierarchicalCopyAllReduce InputContext InputReplicationMode MirroredStrategy
    NcclAllReduce OneDeviceStrategy ReduceOp ReductionToOneDevice ReplicaContext Server Strategy
    StrategyExtended cluster_resolver experimental experimental_set_strategy get_loss_reduction
    get_replica_context get_strategy has_strategy in_cross_replica_context
""".split()


@pytest.mark.parametrize(
    ("seed", "line", "listed"),
    [(0, 99, {*LISTED_BY_BOTH, "RunOptions"}), (1, 14, {*LISTED_BY_BOTH})],
    ids=["seed_000_line_99", "seed_001_line_14"],
)
def test_the_module_has_what_its_pages_list(seed: int, line: int, listed: set[str]) -> None:
    lines = text_of(seed)[line:]
    if lines:
        patterns = r"`?class (\w+)`?", r"`?(\w+)`?(?: module.*)?", r"`?(\w+)\(\.\.\.\)`?.*"
        found = {m[1] for text in lines for p in patterns if (m := re.match(p, text))}
        assert listed <= found
    module = tf.compat.v1.distribute
    assert listed <= set(dir(module))
    for name in listed:
        assert getattr(module, name).__doc__


# 002: StrategyExtended.


@pytest.fixture
def two() -> Any:
    return tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"])


def test_seed_002_line_16_run_merges_x_a_and_v(two: Any) -> None:
    strategy = two
    x = object()
    with strategy.scope():
        v = tf.Variable(1.0)
    given = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(float(context.replica_id_in_sync_group))
    )

    def fn(w: Any) -> Any:
        return x, w * 2.0, v

    same, different, variable = strategy.run(fn, args=[given])
    assert same is x
    assert floats(strategy.experimental_local_results(different)) == [0.0, 2.0]
    assert variable is v


def test_seed_002_line_51_sync_on_read_moving_average(two: Any) -> None:
    strategy = two
    with strategy.scope():
        v = tf.Variable(
            1.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
    update = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(10.0 * context.replica_id_in_sync_group)
    )

    @tf.function
    def fn(update: Any) -> None:
        v.assign(0.9 * v + 0.1 * update)

    strategy.run(fn, args=(update,))
    np.testing.assert_allclose(
        floats(strategy.experimental_local_results(v)), [0.9, 1.9], rtol=1e-6
    )
    np.testing.assert_allclose(v.numpy(), 2.8, rtol=1e-6)


def test_seed_002_line_94_the_update_recipe(two: Any) -> None:
    strategy = two
    with strategy.scope():
        v = tf.Variable(1.0)

    def merge_fn(strategy: Any, t: Any, v: Any) -> None:
        total = strategy.extended.reduce_to(tf.VariableAggregation.SUM, t, v)
        strategy.extended.update(v, lambda v, total: v.assign_sub(total), args=(total,))

    def fn() -> None:
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        t = tf.cast(index, tf.float32) + 1.0
        tf.distribute.get_replica_context().merge_call(merge_fn, args=(t, v))

    strategy.run(fn)
    assert floats(strategy.experimental_local_results(v)) == [-2.0, -2.0]


def test_seed_002_line_133_colocate_vars_with_and_update(two: Any) -> None:
    strategy = two
    ran: list[Any] = []
    found = run_sample(
        2,
        133,
        """
        with strategy.scope():
          var1 = tf.Variable(...)
          with strategy.extended.colocate_vars_with(var1):
            var2 = tf.Variable(...)
            var3 = tf.Variable(...)
          def fn(v1, v2, v3):
            # operates on v1 from var1, v2 from var2, and v3 from var3
          strategy.extended.update(var1, fn, args=(var2, var3))
        """,
        fill={
            "var1 = tf.Variable(...)": "var1 = tf.Variable(1.0)",
            "var2 = tf.Variable(...)": "var2 = tf.Variable(2.0)",
            "var3 = tf.Variable(...)": "var3 = tf.Variable(3.0)",
            "    # operates on v1 from var1, v2 from var2, and v3 from var3": (
                "    ran.append([v1.device, v2.device, v3.device])\n    v1.assign_add(v2 * v3)"
            ),
        },
        strategy=strategy,
        ran=ran,
    )
    assert ran == [[TASK + "GPU:0"] * 3, [TASK + "GPU:1"] * 3]
    assert floats(strategy.experimental_local_results(found.var1)) == [7.0, 7.0]


def test_seed_002_line_170_update_calls_fn_on_each_device(two: Any) -> None:
    strategy = two
    with strategy.scope():
        var = tf.Variable(1.0)
        args = (strategy.extended.broadcast_to(tf.constant(2.0), var),)
        where: list[str] = []

        def fn(v: Any, x: Any) -> Any:
            where.append(v.device)
            return v * x

        results = strategy.extended.update(var, fn, args=args)
        apart = strategy.extended.update(var, fn, args=args, group=False)
    assert where == [TASK + "GPU:0", TASK + "GPU:1"] * 2
    assert floats(strategy.experimental_local_results(results)) == [2.0, 2.0]
    assert floats(apart) == [2.0, 2.0]


def test_seed_002_line_208_variable_created_in_scope(two: Any) -> None:
    strategy = two
    # The text makes a StrategyExtended without its argument, which TensorFlow refuses too.
    found = run_sample(
        2,
        208,
        """
        strategy = tf.distribute.StrategyExtended()
        with strategy.scope():
          v = tf.Variable(1.)
        strategy.variable_created_in_scope(v)
        v = tf.Variable(1.)
        strategy.variable_created_in_scope(v)
        """,
        fill={
            "strategy = tf.distribute.StrategyExtended()": "",
            "strategy.variable_created_in_scope(v)\nv": (
                "strategy.extended.variable_created_in_scope(v)\nv"
            ),
            "\nstrategy.variable": "\nstrategy.extended.variable",
        },
        strategy=strategy,
    )
    assert found.shown == ["True", "False"]
    with pytest.raises(TypeError, match="container_strategy"):
        tf.distribute.StrategyExtended()


# 003: ParameterServerStrategy, and the methods of all strategies.


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three parameter servers, as one of the samples assumes."""
    with kept_cluster(workers=1, ps=3) as found:
        yield found


@pytest.fixture
def closing() -> Iterator[list[Any]]:
    """What a test opens; a cluster has one strategy at a time."""
    opened: list[Any] = []
    yield opened
    for found in reversed(opened):
        found.close()


def test_seed_003_line_55_the_coordinator(
    cluster: Any,
    closing: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("GRPC_FAIL_FAST", "")
    caplog.set_level(logging.INFO)
    x = np.arange(8, dtype=np.float32).reshape(8, 1)

    def dataset_fn() -> Any:
        return tf.data.Dataset.from_tensor_slices((x, 3.0 * x)).repeat().batch(8)

    found = run_sample(
        3,
        55,
        """
        # Set the environment variable to allow reporting worker and ps failure to the
        os.environ["GRPC_FAIL_FAST"] = "use_caller"

        strategy = tf.distribute.experimental.ParameterServerStrategy(
            cluster_resolver=...,
            variable_partitioner=...)
        coordinator = tf.distribute.experimental.coordinator.ClusterCoordinator(
            strategy=strategy)

        distributed_dataset = coordinator.create_per_worker_dataset(dataset_fn=...)

        with strategy.scope():
          model = ...
          optimizer, metrics = ...  # Keras optimizer/metrics are great choices
          checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
          checkpoint_manager = tf.train.CheckpointManager(
              checkpoint, checkpoint_dir, max_to_keep=2)
          initial_epoch = load_checkpoint(checkpoint_manager) or 0

        @tf.function
        def worker_fn(iterator):

          def replica_fn(inputs):
            batch_data, labels = inputs
            # calculate gradient, applying gradient, metrics update etc.

          strategy.run(replica_fn, args=(next(iterator),))

        for epoch in range(initial_epoch, num_epoch):
          distributed_iterator = iter(distributed_dataset)  # Reset iterator state.
          for step in range(steps_per_epoch):

            coordinator.schedule(worker_fn, args=(distributed_iterator,))

          coordinator.join()
          logging.info('Metric result: %r', metrics.result())
          train_accuracy.reset_states()
          checkpoint_manager.save()
        """,
        fill={
            "cluster_resolver=...": "cluster_resolver=resolver",
            "variable_partitioner=...)": (
                "variable_partitioner="
                "tf.distribute.experimental.partitioners.FixedShardsPartitioner(1))\n"
                "closing.append(strategy)"
            ),
            "    strategy=strategy)\n": "    strategy=strategy)\nclosing.append(coordinator)\n",
            "dataset_fn=...": "dataset_fn=dataset_fn",
            "model = ...": (
                "model = tf.keras.Sequential([tf.keras.layers.Dense("
                "1, use_bias=False, kernel_initializer='zeros')])\n"
                "  model.build([None, 1])"
            ),
            "optimizer, metrics = ...": (
                "optimizer, metrics = "
                "tf.keras.optimizers.SGD(0.01), tf.keras.metrics.Mean(name='loss')\n"
                "  train_accuracy = metrics"
            ),
            "    # calculate gradient, applying gradient, metrics update etc.": (
                "    with tf.GradientTape() as tape:\n"
                "      loss = tf.reduce_mean((model(batch_data) - labels) ** 2)\n"
                "    gradients = tape.gradient(loss, model.trainable_variables)\n"
                "    optimizer.apply_gradients(zip(gradients, model.trainable_variables))\n"
                "    metrics.update_state(loss)"
            ),
        },
        resolver=cluster.resolver,
        closing=closing,
        dataset_fn=dataset_fn,
        checkpoint_dir=str(tmp_path),
        load_checkpoint=lambda manager: manager.latest_checkpoint and 1,
        num_epoch=2,
        steps_per_epoch=3,
        logging=logging,
    )
    # A step multiplies the error of the only weight, 3 at first, by 1 - 2 * 0.01 * mean(x * x).
    weight = 3.0 - 3.0 * (1 - 0.02 * float(np.mean(x * x))) ** 6
    np.testing.assert_allclose(found.model.weights[0].numpy(), [[weight]], rtol=1e-5)
    assert int(found.optimizer.iterations) == 6
    assert caplog.text.count("Metric result") == 2
    assert len(found.checkpoint_manager.checkpoints) == 2


def test_seed_003_line_108_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="rx-") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        spec = {"chief": ["localhost:0"], "ps": ["localhost:0"], "worker": ["localhost:0"]}
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(spec), task_type="ps", task_id=0
        )
        monkeypatch.setenv("GRPC_FAIL_FAST", "")
        servers: list[Any] = []

        class Stopping(threading.Timer):
            """`join` blocks until the server is stopped, here by another thread."""

            def __init__(self) -> None:
                super().__init__(0.1, lambda: servers[0].stop())

        found = run_sample(
            3,
            108,
            """
            # Set the environment variable to allow reporting worker and ps failure to the
            os.environ["GRPC_FAIL_FAST"] = "use_caller"

            cluster_resolver = ...

            server = tf.distribute.Server(
                cluster_resolver.cluster_spec(),
                job_name=cluster_resolver.task_type,
                task_index=cluster_resolver.task_id,
                protocol="grpc")

            server.join()
            """,
            fill={
                "cluster_resolver = ...": "cluster_resolver = resolver",
                "server.join()": "servers.append(server); Stopping().start(); server.join()",
            },
            resolver=resolver,
            servers=servers,
            Stopping=Stopping,
        )
        assert repr(found.server).startswith("Server(/job:ps/task:0, ")


CLUSTER_OF_LINE_142 = """
    os.environ['TF_CONFIG'] = '''
    {
      "cluster": {
        "chief": ["chief.example.com:2222"],
        "ps": ["ps0.example.com:2222", "ps1.example.com:2222"],
        "worker": ["worker0.example.com:2222", "worker1.example.com:2222",
                   "worker2.example.com:2222"]
      },
      "task": {
        "type": "ps",
        "index": 1
      }
    }
    '''
"""


def test_seed_003_line_142_tf_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "{}")
    run_sample(3, 142, CLUSTER_OF_LINE_142)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id) == ("ps", 1)
    spec = resolver.cluster_spec()
    assert [spec.num_tasks(job) for job in ("chief", "ps", "worker")] == [1, 2, 3]
    assert spec.task_address("ps", 1) == "ps1.example.com:2222"


@pytest.mark.parametrize("role", ["chief", "ps", "worker"])
def test_seed_003_line_161_one_program_for_all_tasks(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPC_FAIL_FAST", "")
    config = {
        "cluster": {"chief": ["localhost:0"], "ps": ["localhost:0"], "worker": ["localhost:0"]},
        "task": {"type": role, "index": 0},
    }
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with tempfile.TemporaryDirectory(prefix="rx-") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        found = run_sample(
            3,
            161,
            """
            os.environ["GRPC_FAIL_FAST"] = "use_caller"
            cluster_resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()

            if cluster_resolver.task_type == 'chief':
              strategy = tf.distribute.experimental.ParameterServerStrategy(
                  cluster_resolver)
              ...

            elif cluster_resolver.task_type in ("worker", "ps"):
              server = tf.distribute.Server(...)
              ...
            """,
            fill={
                "tf.distribute.Server(...)": (
                    "tf.distribute.Server(cluster_resolver.cluster_spec(),\n"
                    "      job_name=cluster_resolver.task_type, start=False)"
                ),
            },
        )
        made = found.strategy if role == "chief" else found.server
        kind = tf.distribute.ParameterServerStrategy if role == "chief" else tf.distribute.Server
        assert isinstance(made, kind)
        assert hasattr(found, "server") is (role != "chief")
        if role == "chief":
            assert made.cluster_resolver is found.cluster_resolver
            made.close()


def test_seed_003_line_185_variables_go_to_servers(cluster: Any, closing: list[Any]) -> None:
    found = run_sample(
        3,
        185,
        """
        # In this example, we're assuming having 3 ps.
        strategy = tf.distribute.experimental.ParameterServerStrategy(
            cluster_resolver=...)
        coordinator = tf.distribute.experimental.coordinator.ClusterCoordinator(
            strategy=strategy)

        v1 = tf.Variable(initial_value=0.0)

        with strategy.scope():
          v2 = tf.Variable(initial_value=1.0)
          v3 = tf.Variable(initial_value=2.0)
          v4 = tf.Variable(initial_value=3.0)
          v5 = tf.Variable(initial_value=4.0)

        assert v2.device == "/job:ps/replica:0/task:0/device:CPU:0"
        assert v3.device == "/job:ps/replica:0/task:1/device:CPU:0"
        assert v4.device == "/job:ps/replica:0/task:2/device:CPU:0"
        assert v5.device == "/job:ps/replica:0/task:0/device:CPU:0"
        """,
        fill={
            "cluster_resolver=...)": "cluster_resolver=resolver)\nclosing.append(strategy)",
            "    strategy=strategy)": "    strategy=strategy)\nclosing.append(coordinator)",
        },
        resolver=cluster.resolver,
        closing=closing,
    )
    assert "/job:ps" not in found.v1.device
    assert [v.numpy() for v in (found.v1, found.v2, found.v5)] == [0.0, 1.0, 4.0]


def test_seed_003_line_227_partitioned_variables(cluster: Any, closing: list[Any]) -> None:
    found = run_sample(
        3,
        227,
        """
        class Dense(tf.Module):
          def __init__(self, name=None):
            super().__init__(name=name)
            self.w = tf.Variable(tf.random.normal([100, 10]), name='w')

          def __call__(self, x):
            return x * self.w

        variable_partitioiner  = (
          tf.distribute.experimental.partitioners.FixedShardsPartitioner(
            num_shards = 2))
        strategy = ParameterServerStrategy(cluster_resolver=...,
          variable_partitioner = variable_partitioner)
        with strategy.scope():
          dense = Dense()
        assert len(dense.variables) == 2
        assert isinstance(dense.variables[0], tf.Variable)
        assert isinstance(dense.variables[1], tf.Variable)
        assert dense.variables[0].name == "w/part_0"
        assert dense.variables[1].name == "w/part_1"
        """,
        fill={
            "cluster_resolver=...": "cluster_resolver=resolver",
            # The text spells the name in two ways.
            "= variable_partitioner)": "= variable_partitioiner)\nclosing.append(strategy)",
        },
        ParameterServerStrategy=tf.distribute.experimental.ParameterServerStrategy,
        resolver=cluster.resolver,
        closing=closing,
    )
    result = found.dense(tf.ones([100, 10]))
    assert result.shape == (100, 10)
    np.testing.assert_array_equal(result, tf.convert_to_tensor(found.dense.w))
    np.testing.assert_array_equal(
        tf.nn.embedding_lookup(found.dense.w, [1, 99]), result.numpy()[[1, 99]]
    )


def test_seed_003_line_277_datasets_of_workers(
    cluster: Any, closing: list[Any], tmp_path: Path
) -> None:
    strategy = tf.distribute.experimental.ParameterServerStrategy(cluster.resolver)
    closing.append(strategy)
    found = run_sample(
        3,
        277,
        """
        def dataset_fn():
          filenames = ...
          dataset = tf.data.Dataset.from_tensor_slices(filenames)

          return dataset.shuffle(buffer_size=...).repeat().batch(batch_size=...)

        coordinator =
            tf.distribute.experimental.coordinator.ClusterCoordinator(strategy=...)
        distributed_dataset = coordinator.create_per_worker_dataset(dataset_fn)
        """,
        fill={
            "filenames = ...": "filenames = [1, 2, 3]",
            "buffer_size=...": "buffer_size=3",
            "batch_size=...": "batch_size=3",
            # The line break is one of the text.
            "coordinator =\n": "coordinator = \\\n",
            "strategy=...)": "strategy=strategy)\nclosing.append(coordinator)",
        },
        strategy=strategy,
        closing=closing,
    )
    iterator = iter(found.distributed_dataset)

    @tf.function
    def worker_fn(iterator: Any) -> Any:
        return tf.reduce_sum(next(iterator))

    results = [found.coordinator.schedule(worker_fn, args=(iterator,)) for _ in range(2)]
    found.coordinator.join()
    assert [int(result.fetch()) for result in results] == [6, 6]


def test_seed_003_line_311_the_resolver_of_a_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "{}")
    # The other worker is not there, so this one joins no group.
    alone = rx.ReplicaLayout(jax.devices("cpu")[1:2])
    monkeypatch.setattr(multi_worker, "_joined", lambda *_: alone)
    ran: list[str] = []
    found = run_sample(
        3,
        311,
        """
        os.environ['TF_CONFIG'] = json.dumps({
        'cluster': {
        'worker': ["localhost:12345", "localhost:23456"],
        'ps': ["localhost:34567"]
        },
        'task': {'type': 'worker', 'index': 0}
        })

        strategy = tf.distribute.experimental.MultiWorkerMirroredStrategy()

        ...

        if strategy.cluster_resolver.task_type == 'worker':
        # as a worker above, this block will run on this particular instance.
        elif strategy.cluster_resolver.task_type == 'ps':
        # instance.
        """,
        fill={
            "# as a worker above, this block will run on this particular instance.": (
                "  ran.append('worker')"
            ),
            "# instance.": "  ran.append('ps')",
        },
        json=json,
        ran=ran,
    )
    assert ran == ["worker"]
    resolver = found.strategy.cluster_resolver
    assert resolver.task_id == 0
    assert resolver.cluster_spec().as_dict()["ps"] == ["localhost:34567"]


def test_seed_003_line_430_distribute_a_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    run_sample(
        3,
        430,
        """
        global_batch_size = 2
        strategy = tf.distribute.MirroredStrategy(devices=["GPU:0", "GPU:1"])
        dataset = tf.data.Dataset.range(4).batch(global_batch_size)
        dist_dataset = strategy.experimental_distribute_dataset(dataset)
        @tf.function
        def replica_fn(input):
          return input*2
        result = []
        for x in dist_dataset:
          result.append(strategy.run(replica_fn, args=(x,)))
        print(result)
        """,
    )
    assert capsys.readouterr().out.strip() == stated(
        """
        [PerReplica:{
          0: <tf.Tensor: shape=(1,), dtype=int64, numpy=array([0])>,
          1: <tf.Tensor: shape=(1,), dtype=int64, numpy=array([2])>
        }, PerReplica:{
          0: <tf.Tensor: shape=(1,), dtype=int64, numpy=array([4])>,
          1: <tf.Tensor: shape=(1,), dtype=int64, numpy=array([6])>
        }]
        """
    )


def test_seed_003_line_550_a_constant_per_replica() -> None:
    found = run_sample(
        3,
        550,
        """
        strategy = tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"])
        def value_fn(ctx):
          return tf.constant(1.)
        distributed_values = (
             strategy.experimental_distribute_values_from_function(
               value_fn))
        local_result = strategy.experimental_local_results(distributed_values)
        local_result
        """,
    )
    assert found.shown == [
        "(<tf.Tensor: shape=(), dtype=float32, numpy=1.0>, "
        "<tf.Tensor: shape=(), dtype=float32, numpy=1.0>)"
    ]


def test_seed_003_line_564_values_by_replica_id() -> None:
    found = run_sample(
        3,
        564,
        """
        strategy = tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"])
        array_value = np.array([3., 2., 1.])
        def value_fn(ctx):
          return array_value[ctx.replica_id_in_sync_group]
        distributed_values = (
             strategy.experimental_distribute_values_from_function(
               value_fn))
        local_result = strategy.experimental_local_results(distributed_values)
        local_result
        """,
    )
    assert found.local_result == (3.0, 2.0)
    assert [isinstance(x, np.float64) for x in found.local_result] == [True, True]


def test_seed_003_line_578_values_by_num_replicas_in_sync() -> None:
    found = run_sample(
        3,
        578,
        """
        strategy = tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"])
        def value_fn(ctx):
          return ctx.num_replicas_in_sync
        distributed_values = (
             strategy.experimental_distribute_values_from_function(
               value_fn))
        local_result = strategy.experimental_local_results(distributed_values)
        local_result
        """,
    )
    assert found.shown == ["(2, 2)"]


def test_seed_003_line_591_values_on_devices() -> None:
    found = run_sample(
        3,
        591,
        """
        strategy = tf.distribute.TPUStrategy()
        worker_devices = strategy.extended.worker_devices
        multiple_values = []
        for i in range(strategy.num_replicas_in_sync):
          with tf.device(worker_devices[i]):
            multiple_values.append(tf.constant(1.0))

        def value_fn(ctx):
          return multiple_values[ctx.replica_id_in_sync_group]

        distributed_values = strategy.
          experimental_distribute_values_from_function(
          value_fn)
        """,
        # The line break is one of the text.
        fill={"strategy.\n  experimental": "strategy.experimental"},
    )
    strategy = found.strategy
    assert strategy.num_replicas_in_sync == 3
    local = strategy.experimental_local_results(found.distributed_values)
    assert [x.device for x in local] == list(found.worker_devices)
    assert floats(local) == [1.0] * 3


def test_seed_003_line_662_gather() -> None:
    found = run_sample(
        3,
        662,
        """
        strategy = tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"])
        distributed_values = strategy.experimental_distribute_values_from_function(lambda _: tf.identity(tf.constant([[1], [2]])))
        @tf.function
        def run():
          return strategy.gather(distributed_values, axis=0)
        run()
        """,  # noqa: E501
    )
    expected = """
        <tf.Tensor: shape=(4, 1), dtype=int32, numpy=
        array([[1],
               [2],
               [1],
               [2]], dtype=int32)>
    """
    assert printed(found.shown) == printed([expected])


def test_seed_003_line_678_gather_along_each_axis() -> None:
    found = run_sample(
        3,
        678,
        """
        strategy = tf.distribute.MirroredStrategy(["GPU:0", "GPU:1", "GPU:2", "GPU:3"])
        single_tensor = tf.reshape(tf.range(6), shape=(1,2,3))
        distributed_values = strategy.experimental_distribute_values_from_function(lambda _: tf.identity(single_tensor))
        @tf.function
        def run(axis):
          return strategy.gather(distributed_values, axis=axis)
        axis=0
        run(axis)
        axis=1
        run(axis)
        axis=2
        run(axis)
        """,  # noqa: E501
    )
    row = "[[0, 1, 2], [3, 4, 5]]"
    expected = [
        f"(4, 2, 3), dtype=int32, numpy=array([{', '.join([row] * 4)}], dtype=int32)>",
        f"(1, 8, 3), dtype=int32, numpy=array([[{', '.join([row[1:-1]] * 4)}]], dtype=int32)>",
        "(1, 2, 12), dtype=int32, numpy=array([[[0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2], "
        "[3, 4, 5, 3, 4, 5, 3, 4, 5, 3, 4, 5]]], dtype=int32)>",
    ]
    assert printed(found.shown) == printed([f"<tf.Tensor: shape={rest}" for rest in expected])


def printed(shown: list[str]) -> list[str]:
    """What is printed, wherever its lines break."""
    return ["".join(text.split()) for text in shown]


def test_seed_003_line_732_reduce() -> None:
    found = run_sample(
        3,
        732,
        """
        strategy = tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"])
        def step_fn():
          i = tf.distribute.get_replica_context().replica_id_in_sync_group
          return tf.identity(i)

        per_replica_result = strategy.run(step_fn)
        total = strategy.reduce("SUM", per_replica_result, axis=None)
        total
        """,
    )
    assert found.shown == ["<tf.Tensor: shape=(), dtype=int32, numpy=1>"]


def test_seed_003_line_746_devices_of_a_reduction() -> None:
    found = run_sample(
        3,
        746,
        """
        strategy = tf.distribute.MirroredStrategy(devices=["GPU:0", "GPU:1"])
        def step_fn():
          i = tf.distribute.get_replica_context().replica_id_in_sync_group
          return tf.identity(i)

        per_replica_result = strategy.run(step_fn)
        strategy.experimental_local_results(per_replica_result)[0].device
        strategy.experimental_local_results(per_replica_result)[1].device

        total = strategy.reduce("SUM", per_replica_result, axis=None)
        total.device
        """,
    )
    assert found.shown == [repr(TASK + name) for name in ("GPU:0", "GPU:1", "CPU:0")]


def test_seed_003_line_793_and_line_801_reduce_a_global_batch(two: Any) -> None:
    strategy = two
    dataset = tf.data.Dataset.range(14).batch(8)
    first, last = (
        strategy.run(lambda x: x * 1, args=(x,))
        for x in strategy.experimental_distribute_dataset(dataset)
    )
    code = 'strategy.reduce("sum", per_replica_result, axis={})'
    given = {"strategy": strategy, "per_replica_result": first}
    assert run_sample(3, 793, code.format("None"), **given).shown == [
        "<tf.Tensor: shape=(4,), dtype=int32, numpy=array([ 4,  6,  8, 10], dtype=int32)>"
    ]
    assert run_sample(3, 801, code.format("0"), **given).shown == [
        "<tf.Tensor: shape=(), dtype=int32, numpy=28>"
    ]
    # A last batch of 6, in parts of 4 and 2 or 3 and 3: the mean is that of all examples.
    as_floats = strategy.run(lambda x: tf.cast(x, tf.float32), args=(last,))
    assert strategy.reduce(tf.distribute.ReduceOp.MEAN, as_floats, axis=0).numpy() == 10.5


def test_seed_003_line_804_a_partial_batch_needs_an_axis(two: Any) -> None:
    strategy = two
    parts = strategy.experimental_distribute_values_from_function(
        lambda context: [tf.range(4.0), tf.range(4.0, 6.0)][context.replica_id_in_sync_group]
    )
    with pytest.raises(ValueError, match="shape"):
        strategy.reduce("SUM", parts, axis=None)
    assert strategy.reduce(tf.distribute.ReduceOp.MEAN, parts, axis=0).numpy() == 2.5
    means = strategy.run(tf.reduce_mean, args=(parts,))
    assert strategy.reduce("MEAN", means, axis=None).numpy() == 3.0


def test_seed_003_line_867_run_with_a_constant() -> None:
    found = run_sample(
        3,
        867,
        """
        strategy = tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"])
        tensor_input = tf.constant(3.0)
        @tf.function
        def replica_fn(input):
          return input*2.0
        result = strategy.run(replica_fn, args=(tensor_input,))
        result
        """,
    )
    assert found.shown == [
        stated(
            """
            PerReplica:{
              0: <tf.Tensor: shape=(), dtype=float32, numpy=6.0>,
              1: <tf.Tensor: shape=(), dtype=float32, numpy=6.0>
            }
            """
        )
    ]


def test_seed_003_line_882_run_with_distributed_values() -> None:
    found = run_sample(
        3,
        882,
        """
        strategy = tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"])
        @tf.function
        def run():
          def value_fn(value_context):
            return value_context.num_replicas_in_sync
          distributed_values = (
            strategy.experimental_distribute_values_from_function(
              value_fn))
          def replica_fn2(input):
            return input*2
          return strategy.run(replica_fn2, args=(distributed_values,))
        result = run()
        result
        """,
    )
    assert found.shown == ["<tf.Tensor: shape=(), dtype=int32, numpy=4>"]


def test_seed_003_line_900_all_reduce_in_replicas() -> None:
    found = run_sample(
        3,
        900,
        """
        strategy = tf.distribute.MirroredStrategy(["gpu:0", "gpu:1"])
        @tf.function
        def run():
           def value_fn(value_context):
             return tf.constant(value_context.replica_id_in_sync_group)
           distributed_values = (
               strategy.experimental_distribute_values_from_function(
                   value_fn))
           def replica_fn(input):
             return tf.distribute.get_replica_context().all_reduce("sum", input)
           return strategy.run(replica_fn, args=(distributed_values,))
        result = run()
        result
        """,
    )
    assert found.shown == [
        stated(
            """
            PerReplica:{
              0: <tf.Tensor: shape=(), dtype=int32, numpy=1>,
              1: <tf.Tensor: shape=(), dtype=int32, numpy=1>
            }
            """
        )
    ]


def test_seed_003_line_942_variables_of_a_scope() -> None:
    found = run_sample(
        3,
        942,
        """
        strategy = tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"])
        with strategy.scope():
          mirrored_variable = tf.Variable(1.)
        mirrored_variable
        regular_variable = tf.Variable(1.)
        regular_variable
        """,
    )
    assert found.shown == [
        stated(
            """
            MirroredVariable:{
              0: <tf.Variable 'Variable:0' shape=() dtype=float32, numpy=1.0>,
              1: <tf.Variable 'Variable/replica_1:0' shape=() dtype=float32, numpy=1.0>
            }
            """
        ),
        "<tf.Variable 'Variable:0' shape=() dtype=float32, numpy=1.0>",
    ]


# 004: DistributionStrategy of r1.9.


@pytest.fixture
def distribution() -> Any:
    return tf.contrib.distribute.MirroredStrategy(["GPU:0", "GPU:1"])


def test_seed_004_line_80_a_one_shot_iterator(distribution: Any) -> None:
    made: list[Any] = []

    def tower_fn(x: Any) -> Any:
        if not made:
            made.append(tf.compat.v1.get_variable("w", initializer=1.0))
        made[0].assign_add(tf.cast(tf.reduce_sum(x), tf.float32), read_value=False)
        return x

    with distribution.scope():
        made.append(tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM))
    found = run_sample(
        4,
        80,
        """
        with my_distribution.scope():
          iterator = my_distribution.distribute_dataset(
              dataset).make_one_shot_iterator()
          tower_train_ops = my_distribution.call_for_each_tower(
              tower_fn, iterator.get_next())
          train_op = tf.group(my_distribution.unwrap(tower_train_ops))
        """,
        imports=V1,
        my_distribution=distribution,
        dataset=tf.data.Dataset.range(4).batch(2),
        tower_fn=tower_fn,
    )
    assert found.train_op is None
    assert [np.asarray(x).tolist() for x in distribution.unwrap(found.tower_train_ops)] == [
        [0, 1],
        [2, 3],
    ]
    assert floats(distribution.unwrap(made[0])) == [7.0, 7.0]


def test_seed_004_line_98_an_initializable_iterator(distribution: Any) -> None:
    # There are no sessions: an initializer is a function.
    session = SimpleNamespace(run=lambda op: op())
    with distribution.scope():
        found = run_sample(
            4,
            98,
            """
            iterator = my_distribution.distribute_dataset(
                dataset).make_initializable_iterator())
            session.run(iterator.initializer)
            """,
            # The text closes one bracket too many.
            fill={"iterator())": "iterator()"},
            imports=V1,
            my_distribution=distribution,
            dataset=tf.data.Dataset.range(4).batch(2),
            session=session,
        )
        parts = distribution.unwrap(found.iterator.get_next())
    assert [np.asarray(x).tolist() for x in parts] == [[0, 1], [2, 3]]


def test_seed_004_line_172_colocated_variables(distribution: Any) -> None:
    d, tf1 = distribution, tf.compat.v1
    with d.scope():
        v1 = tf1.get_variable("v1", [2])
        with d.colocate_vars_with(v1):
            v2 = tf1.get_variable("v2", [2], initializer=tf.zeros)
        with d.colocate_vars_with(d.non_slot_devices([v1])):
            step = tf1.get_variable("step", initializer=0, trainable=False)
    assert v1.placement == v2.placement == step.placement
    assert [x.device for x in d.unwrap(v2)] == d.parameter_devices


def test_seed_004_line_258_worker_device_index(distribution: Any) -> None:
    ran: dict[int, str] = {}
    run_sample(
        4,
        258,
        """
        with distribution_strategy.scope():

          def fn(device_id):
            #    distribution_strategy.worker_devices[device_id].

          distribution_strategy.call_for_each_tower(
              fn, distribution_strategy.worker_device_index)
        """,
        fill={
            "#    distribution_strategy.worker_devices[device_id].": (
                "ran[device_id] = tf.get_tower_context().device"
            )
        },
        imports=V1,
        distribution_strategy=distribution,
        ran=ran,
    )
    assert ran == dict(enumerate(distribution.worker_devices))
    assert list(ran) == [0, 1]


def test_seed_004_line_358_merge_call(
    distribution: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_sample(
        4,
        358,
        """
        def merge_fn(distribution, three_plus_tower_id):
          return sum(distribution.unwrap(three_plus_tower_id))

        def fn(three):
          tower_ctx = tf.get_tower_context()
          v = three + tower_ctx.tower_id
          s = tower_ctx.merge_call(merge_fn, v)
          return s + v

        with distribution.scope():
          ...
          merged_results = distribution.call_for_each_tower(fn, 3)
          print(distribution.unwrap(merged_results))  # Prints a list
        """,
        imports=V1,
        distribution=distribution,
    )
    # The towers have 3 and 4, whose sum is 7.
    assert floats(distribution.unwrap(found.merged_results)) == [10.0, 11.0]
    assert re.match(r"\[.*10.*, .*11.*\]", capsys.readouterr().out)


def test_seed_004_line_410_colocate_vars_with_and_update(distribution: Any) -> None:
    ran: list[Any] = []
    found = run_sample(
        4,
        410,
        """
        with distribution_strategy.scope():
          var1 = tf.get_variable(...)
          with distribution_strategy.colocate_vars_with(v1):
            var2 = tf.get_variable(...)
            var3 = tf.get_variable(...)

          def fn(v1, v2, v3):
            # operates on v1 from var1, v2 from var2, and v3 from var3

          distribution_strategy.update(v1, fn, v2, v3)
        """,
        fill={
            # The text calls a variable var1 where it makes it, and v1 where it uses it.
            "var1 = tf.get_variable(...)": "v1 = tf.get_variable('v1', initializer=1.0)",
            "var2 = tf.get_variable(...)": "v2 = tf.get_variable('v2', initializer=2.0)",
            "var3 = tf.get_variable(...)": "v3 = tf.get_variable('v3', initializer=3.0)",
            "# operates on v1 from var1, v2 from var2, and v3 from var3": (
                "ran.append([v1.device, v2.device, v3.device]); v1.assign_add(v2 * v3)"
            ),
        },
        imports=V1,
        distribution_strategy=distribution,
        ran=ran,
    )
    assert ran == [[TASK + "GPU:0"] * 3, [TASK + "GPU:1"] * 3]
    assert floats(distribution.unwrap(found.v1)) == [7.0, 7.0]


def test_seed_004_line_455_distribute_dataset(distribution: Any) -> None:
    found = run_sample(
        4,
        455,
        """
        def dataset_fn():
          return tf.data.Dataset.from_tensors([[1.]]).repeat()
        with distribution_strategy.scope():
          distributed_dataset = distribution_strategy.distribute_dataset(dataset_fn)
          iterator = distributed_dataset.make_one_shot_iterator()
          tower_results = distribution_strategy.call_for_each_tower(
              tower_fn, iterator.get_next())
        """,
        imports=V1,
        distribution_strategy=distribution,
        tower_fn=lambda x: x + tf.cast(tf.compat.v1.get_tower_context().tower_id, tf.float32),
    )
    parts = distribution.unwrap(found.tower_results)
    assert [np.asarray(x).tolist() for x in parts] == [[[1.0]], [[2.0]]]


def test_seed_004_line_645_update_calls_fn_on_each_device(distribution: Any) -> None:
    where: list[str] = []

    def fn(v: Any, x: Any, *, y: Any) -> Any:
        where.append(v.device)
        return v + x * y

    with distribution.scope():
        var = tf.compat.v1.get_variable("var", initializer=1.0)
        x = distribution.broadcast(tf.constant(2.0), var)
        results = distribution.update(var, fn, x, y=3.0)
    assert where == [TASK + "GPU:0", TASK + "GPU:1"]
    assert floats(distribution.unwrap(results)) == [7.0, 7.0]
