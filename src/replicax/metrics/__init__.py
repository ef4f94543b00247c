"""Metrics with state per replica, combined when it is read."""

from replicax.foundation.public_names import show_as_public
from replicax.training.metrics.confusion import FalseNegatives as FalseNegatives
from replicax.training.metrics.confusion import FalsePositives as FalsePositives
from replicax.training.metrics.confusion import Precision as Precision
from replicax.training.metrics.confusion import Recall as Recall
from replicax.training.metrics.confusion import TrueNegatives as TrueNegatives
from replicax.training.metrics.confusion import TruePositives as TruePositives
from replicax.training.metrics.curves import AUC as AUC
from replicax.training.metrics.curves import PrecisionAtRecall as PrecisionAtRecall
from replicax.training.metrics.curves import RecallAtPrecision as RecallAtPrecision
from replicax.training.metrics.curves import SensitivityAtSpecificity as SensitivityAtSpecificity
from replicax.training.metrics.curves import SpecificityAtSensitivity as SpecificityAtSensitivity
from replicax.training.metrics.means import Accuracy as Accuracy
from replicax.training.metrics.means import BinaryAccuracy as BinaryAccuracy
from replicax.training.metrics.means import CategoricalAccuracy as CategoricalAccuracy
from replicax.training.metrics.means import Mean as Mean
from replicax.training.metrics.means import MeanAbsoluteError as MeanAbsoluteError
from replicax.training.metrics.means import MeanSquaredError as MeanSquaredError
from replicax.training.metrics.means import MeanTensor as MeanTensor
from replicax.training.metrics.means import RootMeanSquaredError as RootMeanSquaredError
from replicax.training.metrics.means import (
    SparseCategoricalAccuracy as SparseCategoricalAccuracy,
)
from replicax.training.metrics.means import (
    SparseTopKCategoricalAccuracy as SparseTopKCategoricalAccuracy,
)
from replicax.training.metrics.means import Sum as Sum
from replicax.training.metrics.means import TopKCategoricalAccuracy as TopKCategoricalAccuracy
from replicax.training.metrics.metric import Metric as Metric
from replicax.training.metrics.overlap import BinaryIoU as BinaryIoU
from replicax.training.metrics.overlap import F1Score as F1Score
from replicax.training.metrics.overlap import FBetaScore as FBetaScore
from replicax.training.metrics.overlap import IoU as IoU
from replicax.training.metrics.overlap import MeanIoU as MeanIoU
from replicax.training.metrics.overlap import OneHotIoU as OneHotIoU
from replicax.training.metrics.overlap import OneHotMeanIoU as OneHotMeanIoU

__all__ = [
    "AUC",
    "Accuracy",
    "BinaryAccuracy",
    "BinaryIoU",
    "CategoricalAccuracy",
    "F1Score",
    "FBetaScore",
    "FalseNegatives",
    "FalsePositives",
    "IoU",
    "Mean",
    "MeanAbsoluteError",
    "MeanIoU",
    "MeanSquaredError",
    "MeanTensor",
    "Metric",
    "OneHotIoU",
    "OneHotMeanIoU",
    "Precision",
    "PrecisionAtRecall",
    "Recall",
    "RecallAtPrecision",
    "RootMeanSquaredError",
    "SensitivityAtSpecificity",
    "SparseCategoricalAccuracy",
    "SparseTopKCategoricalAccuracy",
    "SpecificityAtSensitivity",
    "Sum",
    "TopKCategoricalAccuracy",
    "TrueNegatives",
    "TruePositives",
]


def __dir__() -> list[str]:
    return __all__


show_as_public(__name__)
