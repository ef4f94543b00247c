"""`rx.ray`: clusters on Ray, and its datasets; needs `pip install replicax[ray]`.

Imported when it is first used; nothing else of the library imports Ray.
"""

from __future__ import annotations

import importlib.util

from replicax.foundation import errors

if importlib.util.find_spec("ray") is None:
    raise errors.MissingDependencyError(
        "`rx.ray` needs the package 'ray'",
        "it is not installed",
        "Run `pip install replicax[ray]`.",
    )

from replicax.launch.ray_cluster import RayCluster as RayCluster
from replicax.ray.datasets import batches as batches

__all__ = ["RayCluster", "batches"]


def __dir__() -> list[str]:
    return __all__
