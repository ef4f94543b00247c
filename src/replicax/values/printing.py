"""The printed form of distributed values and variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from replicax.foundation import jax_compat


def describe(value: object) -> str:
    """Describes one component: arrays by shape, type and content, the rest by `repr`."""
    if isinstance(value, jax.Array):
        head = f"shape={value.shape}, dtype={value.dtype}"
        if jax_compat.is_traced(value):
            return f"<jax.Array: {head}, traced>"
        return f"<jax.Array: {head}, numpy={content(value)}>"
    return repr(value)


def content(value: ArrayLike) -> str:
    """Returns an array's content as NumPy prints it, scalars without the type's name."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        # NumPy has no keys.
        value = jax.random.key_data(value)
    array = np.asarray(value)
    if array.ndim == 0:
        return str(array[()])
    return repr(array)


def preview(description: str, most: int = 300) -> str:
    """Returns the value at the end of a variable's description, cut to a cell of a table.

    >>> preview("<rx.Variable 'v:0' shape=() dtype=float32, numpy=3.0>")
    '3.0'
    """
    value = description.rpartition("numpy=")[2].removesuffix(">")
    return value if len(value) <= most else f"{value[:most]} …"


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


# Beyond so many replicas only the first and the last ones are printed.
_MOST_REPLICAS = 8


def braces(kind: str, num_replicas: int, describe_one: Callable[[int], str]) -> str:
    """Returns `Kind:{ 0: …, 1: … }`, one replica a line; of many replicas, eight.

    >>> len(braces("PerReplica", 1024, str).splitlines())
    11
    """
    numbers = list(range(num_replicas))
    lines = [f"  {i}: {describe_one(i)}" for i in shown(numbers)]
    if len(lines) < num_replicas:
        lines.insert(_MOST_REPLICAS // 2, f"  … ({num_replicas:,} in all)")
    inside = ",\n".join(lines)
    return f"{kind}:{{\n{inside}\n}}"


def shown(replicas: Sequence[Any]) -> list[Any]:
    """Returns those of a list of replicas that are printed."""
    if len(replicas) <= _MOST_REPLICAS:
        return list(replicas)
    half = _MOST_REPLICAS // 2
    return [*replicas[:half], *replicas[-half:]]
