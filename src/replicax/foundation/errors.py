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
    ├── CheckpointError         (OSError)              a checkpoint that cannot be written or read
    │   └── DataLossError                              its bytes are not those that were written
    ├── UnavailableError        (ConnectionError)      a task of the cluster that does not answer
    │   ├── PSUnavailableError                         a parameter server
    │   │   └── PSIncarnationError                     one that came back without its variables
    │   └── NoWorkersError                             no worker is left
    ├── DeadlineExceededError   (TimeoutError)         an answer that did not come in time
    ├── AddressInUseError       (OSError)              an address where another task listens
    ├── PermissionDeniedError   (PermissionError)      a caller without the right to ask
    ├── ResourceExhaustedError  (MemoryError)          more memory than there is, or than is allowed
    ├── FencedError             (RuntimeError)         a task that was declared dead, or replaced
    ├── ProtocolError           (RuntimeError)         bytes that are no message of ours
    ├── CancelledError          (RuntimeError)         a closure that will not run
    └── ClosureError            (RuntimeError)         a closure that failed
        ├── ClosureInputError                          what it needed could not be made
        ├── ClosureAbortedError                        it was given up while it ran
        └── PoisonClosureError                         it ended every worker that ran it

An error about an argument or a call has three parts: what was required, what was found, what to
do. An error about the state of the system (a task is gone, a wait timed out) has one text, which
says what happened, with the numbers, and what to do.
"""

from __future__ import annotations


class DistributeError(Exception):
    """Base of every error raised by replicax.

    Args:
      text: What was required; or the whole text, if it is the only part.
      found: What was found instead.
      advice: What to do about it.

    Attributes:
      required: What was required; empty if the error has one text.
      found: What was found, or the whole text.
      advice: What to do; empty if the error has one text.

    Example:
      >>> error = InvalidArgumentError("`axis` must be 0", "it is 3", "Pass 0.")
      >>> str(error), error.found
      ('`axis` must be 0, but it is 3. Pass 0.', 'it is 3')
    """

    required: str
    found: str
    advice: str

    def __init__(self, text: str = "", found: str = "", advice: str = "") -> None:
        if found:
            self.required, self.found, self.advice = text, found, advice
            text = f"{text.rstrip('.')}, but {found.rstrip('.')}. {advice}"
        else:
            self.required, self.found, self.advice = "", text, ""
        super().__init__(text)

    @property
    def parts(self) -> tuple[str, ...]:
        """What was required, what was found and what to do; empty for an error of one text."""
        return (self.required, self.found, self.advice) if self.required else ()


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


class UnavailableError(DistributeError, ConnectionError):
    """Raised when a task of the cluster does not answer."""


class PSUnavailableError(UnavailableError):
    """Raised when a parameter server does not answer."""


class PSIncarnationError(PSUnavailableError):
    """Raised when a parameter server was restarted and has lost its variables."""


class NoWorkersError(UnavailableError):
    """Raised when closures wait and no worker is left to run them."""


class DeadlineExceededError(DistributeError, TimeoutError):
    """Raised when an answer does not come in time."""


class AddressInUseError(DistributeError, OSError):
    """Raised when another task already listens at an address."""


class PermissionDeniedError(DistributeError, PermissionError):
    """Raised when a caller may not ask for what it asks for."""


class ResourceExhaustedError(DistributeError, MemoryError):
    """Raised when something needs more memory, or a longer message, than there may be."""


class FencedError(DistributeError, RuntimeError):
    """Raised in a task that was declared dead, or that another one has replaced."""


class ProtocolError(DistributeError, RuntimeError):
    """Raised for bytes that are not a valid message in this version of the protocol."""


class CancelledError(DistributeError, RuntimeError):
    """Raised for the result of a closure that was cancelled before it ran."""


class ClosureError(DistributeError, RuntimeError):
    """Raised when a closure failed on a worker with an error of its own type.

    Errors of Python and of replicax keep their type; this stands for all others.
    """


class ClosureInputError(ClosureError):
    """Raised when something that a closure needs could not be made on its worker."""


class ClosureAbortedError(ClosureError):
    """Raised when a running closure was given up after another one had failed."""


class PoisonClosureError(ClosureError):
    """Raised when a closure ended every worker process that tried to run it."""
