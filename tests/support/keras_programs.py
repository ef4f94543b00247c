"""Small Keras models, data and sources, and what training them under a strategy comes to."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np
from strategies_under_test import STRATEGIES

import replicax as rx

# After replicax, which chooses the backend.
import keras  # isort: skip
from keras import layers

# Strategies of one process that tests compare with Keras alone.
STRATEGY_NAMES = ("one_device", "mirrored_2", "virtual_2", "central_2")
BATCH = 8
# Rows whose last batch is whole, and rows whose last batch has an odd size.
EVEN, UNEVEN = 24, 21
Data = tuple[Any, Any]


def scope_of(name: str | None) -> contextlib.AbstractContextManager[Any]:
    """Returns the scope of a new strategy, or one without effect if there is no name."""
    return contextlib.nullcontext() if name is None else STRATEGIES[name]().scope()


class Subclassed(keras.Model):
    """A model whose layers are built when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(3, activation="tanh")
        self.out = layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x))


def sequential() -> keras.Model:
    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(3, activation="relu"), layers.Dense(1)]
    )


def lazy() -> keras.Model:
    return keras.Sequential([layers.Dense(3, activation="relu"), layers.Dense(1)])


def functional() -> keras.Model:
    x = keras.Input((4,))
    hidden = layers.Dense(3, activation="tanh")(x)
    return keras.Model(x, layers.Dense(1)(layers.Concatenate()([hidden, x])))


def batch_norm() -> keras.Model:
    parts = [layers.Dense(3), layers.BatchNormalization(momentum=0.5), layers.Dense(1)]
    return keras.Sequential([keras.Input((4,)), *parts])


def dropout() -> keras.Model:
    parts = [layers.Dense(8), layers.Dropout(0.5, seed=3), layers.Dense(1)]
    return keras.Sequential([keras.Input((4,)), *parts])


def lstm() -> keras.Model:
    return keras.Sequential(
        [keras.Input((4,)), layers.Reshape((2, 2)), layers.LSTM(3), layers.Dense(1)]
    )


def embedding() -> keras.Model:
    parts = [layers.Embedding(5, 2), layers.Flatten(), layers.Dense(1)]
    return keras.Sequential([keras.Input((4,), dtype="int32"), *parts])


def several() -> keras.Model:
    """Two inputs, by name, and two outputs, by name."""
    a, b = keras.Input((4,), name="a"), keras.Input((2,), name="b")
    joined = layers.Concatenate()([layers.Dense(3)(a), b])
    outputs = {"p": layers.Dense(1, name="p")(joined), "q": layers.Dense(2, name="q")(joined)}
    return keras.Model({"a": a, "b": b}, outputs)


def pair() -> keras.Model:
    """Two inputs in a list."""
    a, b = keras.Input((4,)), keras.Input((2,))
    return keras.Model([a, b], layers.Dense(1)(layers.Concatenate()([a, b])))


MODELS: dict[str, Callable[[], keras.Model]] = {
    "sequential": sequential,
    "lazy": lazy,
    "functional": functional,
    "subclassed": Subclassed,
    "batch_norm": batch_norm,
    "dropout": dropout,
    "lstm": lstm,
    "embedding": embedding,
    "several": several,
    "pair": pair,
}


def data_of(model: str, rows: int) -> Data:
    """Returns inputs and targets for a model."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 4)).astype(np.float32)
    second = rng.normal(size=(rows, 2)).astype(np.float32)
    y = x.sum(1, keepdims=True)
    if model == "embedding":
        return rng.integers(0, 5, (rows, 4)).astype(np.int32), y
    if model == "several":
        return {"a": x, "b": second}, {"p": y, "q": second * 2}
    return ((x, second), y) if model == "pair" else (x, y)


class _Batches(keras.utils.PyDataset):
    """Batches of arrays, as a `keras.utils.PyDataset`."""

    def __init__(self, data: Data) -> None:
        super().__init__()
        self._data = data

    def __len__(self) -> int:
        return -(-_num_rows(self._data) // BATCH)

    def __getitem__(self, index: int) -> Data:
        return _rows(self._data, slice(index * BATCH, (index + 1) * BATCH))


def _num_rows(data: Any) -> int:
    return len(keras.tree.flatten(data)[0])


def _rows(data: Any, rows: Any) -> Any:
    return keras.tree.map_structure(lambda leaf: leaf[rows], data)


def _forever(data: Data) -> Iterator[Data]:
    while True:
        yield from (_Batches(data)[i] for i in range(len(_Batches(data))))


def _arguments(source: str, data: Data, strategy: Any) -> dict[str, Any]:
    """Returns arguments of fit, evaluate and predict that give the data in one form."""
    steps = -(-_num_rows(data) // BATCH)
    if source == "numpy":
        inputs = list(data[0]) if isinstance(data[0], tuple) else data[0]
        return {"x": inputs, "y": data[1], "batch_size": BATCH}
    if source == "py_dataset":
        return {"x": _Batches(data)}
    if source == "generator":
        return {"x": _forever(data), "steps": steps}
    if source == "grain":
        rows = [_rows(data, i) for i in range(_num_rows(data))]
        # Without Grain's threads, which end when their iterators are collected.
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        return {"x": grain.MapDataset.source(rows).batch(BATCH).to_iter_dataset(options)}
    dataset = rx.data.Dataset.from_tensor_slices(data).batch(BATCH)
    if source == "rx_data":
        return {"x": dataset}
    assert source == "distributed"
    own = strategy or rx.get_strategy()
    return {"x": own.experimental_distribute_dataset(dataset)}


SOURCES = ("numpy", "py_dataset", "generator", "grain", "rx_data", "distributed")


@dataclasses.dataclass
class Outcome:
    """What a model came to: arrays by name."""

    arrays: dict[str, np.ndarray]

    def require_equal(self, other: Outcome, tolerance: float = 2e-5) -> None:
        assert self.arrays.keys() == other.arrays.keys()
        for name, found in self.arrays.items():
            np.testing.assert_allclose(
                found, other.arrays[name], rtol=tolerance, atol=tolerance, err_msg=name
            )


def outcome(model: keras.Model, *trees: Any) -> Outcome:
    """Returns the weights of a model, of its optimizer, and further arrays."""
    found = {f"weights {i}": array for i, array in enumerate(model.get_weights())}
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        for i, variable in enumerate(optimizer.variables):
            found[f"optimizer {i}"] = keras.ops.convert_to_numpy(variable.value)
    for i, tree in enumerate(trees):
        for path, leaf in keras.tree.flatten_with_path(tree):
            found[f"tree {i} {path}"] = np.asarray(leaf)
    return Outcome(found)


def compiled(name: str, **options: Any) -> keras.Model:
    """Returns a model with fixed initial weights, compiled with SGD."""
    keras.utils.set_random_seed(1)
    model = MODELS[name]()
    options.setdefault("optimizer", keras.optimizers.SGD(0.05))
    options.setdefault("loss", "mse")
    model.compile(**options)
    return model


def run_whole(strategy: str | None, model_name: str, source: str, rows: int) -> Outcome:
    """Fits a model for three epochs, evaluates it, and predicts."""
    scope = scope_of(strategy)
    with scope as used:
        model = compiled(model_name, metrics=None if model_name == "several" else ["mae"])

    def arguments(steps: str) -> dict[str, Any]:
        found = _arguments(source, data_of(model_name, rows), used)
        if "steps" in found:
            found[steps] = found.pop("steps")
        return found

    history = model.fit(**arguments("steps_per_epoch"), epochs=3, shuffle=False, verbose=0)
    scores = model.evaluate(**arguments("steps"), verbose=0, return_dict=True)
    given = arguments("steps")
    given.pop("y", None)
    return outcome(model, history.history, scores, model.predict(**given, verbose=0))


@functools.cache
def reference(model_name: str, rows: int) -> Outcome:
    """Returns what Keras alone comes to, with arrays."""
    return run_whole(None, model_name, "numpy", rows)
