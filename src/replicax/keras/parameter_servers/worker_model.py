"""A model on its way to a worker: its configuration, and its variables on the servers."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from replicax.foundation import errors, jax_compat
from replicax.foundation.types import Tree
from replicax.keras import internals
from replicax.keras.parameter_servers import step_values
from replicax.keras.variables import DistributedVariable, is_seed, outside_scopes
from replicax.variables.variable import Variable

# The distance of the seeds of neighbouring steps: far apart, and odd, so that all differ.
_SEED_STRIDE = 0x9E3779B1


@dataclasses.dataclass
class WorkerModel:
    """A model that a worker builds from its configuration when it is first used.

    Attributes:
      config: The configuration of the model, as Keras serializes it.
      compile_config: The arguments of `compile`, without the optimizer.
      custom_objects: Classes and functions of the configuration that are not those of Keras.
      settings: Global settings of Keras.
      twins: The variables on the servers, in the order of `model.variables`; None for seeds.
      seeds: The first state of each seed generator, in the order of `model.variables`.
    """

    config: dict[str, Any]
    compile_config: dict[str, Any] | None
    custom_objects: dict[str, Any]
    settings: dict[str, Any]
    twins: list[Variable | None]
    seeds: list[np.ndarray]

    @classmethod
    def of(cls, model: keras.Model) -> WorkerModel:
        """Describes a model whose variables are on servers."""
        config, compile_config = _serialized(model)
        seeds = [v for v in model.variables if is_seed(v)]
        return cls(
            config,
            compile_config,
            _custom_objects(model, {*_names_in(config), *_names_in(compile_config)}),
            {"floatx": keras.config.floatx(), "epsilon": keras.config.epsilon()},
            [None if is_seed(v) else _twin(v) for v in model.variables],
            [np.asarray(v.value) for v in seeds],
        )

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def model(self) -> keras.Model:
        """The model, on a worker."""
        found = self.__dict__.get("_model")
        if found is None:
            with outside_scopes(), jax_compat.eagerly():
                found = self.__dict__["_model"] = self._build()
        return found

    def _build(self) -> keras.Model:
        keras.config.set_floatx(self.settings["floatx"])
        keras.config.set_epsilon(self.settings["epsilon"])
        with keras.saving.custom_object_scope(self.custom_objects), step_values.construction():
            model = keras.saving.deserialize_keras_object(self.config, safe_mode=False)
            if self.compile_config is not None:
                arguments = keras.saving.deserialize_keras_object(
                    self.compile_config, safe_mode=False
                )
                model.compile(**arguments, optimizer=None)
        return model

    def prepare(self, batch: Tree, *, has_targets: bool = True) -> None:
        """Builds what depends on the shapes of a batch: layers and, with targets, metrics."""
        if self.__dict__.get("_is_prepared"):
            return
        model = self.model
        with outside_scopes(), step_values.construction():
            if has_targets:
                internals.build_from_batch(model, batch)
            else:
                internals.build_layers_from_batch(model, batch)
        self.require_same_variables(model)
        step_values.adopt([*model.variables, *model.metrics_variables])
        self.__dict__["_is_prepared"] = has_targets

    def require_same_variables(self, model: keras.Model) -> None:
        """Raises unless a model that was built here has the variables of the coordinator's."""
        expected = [_SEED_SHAPE if t is None else tuple(t.shape) for t in self.twins]
        found = [tuple(v.shape) for v in model.variables]
        if expected != found:
            raise errors.UnsupportedError(
                "A worker must build the model with the same variables from its configuration",
                f"it built {len(found)} variables of shapes {_short(found)} instead of "
                f"{len(expected)} of shapes {_short(expected)}",
                "Let `get_config` of your layers and models return all arguments of `__init__`, "
                "and create variables in `__init__` or `build`.",
            )

    # Values.

    @property
    def tables(self) -> dict[int, Variable]:
        """The variables that are looked up in by rows, by the id of the Keras variable."""
        ids = {id(v) for v in internals.tables_of(self.model)}
        return {i: twin for i, twin in self._by_id().items() if i in ids}

    @property
    def trained(self) -> dict[int, Variable]:
        """The trainable variables that are read as a whole, by the id of the Keras variable."""
        tables = self.tables
        ids = {id(v) for v in self.model.trainable_variables}
        return {i: t for i, t in self._by_id().items() if i in ids and i not in tables}

    @property
    def frozen(self) -> dict[int, Variable]:
        """All other variables but seeds, by the id of the Keras variable."""
        others = {**self.tables, **self.trained}
        return {i: twin for i, twin in self._by_id().items() if i not in others}

    def _by_id(self) -> dict[int, Variable]:
        pairs = zip(self.model.variables, self.twins, strict=True)
        return {id(v): twin for v, twin in pairs if twin is not None}

    def seeds_of(self, step: jax.Array) -> dict[int, jax.Array]:
        """Returns the states of the seed generators in a step: each step has its own."""
        found = [
            v for v, twin in zip(self.model.variables, self.twins, strict=True) if twin is None
        ]
        distance = jnp.asarray(step, jnp.uint32) * jnp.uint32(_SEED_STRIDE)
        return {
            id(v): jnp.asarray(first) + jnp.stack([distance, jnp.uint32(0)]).astype(first.dtype)
            for v, first in zip(found, self.seeds, strict=True)
        }


_SEED_SHAPE = (2,)


def _short(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(map(str, shapes[:8])) + (", ..." if len(shapes) > 8 else "")


def _twin(variable: keras.Variable) -> Variable:
    assert isinstance(variable, DistributedVariable) and variable.twin is not None
    return variable.twin


def _serialized(model: keras.Model) -> tuple[dict[str, Any], dict[str, Any] | None]:
    try:
        config: Any = keras.saving.serialize_keras_object(model)
        compiled: Any = model.get_compile_config() if model.compiled else None
    except Exception as error:  # `get_config` of the user may raise anything.
        raise errors.UnsupportedError(
            "A model that workers train must be serializable: they build it from its configuration",
            f"{model.name!r} is not ({type(error).__name__}: {error})",
            "Implement `get_config` in your own layers, losses and metrics.",
        ) from error
    config.pop("compile_config", None)
    if compiled is not None:
        compiled.pop("optimizer", None)
    return config, compiled


def _custom_objects(model: keras.Model, names: set[str]) -> dict[str, Any]:
    """Returns the classes and functions with some names that a worker cannot find in Keras."""
    return _those_named(_objects_of(model), names)


def _those_named(objects: Iterable[Any], names: set[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for value in objects:
        named = value if isinstance(value, type | types.FunctionType) else type(value)
        module = getattr(named, "__module__", None) or ""
        if module.partition(".")[0] in _KNOWN_PACKAGES:
            continue
        name = keras.saving.get_registered_name(named)
        if name in names:
            found[name] = named
    return found


def custom_objects_of(value: object, config: Tree) -> dict[str, Any]:
    """Returns the class and functions of an object that a worker cannot find in Keras."""
    return _those_named([value, *_leaves(dict(vars(value)))], {*_names_in(config)})


def _names_in(config: Tree) -> Iterator[str]:
    """Yields the names of the classes and functions that a configuration refers to."""
    if isinstance(config, list | tuple):
        for item in config:
            yield from _names_in(item)
    elif isinstance(config, dict):
        for key in ("registered_name", "class_name", "config"):
            if isinstance(config.get(key), str):
                yield config[key]
        for item in config.values():
            yield from _names_in(item)


_KNOWN_PACKAGES = ("builtins", "keras", "numpy", "jax", "jaxlib", "optree")


def _objects_of(model: keras.Model) -> Iterator[Any]:
    """Yields the objects that the configuration of a model may name."""
    layers = internals.layers_of(model)
    yield from layers
    for layer in layers:
        for value in vars(layer).values():
            yield from _leaves(value)
    yield from _leaves(internals.compile_arguments_of(model))


def _leaves(value: Tree) -> Iterator[Any]:
    if isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif callable(value) or hasattr(value, "get_config"):
        yield value
