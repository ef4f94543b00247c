"""How distributed values and variables look when printed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.foundation import jax_compat


def describe(value: Any) -> str:
    """Describes one component: arrays by shape, type and content, the rest by `repr`."""
    if isinstance(value, jax.Array):
        head = f"shape={value.shape}, dtype={value.dtype}"
        if jax_compat.is_traced(value):
            return f"<jax.Array: {head}, traced>"
        return f"<jax.Array: {head}, numpy={content(value)}>"
    return repr(value)


def content(value: Any) -> str:
    """Returns an array's content as NumPy prints it, scalars without the type's name."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        # NumPy has no keys.
        value = jax.random.key_data(value)
    array = np.asarray(value)
    if array.ndim == 0:
        return str(array[()])
    return repr(array)


def listing(names: Sequence[str], most: int = 8) -> str:
    """Returns names with commas between them, and the number of those that are left out.

    >>> listing(["a", "b", "c", "d"], most=2)
    'a, b, … (4 in all)'
    """
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])}, … ({len(names):,} in all)"


def count(number: int, noun: str) -> str:
    """Returns a number with its noun, such as "1 replica" or "1,024 replicas"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def public_name(kind: type) -> str:
    """Returns the name of a class as users write it: `rx.metrics.Mean`, and their own as it is."""
    package, *below = kind.__module__.split(".")
    is_public = package == "replicax" and len(below) < 2
    return ".".join(["rx", *below, kind.__name__]) if is_public else kind.__qualname__


def braces(kind: str, parts: Sequence[str]) -> str:
    """Returns `Kind:{ 0: …, 1: … }`, one replica a line."""
    lines = ",\n".join(f"  {i}: {part}" for i, part in enumerate(parts))
    return f"{kind}:{{\n{lines}\n}}"
