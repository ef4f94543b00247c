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
    """A program that may leave sizes open, compiled once for each combination of sizes.

    Attributes:
      key: Tells programs apart: the SHA-256 of their bytes.
      arguments: The shapes and types of the arguments; open sizes are symbols.
      results: The shapes and types of the results.
    """

    def __init__(self, serialized: Any, label: str) -> None:
        data = bytearray(serialized)
        self.key = key_of(data)
        self._label = label
        try:
            exported = jax.export.deserialize(data)
        except Exception as error:
            raise self._invalid("a program made by `jax.export`", repr(error)) from error
        if "cpu" not in exported.platforms:
            found = f"it is for {', '.join(exported.platforms)}"
            raise self._invalid("a program for the platform 'cpu'", found)
        self.arguments = exported.in_avals
        self.results = exported.out_avals
        self._exported = exported
        dtypes = [array.dtype for array in (*self.arguments, *self.results)]
        self._widest = max(dtypes, key=lambda dtype: dtype.itemsize, default=np.dtype(np.int8))
        self._compiled: dict[tuple[Shape, ...], Any] = {}

    def compile(self, shapes: Sequence[Shape]) -> Any:
        """Returns the program for these shapes of its arguments.

        Compiled code takes and returns arrays; calling it costs a few dozen microseconds.
        """
        key = tuple(shapes)
        if (compiled := self._compiled.get(key)) is None:
            compiled = self._compiled[key] = self._compile(key)
        return compiled

    def call(self, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Runs the program and waits for its results, which are read-only arrays.

        Raises:
          ResourceExhaustedError: There is not enough memory to run it.
          InvalidArgumentError: It cannot be run.
        """
        compiled = self.compile([argument.shape for argument in arguments])
        try:
            with self._any_dtype():
                # Waiting here means that the arguments may be overwritten afterwards.
                return [np.asarray(result) for result in compiled(*arguments)]
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            raise self._failed(error) from error
        except TypeError as error:
            raise self._invalid(
                "arguments of the types that its program takes", str(error)
            ) from error

    def _compile(self, shapes: tuple[Shape, ...]) -> Any:
        if len(shapes) != len(self.arguments):
            required = f"a program that takes {len(shapes)} arrays"
            raise self._invalid(required, f"it takes {len(self.arguments)}")
        specs = [
            jax.ShapeDtypeStruct(shape, argument.dtype)
            for shape, argument in zip(shapes, self.arguments, strict=True)
        ]

        def flat(*arguments: Any) -> list[Any]:
            return jax.tree.leaves(self._exported.call(*arguments))

        try:
            with _on_cpu(), self._any_dtype():
                return jax.jit(flat).lower(*specs).compile()
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            raise self._failed(error) from error
        except (TypeError, ValueError, NotImplementedError) as error:
            required = f"a program that takes shapes {list(shapes)}"
            raise self._invalid(required, str(error)) from error

    def _any_dtype(self) -> contextlib.AbstractContextManager[Any]:
        return jax_compat.any_dtype(self._widest)

    def _failed(self, error: Exception) -> errors.DistributeError:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            return errors.ResourceExhaustedError(
                errors.message(
                    f"{self._label} needs memory to run its program",
                    f"there is not enough: {error}",
                    "Use smaller parts, or more servers.",
                )
            )
        return self._invalid("a program that runs", str(error))

    def _invalid(self, required: str, found: str) -> errors.InvalidArgumentError:
        return errors.InvalidArgumentError(
            errors.message(f"{self._label} needs {required}", found, "Export it again.")
        )


def key_of(serialized: Any) -> bytes:
    """Returns what tells a program apart from others."""
    return hashlib.sha256(serialized).digest()


def _on_cpu() -> contextlib.AbstractContextManager[Any]:
    return jax.default_device(jax.local_devices(backend="cpu")[0])


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
