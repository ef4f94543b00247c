"""`tf.strings`: strings of bytes, on the host.

A tensor of strings is a NumPy array of `bytes` objects: devices have no strings. A result whose
rows have different lengths would be a ragged tensor, so some functions take one string at a time.
"""

from replicax.tf import namespaces as _namespaces

_TABLE = _namespaces.Table(
    modules=(
        ".strings.parts",
        ".strings.numbers",
        ".strings.patterns",
        ".strings.hashing",
        ".strings.characters",
    )
)

__getattr__, __dir__ = _namespaces.lookup("strings", _TABLE, globals())
