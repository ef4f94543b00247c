"""`tf.autograph`: settings that programs make; functions are traced as Python, except for loops."""

from __future__ import annotations

import enum
import inspect
import logging
from collections.abc import Callable
from typing import Any

from replicax.foundation import errors
from replicax.tf.arguments import Value
from replicax.tf.host_functions import print as tf_print

__all__ = [
    "Feature",
    "do_not_convert",
    "set_loop_options",
    "set_verbosity",
    "to_code",
    "trace",
]

_log = logging.getLogger("replicax.tf.loops")


class Feature(enum.Enum):
    """Parts of AutoGraph; accepted for portability.

    >>> Feature.ALL.value
    'ALL'
    """

    ALL = "ALL"
    ASSERT_STATEMENTS = "ASSERT_STATEMENTS"
    AUTO_CONTROL_DEPS = "AUTO_CONTROL_DEPS"
    BUILTIN_FUNCTIONS = "BUILTIN_FUNCTIONS"
    EQUALITY_OPERATORS = "EQUALITY_OPERATORS"
    LISTS = "LISTS"
    NAME_SCOPES = "NAME_SCOPES"


def do_not_convert(func: Callable[..., Any] | None = None) -> Any:
    """Returns the function: only `tf.function` changes loops, and `autograph=False` turns it off.

    >>> do_not_convert(len)([1])
    1
    """
    return do_not_convert if func is None else func


def set_loop_options(
    parallel_iterations: Value = None,
    swap_memory: Value = None,
    maximum_iterations: Value = None,
    shape_invariants: Value = None,
) -> None:
    """Accepts the options of a loop; shapes in loops are fixed.

    >>> set_loop_options(maximum_iterations=10)
    """
    del parallel_iterations, swap_memory, maximum_iterations, shape_invariants


def set_verbosity(level: int, alsologtostdout: bool = False) -> None:
    """Shows how loops are converted, from level 1.

    >>> set_verbosity(0)
    """
    del alsologtostdout
    _log.setLevel(logging.DEBUG if level > 0 else logging.NOTSET)


def trace(*args: Any) -> None:
    """Prints arguments when the function is traced."""
    tf_print(*map(str, args))


def to_code(entity: Callable[..., Any], recursive: bool = True, **_: Any) -> str:
    """Returns the source of a function; it is traced as it is written.

    >>> to_code(do_not_convert).startswith("def do_not_convert")
    True
    """
    del recursive
    try:
        return inspect.getsource(inspect.unwrap(entity))
    except (OSError, TypeError) as error:
        raise errors.InvalidArgumentError(
            "`to_code` needs a function with source code", f"{error}", "Pass a Python function."
        ) from error
