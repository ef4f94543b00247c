"""`tf.errors`: TensorFlow's error names and codes, as the errors that replicax raises.

An `except tf.errors.OutOfRangeError:` catches what replicax raises in the same situation. Names
without a counterpart are classes of their own, for programs that raise them.
"""

from __future__ import annotations

from replicax.foundation.errors import (
    CancelledError,
    DataLossError,
    DeadlineExceededError,
    DistributeError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnavailableError,
)
from replicax.foundation.errors import ContextError as FailedPreconditionError
from replicax.foundation.errors import TracedValueError as OperatorNotAllowedInGraphError
from replicax.foundation.errors import UnsupportedError as UnimplementedError
from replicax.tf import namespaces

# The base of all: `except tf.errors.OpError` catches every error of replicax.
OpError = DistributeError


class AbortedError(DistributeError, RuntimeError):
    """An operation that was aborted, such as by a preemption.

    >>> issubclass(AbortedError, OpError)
    True
    """


class AlreadyExistsError(DistributeError, FileExistsError):
    """A file or object that exists already.

    >>> issubclass(AlreadyExistsError, FileExistsError)
    True
    """


class InternalError(DistributeError, RuntimeError):
    """An error inside the runtime.

    >>> issubclass(InternalError, RuntimeError)
    True
    """


class UnauthenticatedError(DistributeError, PermissionError):
    """A request without valid credentials.

    >>> issubclass(UnauthenticatedError, PermissionError)
    True
    """


class UnknownError(DistributeError, RuntimeError):
    """An error of an unknown kind.

    >>> issubclass(UnknownError, OpError)
    True
    """


OK = 0
CANCELLED = 1
UNKNOWN = 2
INVALID_ARGUMENT = 3
DEADLINE_EXCEEDED = 4
NOT_FOUND = 5
ALREADY_EXISTS = 6
PERMISSION_DENIED = 7
RESOURCE_EXHAUSTED = 8
FAILED_PRECONDITION = 9
ABORTED = 10
OUT_OF_RANGE = 11
UNIMPLEMENTED = 12
INTERNAL = 13
UNAVAILABLE = 14
DATA_LOSS = 15
UNAUTHENTICATED = 16

# From the narrowest class, as several inherit from others.
_CODES: dict[type[Exception], int] = {
    DataLossError: DATA_LOSS,
    CancelledError: CANCELLED,
    InvalidArgumentError: INVALID_ARGUMENT,
    DeadlineExceededError: DEADLINE_EXCEEDED,
    NotFoundError: NOT_FOUND,
    AlreadyExistsError: ALREADY_EXISTS,
    PermissionDeniedError: PERMISSION_DENIED,
    ResourceExhaustedError: RESOURCE_EXHAUSTED,
    FailedPreconditionError: FAILED_PRECONDITION,
    AbortedError: ABORTED,
    OutOfRangeError: OUT_OF_RANGE,
    UnimplementedError: UNIMPLEMENTED,
    InternalError: INTERNAL,
    UnavailableError: UNAVAILABLE,
    UnauthenticatedError: UNAUTHENTICATED,
}


def error_code(error: Exception) -> int:
    """Returns the code of an error, such as `tf.errors.NOT_FOUND`.

    >>> error_code(NotFoundError("a file is missing")) == NOT_FOUND
    True
    """
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), UNKNOWN)


__all__ = [
    "ABORTED",
    "ALREADY_EXISTS",
    "CANCELLED",
    "DATA_LOSS",
    "DEADLINE_EXCEEDED",
    "FAILED_PRECONDITION",
    "INTERNAL",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "OK",
    "OUT_OF_RANGE",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
    "UNIMPLEMENTED",
    "UNKNOWN",
    "AbortedError",
    "AlreadyExistsError",
    "CancelledError",
    "DataLossError",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "InternalError",
    "InvalidArgumentError",
    "NotFoundError",
    "OpError",
    "OperatorNotAllowedInGraphError",
    "OutOfRangeError",
    "PermissionDeniedError",
    "ResourceExhaustedError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "UnknownError",
    "error_code",
]

__getattr__ = namespaces.refusing(__name__)
