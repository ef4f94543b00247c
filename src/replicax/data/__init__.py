"""Datasets for people who come from tf.data: a thin layer over Grain."""

from replicax.input.builder import Dataset as Dataset
from replicax.input.builder_elements import DatasetSpec as DatasetSpec
from replicax.input.builder_iterator import DatasetIterator as DatasetIterator
from replicax.input.builder_plan import AUTOTUNE as AUTOTUNE
from replicax.input.builder_plan import INFINITE_CARDINALITY as INFINITE_CARDINALITY
from replicax.input.builder_plan import UNKNOWN_CARDINALITY as UNKNOWN_CARDINALITY
from replicax.input.builder_readers import ArrayRecordDataset as ArrayRecordDataset
from replicax.input.builder_readers import FixedLengthRecordDataset as FixedLengthRecordDataset
from replicax.input.builder_readers import TextLineDataset as TextLineDataset
from replicax.input.builder_readers import TFRecordDataset as TFRecordDataset
from replicax.input.options import AutoShardPolicy as AutoShardPolicy
from replicax.input.options import DistributeOptions as DistributeOptions
from replicax.input.options import Options as Options

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
