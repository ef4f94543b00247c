"""Buckets of strings, by the hash functions that saved models depend on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from replicax.foundation import errors
from replicax.tf.dispatch import op
from replicax.tf.ops.operands import (
    Array,
    Value,
    integer,
    integers,
)
from replicax.tf.strings import fingerprints
from replicax.tf.strings.arguments import placed, strings_of

__all__ = ["to_hash_bucket", "to_hash_bucket_fast", "to_hash_bucket_strong"]


def _buckets(input: Value, num_buckets: Value, name: str, hashed: Callable[[bytes], int]) -> Array:
    strings, count = strings_of(input, name), integer(num_buckets, "num_buckets")
    if count < 1:
        raise errors.InvalidArgumentError(
            "`num_buckets` must be positive", f"it is {count}", "Pass the number of buckets."
        )
    found = [hashed(data) % count for data in strings.reshape(-1).tolist()]
    return placed(np.asarray(found, np.int64).reshape(strings.shape))


@op(differentiable=False)
def to_hash_bucket_fast(input: Value, num_buckets: Value, name: str | None = None) -> Array:
    """Returns a number from 0 to below `num_buckets` for each string, by FarmHash.

    >>> to_hash_bucket_fast(["Hello", "TensorFlow", "2.x"], 3).numpy().tolist()
    [0, 2, 2]
    """
    return _buckets(input, num_buckets, "to_hash_bucket_fast", fingerprints.fingerprint64)


@op(differentiable=False)
def to_hash_bucket(input: Value, num_buckets: Value, name: str | None = None) -> Array:
    """Returns a number from 0 to below `num_buckets` for each string, by MurmurHash."""
    return _buckets(input, num_buckets, "to_hash_bucket", fingerprints.murmur64)


@op(differentiable=False)
def to_hash_bucket_strong(
    input: Value, num_buckets: Value, key: Value, name: str | None = None
) -> Array:
    """Returns a number from 0 to below `num_buckets` for each string, by SipHash with a key."""
    pair = integers(key, "key")
    if len(pair) != 2:
        raise errors.InvalidArgumentError(
            "`key` must be two integers", f"it is {pair}", "Pass [1, 2]."
        )
    hashed = lambda data: fingerprints.siphash(data, (pair[0], pair[1]))  # noqa: E731
    return _buckets(input, num_buckets, "to_hash_bucket_strong", hashed)
