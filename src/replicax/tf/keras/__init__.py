"""`tf.keras`: the names of Keras 3, and those of earlier versions that programs still use.

Importing this package imports Keras. docs/guides/tf-keras.md lists what differs.
"""

from replicax.tf.keras import namespace as _namespace

_namespace.install()
__getattr__, __dir__ = _namespace.lookup("", globals())
