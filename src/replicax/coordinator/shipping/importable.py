"""Which code workers can import, and which has to be sent to them.

Workers have the same packages, but not the user's own files: the main script, and modules
under its directory or under the current one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import sysconfig
import types
from typing import Any


def global_name(obj: Any, roots: tuple[str, ...]) -> str | None:
    """Returns the name under which workers can import an object that is no plain function.

    Compiled functions and functions with their own derivatives, such as those of JAX.
    """
    name, module = getattr(obj, "__qualname__", None), getattr(obj, "__module__", None)
    found = sys.modules.get(module) if isinstance(module, str) else None
    file = getattr(found, "__file__", None)
    if not isinstance(name, str) or not file or module in (None, "__main__"):
        return None
    if getattr(found, name, None) is not obj or is_local(module, file, roots):
        return None
    return name


def local_directories() -> tuple[str, ...]:
    """Returns the current directory, and that of the main script."""
    found = []
    with contextlib.suppress(OSError):
        found.append(os.getcwd())
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script:
        found.append(os.path.dirname(os.path.abspath(script)))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def is_local(name: str, file: str, roots: tuple[str, ...]) -> bool:
    """Tells whether a module is one of the user's own files."""
    if name.partition(".")[0] == "replicax":
        return False
    path = os.path.abspath(file)
    parts = path.split(os.sep)
    if "site-packages" in parts or "dist-packages" in parts:
        return False
    if _is_under(path, sysconfig.get_path("stdlib")):
        return False
    return any(_is_under(path, root) for root in roots)


def _is_under(path: str, directory: str) -> bool:
    return path.startswith(directory.rstrip(os.sep) + os.sep)


class _Globals:
    """Stands for the global names of a module: at the other end they are those of the module."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __reduce__(self) -> Any:
        return vars, (self._module,)


def with_shared_globals(function: types.FunctionType, reduced: Any, roots: tuple[str, ...]) -> Any:
    """Lets an inner function of a package use the package's own global names.

    cloudpickle sends copies of the globals that such a function uses. Those of packages are
    not all picklable, such as the caches behind `jax.checkpoint`, and not meant to be copied.

    Args:
      function: The function.
      reduced: What cloudpickle makes of it; returned if the function is not of a package.
      roots: Where the user's own files are.
    """
    name = function.__globals__.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    file = getattr(module, "__file__", None)
    if module is None or not file or name == "__main__" or is_local(module.__name__, file, roots):
        return reduced
    if vars(module) is not function.__globals__ or not isinstance(reduced, tuple):
        return reduced
    make, (code, _, *rest), (state, slots), *others = reduced
    return (
        make,
        (code, _Globals(module), *rest),
        (state, {**slots, "__globals__": {}}),
        *others,
    )
