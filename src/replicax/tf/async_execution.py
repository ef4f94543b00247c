"""`tf.experimental`: asynchronous execution, optional values and function options."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from replicax.foundation import errors
from replicax.tf.arguments import Structure, Value
from replicax.tf.dispatch import wrap_tree

__all__ = [
    "Optional",
    "async_clear_error",
    "async_scope",
    "register_filesystem_plugin",
]


@contextlib.contextmanager
def async_scope() -> Iterator[None]:
    """Runs a block; JAX always computes asynchronously, and this waits at the end.

    >>> with async_scope():
    ...     pass
    """
    yield
    jax.effects_barrier()


def async_clear_error() -> None:
    """Does nothing: an error is raised by the call that caused it.

    >>> async_clear_error()
    """


class Optional:
    """A value that may be missing.

    >>> Optional.from_value(3).has_value(), Optional.empty(None).has_value()
    (True, False)
    """

    def __init__(self, values: tuple[Any, ...], element_spec: Structure = None) -> None:
        self._values = values
        self.element_spec = element_spec

    @staticmethod
    def empty(element_spec: Structure) -> Optional:
        """Returns one without a value."""
        return Optional((), element_spec)

    @staticmethod
    def from_value(value: Value) -> Optional:
        """Returns one with a value."""
        return Optional((value,))

    def has_value(self, name: str | None = None) -> bool:
        """Tells whether there is a value."""
        del name
        return bool(self._values)

    def get_value(self, name: str | None = None) -> Any:
        """Returns the value, or raises."""
        del name
        if not self._values:
            raise errors.InvalidArgumentError(
                "`get_value` needs an Optional with a value", "it is empty", "Test `has_value()`."
            )
        return wrap_tree(self._values[0])


def register_filesystem_plugin(plugin_location: str) -> None:
    """Not offered: files are read by fsspec."""
    raise errors.UnsupportedError(
        "File systems are those of fsspec",
        f"the plugin {plugin_location} was given",
        "Install the package of fsspec for it, such as `gcsfs` or `s3fs`.",
    )
