"""Pickles functions and arguments for workers; nothing is unpickled here.

Objects of the cluster are pickled by persistent id: variables, the strategy, per-worker resources.
Arrays are pickled out of band. Workers have the same packages, but not the user's own files: the
code of the main script, and of modules under its directory or under the current one, is pickled by
value.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import io
import os
import pickle
import sys
import sysconfig
import threading
import types
from collections.abc import Callable
from typing import Any, Protocol

import cloudpickle
import jax
import numpy as np
from typing_extensions import override

from replicax.coordinator.shipping import persistent_ids
from replicax.foundation import lazy
from replicax.input.dataset.plan import Seed
from replicax.strategies.base import Strategy
from replicax.tracing.function import Function

# The maximum size of a pickle without, and with, its out-of-band arrays.
MAX_INLINE_BYTES = 64 * 1024**2
MAX_BYTES = 2 * 1024**3
# Smaller arrays are pickled in band, and so are those after this number: the header of a message
# lists all others.
_SMALL_BUFFER = 1024
_MAX_BUFFERS = 10_000

_PLAIN_TYPES = frozenset(
    [int, float, bool, str, bytes, tuple, list, dict, set, type(None), type]
    + [types.FunctionType, types.CodeType, types.CellType, types.ModuleType, np.ndarray]
)
# cloudpickle has one registry of modules to pickle by value. Held while the registry is changed,
# until it is restored.
_registry_lock = threading.RLock()


class TooLargeError(Exception):
    """A function or call exceeds the maximum size."""


class Sink(Protocol):
    """A file-like object for a pickle."""

    def write(self, data: Any, /) -> int: ...


def dump(value: object, strategy: Strategy | None = None) -> list[bytes]:
    """Returns the pickle of a value, followed by copies of its arrays.

    Args:
      value: The value.
      strategy: The strategy whose variables it may contain; any strategy, if None.

    Raises:
      NotShippableError: It contains an object that must not be sent.
      TooLargeError: It is too large.
      Exception: The error of an object that cannot be pickled.
    """
    sink = _Sink(MAX_INLINE_BYTES)
    arrays = _Arrays(keeps=True)
    _run(sink, arrays, value, strategy)
    if sink.tell() + arrays.size > MAX_BYTES:
        raise TooLargeError
    return [sink.getvalue(), *arrays.kept]


def measure(value: object, strategy: Strategy | None = None) -> int:
    """Returns the size of the pickle of a value, with its arrays."""
    sink, arrays = _Meter(), _Arrays(keeps=False)
    _run(sink, arrays, value, strategy)
    return sink.size + arrays.size


_destination: contextvars.ContextVar[Strategy | None] = contextvars.ContextVar(
    "replicax_destination", default=None
)


def _run(sink: Sink, arrays: _Arrays, value: object, strategy: Strategy | None) -> None:
    with _registry_lock, contextlib.ExitStack() as stack:
        token = _destination.set(strategy)
        stack.callback(_destination.reset, token)
        _Pickler(sink, arrays.take, strategy, stack).dump(value)


def destination() -> Strategy | None:
    """Returns the strategy to whose workers an object is sent that is being pickled."""
    return _destination.get()


class _Sink(io.BytesIO):
    """A buffer of limited size."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._left = max_bytes

    @override
    def write(self, data: Any) -> int:
        self._left -= memoryview(data).nbytes
        if self._left < 0:
            raise TooLargeError
        return super().write(data)


class _Meter:
    """Counts bytes and discards them."""

    def __init__(self) -> None:
        self.size = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.size += size
        return size


class _Arrays:
    """Collects the out-of-band arrays of a pickle."""

    def __init__(self, keeps: bool) -> None:
        self.kept: list[bytes] = []
        self.size = 0
        self._keeps = keeps

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """Collects an array, or returns True to pickle it in band."""
        raw = buffer.raw()
        if raw.nbytes < _SMALL_BUFFER or len(self.kept) == _MAX_BUFFERS:
            return True
        self.size += raw.nbytes
        if self._keeps:
            if self.size > MAX_BYTES:
                raise TooLargeError
            # A copy: the caller may change its array before the closure is sent.
            self.kept.append(bytes(raw))
        return False


class _Pickler(cloudpickle.Pickler):
    def __init__(
        self,
        sink: Sink,
        take: Callable[[pickle.PickleBuffer], bool],
        strategy: Strategy | None,
        stack: contextlib.ExitStack,
    ) -> None:
        super().__init__(sink, protocol=5, buffer_callback=take)
        self._strategy = strategy
        # Restores the registry of cloudpickle.
        self._stack = stack
        self._seen: set[str] = set()
        self._roots = local_directories()

    @override
    def persistent_id(self, obj: object) -> tuple[object, ...] | None:
        if type(obj) in _PLAIN_TYPES:
            return None
        return persistent_ids.persistent_id_of(obj, self._strategy)

    @override
    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, types.FunctionType):
            self._register_by_value(obj.__module__)
            reduced = super().reducer_override(obj)
            return with_shared_globals(obj, reduced, self._roots)
        if isinstance(obj, type):
            self._register_by_value(getattr(obj, "__module__", None))
        elif isinstance(obj, types.ModuleType):
            self._register_by_value(obj.__name__)
        elif isinstance(obj, Function):
            return obj.__reduce__()
        elif type(obj) is Seed:
            # Workers must not read the same data in the same order: each draws its own seed for a
            # shuffle without one, as if it had created the dataset itself.
            return Seed, ()
        elif isinstance(obj, lazy.LazyModule):
            return lazy.module, (obj._name,)
        elif isinstance(obj, jax.Array):
            return _reduce_jax_array(obj)
        elif type(obj) is np.ndarray and obj.dtype.isbuiltin == 2 and obj.ndim:
            # NumPy pickles arrays of extension dtypes in band.
            flat = np.ascontiguousarray(obj)
            return np.ndarray.view, (flat.view(np.uint8), obj.dtype)
        elif callable(obj) and (name := global_name(obj, self._roots)) is not None:
            return name
        return super().reducer_override(obj)

    def _register_by_value(self, name: str | None) -> None:
        """Makes cloudpickle pickle a module by value, if workers cannot import it."""
        if name is None or name in self._seen:
            return
        self._seen.add(name)
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if module is None or not file or not is_local(name, file, self._roots):
            return
        if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            self._stack.callback(cloudpickle.unregister_pickle_by_value, module)


def _reduce_jax_array(array: jax.Array) -> Any:
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(array))
        make = functools.partial(jax.random.wrap_key_data, impl=str(jax.random.key_impl(array)))
        return make, (data,)
    return jax.numpy.asarray, (np.asarray(array),)


def global_name(obj: object, roots: tuple[str, ...]) -> str | None:
    """Returns the name under which workers can import a callable that is no plain function.

    For example, compiled functions and functions with custom derivatives of JAX.
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
    """Returns the current directory and the directory of the main script."""
    found = []
    with contextlib.suppress(OSError):
        found.append(os.getcwd())
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script:
        found.append(os.path.dirname(os.path.abspath(script)))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def is_local(name: str, file: str, roots: tuple[str, ...]) -> bool:
    """Returns whether a module is one of the user's own files."""
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
    """Pickles the globals of a module by reference to the module."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __reduce__(self) -> tuple[Callable[..., object], tuple[types.ModuleType]]:
        return vars, (self._module,)


def with_shared_globals(function: types.FunctionType, reduced: Any, roots: tuple[str, ...]) -> Any:
    """Makes an inner function of a package use the globals of the package's module.

    cloudpickle copies the globals that such a function uses. Those of packages are not all
    picklable, such as the caches behind `jax.checkpoint`, and must not be copied.

    Args:
      function: The function.
      reduced: cloudpickle's reduction; returned unchanged if the function is not of a package.
      roots: The directories of the user's own files.
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
