"""The name of a function that travels: the SHA-256 of its buffers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any


def of_buffers(buffers: Iterable[Any]) -> str:
    """Returns the SHA-256 of some buffers, in hexadecimal.

    The size of each goes in before its bytes, so that no two lists share a name.

    >>> of_buffers([b"ab", b"c"]) == of_buffers([b"a", b"bc"])
    False
    """
    digest = hashlib.sha256()
    for buffer in buffers:
        view = memoryview(buffer)
        digest.update(view.nbytes.to_bytes(8, "little"))
        digest.update(view)
    return digest.hexdigest()
