"""Programs from `jax.export`: deserialized, validated and compiled for the CPU of a server.

They contain no Python code: an exported program is StableHLO, and JAX rejects custom calls that are
not on its allow-list.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from typing import Protocol, TypeVar

import jax
import jax.export
import numpy as np

from replicax.foundation import errors, jax_compat
from replicax.protocol.codec import Buffer

Shape = tuple[int, ...]
_T = TypeVar("_T")


class AbstractArray(Protocol):
    """The shape, which may contain symbolic dimensions, and the type of an array."""

    @property
    def shape(self) -> Sequence[object]: ...

    @property
    def dtype(self) -> np.dtype: ...


class Program:
    """A program that may have symbolic dimensions.

    Attributes:
      key: The SHA-256 of its bytes.
      arguments: The shapes and types of the arguments.
      results: The shapes and types of the results.
    """

    def __init__(self, serialized: Buffer, label: str) -> None:
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

    def trace(self, arguments: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the results for traced arguments."""
        return jax.tree.leaves(self._exported.call(*arguments))


class Compiled:
    """Programs with fixed shapes, compiled into one, which is cheap to call.

    Its arguments are those of all programs in order, without the shared ones, then the shared ones.
    Its results have the same order; the shared ones are those of the last program.

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

        def together(*arguments: jax.Array) -> list[jax.Array]:
            own, common = _split(arguments, len(shared))
            results: list[jax.Array] = []
            last: Sequence[jax.Array] = ()
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
          arguments: The arguments.
          label: The name in errors, if not that of the part it was compiled for.

        Raises:
          ResourceExhaustedError: The program ran out of memory.
          InvalidArgumentError: The program failed.
        """
        try:
            with self._any_dtype():
                # Waits, so that the caller may overwrite the arguments afterwards.
                return [np.asarray(result) for result in self._executable(*arguments)]
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            raise _failed(label or self._label, error) from error
        except TypeError as error:
            required = "arguments of the types that its program takes"
            raise _invalid(label or self._label, required, str(error)) from error

    def _any_dtype(self) -> contextlib.AbstractContextManager[object]:
        return jax_compat.any_dtype(self._widest)


def key_of(serialized: Buffer) -> bytes:
    """Returns the key of a serialized program."""
    return hashlib.sha256(serialized).digest()


def accepts(argument: AbstractArray, shape: Shape, dtype: np.dtype) -> bool:
    """Returns whether an argument or result of a program may have a shape and a type."""
    return (
        argument.dtype == dtype
        and len(argument.shape) == len(shape)
        and all(
            jax_compat.is_open_size(expected) or expected == size
            for expected, size in zip(argument.shape, shape, strict=True)
        )
    )


def _spec(argument: AbstractArray, shape: Shape) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, argument.dtype)


def _split(arrays: Sequence[_T], num_last: int) -> tuple[Sequence[_T], Sequence[_T]]:
    first = len(arrays) - num_last
    return arrays[:first], arrays[first:]


def _invalid(label: str, required: str, found: str) -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError(f"{label} needs {required}", found, "Export it again.")


def _failed(label: str, error: Exception) -> errors.DistributeError:
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return errors.ResourceExhaustedError(
            f"The program of {label} ran out of memory: {error}. Use smaller parts, or more "
            "servers."
        )
    return _invalid(label, "a program that runs", str(error))
