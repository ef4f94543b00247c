"""Placeholder until the builder is here."""

from __future__ import annotations

from typing import Any


class Dataset:
    """Placeholder."""

    batch_size: int | None
    drops_remainder: bool
    is_quick: bool
    files: tuple[str, ...] | None
    auto_shard_policy: Any
    with_files: Any
    shard_records: Any
    cardinality: Any
    __iter__: Any
