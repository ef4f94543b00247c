"""Metrics that count on every replica and are combined when they are read."""

from replicax.training.metrics import Metric as Metric
from replicax.training.metrics_accuracy import Accuracy as Accuracy
from replicax.training.metrics_accuracy import BinaryAccuracy as BinaryAccuracy
from replicax.training.metrics_accuracy import CategoricalAccuracy as CategoricalAccuracy
from replicax.training.metrics_accuracy import (
    SparseCategoricalAccuracy as SparseCategoricalAccuracy,
)
from replicax.training.metrics_accuracy import (
    SparseTopKCategoricalAccuracy as SparseTopKCategoricalAccuracy,
)
from replicax.training.metrics_accuracy import TopKCategoricalAccuracy as TopKCategoricalAccuracy
from replicax.training.metrics_confusion import AUC as AUC
from replicax.training.metrics_confusion import Precision as Precision
from replicax.training.metrics_confusion import Recall as Recall
from replicax.training.metrics_means import Mean as Mean
from replicax.training.metrics_means import MeanAbsoluteError as MeanAbsoluteError
from replicax.training.metrics_means import MeanSquaredError as MeanSquaredError
from replicax.training.metrics_means import MeanTensor as MeanTensor
from replicax.training.metrics_means import RootMeanSquaredError as RootMeanSquaredError
from replicax.training.metrics_means import Sum as Sum

__all__ = [
    "AUC",
    "Accuracy",
    "BinaryAccuracy",
    "CategoricalAccuracy",
    "Mean",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "MeanTensor",
    "Metric",
    "Precision",
    "Recall",
    "RootMeanSquaredError",
    "SparseCategoricalAccuracy",
    "SparseTopKCategoricalAccuracy",
    "Sum",
    "TopKCategoricalAccuracy",
]


def __dir__() -> list[str]:
    return __all__
