"""The names of Keras that are not public; no other module uses such names.

`require_known` checks all of them when Keras is first used with a strategy, so that a version
without one of them is named in an error instead of failing somewhere inside `fit`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import keras
from jax.typing import ArrayLike
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope as in_symbolic_scope
from keras.src.losses import loss
from keras.src.saving import saving_lib
from keras.src.saving.keras_saveable import KerasSaveable as KerasSaveable
from keras.src.trainers import data_adapters, trainer
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.data_adapter import DataAdapter as DataAdapter

from replicax.foundation import errors
from replicax.foundation.types import Tree

# The module whose `scale_loss_for_distribution` all losses of Keras call.
loss_module = loss
# The module whose `get_data_adapter` every loop of Keras calls with its data.
data_adapters_module = data_adapters

# The method by which an optimizer adds a variable to its own.
TRACK_VARIABLE = "_track_variable"
# The method that a layer calls when it was built, before it refuses further variables.
AFTER_BUILD = "_lock_state"

# The class whose `compile` loading compares with that of a model, to see if a user has replaced it.
Trainer = trainer.Trainer

# For each class or module: methods and names that are replaced, or used.
_METHODS: dict[str, tuple[str, ...]] = {
    "keras.Variable": ("_direct_assign", "_maybe_autocast", "_deferred_initialize"),
    "keras.Model": (
        "_compute_loss",
        "_flatten_layers",
        "_get_jax_state",
        "_symbolic_build",
        "_update_metrics_variables",
        "jax_state_sync",
    ),
    "keras.optimizers.Optimizer": ("_overwrite_variable_with_gradient", TRACK_VARIABLE),
    "keras.layers.BatchNormalization": ("_moments",),
    "keras.layers.Layer": (AFTER_BUILD,),
    "keras.src.backend.common.global_state": ("GLOBAL_STATE_TRACKER",),
}


@functools.cache
def require_known() -> None:
    """Raises if this version of Keras lacks a name that is used here."""
    missing = [
        f"{owner}.{name}"
        for owner, names in _METHODS.items()
        for name in names
        if not hasattr(_class(owner), name)
    ]
    if missing:
        raise errors.UnsupportedError(
            "replicax needs names of Keras that this version does not have",
            f"keras {keras.__version__} lacks {', '.join(missing)}",
            "Install a version that is tested with this one: `pip install replicax[keras]`.",
        )


def _class(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def stateless_value(variable: keras.Variable) -> Any:
    """Returns the value that a `keras.StatelessScope` around this code has for a variable."""
    scope = get_stateless_scope()
    return None if scope is None else scope.get_current_value(variable)


def in_stateless_scope() -> bool:
    """Tells whether a `keras.StatelessScope` is open in this thread."""
    return get_stateless_scope() is not None


def placeholder(variable: keras.Variable) -> Any:
    """Returns what Keras reads of a variable that has no value yet, to infer shapes."""
    return variable._initializer(variable._shape, dtype=variable._dtype)


def autocast(variable: keras.Variable, value: jax.Array | None) -> Any:
    """Converts a value to the type of the layer that reads it."""
    return variable._maybe_autocast(value)


def learning_rate_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns the learning rate of an optimizer: a variable, or a schedule."""
    return optimizer._learning_rate


def trainable_variables_of(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Returns the variables that an optimizer was built for."""
    return list(optimizer._trainable_variables)


# The attribute in which `fit` holds the state after each step.
STATE = "_jax_state"


def state_of(model: keras.Model) -> dict[str, Tree] | None:
    """Returns the arrays of a model that `fit` holds, by kind; None outside of it."""
    return getattr(model, STATE, None)


def set_state(model: keras.Model, state: dict[str, Tree]) -> None:
    """Replaces the arrays of a model that `fit` holds."""
    model.__dict__.update({STATE: state, "_jax_state_synced": False})


def is_state_synced(model: keras.Model) -> bool:
    """Tells whether the variables of a model have the values that `fit` holds."""
    return model._jax_state_synced


def set_state_synced(model: keras.Model) -> None:
    """Notes that the variables of a model have the values that `fit` holds."""
    model._jax_state_synced = True


def with_class_weight(batch: Tree, class_weight: Mapping[int, float]) -> Tree:
    """Adds weights to a batch, by the classes of its targets."""
    x, y, weights = data_adapter_utils.unpack_x_y_sample_weight(batch)
    own = data_adapter_utils.class_weight_to_sample_weights(y, class_weight)
    return x, y, own if weights is None else weights * own


def own_variables(owner: KerasSaveable) -> list[Any]:
    """Returns the variables of a layer, optimizer or metric itself, in Keras' order."""
    if isinstance(owner, keras.layers.Layer):
        return [*owner._trainable_variables, *owner._non_trainable_variables]
    assert isinstance(owner, keras.optimizers.Optimizer | keras.metrics.Metric)
    return list(owner.variables)


def seed_generators(owner: KerasSaveable) -> list[keras.random.SeedGenerator]:
    """Returns the sources of random numbers of a layer, but not those of layers in it."""
    return list(getattr(owner, "_seed_generators", ()))


def saveable_children(owner: KerasSaveable) -> dict[str, Any]:
    """Returns the layers, optimizers and metrics in a Keras object, named as in Keras' files."""
    found: dict[str, Any] = {}
    seen: set[int] = {id(owner)}
    for name, child in saving_lib._walk_saveable(owner):
        _add_saveables(found, seen, name, child)
    return found


def _add_saveables(found: dict[str, Any], seen: set[int], path: str, child: object) -> None:
    if not isinstance(child, KerasSaveable | list | dict | tuple) or id(child) in seen:
        return
    seen.add(id(child))
    if isinstance(child, KerasSaveable):
        found[path] = child
        return
    used: dict[str, int] = {}
    for item in child.values() if isinstance(child, dict) else child:
        is_part = isinstance(item, KerasSaveable)
        name = saving_lib.naming.to_snake_case(type(item).__name__) if is_part else "container"
        if is_part or isinstance(item, list | dict | tuple):
            _add_saveables(found, seen, f"{path}/{_unique(name, used)}", item)


def _unique(name: str, used: dict[str, int]) -> str:
    count = used[name] = used.get(name, -1) + 1
    return f"{name}_{count}" if count else name


def compilation_of(model: keras.Model) -> object:
    """Returns an object that each call of `compile` replaces."""
    return getattr(model, "_compile_config", None)


def initial_epoch_of(model: keras.Model) -> int | None:
    """Returns the epoch that a callback has told `fit` to start with; None by default."""
    return model._initial_epoch


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Tells `fit` which epoch to start with."""
    model._initial_epoch = epoch


def is_overridden(callback: keras.callbacks.Callback, hook: str) -> bool:
    """Tells whether a callback does something in a hook."""
    return not getattr(getattr(callback, hook), "_is_default", False)


# Where Keras counts the objects of each kind, from which it makes names.
_COUNTERS = "object_name_uids"


@contextlib.contextmanager
def kept_names() -> Iterator[None]:
    """Lets the objects made afterwards have the names that they would have had without this."""
    before = copy.copy(global_state.get_global_attribute(_COUNTERS))
    try:
        yield
    finally:
        global_state.set_global_attribute(_COUNTERS, before)


def thread_state() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Captures what Keras keeps per thread: policies, scopes, counters of names, and others."""
    found = dict(vars(global_state.GLOBAL_STATE_TRACKER))

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        here = vars(global_state.GLOBAL_STATE_TRACKER)
        before = dict(here)
        here.clear()
        # Lists are stacks of open scopes: each thread opens its own.
        here.update((name, copy.copy(v) if isinstance(v, list) else v) for name, v in found.items())
        try:
            yield
        finally:
            here.clear()
            here.update(before)

    return enter


# Models on workers of parameter servers.


def forget_uninitialized_variables() -> None:
    """Keeps Keras from giving values to variables that were made without one."""
    global_state.set_global_attribute("uninitialized_variables", [])


def layers_of(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns a model and all layers inside it."""
    return list(model._flatten_layers())


def compile_arguments_of(model: keras.Model) -> dict[str, Any]:
    """Returns the arguments that a model was compiled with."""
    found = getattr(model, "_compile_config", None)
    return {} if found is None else dict(found.config)


def build_from_batch(model: keras.Model, batch: Tree) -> None:
    """Builds layers, losses and metrics for batches like this one."""
    model._symbolic_build(data_batch=batch)


def build_layers_from_batch(model: keras.Model, batch: Tree) -> None:
    """Builds the layers of a model for batches like this one."""
    if all(layer.built for layer in layers_of(model)):
        return
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    output_spec(model, x)


def output_spec(model: keras.Model, x: Tree) -> Any:
    """Returns the shapes and types of the outputs of a model, as tensors without a value."""
    symbolic = jax.tree.map(
        lambda a: keras.KerasTensor(a.shape, keras.backend.standardize_dtype(a.dtype)), x
    )
    return backend.compute_output_spec(model, symbolic)


def metrics_of(model: keras.Model) -> list[keras.metrics.Metric]:
    """Returns all metrics of a model, those given to `compile` one by one."""
    compiled = model._compile_metrics
    others = [metric for metric in model.metrics if metric is not compiled]
    return others if compiled is None else [*others, *compiled.metrics]


def is_plain_table(layer: keras.layers.Layer) -> bool:
    """Tells whether a layer looks rows of one variable up, and does nothing else to it."""
    return (
        isinstance(layer, keras.layers.Embedding)
        and layer.built
        and not layer.lora_enabled
        and not layer.quantization_mode
        and type(layer).embeddings is keras.layers.Embedding.embeddings
    )


def table_of(layer: keras.layers.Embedding) -> keras.Variable:
    """Returns the table of an embedding layer."""
    return layer._embeddings


def tables_of(model: keras.Model) -> list[keras.Variable]:
    """Returns the tables of all embedding layers of a model that only look rows up."""
    return [layer._embeddings for layer in layers_of(model) if is_plain_table(layer)]


def call(model: keras.Model, x: Tree, *, training: bool) -> Any:
    """Calls a model, with `training` if it takes that."""
    kwargs = {"training": training} if model._call_has_training_arg else {}
    return model(x, **kwargs)


def compute_loss(
    model: keras.Model, x: Tree, y: Tree, y_pred: Tree, weights: Tree, *, training: bool
) -> Any:
    """Returns the loss of a batch, with the losses that layers have added in this scope."""
    return model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weights, training=training)


def update_metrics(
    model: keras.Model,
    values: Sequence[ArrayLike],
    loss: ArrayLike,
    batch: tuple[Tree, Tree, Tree],
    y_pred: Tree,
) -> list[jax.Array]:
    """Returns the values of the metrics' variables after a batch."""
    x, y, weights = batch
    return model._update_metrics_variables(values, loss, x, y, y_pred, weights)[1]


@contextlib.contextmanager
def shaped(
    variables: Sequence[keras.Variable], shapes: Sequence[tuple[Any, ...]]
) -> Iterator[None]:
    """Gives variables other shapes, with dimensions that are not known, while code is traced."""
    before = [variable._shape for variable in variables]
    try:
        for variable, shape in zip(variables, shapes, strict=True):
            variable._shape = shape
        yield
    finally:
        for variable, shape in zip(variables, before, strict=True):
            variable._shape = shape
