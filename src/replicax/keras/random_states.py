"""The random states that Keras shuffles with: workers that have the chief's see one order."""

from __future__ import annotations

import random

import msgspec
import numpy as np


class RandomStates(msgspec.Struct, frozen=True):
    """The states of `numpy.random` and `random`, in a form that is sent.

    >>> before = current()
    >>> drawn = np.random.permutation(4).tolist(), random.random()
    >>> before == current()
    False
    >>> before.set()
    >>> drawn == (np.random.permutation(4).tolist(), random.random())
    True
    """

    key: bytes
    position: int
    has_gauss: int
    cached_gaussian: float
    version: int
    words: tuple[int, ...]
    gauss_next: float | None

    def set(self) -> None:
        """Makes both generators continue from here."""
        key = np.frombuffer(self.key, np.uint32)
        np.random.set_state(("MT19937", key, self.position, self.has_gauss, self.cached_gaussian))
        random.setstate((self.version, self.words, self.gauss_next))


def current() -> RandomStates:
    """Returns the states of this process."""
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    inner = state["state"]
    return RandomStates(
        np.asarray(inner["key"], np.uint32).tobytes(),
        int(inner["pos"]),
        int(state["has_gauss"]),
        float(state["gauss"]),
        *random.getstate(),
    )
