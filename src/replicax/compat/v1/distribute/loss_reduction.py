"""`get_loss_reduction`: how the losses of replicas combine to one loss."""

from __future__ import annotations

from replicax.foundation.options import ReduceOp


def get_loss_reduction() -> ReduceOp:
    """Returns the reduction that combines the losses of replicas: SUM.

    Only Estimator averaged them. Here, each replica computes its part of the loss over the global
    batch, for which `rx.nn.compute_average_loss` divides by the global batch size.

    >>> get_loss_reduction()
    <ReduceOp.SUM: 'SUM'>
    """
    return ReduceOp.SUM
