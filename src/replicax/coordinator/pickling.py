"""How functions and arguments become bytes for workers; nothing is read back here.

What belongs to the cluster goes by name: variables, the strategy, objects that live on
workers. Arrays go beside the pickle. Code that workers cannot import goes by value: that of
the main script, and of modules that lie under its directory or under the current one.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

import cloudpickle
import jax
import jax.core
import numpy as np
from typing_extensions import override

from replicax.foundation import errors, lazy
from replicax.strategies.base import Strategy
from replicax.strategies.extended import StrategyExtended
from replicax.tracing.function import Function
from replicax.tracing.signature import Feed
from replicax.values.layout import ReplicaLayout
from replicax.variables.variable import Variable

# The most that a pickle may have without, and with, the arrays beside it.
MOST_INLINE_BYTES = 64 * 1024**2
MOST_BYTES = 2 * 1024**3
# Smaller arrays stay inside the pickle.
_SMALL_BUFFER = 1024

_PLAIN_TYPES = frozenset(
    [int, float, bool, str, bytes, tuple, list, dict, set, type(None), type]
    + [types.FunctionType, types.CodeType, types.CellType, types.ModuleType, np.ndarray]
)
# cloudpickle keeps the modules that go by value in one place for all threads. Held while
# that place is changed, and until it is as it was.
_registry_lock = threading.RLock()


class Refusal(Exception):
    """Something that must not travel: the kind of error, and its three parts.

    Attributes:
      culprit: The thing.
    """

    def __init__(self, kind: type[Exception], required: str, found: str, todo: str) -> None:
        super().__init__(required, found, todo)
        self.kind = kind
        self.culprit: Any = None
        self.required, self.found, self.todo = required, found, todo

    def error(self, place: str) -> Exception:
        """Returns the error to raise, given where the thing was found."""
        return self.kind(errors.message(self.required, f"{self.found}{place}", self.todo))


class TooLarge(Exception):
    """There are more bytes than one function or call may have."""


def dump(value: Any, strategy: Any = None) -> list[Any]:
    """Returns the pickle of a value, followed by copies of the arrays in it.

    Args:
      value: What to pickle.
      strategy: The one whose variables may be inside; those of every cluster, if None.

    Raises:
      Refusal: Something inside must not travel.
      TooLarge: There are too many bytes.
      Exception: Whatever an object raises that cannot be pickled.
    """
    sink = _Sink(MOST_INLINE_BYTES)
    arrays = _Arrays(keeps=True)
    _run(sink, arrays, value, strategy)
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
        if raw.nbytes < _SMALL_BUFFER:
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
        self._roots = _local_directories()

    @override
    def persistent_id(self, obj: Any) -> Any:
        if type(obj) in _PLAIN_TYPES:
            return None
        role = _role_of(type(obj))
        if role is None:
            return None
        try:
            return _NAMING[role](obj, self._strategy)
        except Refusal as refusal:
            refusal.culprit = obj
            raise

    @override
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType | type):
            self._send_by_value(getattr(obj, "__module__", None))
        elif isinstance(obj, types.ModuleType):
            self._send_by_value(obj.__name__)
        elif isinstance(obj, Function):
            return Function, (obj.python_function, obj.input_signature, obj.name)
        elif isinstance(obj, lazy.LazyModule):
            return lazy.module, (obj._name,)
        elif isinstance(obj, jax.Array):
            return _reduce_jax_array(obj)
        elif type(obj) is np.ndarray and obj.dtype.isbuiltin == 2 and obj.ndim:
            # NumPy keeps arrays of types that are not its own inside the pickle.
            flat = np.ascontiguousarray(obj)
            return np.ndarray.view, (flat.view(np.uint8), obj.dtype)
        elif callable(obj) and (name := _global_name(obj, self._roots)) is not None:
            return name
        return super().reducer_override(obj)

    def _send_by_value(self, name: str | None) -> None:
        """Makes cloudpickle send a module's code, if workers cannot import it."""
        if name is None or name in self._seen:
            return
        self._seen.add(name)
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if module is None or not file or not _is_local(name, file, self._roots):
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


def _global_name(obj: Any, roots: tuple[str, ...]) -> str | None:
    """Returns the name under which workers can import an object that is no plain function.

    Compiled functions and functions with their own derivatives, such as those of JAX.
    """
    name, module = getattr(obj, "__qualname__", None), getattr(obj, "__module__", None)
    found = sys.modules.get(module) if isinstance(module, str) else None
    file = getattr(found, "__file__", None)
    if not isinstance(name, str) or not file or module in (None, "__main__"):
        return None
    if getattr(found, name, None) is not obj or _is_local(module, file, roots):
        return None
    return name


def _local_directories() -> tuple[str, ...]:
    """Returns the current directory, and that of the main script."""
    found = []
    with contextlib.suppress(OSError):
        found.append(os.getcwd())
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script:
        found.append(os.path.dirname(os.path.abspath(script)))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _is_local(name: str, file: str, roots: tuple[str, ...]) -> bool:
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


# What goes by name, or not at all. The coordinator's own classes are known by name here,
# because they are made above this module.

_COORDINATOR_CLASSES = {
    "replicax.coordinator.remote_value.RemoteValue": "remote_value",
    "replicax.coordinator.cluster_coordinator.ClusterCoordinator": "coordinator",
}
_ROLE_OF_CLASS: list[tuple[type, str]] = [
    (Variable, "local_variable"),
    (Strategy, "strategy"),
    (StrategyExtended, "extended"),
    (ReplicaLayout, "layout"),
    (Feed, "iterator"),
    (jax.core.Tracer, "tracer"),
]
_roles: weakref.WeakKeyDictionary[type, str | None] = weakref.WeakKeyDictionary()


def _role_of(kind: type) -> str | None:
    """Returns what objects of a class are to the cluster; None for ordinary ones."""
    try:
        return _roles[kind]
    except KeyError:
        role = _roles[kind] = next(_possible_roles(kind), None)
        return role


def _possible_roles(kind: type) -> Iterator[str]:
    # Asked of the dictionaries: `hasattr` would run the code of a metaclass.
    names = {name for base in kind.__mro__ for name in vars(base)}
    if "shipping_key" in names:
        yield "variable"
    if "is_per_worker" in names:
        yield "resource"
    for base in kind.__mro__:
        known = _COORDINATOR_CLASSES.get(f"{base.__module__}.{base.__qualname__}")
        if known is not None:
            yield known
    for base, role in _ROLE_OF_CLASS:
        if issubclass(kind, base):
            yield role


def _name_variable(variable: Any, strategy: Any) -> Any:
    owner = getattr(variable, "owner", None)
    if strategy is not None and owner is not None and owner is not strategy.extended:
        raise Refusal(
            errors.InvalidArgumentError,
            "A closure may use variables of its own cluster",
            f"variable {variable.name!r} belongs to another strategy",
            "Create it inside `with strategy.scope():` of the strategy that runs the closure.",
        )
    return ("variable", variable.shipping_key())


def _name_strategy(found: Any, strategy: Any) -> Any:
    is_own = found is strategy if strategy is not None else hasattr(found.extended, "cluster")
    if not is_own:
        raise _foreign_strategy(found)
    return ("strategy",)


def _name_extended(found: Any, strategy: Any) -> Any:
    is_own = found is strategy.extended if strategy is not None else hasattr(found, "cluster")
    if not is_own:
        raise _foreign_strategy(found.container_strategy)
    return ("extended",)


def _name_layout(layout: Any, strategy: Any) -> Any:
    if strategy is not None and getattr(strategy.extended, "layout", None) != layout:
        raise _foreign_strategy(layout)
    return ("layout",)


def _foreign_strategy(found: Any) -> Refusal:
    return Refusal(
        errors.InvalidArgumentError,
        "A closure may use the strategy of its own cluster",
        f"it holds {type(found).__name__}, which belongs to the devices of the coordinator",
        "Use the ParameterServerStrategy, or rx.get_strategy() inside the closure.",
    )


def _refuse_local_variable(variable: Any, strategy: Any) -> Any:
    raise Refusal(
        errors.InvalidArgumentError,
        "A closure may use variables that live on parameter servers",
        f"variable {variable.name!r} lives on the coordinator, or belongs to another strategy",
        "Create it inside `with strategy.scope():`, or pass its value as an argument.",
    )


def _refuse_remote_value(value: Any, strategy: Any) -> Any:
    raise Refusal(
        errors.InvalidArgumentError,
        "The inputs of a closure must be there when it is scheduled",
        "there is a RemoteValue",
        "Pass `value.fetch()`, or do both steps in one closure.",
    )


def _refuse_coordinator(value: Any, strategy: Any) -> Any:
    raise Refusal(
        errors.InvalidArgumentError,
        "A closure runs on a worker, where there is no coordinator",
        "it holds a ClusterCoordinator",
        "Call `schedule`, `join` and `fetch` outside of the function.",
    )


def _refuse_iterator(value: Any, strategy: Any) -> Any:
    raise Refusal(
        errors.ArgumentTypeError,
        "A closure reads data that is made on its worker",
        f"it holds a {type(value).__name__} of the coordinator",
        "Use `iter(coordinator.create_per_worker_dataset(dataset_fn))`, and pass that.",
    )


def _refuse_tracer(value: Any, strategy: Any) -> Any:
    raise Refusal(
        errors.TracedValueError,
        "A closure is scheduled with values",
        "there is a value that is being traced",
        "Call `schedule` outside of compiled functions.",
    )


_NAMING: dict[str, Any] = {
    "variable": _name_variable,
    "resource": lambda found, _: ("resource", found.resource),
    "strategy": _name_strategy,
    "extended": _name_extended,
    "layout": _name_layout,
    "local_variable": _refuse_local_variable,
    "remote_value": _refuse_remote_value,
    "coordinator": _refuse_coordinator,
    "iterator": _refuse_iterator,
    "tracer": _refuse_tracer,
}
