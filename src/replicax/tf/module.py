"""`tf.Module`: a module of replicax with the scopes of names that TensorFlow's has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from replicax.tf.running import name_scope
from replicax.variables import module


class Module(module.Module):
    """Base for models: collects variables from attributes, lists, dicts and submodules.

    >>> class Scaled(Module):
    ...     @Module.with_name_scope
    ...     def scope(self):
    ...         from replicax.tf.running import get_current_name_scope
    ...         return get_current_name_scope()
    >>> Scaled().scope()
    'scaled'
    """

    @property
    def name_scope(self) -> name_scope:
        """A scope with the name of the module."""
        return name_scope(self.name)

    @classmethod
    def with_name_scope(cls, method: Callable[..., Any]) -> Callable[..., Any]:
        """Decorates a method that runs in the scope of the module."""

        @functools.wraps(method)
        def method_with_name_scope(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self.name_scope:
                return method(self, *args, **kwargs)

        return method_with_name_scope
