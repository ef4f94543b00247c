"""The names of Keras that are not public and that `tf.keras` needs; no other module has them."""

from __future__ import annotations

from typing import Any

import keras
from keras.src import activations, backend, constraints, initializers, regularizers
from keras.src.layers.preprocessing import discretization, normalization
from keras.src.legacy import backend as legacy_backend
from keras.src.legacy import layers as legacy_layers
from keras.src.legacy.saving import legacy_h5_format
from keras.src.losses.losses import LossFunctionWrapper as LossFunctionWrapper
from keras.src.metrics.reduction_metrics import MeanMetricWrapper as MeanMetricWrapper
from keras.src.trainers import data_adapters as data_adapters
from keras.src.utils import (
    dataset_utils,
    image_dataset_utils,
    text_dataset_utils,
    timeseries_dataset_utils,
    tracking,
)
from keras.src.utils.module_utils import h5py

from replicax.tf.keras.argument_types import KerasObject, Value

# The modules whose `get` layers call with their arguments.
ACTIVATIONS, INITIALIZERS = activations, initializers
REGULARIZERS, CONSTRAINTS = regularizers, constraints
# The module whose `compute_output_spec` layers and models call.
BACKEND = backend
# The class that lists the variables and layers among the attributes of a layer.
Tracker = tracking.Tracker
# The modules that call functions of TensorFlow by the name `tf`.
LEGACY_MODULES = (legacy_backend, legacy_layers)
DATASET_MODULES = (
    image_dataset_utils,
    text_dataset_utils,
    timeseries_dataset_utils,
    discretization,
    normalization,
)
# The module of the functions that those call, and the one that reads images.
DATASET_FUNCTIONS, IMAGE_DATASETS = dataset_utils, image_dataset_utils

CURRENT_LEARNING_RATE = "_get_current_learning_rate"
SYMBOLIC_BUILD = "_symbolic_build"
WRITE_MODEL_SUMMARY = "_write_keras_model_summary"


def loss_tracker(model: keras.Model) -> Any:
    """Returns the mean of the losses of an epoch; None if the model is not compiled."""
    return model._loss_tracker


def compiled_loss(model: keras.Model) -> Any:
    """Returns the loss that was given to `compile`; None if there is none."""
    return model._compile_loss


def compiled_metrics(model: keras.Model) -> Any:
    """Returns the metrics that were given to `compile`; None if there are none."""
    return model._compile_metrics


def compute_loss(
    model: keras.Model, x: Value, y: Value, y_pred: Value, sample_weight: Value
) -> Any:
    """Returns the loss of a batch in training."""
    return model._compute_loss(x, y, y_pred, sample_weight, training=True)


def clear_losses(model: keras.Model) -> None:
    """Removes the losses that layers have added."""
    model._clear_losses()


def post_build(model: keras.Model) -> None:
    """Tells a model that all of its variables were made."""
    model._post_build()


def wrapped_function(owner: KerasObject) -> Any:
    """Returns the function of a loss or a metric that was made from one."""
    return owner.fn if isinstance(owner, LossFunctionWrapper) else owner._fn


def set_wrapped_function(owner: KerasObject, function: KerasObject) -> None:
    """Replaces the function of a loss or a metric that was made from one."""
    if isinstance(owner, LossFunctionWrapper):
        owner.fn = function
    else:
        owner._fn = function


def save_old_weights(model: keras.Model, path: str) -> None:
    """Writes the weights of a model as an HDF5 file of Keras 2."""
    with h5py.File(path, "w") as file:
        legacy_h5_format.save_weights_to_hdf5_group(file, model)


def summary_writer(callback: KerasObject) -> Any:
    """Returns the writer of a TensorBoard callback for training."""
    return callback._train_writer


def first_batch(iterator: KerasObject) -> Any:
    """Returns the first batch of an epoch, as Keras does to build a model."""
    for _, _, found in iterator:
        return found[0] if isinstance(found, list | tuple) else next(found)
    return None


def add_metric(layer: keras.layers.Layer, metric: keras.Metric) -> None:
    """Adds a metric to those of a layer, also after it was built."""
    layer._metrics.append(metric)


def rescale_split_sizes(
    left_size: float | None, right_size: float | None, num_rows: int
) -> tuple[int, int]:
    """Returns how many rows the two parts of a dataset have; either may be a share or None."""
    return dataset_utils._rescale_dataset_split_sizes(left_size, right_size, num_rows)
