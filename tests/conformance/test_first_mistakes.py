"""What somebody who starts with the library gets wrong, and what it answers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from vocabulary import refused

import replicax as rx
from replicax.foundation import devices

pytestmark = pytest.mark.strategies("mirrored_2")


@pytest.mark.parametrize("make", [lambda: rx.MirroredStrategy(["GPU:0"]), rx.TPUStrategy])
def test_devices_that_this_jax_does_not_support(make: Any) -> None:
    with refused(ValueError, match=r"support, but the installed JAX .* has CPU:0, .*pip install"):
        make()


def test_a_gpu_that_jax_supports_and_does_not_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_is_installed", lambda package: True)
    with refused(ValueError, match=r"The device 'GPU:0' needs a GPU that JAX can use.*nvidia-smi"):
        rx.OneDeviceStrategy("GPU:0")


def test_a_cpu_device_too_many() -> None:
    with refused(ValueError, match="set_virtual_cpu_devices"):
        rx.MirroredStrategy(["CPU:0", "CPU:99"])


def test_reduce_with_its_arguments_in_another_order(strategy: Any) -> None:
    value = rx.PerReplica([jnp.ones(1000), jnp.ones(1000)])
    with refused(ValueError, match="it is a PerReplica. Pass .* first, and the value after it"):
        strategy.reduce(value, "SUM", axis=None)


def test_reduce_without_axis(strategy: Any) -> None:
    with refused(TypeError, match="axis=None to combine across replicas only"):
        strategy.reduce("SUM", 1.0)


def test_a_value_of_all_replicas_given_to_jax(strategy: Any) -> None:
    loss = strategy.run(lambda: 1.0 * rx.get_replica_context().replica_id_in_sync_group)
    with refused(ValueError, match=r"strategy\.reduce"):
        jnp.sum(loss)
    with refused(TypeError, match=r"strategy\.reduce"):
        loss + 1


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap])
def test_run_inside_a_transformation_of_jax(strategy: Any, transform: Any) -> None:
    def step(x: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(lambda y: y * 2, args=(x,)), axis=None)

    with refused(rx.errors.TracingError, match="Use `rx.function`"):
        transform(step)(jnp.ones(2) if transform is jax.vmap else 1.0)


def test_run_inside_run(strategy: Any) -> None:
    with refused(RuntimeError, match="Call it outside `strategy.run`"):
        strategy.run(lambda: strategy.run(lambda: 1))


def test_a_dataset_that_is_not_batched(strategy: Any) -> None:
    with refused(ValueError, match="Batch it first"):
        strategy.experimental_distribute_dataset(rx.data.Dataset.range(4))


def test_the_replica_id_as_a_number_of_python_in_compiled_code(strategy: Any) -> None:
    def branch() -> Any:
        return 1.0 if rx.get_replica_context().replica_id_in_sync_group == 0 else 2.0

    with refused(TypeError, match=r"the replica id.*Use jnp\.where, rx\.cond"):
        rx.function(lambda: strategy.run(branch))()


def test_virtual_devices_after_the_first_computation() -> None:
    with refused(RuntimeError, match="right after the imports"):
        rx.set_virtual_cpu_devices(len(jax.devices()) + 1)


def test_a_variable_made_outside_of_the_scope(strategy: Any) -> None:
    variable = rx.Variable(1.0, name="outside")
    with refused(RuntimeError, match="Create it inside `with strategy.scope"):
        strategy.run(lambda: variable.assign_add(1.0))


def test_optimizers_with_arguments_in_another_order() -> None:
    variable = rx.Variable(1.0)
    with refused(TypeError, match="a list has no `init`.* and the variables after it"):
        rx.optimizers.Optimizer([variable], optax.sgd(0.1))  # type: ignore[arg-type]
    optimizer = rx.optimizers.Optimizer(optax.sgd(0.1), [variable])
    with refused(rx.errors.StructureError, match="each pair has its variable first"):
        optimizer.apply_gradients([(variable, 1.0)])
    with refused(rx.errors.StructureError, match=r"value_and_grad\(loss, variables\)\(\)"):
        optimizer.apply_gradients(rx.grad(lambda: variable * 2.0, [variable]))
    with refused(ValueError, match="Check that the loss depends on the variables"):
        optimizer.apply_gradients([(None, variable)])


def test_names_that_are_misspelt_or_not_offered() -> None:
    def name_of(wanted: str) -> str:
        with pytest.raises(AttributeError) as caught:
            getattr(rx, wanted)
        return str(caught.value)

    assert "Did you mean `MirroredStrategy`?" in name_of("MiroredStrategy")
    assert not hasattr(rx, "estimator")
    with refused(ValueError, match=r"for several machines use rx\.MultiWorkerMirroredStrategy"):
        rx.MirroredStrategy(["/job:worker/task:0/device:CPU:0", "/job:worker/task:1/device:CPU:0"])


@pytest.mark.parametrize("call", ["run", "function", "run a function"])
def test_arguments_that_contain_themselves_or_are_very_deep(strategy: Any, call: str) -> None:
    calls: dict[str, Any] = {
        "run": lambda x: strategy.run(lambda _: 0, args=(x,)),
        "function": rx.function(lambda _: 0),
        "run a function": lambda x: strategy.run(rx.function(lambda _: 0), args=(x,)),
    }
    endless: list[Any] = [1.0]
    endless.append({"again": (endless,)})
    deep: Any = 1.0
    for _ in range(5000):
        deep = [deep]
    for structure in (endless, deep):
        with refused(rx.errors.StructureError, match="at most 100 levels.*contains itself"):
            calls[call](structure)

    def recurses(x: Any) -> Any:
        return recurses(x)

    with pytest.raises(RecursionError):
        strategy.run(recurses, args=([[1.0]],))


def test_arguments_that_are_no_list_and_no_dict(strategy: Any) -> None:
    for args in (jnp.ones(2), "ab", {"x": 1}, 3):
        with refused(ValueError, match=r"`args` must be a list or tuple.*args=\(value,\)"):
            strategy.run(lambda x: x, args=args)
    with refused(TypeError, match="`kwargs` must be a dict"):
        strategy.run(lambda x: x, kwargs=[1])


def test_attributes_of_arrays_on_values_of_all_replicas(strategy: Any) -> None:
    loss = strategy.run(lambda: 1.0 * rx.get_replica_context().replica_id_in_sync_group)
    for name in ("shape", "numpy", "mean"):
        assert not hasattr(loss, name)
        with pytest.raises(AttributeError, match=rf"no attribute '{name}'.*strategy\.reduce"):
            getattr(loss, name)


def test_arguments_of_variables_that_are_misspelt() -> None:
    for wrong, right in {"nam": "name", "per_worker_varible": "per_worker_variable"}.items():
        with refused(TypeError, match=f"`{wrong}` was given. Did you mean `{right}`"):
            rx.Variable(1.0, **{wrong: None})


def test_adding_to_a_variable_of_all_replicas_outside_of_replica_code(strategy: Any) -> None:
    with strategy.scope():
        total = rx.Variable(
            0.0,
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )
    with refused(ValueError, match="needs a replica context, but this is code outside of every sc"):
        total.assign_add(1.0)
