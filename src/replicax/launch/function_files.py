"""The files between a process that has a function run and the process that runs it."""

from __future__ import annotations

import signal

import msgspec

from replicax.protocol.messages import RemoteError

# Makes a process that runs a function print the stacks of all its threads.
SHOW_STACKS = signal.SIGUSR1


class FunctionCall(msgspec.Struct, frozen=True):
    """A pickled function with its arguments.

    Attributes:
      buffers: The pickle, and its out-of-band arrays.
      import_path: The `sys.path` of the process that pickled it.
      num_devices: The number of CPU devices; 0 for JAX's own default.
    """

    buffers: list[bytes]
    import_path: list[str]
    num_devices: int


class FunctionResult(msgspec.Struct, frozen=True):
    """What a function has returned or raised; reading it runs no code.

    Attributes:
      tree: The encoded value; None if it raised.
      buffers: The arrays of the value.
      error: What it raised; None if it returned.
    """

    tree: bytes | None
    buffers: list[bytes]
    error: RemoteError | None
