"""`rx.ray`: clusters on Ray, and its datasets; needs `pip install replicax[ray]`.

Imported when it is first used. Ray itself is imported when `RayCluster` is: nothing else of the
library imports it.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from replicax.foundation import errors
from replicax.ray.datasets import batches as batches

if TYPE_CHECKING:
    from replicax.launch.ray_cluster import RayCluster as RayCluster

__all__ = ["RayCluster", "batches"]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # which would take any name for an attribute

    def __getattr__(name: str) -> Any:
        if name != "RayCluster":
            raise AttributeError(f"module 'replicax.ray' has no attribute {name!r}")
        if importlib.util.find_spec("ray") is None:
            raise errors.MissingDependencyError(
                "`rx.ray.RayCluster` needs the package 'ray'",
                "it is not installed",
                "Run `pip install replicax[ray]`.",
            )
        return importlib.import_module("replicax.launch.ray_cluster").RayCluster
