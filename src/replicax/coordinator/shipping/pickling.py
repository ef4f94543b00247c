"""How functions and arguments become bytes for workers; nothing is read back here.

What belongs to the cluster goes by name: variables, the strategy, objects that live on
workers. Arrays go beside the pickle. Code that workers cannot import goes by value: that of
the main script, and of modules that lie under its directory or under the current one.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import sys
import threading
import types
from typing import Any

import cloudpickle
import jax
import numpy as np
from typing_extensions import override

from replicax.coordinator.shipping import importable, persistent_ids
from replicax.foundation import lazy
from replicax.input.dataset.plan import Seed
from replicax.tracing.function import Function

# The most that a pickle may have without, and with, the arrays beside it.
MOST_INLINE_BYTES = 64 * 1024**2
MOST_BYTES = 2 * 1024**3
# Smaller arrays stay inside the pickle, and those after so many: headers list all that do not.
_SMALL_BUFFER = 1024
_MOST_BUFFERS = 10_000

_PLAIN_TYPES = frozenset(
    [int, float, bool, str, bytes, tuple, list, dict, set, type(None), type]
    + [types.FunctionType, types.CodeType, types.CellType, types.ModuleType, np.ndarray]
)
# cloudpickle keeps the modules that go by value in one place for all threads. Held while
# that place is changed, and until it is as it was.
_registry_lock = threading.RLock()


class TooLarge(Exception):
    """There are more bytes than one function or call may have."""


def dump(value: Any, strategy: Any = None) -> list[Any]:
    """Returns the pickle of a value, followed by copies of the arrays in it.

    Args:
      value: What to pickle.
      strategy: The one whose variables may be inside; those of every cluster, if None.

    Raises:
      naming.Refusal: Something inside must not travel.
      TooLarge: There are too many bytes.
      Exception: Whatever an object raises that cannot be pickled.
    """
    sink = _Sink(MOST_INLINE_BYTES)
    arrays = _Arrays(keeps=True)
    _run(sink, arrays, value, strategy)
    if sink.tell() + arrays.size > MOST_BYTES:
        raise TooLarge
    return [sink.getvalue(), *arrays.kept]


def measure(value: Any, strategy: Any = None) -> int:
    """Returns how many bytes the pickle of a value and its arrays have."""
    sink, arrays = _Meter(), _Arrays(keeps=False)
    _run(sink, arrays, value, strategy)
    return sink.size + arrays.size


def _run(sink: Any, arrays: _Arrays, value: Any, strategy: Any) -> None:
    with _registry_lock, contextlib.ExitStack() as stack:
        _Pickler(sink, arrays.take, strategy, stack).dump(value)


class _Sink(io.BytesIO):
    """Bytes in memory, so many and no more."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._left = most

    @override
    def write(self, data: Any) -> int:
        self._left -= memoryview(data).nbytes
        if self._left < 0:
            raise TooLarge
        return super().write(data)


class _Meter:
    """Counts bytes and forgets them."""

    def __init__(self) -> None:
        self.size = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.size += size
        return size


class _Arrays:
    """Takes arrays out of a pickle."""

    def __init__(self, keeps: bool) -> None:
        self.kept: list[bytes] = []
        self.size = 0
        self._keeps = keeps

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """Takes one, or returns True to leave it inside."""
        raw = buffer.raw()
        if raw.nbytes < _SMALL_BUFFER or len(self.kept) == _MOST_BUFFERS:
            return True
        self.size += raw.nbytes
        if self._keeps:
            if self.size > MOST_BYTES:
                raise TooLarge
            # A copy: the caller may change its array before the closure is sent.
            self.kept.append(bytes(raw))
        return False


class _Pickler(cloudpickle.Pickler):
    def __init__(self, sink: Any, take: Any, strategy: Any, stack: contextlib.ExitStack) -> None:
        super().__init__(sink, protocol=5, buffer_callback=take)
        self._strategy = strategy
        # Takes back what was registered with cloudpickle.
        self._stack = stack
        self._seen: set[str] = set()
        self._roots = importable.local_directories()

    @override
    def persistent_id(self, obj: Any) -> Any:
        if type(obj) in _PLAIN_TYPES:
            return None
        return persistent_ids.name_of(obj, self._strategy)

    @override
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType):
            self._send_by_value(obj.__module__)
            reduced = super().reducer_override(obj)
            return importable.with_shared_globals(obj, reduced, self._roots)
        if isinstance(obj, type):
            self._send_by_value(getattr(obj, "__module__", None))
        elif isinstance(obj, types.ModuleType):
            self._send_by_value(obj.__name__)
        elif isinstance(obj, Function):
            signature = obj.input_signature
            return Function, (obj.python_function, signature, obj.name, obj.reduce_retracing)
        elif type(obj) is Seed:
            # Workers must not read the same data in the same order: each draws a seed of its own
            # for a shuffle to which the user gave none, as if it had made the dataset itself.
            return Seed, ()
        elif isinstance(obj, lazy.LazyModule):
            return lazy.module, (obj._name,)
        elif isinstance(obj, jax.Array):
            return _reduce_jax_array(obj)
        elif type(obj) is np.ndarray and obj.dtype.isbuiltin == 2 and obj.ndim:
            # NumPy keeps arrays of types that are not its own inside the pickle.
            flat = np.ascontiguousarray(obj)
            return np.ndarray.view, (flat.view(np.uint8), obj.dtype)
        elif callable(obj) and (name := importable.global_name(obj, self._roots)) is not None:
            return name
        return super().reducer_override(obj)

    def _send_by_value(self, name: str | None) -> None:
        """Makes cloudpickle send a module's code, if workers cannot import it."""
        if name is None or name in self._seen:
            return
        self._seen.add(name)
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if module is None or not file or not importable.is_local(name, file, self._roots):
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
