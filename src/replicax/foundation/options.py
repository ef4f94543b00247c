"""The enums and option tuples of the public API."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from replicax.foundation import errors


class ReduceOp(enum.Enum):
    """The reduction of values of several replicas.

    >>> ReduceOp("SUM")
    <ReduceOp.SUM: 'SUM'>
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @staticmethod
    def from_variable_aggregation(aggregation: VariableAggregation) -> ReduceOp:
        """Returns the reduction of a variable's aggregation.

        Raises:
          InvalidArgumentError: The aggregation is neither SUM nor MEAN.
        """
        if aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN):
            return ReduceOp(aggregation.name)
        raise errors.InvalidArgumentError(
            "A reduction needs VariableAggregation.SUM or MEAN",
            f"{aggregation} was given",
            "Pass ReduceOp.SUM or ReduceOp.MEAN.",
        )


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are synchronized.

    >>> import replicax as rx
    >>> rx.Variable(0.0, synchronization=rx.VariableSynchronization.ON_READ).synchronization.name
    'ON_READ'
    """

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"


class VariableAggregation(enum.Enum):
    """The aggregation of values that replicas write (or hold, for ON_READ).

    >>> import replicax as rx
    >>> rx.Variable(0.0, aggregation=rx.VariableAggregation.SUM).aggregation.name
    'SUM'
    """

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"


class RunOptions(NamedTuple):
    """Hints for `Strategy.run`; accepted for portability, without effect outside TPUs.

    >>> import replicax as rx
    >>> strategy = rx.OneDeviceStrategy("CPU:0")
    >>> strategy.run(lambda: 1, options=rx.RunOptions())
    1
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None


class CommunicationImplementation(enum.Enum):
    """The preferred collectives: RING is XLA's own all-reduce, NCCL needs GPUs.

    AUTO selects the fastest for the devices and for the size of the values.

    >>> CommunicationImplementation("RING")
    <CommunicationImplementation.RING: 'RING'>
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


class CommunicationOptions:
    """Hints for one reduction.

    Args:
      bytes_per_pack: Tensors are joined into packs of about this size; 0 lets the
        library choose.
      timeout_seconds: Of the options of a strategy: the time within which all workers must arrive
        at a collective, or at a call that they make together.
      implementation: A `CommunicationImplementation`.

    Raises:
      InvalidArgumentError: `bytes_per_pack` is negative, or `implementation` is not a member of
        its enum.

    >>> CommunicationOptions(bytes_per_pack=1 << 20).bytes_per_pack
    1048576
    """

    __slots__ = ("bytes_per_pack", "implementation", "timeout_seconds")

    def __init__(
        self,
        bytes_per_pack: int = 0,
        timeout_seconds: float | None = None,
        implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO,
    ) -> None:
        if bytes_per_pack < 0:
            raise errors.InvalidArgumentError(
                "`bytes_per_pack` must be 0 or more",
                f"it is {bytes_per_pack}",
                "Leave it out to let the library choose.",
            )
        if isinstance(implementation, str):
            implementation = implementation.upper()
        try:
            self.implementation = CommunicationImplementation(implementation)
        except ValueError:
            raise errors.InvalidArgumentError(
                "`implementation` must be AUTO, RING or NCCL",
                f"it is {implementation!r}",
                "Pass a member of rx.experimental.CommunicationImplementation.",
            ) from None
        self.bytes_per_pack = bytes_per_pack
        self.timeout_seconds = timeout_seconds

    def merge(self, newer: CommunicationOptions | None) -> CommunicationOptions:
        """Returns these options with the non-default values of `newer` on top."""
        if newer is None:
            return self
        auto = CommunicationImplementation.AUTO
        return CommunicationOptions(
            newer.bytes_per_pack or self.bytes_per_pack,
            self.timeout_seconds if newer.timeout_seconds is None else newer.timeout_seconds,
            self.implementation if newer.implementation is auto else newer.implementation,
        )

    def __repr__(self) -> str:
        return (
            f"CommunicationOptions(bytes_per_pack={self.bytes_per_pack}, "
            f"timeout_seconds={self.timeout_seconds}, implementation={self.implementation})"
        )


def resolve_reduce_op(reduce_op: ReduceOp | VariableAggregation | str) -> ReduceOp:
    """Returns the `ReduceOp` for an enum member or its name, in any case."""
    if isinstance(reduce_op, ReduceOp):
        return reduce_op
    if isinstance(reduce_op, VariableAggregation):
        return ReduceOp.from_variable_aggregation(reduce_op)
    if isinstance(reduce_op, str) and reduce_op.upper() in ReduceOp.__members__:
        return ReduceOp[reduce_op.upper()]
    raise errors.InvalidArgumentError(
        "`reduce_op`, the first argument, must be ReduceOp.SUM, ReduceOp.MEAN or one of "
        "their names",
        f"it is {reduce_op!r}"
        if isinstance(reduce_op, str)
        else f"it is a {type(reduce_op).__name__}",
        'Pass "SUM" or "MEAN" first, and the value after it.',
    )
