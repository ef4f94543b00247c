"""`tf.data`: datasets whose functions run on the host, with tensors of NumPy arrays."""

from replicax.tf import namespaces as _namespaces

_TABLE = _namespaces.Table(
    names={
        "AUTOTUNE": "replicax.input.dataset.plan:AUTOTUNE",
        "INFINITE_CARDINALITY": "replicax.input.dataset.plan:INFINITE_CARDINALITY",
        "UNKNOWN_CARDINALITY": "replicax.input.dataset.plan:UNKNOWN_CARDINALITY",
        "Dataset": ".data.dataset:Dataset",
        "DatasetSpec": "replicax.input.dataset.elements:DatasetSpec",
        "FixedLengthRecordDataset": ".data.readers:FixedLengthRecordDataset",
        "Iterator": ".data.dataset:TensorIterator",
        "NumpyIterator": "replicax.input.dataset.reading:DatasetIterator",
        "Options": ".data.options:Options",
        "TFRecordDataset": ".data.readers:TFRecordDataset",
        "TextLineDataset": ".data.readers:TextLineDataset",
        "ThreadingOptions": ".data.options:ThreadingOptions",
        "make_one_shot_iterator": "builtins:iter",
    },
    children=("experimental",),
)

__getattr__, __dir__ = _namespaces.lookup("data", _TABLE, globals())
