"""Checkpoints of Flax programs, which Orbax writes, to and from ours."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import flax.linen
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as orbax
import pytest
import typer.testing
from flax import nnx

import replicax as rx
from replicax.cli.main import app
from replicax.foundation import lazy

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


def convert(source: Path, target: Path, *, to: str) -> typer.testing.Result:
    other = "orbax" if to == "replicax" else "replicax"
    command = ["checkpoint", "convert", "--from", other, "--to", to, str(source), str(target)]
    return typer.testing.CliRunner().invoke(app, command)


def converted(source: Path, target: Path, *, to: str) -> str:
    result = convert(source, target, to=to)
    assert result.exit_code == 0, result.output
    return result.output


class Linen(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x: Any) -> Any:
        return flax.linen.Dense(4)(x)


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def train_state() -> flax.training.train_state.TrainState:
    model = Linen()
    params = model.init(jax.random.key(0), jnp.ones((1, 3)))["params"]
    create = flax.training.train_state.TrainState.create
    state = create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))
    return state.apply_gradients(grads=jax.tree.map(jnp.ones_like, params))


def restored_params(path: Path) -> Any:
    params = {"Dense_0": {"kernel": rx.Variable(jnp.zeros((3, 4))), "bias": np.zeros(4, "f4")}}
    rx.train.Checkpoint(params=params).restore(path).expect_partial()
    return params


@pytest.mark.parametrize("how", ["standard", "pytree", "manager"])
def test_a_linen_train_state_becomes_a_checkpoint(tmp_path: Path, how: str) -> None:
    state = train_state()
    source = tmp_path / "orbax"
    if how == "standard":
        with orbax.StandardCheckpointer() as checkpointer:
            checkpointer.save(source, state)
    elif how == "pytree":
        with orbax.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(source, state)
    else:
        with orbax.CheckpointManager(source) as manager:
            manager.save(7, args=orbax.args.StandardSave(state))
        source /= "7"
    target = tmp_path / "ckpt-7"
    assert "objects" in converted(source, target, to="replicax")
    kernel = state.params["Dense_0"]["kernel"]
    loaded = rx.train.load_variable(target, "params/Dense_0/kernel")
    assert np.array_equal(loaded, kernel) and loaded.dtype == kernel.dtype
    mean = rx.train.load_variable(target, "opt_state/0/mu/Dense_0/kernel")
    assert np.array_equal(mean, state.opt_state[0].mu["Dense_0"]["kernel"])
    assert rx.train.load_variable(target, "step") == 1
    params = restored_params(target)
    assert np.array_equal(params["Dense_0"]["kernel"].numpy(), kernel)
    assert np.array_equal(params["Dense_0"]["bias"], state.params["Dense_0"]["bias"])
    assert rx.train.latest_checkpoint(tmp_path) == str(target)


def test_an_nnx_state_goes_there_and_back(tmp_path: Path) -> None:
    model = Nnx(nnx.Rngs(0))
    state = nnx.state(model)
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", state)
    converted(tmp_path / "orbax", tmp_path / "ours", to="replicax")
    loaded = rx.train.load_variable(tmp_path / "ours", "layer/kernel/value")
    assert np.array_equal(loaded, model.layer.kernel[...])
    key = rx.train.load_variable(tmp_path / "ours", "dropout/rngs/key/value")
    assert key.tolist() == jax.random.key_data(model.dropout.rngs.key[...]).tolist()
    converted(tmp_path / "ours", tmp_path / "again", to="orbax")
    with orbax.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(tmp_path / "again")
    assert np.array_equal(tree["layer"]["kernel"]["value"], model.layer.kernel[...])
    assert np.array_equal(tree["norm"]["scale"]["value"], model.norm.scale[...])


def test_flax_reads_what_was_a_checkpoint_of_ours(tmp_path: Path) -> None:
    state = train_state()
    params = jax.tree.map(rx.Variable, state.params)
    objects = {"params": params, "epoch": 3, "flag": True, "note": "x", "half": jnp.bfloat16(2)}
    path = Path(rx.train.Checkpoint(**objects).write(tmp_path / "ours"))
    output = converted(path, tmp_path / "orbax", to="orbax")
    assert output.splitlines()[1:] == ["left out flag", "left out note"]
    template = {"params": jax.tree.map(jnp.zeros_like, state.params)}
    with orbax.PyTreeCheckpointer() as checkpointer:
        found = checkpointer.restore(
            tmp_path / "orbax", args=orbax.args.PyTreeRestore(template, partial_restore=True)
        )
    expected = {"params": state.params}
    assert jax.tree.all(jax.tree.map(np.array_equal, found, expected))
    with orbax.PyTreeCheckpointer() as checkpointer:
        everything = checkpointer.restore(tmp_path / "orbax")
    assert everything["half"].dtype == jnp.bfloat16 and everything["epoch"] == 3


def test_what_cannot_be_converted_is_named(tmp_path: Path) -> None:
    path = Path(rx.train.Checkpoint(v=rx.Variable(1.0)).write(tmp_path / "ours"))
    for source, target, to, text in [
        (tmp_path / "nothing", tmp_path / "x", "replicax", "must be an Orbax checkpoint"),
        (path, tmp_path / "x", "replicax", "must be an Orbax checkpoint"),
        (tmp_path / "nothing", tmp_path / "x", "orbax", "needs a readable manifest.json"),
        (path, path, "orbax", "must not exist"),
    ]:
        result = convert(source, target, to=to)
        assert result.exit_code == 1 and text in result.output, result.output
    assert not (tmp_path / "x").exists()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "_METADATA").write_text("{}")
    result = convert(tmp_path / "broken", tmp_path / "x", to="replicax")
    assert result.exit_code == 1 and "Orbax must read" in result.output, result.output


def test_without_orbax_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = lazy.module("orbax.checkpoint", "replicax[orbax]")
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(rx.errors.MissingDependencyError, match=r"pip install replicax\[orbax\]"):
        _ = missing.StandardCheckpointer
