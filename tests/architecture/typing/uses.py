"""Uses of the public API, right and wrong, for a type checker; run by `../test_typing.py`.

An error is expected in the lines that end with `# error`, and in no others.
"""

from __future__ import annotations

import functools
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

strategy = rx.MirroredStrategy(["CPU:0"], virtual_replicas=2)

# Variables.
v = rx.Variable(1.0, name="v", aggregation=rx.VariableAggregation.SUM)
assert_type(v, rx.Variable)
assert_type(v + 1, jax.Array)
assert_type(2 / v, jax.Array)
assert_type(jnp.dot(jnp.ones(3), v), jax.Array)
assert_type(v.read_value(), jax.Array)
assert_type(v.numpy(), np.ndarray)
v.assign_add(1.0)
by_variable = {v: v.shape}
as_text = f"{v:.3f} {float(v)} {v[0]}"
rx.Variable(lambda: jnp.zeros(3), trainable=False, dtype=jnp.float32, shape=[3])
rx.Variable([1.0], validate_shape=False)
rx.Variable(1.0, nam="v")  # error
rx.Variable(1.0, name=5)  # error
rx.Variable(1.0, True, "v")  # error
v.asign(1.0)  # error
rx.ShardedVariable([v, v], name="table")
rx.ShardedVariable(v, nam="table")  # error


# Replica code.
def replica_step(x: jax.Array, scale: float = 1.0) -> jax.Array:
    context = rx.get_replica_context()
    total = context.all_reduce("SUM", x)
    context.merge_call(lambda strategy, y: y, args=(x,))
    return total * scale


def typed_replica_step(context: rx.ReplicaContext, x: jax.Array) -> None:
    assert_type(context.all_reduce(rx.ReduceOp.SUM, x), jax.Array)
    assert_type(context.all_reduce("SUM", {"loss": x}), dict[str, jax.Array])
    assert_type(context.all_gather(x, axis=0), jax.Array)
    assert_type(context.all_reduce("MEAN", 1.0), jax.Array)
    context.all_redcue("SUM", x)  # error
    context.all_reduce(x, "SUM")  # error
    context.merge_call(lambda strategy, y: y, args=x)  # error


# Strategies.
with strategy.scope() as current:
    assert_type(current, rx.MirroredStrategy)
x = jnp.ones(2)
per_replica: rx.PerReplica = strategy.run(replica_step, args=(x,))
strategy.run(replica_step, (x, 2.0))
strategy.run(replica_step, [x], {"scale": 2.0})
strategy.run(functools.partial(replica_step, scale=2.0), args=(per_replica,))
strategy.run(lambda: None)
strategy.run(replica_step, args=tuple([x]))
strategy.run(replica_step, args=(x))  # error
strategy.run(replica_step, arg=(x,))  # error
strategy.run(x, args=(x,))  # error
assert_type(strategy.reduce("SUM", per_replica, axis=None), jax.Array)
assert_type(strategy.reduce(rx.ReduceOp.MEAN, x, axis=0), jax.Array)
losses: dict[str, Any] = strategy.reduce("SUM", {"loss": per_replica}, axis=None)
strategy.reduce(per_replica, "SUM", axis=None)  # error
strategy.reduce("SUM", per_replica)  # error
strategy.reduce("SUM", per_replica, axis="rows")  # error
assert_type(strategy.gather(per_replica, axis=0), jax.Array)
for part in strategy.experimental_local_results(per_replica):
    print(part)
assert_type(rx.get_strategy(), rx.Strategy)
rx.MirroredStrategy(devices=0)  # error
rx.MirroredStrategy(virtual_replica=2)  # error


# Compiled functions keep the signature of what they compile.
@rx.function
def train_step(x: jax.Array, scale: float = 1.0) -> jax.Array:
    return x * scale


@rx.function(input_signature=[rx.TensorSpec([None, 2], jnp.float32)])
def serve(x: jax.Array) -> jax.Array:
    return x


assert_type(train_step(x, scale=2.0), jax.Array)
assert_type(serve(x), jax.Array)
train_step(x, scal=2.0)  # error
serve()  # error

# Training.
optimizer = rx.optimizers.Optimizer(optax.sgd(0.1), [v])
optimizer.apply_gradients([(jnp.ones(()), v)])
dataset = rx.data.Dataset.range(4).map(lambda row: row + 1).batch(2)
for batch in strategy.experimental_distribute_dataset(dataset):
    strategy.run(replica_step, args=(batch,))
rx.data.Dataset.rang(4)  # error
rx.metrics.Mean(name="loss").update_state(1.0)
rx.metrics.Mean(nam="loss")  # error
