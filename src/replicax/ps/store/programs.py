"""Programs that arrive by `jax.export`: read, checked and compiled for the CPU of a server.

They hold no Python code: an exported program is StableHLO, and operations that could call out
of it are refused by JAX when it is read or run.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import numpy as np

from replicax.foundation import errors, jax_compat

Shape = tuple[int, ...]


class Program:
    """A program that may leave sizes open.

    Attributes:
      key: Tells programs apart: the SHA-256 of their bytes.
      arguments: The shapes and types of the arguments; open sizes are symbols.
      results: The shapes and types of the results.
    """

    def __init__(self, serialized: Any, label: str) -> None:
        data = bytearray(serialized)
        self.key = key_of(data)
        try:
            exported = jax.export.deserialize(data)
        except Exception as error:
            raise _invalid(label, "a program made by `jax.export`", repr(error)) from error
        if "cpu" not in exported.platforms:
            found = f"it is for {', '.join(exported.platforms)}"
            raise _invalid(label, "a program for the platform 'cpu'", found)
        self.arguments = exported.in_avals
        self.results = exported.out_avals
        self._exported = exported

    def trace(self, arguments: Sequence[Any]) -> list[Any]:
        """Returns the results for traced arguments."""
        return jax.tree.leaves(self._exported.call(*arguments))


class Compiled:
    """Programs with fixed shapes, compiled into one: a call of it costs little.

    It takes the arguments of all programs but the shared ones, one after the other, then the
    shared ones. It returns the results of all in the same order; of the shared ones, those that
    the last program returns.

    Attributes:
      shapes: The shapes of the results.
    """

    def __init__(
        self,
        programs: Sequence[tuple[Program, Sequence[Shape]]],
        shared: Sequence[Shape],
        label: str,
    ) -> None:
        self._label = label
        arrays = [a for program, _ in programs for a in (*program.arguments, *program.results)]
        dtypes = (array.dtype for array in arrays)
        self._widest = max(dtypes, key=lambda dtype: dtype.itemsize, default=np.dtype(np.int8))
        specs: list[jax.ShapeDtypeStruct] = []
        for program, shapes in programs:
            if len(program.arguments) != len(shapes) + len(shared):
                required = f"a program that takes {len(shapes) + len(shared)} arrays"
                raise _invalid(label, required, f"it takes {len(program.arguments)}")
            specs += map(_spec, program.arguments, shapes)
        specs += map(_spec, programs[-1][0].arguments[len(programs[-1][1]) :], shared)

        def together(*arguments: Any) -> list[Any]:
            own, common = _split(arguments, len(shared))
            results: list[Any] = []
            last: Sequence[Any] = ()
            for program, shapes in programs:
                mine, own = own[: len(shapes)], own[len(shapes) :]
                returned, last = _split(program.trace([*mine, *common]), len(shared))
                results += returned
            return [*results, *last]

        try:
            with jax.default_device(jax.local_devices(backend="cpu")[0]), self._any_dtype():
                lowered = jax.jit(together).lower(*specs)
                self._executable = lowered.compile()
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            raise _failed(label, error) from error
        except (TypeError, ValueError, NotImplementedError) as error:
            found = [spec.shape for spec in specs]
            raise _invalid(label, f"a program that takes shapes {found}", str(error)) from error
        self.shapes: list[Shape] = [result.shape for result in lowered.out_info]

    def call(self, arguments: Sequence[np.ndarray], label: str | None = None) -> list[np.ndarray]:
        """Runs the program and waits for its results, which are read-only arrays.

        Args:
          arguments: What it takes.
          label: What errors call the one that needs it, if not the one it was compiled for.

        Raises:
          ResourceExhaustedError: There is not enough memory to run it.
          InvalidArgumentError: It cannot be run.
        """
        try:
            with self._any_dtype():
                # Waiting here means that the arguments may be overwritten afterwards.
                return [np.asarray(result) for result in self._executable(*arguments)]
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            raise _failed(label or self._label, error) from error
        except TypeError as error:
            required = "arguments of the types that its program takes"
            raise _invalid(label or self._label, required, str(error)) from error

    def _any_dtype(self) -> contextlib.AbstractContextManager[Any]:
        return jax_compat.any_dtype(self._widest)


def key_of(serialized: Any) -> bytes:
    """Returns what tells a program apart from others."""
    return hashlib.sha256(serialized).digest()


def accepts(argument: Any, shape: Shape, dtype: np.dtype) -> bool:
    """Tells whether an argument of a program, or a result, may have a shape and a type."""
    return (
        argument.dtype == dtype
        and len(argument.shape) == len(shape)
        and all(
            jax_compat.is_open_size(expected) or expected == size
            for expected, size in zip(argument.shape, shape, strict=True)
        )
    )


def _spec(argument: Any, shape: Shape) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, argument.dtype)


def _split(arrays: Sequence[Any], num_last: int) -> tuple[Sequence[Any], Sequence[Any]]:
    first = len(arrays) - num_last
    return arrays[:first], arrays[first:]


def _invalid(label: str, required: str, found: str) -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError(f"{label} needs {required}", found, "Export it again.")


def _failed(label: str, error: Exception) -> errors.DistributeError:
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return errors.ResourceExhaustedError(
            f"{label} needs memory to run its program",
            f"there is not enough: {error}",
            "Use smaller parts, or more servers.",
        )
    return _invalid(label, "a program that runs", str(error))
