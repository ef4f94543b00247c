"""Every error that replicax raises: `DistributeError` and its subclasses.

The tree of them, with the Python error that each one also is, stands in
`replicax.foundation.errors`.
"""

from replicax.foundation.errors import (
    AddressInUseError,
    ArgumentTypeError,
    CancelledError,
    CheckpointError,
    ClosureAbortedError,
    ClosureError,
    ClosureInputError,
    ContextError,
    DataLossError,
    DeadlineExceededError,
    DistributeError,
    FencedError,
    InvalidArgumentError,
    MissingDependencyError,
    NotFoundError,
    NoWorkersError,
    OutOfRangeError,
    PermissionDeniedError,
    PoisonClosureError,
    ProtocolError,
    PSIncarnationError,
    PSUnavailableError,
    ResourceExhaustedError,
    StructureError,
    TracedValueError,
    TracingError,
    UnavailableError,
    UnsupportedError,
)
from replicax.foundation.public_names import show_as_public

__all__ = [
    "AddressInUseError",
    "ArgumentTypeError",
    "CancelledError",
    "CheckpointError",
    "ClosureAbortedError",
    "ClosureError",
    "ClosureInputError",
    "ContextError",
    "DataLossError",
    "DeadlineExceededError",
    "DistributeError",
    "FencedError",
    "InvalidArgumentError",
    "MissingDependencyError",
    "NoWorkersError",
    "NotFoundError",
    "OutOfRangeError",
    "PSIncarnationError",
    "PSUnavailableError",
    "PermissionDeniedError",
    "PoisonClosureError",
    "ProtocolError",
    "ResourceExhaustedError",
    "StructureError",
    "TracedValueError",
    "TracingError",
    "UnavailableError",
    "UnsupportedError",
]


def __dir__() -> list[str]:
    return __all__


show_as_public(__name__)
