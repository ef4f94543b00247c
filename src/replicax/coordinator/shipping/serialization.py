"""Serializes functions and arguments for workers, and decodes their results.

The coordinator pickles and never unpickles: results arrive as trees of arrays.
"""

from __future__ import annotations

import dataclasses
import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import numpy as np

from replicax.coordinator.shipping import persistent_ids, unshippable
from replicax.foundation import errors, lazy
from replicax.foundation.types import Tree
from replicax.protocol import codec, trees
from replicax.protocol.codec import Buffer
from replicax.protocol.messages import Result
from replicax.strategies.base import Strategy
from replicax.tracing.function import Function
from replicax.values.distributed_values import PerReplica
from replicax.values.indexed_slices import IndexedSlices

if TYPE_CHECKING:
    from replicax.coordinator.shipping import pickling
else:
    # cloudpickle is imported with it.
    pickling = lazy.module("replicax.coordinator.shipping.pickling")

# The plain pickler suffices for arguments of these types.
_PLAIN_TYPES = frozenset([int, float, bool, str, bytes, type(None)])
_NUM_NAMED = 3
_CALL = "the call"


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True)
class Shipped:
    """A pickled function.

    Attributes:
      sha: The SHA-256 of its bytes, by which workers find it.
      buffers: Its pickle, and its out-of-band arrays.
    """

    sha: str
    buffers: Sequence[Buffer]


class PerWorkerObject(Protocol):
    """An object that each worker keeps under an id."""

    @property
    def resource(self) -> int: ...


@runtime_checkable
class VariableFinder(Protocol):
    """Finds the variables that a closure returned; implemented by the cluster."""

    def variable(self, key: tuple[object, ...]) -> object: ...


# By function and (weak) strategy; None for any strategy.
_shipped: weakref.WeakKeyDictionary[Function, dict[weakref.ref[Strategy] | None, Shipped]] = (
    weakref.WeakKeyDictionary()
)
# By hash: thousands of queued calls of one plain function share one pickle.
_by_hash: weakref.WeakValueDictionary[str, Shipped] = weakref.WeakValueDictionary()


def ship(fn: object, strategy: Strategy | None = None) -> Shipped:
    """Pickles a function for workers.

    An `rx.function` is pickled once: like its traces, it keeps the Python values of the first
    time. A plain function is pickled each time.

    Args:
      fn: The function, or any other object that workers need.
      strategy: The strategy whose variables it may use; any strategy, if None.

    Raises:
      ArgumentTypeError: It holds an object that cannot be pickled; the text has its path.
      InvalidArgumentError: It holds an object that has no meaning on a worker.
      ResourceExhaustedError: It is too large.

    >>> ship(lambda x: x + 1).sha == ship(lambda x: x + 2).sha
    False
    """
    if not isinstance(fn, Function):
        return _ship_now(fn, strategy)
    known = _shipped.setdefault(fn, {})
    key = None if strategy is None else weakref.ref(strategy)
    if key not in known:
        known[key] = _ship_now(fn, strategy)
    return known[key]


def _ship_now(fn: object, strategy: Strategy | None) -> Shipped:
    name = getattr(fn, "__name__", None) or getattr(fn, "name", None) or type(fn).__name__
    buffers = _dump(fn, strategy, str(name))
    shipped = Shipped(codec.fingerprint(buffers), buffers)
    return _by_hash.setdefault(shipped.sha, shipped)


def pack_arguments(
    args: Sequence[object] | None,
    kwargs: Mapping[str, object] | None,
    strategy: Strategy | None = None,
) -> tuple[list[int], list[Buffer]]:
    """Serializes the arguments of a call; they are copied.

    Returns:
      The ids of per-worker objects, if all arguments are such objects, and the buffers of the
      pickled arguments otherwise. Both are empty if there are no arguments.

    >>> pack_arguments((), {})
    ([], [])
    """
    if args and not kwargs and all(getattr(type(a), "is_per_worker", False) for a in args):
        return [cast(PerWorkerObject, arg).resource for arg in args], []
    return [], pickle_arguments(args, kwargs, strategy)


def pickle_arguments(
    args: Sequence[object] | None,
    kwargs: Mapping[str, object] | None,
    strategy: Strategy | None = None,
) -> list[Buffer]:
    """Pickles the arguments of a call; returns no buffers if there are none.

    >>> pickle_arguments(None, None)
    []
    """
    args, kwargs = tuple(args or ()), dict(kwargs or {})
    if not args and not kwargs:
        return []
    if all(_is_plain(arg) for arg in args) and all(_is_plain(arg) for arg in kwargs.values()):
        return _dump_plain((args, kwargs))
    return list(_dump((args, kwargs), strategy, _CALL))


def unpack_result(result: Result, buffers: Sequence[Buffer], cluster: object = None) -> Tree:
    """Returns the value that a closure returned, with NumPy arrays.

    Args:
      result: The worker's message, without an error.
      buffers: The arrays.
      cluster: A `VariableFinder` for the variables that the closure returned, if it may.

    Raises:
      ProtocolError: The result is not well-formed.

    >>> import numpy as np
    >>> encoded = trees.encode([np.arange(3), "ok"])
    >>> unpack_result(Result(7, encoded.tree, None, 1), encoded.buffers)
    [array([0, 1, 2]), 'ok']
    """
    if result.value is None or result.num_buffers != len(buffers):
        raise _malformed(f"closure {result.closure} lacks a value, or arrays")

    def decode_other(kind: str, items: list[Tree]) -> Tree:
        if kind == "per_replica" and items:
            return PerReplica(items)
        if kind == "slices" and len(items) == 3:
            return _slices(*items)
        if kind == "variable" and isinstance(cluster, VariableFinder):
            return _variable(cluster, tuple(items))
        raise _malformed(f"a node of kind {kind!r} has {len(items)} items")

    return trees.decode(result.value, buffers, decode_other)


def _variable(cluster: VariableFinder, key: tuple[object, ...]) -> object:
    try:
        return cluster.variable(key)
    except errors.DistributeError:
        raise
    except Exception as error:  # A malformed key can fail anywhere.
        raise _malformed(f"a variable has a malformed key ({error})") from None


def _slices(values: object, indices: object, dense_shape: Tree) -> IndexedSlices:
    is_shape = dense_shape is None or (
        isinstance(dense_shape, tuple) and all(isinstance(size, int) for size in dense_shape)
    )
    if not is_shape or not isinstance(values, np.ndarray) or not isinstance(indices, np.ndarray):
        raise _malformed("slices lack their arrays or have a wrong shape")
    return IndexedSlices(values, indices, dense_shape)


def _malformed(found: str) -> errors.ProtocolError:
    return errors.ProtocolError(
        "The result of a closure must be well-formed",
        found,
        "Run the same version of replicax on all tasks.",
    )


def _is_plain(value: object) -> bool:
    if type(value) in _PLAIN_TYPES:
        return True
    # Excludes extension dtypes.
    return type(value) is np.ndarray and value.dtype.isbuiltin == 1 and value.dtype.kind in "biufc"


def _dump_plain(value: object) -> list[Buffer]:
    """Pickles numbers and arrays with the plain pickler, at a tenth of the cost."""
    arrays: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=arrays.append)
    if len(data) + sum(buffer.raw().nbytes for buffer in arrays) > trees.MOST_BUFFER_BYTES:
        raise _too_large(value, None, _CALL)
    return [data, *(bytes(buffer.raw()) for buffer in arrays)]


def _dump(value: object, strategy: Strategy | None, name: str) -> Sequence[Buffer]:
    try:
        return pickling.dump(value, strategy)
    except persistent_ids.NotShippableError as error:
        path, _ = unshippable.find_unpicklable(value, _is_picklable(strategy), error.culprit)
        raise error.error(f" ({_path_text(name, path)})") from None
    except pickling.TooLargeError:
        raise _too_large(value, strategy, name) from None
    except errors.DistributeError:
        raise
    except Exception as error:  # The user's objects may raise anything.
        path, culprit = unshippable.find_unpicklable(value, _is_picklable(strategy))
        if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
            raise errors.InvalidArgumentError(
                "The objects that a closure uses must not be nested deeply, to be sent to a worker",
                f"{_path_text(name, path)[:80]}, a {type(culprit)}, is",
                "Keep nested data in flat lists or arrays, or make it inside the function.",
            ) from None
        raise errors.ArgumentTypeError(
            "The objects that a closure uses must be picklable, to be sent to a worker",
            f"{_path_text(name, path)} is a {type(culprit)}, which is not ({error})",
            "Make such objects inside the function, or pass what they are made from.",
        ) from error


def _path_text(name: str, path: str) -> str:
    """Returns a path with the name of its root; the two parts of a call get their names."""
    if name != _CALL:
        return f"{name}{path}"
    for index, part in (("[0]", "args"), ("[1]", "kwargs")):
        path = f"{part}{path.removeprefix(index)}" if path.startswith(index) else path
    return path or name


def _is_picklable(strategy: Strategy | None) -> Callable[[object], bool]:
    def is_picklable(value: object) -> bool:
        try:
            pickling.measure(value, strategy)
        except Exception:  # `__reduce__` of the user may raise anything.
            return False
        return True

    return is_picklable


def _too_large(
    value: object, strategy: Strategy | None, name: str
) -> errors.ResourceExhaustedError:
    sizes = []
    for label, child in unshippable.children(value):
        try:
            sizes.append((pickling.measure(child, strategy), label))
        except Exception:  # As above; what cannot be pickled is not too large.
            continue
    largest = sorted(sizes, key=lambda pair: -pair[0])[:_NUM_NAMED]
    texts = [f"{_path_text(name, label)} has {size / 1e6:.1f} MB" for size, label in largest]
    return errors.ResourceExhaustedError(
        f"A closure may have {pickling.MAX_INLINE_BYTES >> 20} MiB, and "
        f"{pickling.MAX_BYTES >> 30} GiB with its arrays",
        f"{name} has more: {', '.join(texts) or 'its own data is too large'}",
        "Keep data in variables or per-worker datasets instead of capturing it.",
    )
