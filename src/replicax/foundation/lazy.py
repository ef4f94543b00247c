"""Modules that are imported when they are first used, so that `import replicax` stays quick."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator
from typing import Any

from replicax.foundation import errors


class LazyModule:
    """Imports a module when one of its names is first used."""

    def __init__(self, name: str, requirement: str) -> None:
        self._name = name
        self._requirement = requirement

    def __reduce__(self) -> tuple[type[LazyModule], tuple[str, str]]:
        return LazyModule, (self._name, self._requirement)

    def __getattr__(self, attribute: str) -> Any:
        try:
            module = importlib.import_module(self._name)
        except ModuleNotFoundError as error:
            package = self._name.partition(".")[0]
            raise errors.MissingDependencyError(
                f"This needs the package {package!r}",
                "it is not installed",
                f"Run `pip install {self._requirement}`.",
            ) from error
        value = getattr(module, attribute)
        # The next lookup finds the name in the instance.
        self.__dict__[attribute] = value
        return value


def module(name: str, requirement: str = "") -> Any:
    """Returns a proxy of a module, which is imported at the first use.

    Args:
      name: The module.
      requirement: The package to install if it is missing; by default, the top-level package.

    For type checkers, write the import as well:

        if TYPE_CHECKING:
            import optax
        else:
            optax = lazy.module("optax")
    """
    return LazyModule(name, requirement or name.partition(".")[0])


@contextlib.contextmanager
def collections_paused() -> Iterator[None]:
    """Runs the garbage collector not before the end of a block, unless the program has it off."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class SetByPublicApi(type):
    """Makes a class whose missing attributes are set while the public names are imported.

    `import replicax` imports nothing else, and a program may use a part of the library, such as
    `replicax.tf` or `replicax.metrics`, without a name of the package itself.
    """

    def __getattr__(cls, name: str) -> Any:
        importlib.import_module("replicax.public_api")
        return super().__getattribute__(name)
