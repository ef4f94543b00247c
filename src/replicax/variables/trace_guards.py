"""Where reads and writes of variables must not happen: in traces that JAX caches or discards."""

from __future__ import annotations

from typing import Any

import jax

from replicax.contexts.frames import Frame
from replicax.foundation import errors, jax_compat


def require_readable(variable: Any, frame: Frame) -> None:
    """Raises where a read would be frozen into a program that JAX caches."""
    if variable.stored is None:
        raise errors.TracingError(
            f"Variable {variable.name!r} needs a value",
            "the compiled function that creates it has not finished its first call",
            "Read it after that call, or inside the same function.",
        )
    require_outside_traces(variable, frame)


def require_outside_traces(variable: Any, frame: Frame) -> None:
    """Raises where a read belongs to a trace that would not be told of later values."""
    if not jax_compat.is_staging():
        return
    if frame.eager_reads is None:
        raise errors.TracingError(
            f"A read of variable {variable.name!r} inside traced code needs `rx.function`",
            "the surrounding jax.jit, scan, cond or while would keep today's value for ever",
            "Use `rx.function` instead of `jax.jit`, rx.scan, rx.fori_loop, rx.while_loop or "
            "rx.cond in the place of jax.lax, or read the variable before the loop.",
        )
    frame.eager_reads.note()


def require_concrete(variable: Any, value: Any) -> None:
    """Raises if the value would leave the trace it belongs to."""
    if any(map(jax_compat.is_traced, jax.tree.leaves(value))) or jax_compat.is_staging():
        raise errors.TracingError(
            f"A write to variable {variable.name!r} inside traced code needs `rx.function`",
            "the code runs under a bare jax.jit, jax.grad, jax.vmap, scan or the like",
            "Use `rx.function` and `rx.value_and_grad` instead, and rx.scan, rx.fori_loop, "
            "rx.while_loop or rx.cond in the place of jax.lax.",
        )
