"""The names of TensorFlow 2 that programs use, on JAX: `import replicax.tf as tf`.

Names are found when they are first used, so the import is quick, and Keras is imported by the
programs that use it. A name that is not offered says what to write instead.

>>> import replicax.tf as tf
>>> tf.reduce_sum(tf.constant([1.0, 2.0])).numpy()
np.float32(3.0)
"""

import sys as _sys

from replicax.foundation import after_import as _after_import
from replicax.foundation import lazy as _lazy
from replicax.tf import namespaces as _namespaces
from replicax.tf import tables as _tables

# The version of TensorFlow whose names and rules these are.
__version__ = "2.21.0"

_namespaces.install(_tables.tables)
__getattr__, __dir__ = _namespaces.lookup("", _tables.tables()[""], globals())
_namespace_names = _tables.tables()[""].children
for _name in [name for name in vars() if f"{__name__}.{name}" in _sys.modules]:
    # Set by the imports above.
    del globals()[_name]
_sys.modules[__name__].__class__ = _namespaces.Package

_tape_keras = _lazy.module("replicax.tf.tape_keras")
_keras_changes = _lazy.module("replicax.tf.keras.changes")


def _install_in_keras() -> None:
    _tape_keras.install()
    _keras_changes.install()


# Layers, losses and metrics take tensors as soon as Keras is there. It may be there already, so
# this does not belong in a module that they import.
_after_import.call("keras", lambda: None, _install_in_keras)
