"""Datasets of replicax as the data of Keras models: elements are global batches."""

from __future__ import annotations

from typing import Any

import keras_programs as programs
import numpy as np
import pytest
from keras_programs import UNEVEN, keras
from peer_packages import import_peer

import replicax as rx

X, Y = programs.data_of("sequential", UNEVEN)
WEIGHTS = np.linspace(0.1, 2.0, UNEVEN).astype(np.float32)
BATCH = 8


def dataset(*arrays: Any) -> rx.data.Dataset:
    return rx.data.Dataset.from_tensor_slices(arrays or (X, Y)).batch(BATCH)


def new_model(name: str | None = "mirrored_2", **options: Any) -> tuple[keras.Model, Any]:
    with programs.scope_of(name) as strategy:
        return programs.compiled("lazy", **options), strategy


def fit(model: keras.Model, data: Any, **options: Any) -> programs.Outcome:
    history = model.fit(data, verbose=0, **options)
    return programs.outcome(model, history.history)


def by_arrays(**options: Any) -> programs.Outcome:
    model, _ = new_model(None)
    given = {"x": X, "y": Y, **options}
    history = model.fit(**given, batch_size=BATCH, shuffle=False, verbose=0)
    return programs.outcome(model, history.history)


def test_a_third_part_of_elements_is_the_weight_of_examples() -> None:
    model, _ = new_model()
    fit(model, dataset(X, Y, WEIGHTS)).require_equal(by_arrays(sample_weight=WEIGHTS))


def test_class_weights_apply_to_the_targets_of_a_dataset() -> None:
    labels = (Y > 0).astype(np.float32)
    model, strategy = new_model()
    data = strategy.experimental_distribute_dataset(dataset(X, labels))
    found = fit(model, data, class_weight={0: 0.5, 1: 3.0})
    found.require_equal(by_arrays(y=labels, class_weight={0: 0.5, 1: 3.0}))


def test_validation_data_may_be_a_dataset_of_either_kind() -> None:
    model, strategy = new_model()
    held_out = strategy.experimental_distribute_dataset(dataset(X[:5], Y[:5]))
    found = fit(model, dataset(), epochs=2, validation_data=held_out)
    wanted = by_arrays(epochs=2, validation_data=(X[:5], Y[:5]))
    found.require_equal(wanted)


def test_a_shuffled_dataset_begins_with_its_first_epoch_built_or_not() -> None:
    """Keras reads a batch to build a model; that batch is not lost."""
    found = []
    for is_built in (False, True):
        model, _ = new_model()
        if is_built:
            model.build((None, 4))
        rows = rx.data.Dataset.from_tensor_slices((X, Y)).shuffle(UNEVEN, seed=3)
        found.append(fit(model, rows.batch(BATCH), epochs=2))
    found[0].require_equal(found[1])
    orders = rx.data.Dataset.from_tensor_slices((X, Y)).shuffle(UNEVEN, seed=3).batch(BATCH)
    model, _ = new_model(None)
    for _ in range(2):
        for x, y in orders:
            model.train_on_batch(x, y)
    for i, weights in enumerate(model.get_weights()):
        np.testing.assert_allclose(found[0].arrays[f"weights {i}"], weights, rtol=1e-5, atol=1e-6)


def test_an_iterator_goes_on_where_it_stands_and_loses_nothing() -> None:
    model, strategy = new_model()
    endless = rx.data.Dataset.from_tensor_slices((X, Y)).repeat().batch(BATCH)
    iterator = iter(strategy.experimental_distribute_dataset(endless))
    next(iterator)
    found = fit(model, iterator, steps_per_epoch=2, epochs=2)
    plain = iter(endless)
    next(plain)
    wanted, _ = new_model(None)
    for _ in range(4):
        wanted.train_on_batch(*next(plain))
    for i, weights in enumerate(wanted.get_weights()):
        np.testing.assert_allclose(found.arrays[f"weights {i}"], weights, rtol=1e-5, atol=1e-6)
    following = [np.concatenate([np.asarray(p) for p in part.values]) for part in next(iterator)]
    for part, other in zip(following, next(plain), strict=True):
        np.testing.assert_array_equal(part, other)


def test_datasets_of_a_function_and_of_another_strategy_are_read_too() -> None:
    model, strategy = new_model()

    def own(context: rx.InputContext) -> rx.data.Dataset:
        size = context.get_per_replica_batch_size(BATCH)
        return rx.data.Dataset.from_tensor_slices((X[:16], Y[:16])).batch(size)

    data = strategy.distribute_datasets_from_function(own)
    found = fit(model, data, steps_per_epoch=2)
    found.require_equal(by_arrays(x=X[:16], y=Y[:16]))
    other = rx.MirroredStrategy(["CPU:3"], virtual_replicas=3)
    model, _ = new_model()
    fit(model, other.experimental_distribute_dataset(dataset())).require_equal(by_arrays())
    model, _ = new_model(None)
    fit(model, other.experimental_distribute_dataset(dataset())).require_equal(by_arrays())


def test_prediction_takes_inputs_alone_or_the_first_part_of_elements() -> None:
    model, strategy = new_model()
    wanted = model.predict(X, verbose=0)
    alone = rx.data.Dataset.from_tensor_slices(X).batch(BATCH)
    for data in (alone, dataset(), strategy.experimental_distribute_dataset(alone)):
        np.testing.assert_allclose(model.predict(data, verbose=0), wanted, rtol=1e-5, atol=1e-6)
    iterator = iter(strategy.experimental_distribute_dataset(alone))
    fresh, _ = new_model()
    found = fresh.predict(iterator, steps=3, verbose=0)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_mistakes_about_datasets_are_errors_that_say_what_to_do() -> None:
    model, strategy = new_model()
    with pytest.raises(ValueError, match="`y` was given beside"):
        model.fit(dataset(), Y, verbose=0)
    with pytest.raises(ValueError, match="`batch_size` was given beside"):
        model.evaluate(dataset(), batch_size=4, verbose=0)
    with pytest.raises(ValueError, match="no `batch` step"):
        model.fit(rx.data.Dataset.from_tensor_slices((X, Y)), verbose=0)
    endless = rx.data.Dataset.from_tensor_slices((X, Y)).repeat().batch(BATCH)
    for data in (endless, strategy.experimental_distribute_dataset(endless)):
        with pytest.raises(ValueError, match="`steps_per_epoch`"):
            model.fit(data, verbose=0)
    fit(model, dataset())


@pytest.mark.slow
@pytest.mark.timeout(900)  # the environment may have to be installed
@pytest.mark.parametrize("name", programs.STRATEGY_NAMES)
def test_a_torch_data_loader_is_read_under_every_strategy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = import_peer(monkeypatch, "torch")
    tensors = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    loader = torch.utils.data.DataLoader(tensors, batch_size=BATCH)
    model, _ = new_model(name)
    fit(model, loader, shuffle=False).require_equal(by_arrays())


@pytest.mark.slow
@pytest.mark.timeout(900)  # the environment may have to be installed
@pytest.mark.parametrize("name", programs.STRATEGY_NAMES)
def test_a_tf_data_dataset_is_read_under_every_strategy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tf = import_peer(monkeypatch, "tensorflow")
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    model, _ = new_model(name)
    fit(model, data, shuffle=False).require_equal(by_arrays())
