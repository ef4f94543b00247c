"""Calls a function when a module is imported, or at once if it is there already."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence


def call(name: str, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Calls `before` and `after` around the first import of a top-level module.

    If the module is loaded, `after` is called now.
    """
    if name in sys.modules:
        after()
    else:
        sys.meta_path.insert(0, _Finder(name, before, after))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as the finders behind it do, and wraps its loader."""

    def __init__(self, name: str, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._name, self._before, self._after = name, before, after

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._before, self._after)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads a module as another loader does, with a call before and after."""

    def __init__(
        self, loader: importlib.abc.Loader, before: Callable[[], None], after: Callable[[], None]
    ) -> None:
        self._loader, self._before, self._after = loader, before, after

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._before()
        self._loader.exec_module(module)
        self._after()

    def __getattr__(self, name: str) -> object:
        # Resources, source lines and the like.
        return getattr(self._loader, name)
