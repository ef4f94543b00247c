"""Datasets with the interface of tf.data, run by Grain."""

from replicax.foundation.public_names import show_as_public
from replicax.input.dataset.dataset import Dataset as Dataset
from replicax.input.dataset.elements import DatasetSpec as DatasetSpec
from replicax.input.dataset.options import AutoShardPolicy as AutoShardPolicy
from replicax.input.dataset.options import DistributeOptions as DistributeOptions
from replicax.input.dataset.options import Options as Options
from replicax.input.dataset.plan import AUTOTUNE as AUTOTUNE
from replicax.input.dataset.plan import INFINITE_CARDINALITY as INFINITE_CARDINALITY
from replicax.input.dataset.plan import UNKNOWN_CARDINALITY as UNKNOWN_CARDINALITY
from replicax.input.dataset.readers import ArrayRecordDataset as ArrayRecordDataset
from replicax.input.dataset.readers import FixedLengthRecordDataset as FixedLengthRecordDataset
from replicax.input.dataset.readers import TextLineDataset as TextLineDataset
from replicax.input.dataset.readers import TFRecordDataset as TFRecordDataset
from replicax.input.dataset.reading import DatasetIterator as DatasetIterator

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "ArrayRecordDataset",
    "AutoShardPolicy",
    "Dataset",
    "DatasetIterator",
    "DatasetSpec",
    "DistributeOptions",
    "FixedLengthRecordDataset",
    "Options",
    "TFRecordDataset",
    "TextLineDataset",
]


def __dir__() -> list[str]:
    return __all__


show_as_public(__name__)
