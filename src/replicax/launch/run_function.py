"""Runs a pickled function in a process of its own: `python -m replicax.launch.run_function`.

The parent process has written the function, and reads what it returns: a tree of arrays, or the
description of an error, so that the parent unpickles nothing.
"""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path

import msgspec

from replicax.foundation import devices, errors
from replicax.launch.function_files import SHOW_STACKS, FunctionCall, FunctionResult
from replicax.protocol import trees
from replicax.worker import error_reports, functions


def main(call_path: str, result_path: str) -> None:
    """Calls the function of one file, and writes its result to another.

    An exception is written down and then propagates: it decides the exit code of the process.
    """
    faulthandler.enable()
    faulthandler.register(SHOW_STACKS, all_threads=True)
    call = msgspec.msgpack.decode(Path(call_path).read_bytes(), type=FunctionCall)
    sys.path[:] = [*dict.fromkeys([*sys.path, *call.import_path])]
    if call.num_devices:
        devices.set_virtual_cpu_devices(call.num_devices)
    result = Path(result_path)
    try:
        function, args, kwargs = functions.unpickle(call.buffers, _refuse)
        value = function(*args, **kwargs)
        encoded = trees.encode(value, name="what the function returned")
    except Exception as error:
        _write(result, FunctionResult(None, [], error_reports.describe(error)))
        raise
    _write(result, FunctionResult(encoded.tree, [bytes(b) for b in encoded.buffers], None))


def _write(path: Path, result: FunctionResult) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.msgpack.encode(result))
    new.rename(path)


def _refuse(key: object) -> object:
    raise errors.InvalidArgumentError(
        "A function for other processes must create the variables and the strategy that it uses",
        f"it holds an object of this process, {key!r}",
        "Create it inside the function.",
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
