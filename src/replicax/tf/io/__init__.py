"""`tf.io`: files, TFRecords, serialized examples and images on disk."""

from replicax.tf import namespaces as _namespaces

_TABLE = _namespaces.Table(modules=(".io.parsing", ".io.files", ".io.images"), children=("gfile",))

__getattr__, __dir__ = _namespaces.lookup("io", _TABLE, globals())
