"""Neural-network operations with distributed or sparse implementations."""

from replicax.foundation.public_names import show_as_public
from replicax.tracing.gradients import embedding_lookup as embedding_lookup
from replicax.tracing.sparse_lookup import embedding_lookup_sparse as embedding_lookup_sparse
from replicax.tracing.sparse_lookup import (
    safe_embedding_lookup_sparse as safe_embedding_lookup_sparse,
)
from replicax.training.losses import compute_average_loss as compute_average_loss
from replicax.training.losses import scale_regularization_loss as scale_regularization_loss

__all__ = [
    "compute_average_loss",
    "embedding_lookup",
    "embedding_lookup_sparse",
    "safe_embedding_lookup_sparse",
    "scale_regularization_loss",
]


def __dir__() -> list[str]:
    return __all__


show_as_public(__name__)
