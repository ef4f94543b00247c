"""Resolvers, which find the tasks of a cluster in each environment."""

from replicax.cluster_resolver.base import ClusterResolver as ClusterResolver
from replicax.cluster_resolver.gce import GCEClusterResolver as GCEClusterResolver
from replicax.cluster_resolver.kubernetes import (
    KubernetesClusterResolver as KubernetesClusterResolver,
)
from replicax.cluster_resolver.kubernetes import (
    KubernetesExecutableLocation as KubernetesExecutableLocation,
)
from replicax.cluster_resolver.simple import SimpleClusterResolver as SimpleClusterResolver
from replicax.cluster_resolver.slurm import SlurmClusterResolver as SlurmClusterResolver
from replicax.cluster_resolver.tf_config import TFConfigClusterResolver as TFConfigClusterResolver
from replicax.cluster_resolver.tpu import TPUClusterResolver as TPUClusterResolver
from replicax.cluster_resolver.union import UnionResolver as UnionResolver
from replicax.foundation.public_names import show_as_public

# The name that older programs use.
UnionClusterResolver = UnionResolver

__all__ = [
    "ClusterResolver",
    "GCEClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "UnionClusterResolver",
    "UnionResolver",
]


def __dir__() -> list[str]:
    return __all__


show_as_public(__name__)
