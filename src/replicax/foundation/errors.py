"""Every error that a user can meet.

    DistributeError
    ├── ContextError            (RuntimeError)         right call, wrong place
    │   └── TracingError                               the compiler cannot see what was asked
    ├── InvalidArgumentError    (ValueError)           an argument's value
    │   └── StructureError                             two structures that had to match
    ├── ArgumentTypeError       (TypeError)            an argument's type
    │   └── TracedValueError                           a compiled value used as a Python value
    ├── UnsupportedError        (NotImplementedError)  known, and not offered here
    ├── MissingDependencyError  (ImportError)          a package that this call needs
    ├── NotFoundError           (LookupError)          a file, checkpoint or name that is not there
    ├── OutOfRangeError         (IndexError)           there is no more data
    └── CheckpointError         (OSError)              a checkpoint that cannot be written or read
        └── DataLossError                              its bytes are not those that were written

Each message has three parts: what was required, what was found, what to do.
"""

from __future__ import annotations


class DistributeError(Exception):
    """Base of every error raised by replicax."""


class ContextError(DistributeError, RuntimeError):
    """Raised when a call is made in the wrong context or under the wrong strategy."""


class TracingError(ContextError):
    """Raised when compiled code reads or writes a variable where it cannot be seen."""


class InvalidArgumentError(DistributeError, ValueError):
    """Raised for an argument whose value breaks a rule."""


class StructureError(InvalidArgumentError):
    """Raised when nested structures that must match do not."""


class ArgumentTypeError(DistributeError, TypeError):
    """Raised for an argument of the wrong type."""


class TracedValueError(ArgumentTypeError):
    """Raised when compiled code uses a traced value as a Python int, bool or array."""


class UnsupportedError(DistributeError, NotImplementedError):
    """Raised for an operation that is known but not offered for this kind of value."""


class MissingDependencyError(DistributeError, ImportError):
    """Raised when a call needs a package that is not installed."""


class NotFoundError(DistributeError, LookupError):
    """Raised for a file, checkpoint or name that does not exist."""


class OutOfRangeError(DistributeError, IndexError):
    """Raised when an iterator has no element left."""


class CheckpointError(DistributeError, OSError):
    """Raised when a checkpoint cannot be written or read."""


class DataLossError(CheckpointError):
    """Raised when a checkpoint does not hold the bytes that were written."""


def message(required: str, found: str, todo: str) -> str:
    """Joins the three parts of an error message."""
    return f"{required.rstrip('.')}, but {found.rstrip('.')}. {todo}"
