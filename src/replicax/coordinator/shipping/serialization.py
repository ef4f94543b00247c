"""What travels to workers and back: functions, arguments, results and errors.

The coordinator pickles and never unpickles: results arrive as trees of arrays, errors as
names and texts.
"""

from __future__ import annotations

import dataclasses
import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from replicax.coordinator.shipping import captures, persistent_ids
from replicax.coordinator.shipping.remote_errors import rebuild_error
from replicax.foundation import errors, lazy
from replicax.protocol import codec, trees
from replicax.protocol.messages import Result
from replicax.tracing.function import Function
from replicax.values.distributed_values import PerReplica
from replicax.values.indexed_slices import IndexedSlices

if TYPE_CHECKING:
    from replicax.coordinator.shipping import pickling
else:
    # cloudpickle is imported with it.
    pickling = lazy.module("replicax.coordinator.shipping.pickling")

__all__ = [
    "Shipped",
    "pack_arguments",
    "pickle_arguments",
    "rebuild_error",
    "ship",
    "unpack_result",
]

# Arguments of these types, and no others, need nothing but the plain pickler.
_PLAIN_TYPES = frozenset([int, float, bool, str, bytes, type(None)])
_NUM_NAMED = 3
_CALL = "the call"


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True)
class Shipped:
    """A function as it travels.

    Attributes:
      sha: The name that its bytes have on every worker.
      buffers: Its pickle, and the arrays beside it.
    """

    sha: str
    buffers: list[Any]


# What was shipped, per function and (weak) strategy; None for any strategy.
_shipped: weakref.WeakKeyDictionary[Function, dict[Any, Shipped]] = weakref.WeakKeyDictionary()
# By name: thousands of calls of one plain function wait with one pickle.
_alike: weakref.WeakValueDictionary[str, Shipped] = weakref.WeakValueDictionary()


def ship(fn: Callable[..., Any], strategy: Any = None) -> Shipped:
    """Makes a function ready to travel.

    An `rx.function` is pickled once: like its traces, it keeps the Python values that it
    saw first. A plain function is pickled each time.

    Args:
      fn: The function, or any other object that workers need.
      strategy: The one whose variables it may use; that of any cluster, if None.

    Raises:
      ArgumentTypeError: It holds something that cannot be pickled; the text says where.
      InvalidArgumentError: It holds something that has no meaning on a worker.
      ResourceExhaustedError: It holds too much data.

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


def _ship_now(fn: Any, strategy: Any) -> Shipped:
    name = getattr(fn, "__name__", None) or getattr(fn, "name", None) or type(fn).__name__
    buffers = _dump(fn, strategy, str(name))
    shipped = Shipped(codec.fingerprint(buffers), buffers)
    return _alike.setdefault(shipped.sha, shipped)


def pack_arguments(
    args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, strategy: Any = None
) -> tuple[list[int], list[Any]]:
    """Makes the arguments of a call ready to travel; they are copied.

    Returns:
      The numbers of per-worker objects, if the arguments are nothing else, and the buffers
      of the pickled arguments otherwise. Both are empty if there are no arguments.

    >>> pack_arguments((), {})
    ([], [])
    """
    if args and not kwargs and all(getattr(type(a), "is_per_worker", False) for a in args):
        return [arg.resource for arg in args], []
    return [], pickle_arguments(args, kwargs, strategy)


def pickle_arguments(
    args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, strategy: Any = None
) -> list[Any]:
    """Makes the arguments of a call ready to travel; no buffers if there are none.

    >>> pickle_arguments(None, None)
    []
    """
    args, kwargs = tuple(args or ()), dict(kwargs or {})
    if not args and not kwargs:
        return []
    if all(_is_plain(arg) for arg in args) and all(_is_plain(arg) for arg in kwargs.values()):
        return _dump_plain((args, kwargs))
    return _dump((args, kwargs), strategy, _CALL)


def unpack_result(result: Result, buffers: Sequence[Any], cluster: Any = None) -> Any:
    """Returns the value that a closure returned, with NumPy arrays.

    Args:
      result: What the worker said; it has no error.
      buffers: The arrays.
      cluster: Its `variable(key)` finds the variables that a closure returned.

    Raises:
      ProtocolError: The result breaks the rules of the protocol.

    >>> import numpy as np
    >>> encoded = trees.encode([np.arange(3), "ok"])
    >>> unpack_result(Result(7, encoded.tree, None, 1), encoded.buffers)
    [array([0, 1, 2]), 'ok']
    """
    if result.value is None or result.num_buffers != len(buffers):
        raise _malformed(f"closure {result.closure} has no value, or not the arrays it announced")

    def decode_other(kind: str, items: list[Any]) -> Any:
        if kind == "per_replica" and items:
            return PerReplica(items)
        if kind == "slices" and len(items) == 3:
            return _slices(*items)
        if kind == "variable" and hasattr(cluster, "variable"):
            return _variable(cluster, tuple(items))
        raise _malformed(f"a node of kind {kind!r} came with {len(items)} items")

    return trees.decode(result.value, buffers, decode_other)


def _variable(cluster: Any, key: tuple[Any, ...]) -> Any:
    try:
        return cluster.variable(key)
    except errors.DistributeError:
        raise
    except Exception as error:  # A malformed key can fail anywhere.
        raise _malformed(f"a variable has a malformed key ({error})") from None


def _slices(values: Any, indices: Any, dense_shape: Any) -> IndexedSlices:
    is_shape = dense_shape is None or (
        isinstance(dense_shape, tuple) and all(isinstance(size, int) for size in dense_shape)
    )
    if not is_shape or not isinstance(values, np.ndarray) or not isinstance(indices, np.ndarray):
        raise _malformed("slices came without their arrays or with a wrong shape")
    return IndexedSlices(values, indices, dense_shape)


def _malformed(found: str) -> errors.ProtocolError:
    return errors.ProtocolError(
        "The result of a closure must be well-formed",
        found,
        "Run the same version of replicax on all tasks.",
    )


def _is_plain(value: Any) -> bool:
    if type(value) in _PLAIN_TYPES:
        return True
    # NumPy's own types of numbers.
    return type(value) is np.ndarray and value.dtype.isbuiltin == 1 and value.dtype.kind in "biufc"


def _dump_plain(value: Any) -> list[Any]:
    """Pickles numbers and arrays, at a tenth of the cost."""
    beside: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=beside.append)
    if len(data) + sum(buffer.raw().nbytes for buffer in beside) > trees.MOST_BUFFER_BYTES:
        raise _too_large(value, None, _CALL)
    return [data, *(bytes(buffer.raw()) for buffer in beside)]


def _dump(value: Any, strategy: Any, name: str) -> list[Any]:
    try:
        return pickling.dump(value, strategy)
    except persistent_ids.Refusal as refusal:
        place, _ = captures.locate(value, _travels(strategy), refusal.culprit)
        raise refusal.error(f" ({_words(name, place)})") from None
    except pickling.TooLarge:
        raise _too_large(value, strategy, name) from None
    except errors.DistributeError:
        raise
    except Exception as error:  # Objects raise what they like when they are pickled.
        if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
            place, culprit = captures.locate(value, _travels(strategy))
            raise errors.InvalidArgumentError(
                "What a closure uses must not be nested deeply, as it travels to a worker",
                f"{_words(name, place)[:80]}, a {type(culprit)}, is",
                "Keep nested data in flat lists or arrays, or make it inside the function.",
            ) from None
        place, culprit = captures.locate(value, _travels(strategy))
        raise errors.ArgumentTypeError(
            "What a closure uses must be picklable, as it travels to a worker",
            f"{_words(name, place)} is a {type(culprit)}, which is not ({error})",
            "Make such objects inside the function, or pass what they are made from.",
        ) from error


def _words(name: str, place: str) -> str:
    """Returns where something lies; the two parts of a call get their names."""
    if name != _CALL:
        return f"{name}{place}"
    for index, part in (("[0]", "args"), ("[1]", "kwargs")):
        place = f"{part}{place.removeprefix(index)}" if place.startswith(index) else place
    return place or name


def _travels(strategy: Any) -> Callable[[Any], bool]:
    def travels(value: Any) -> bool:
        try:
            pickling.measure(value, strategy)
        except Exception:  # Any reason will do.
            return False
        return True

    return travels


def _too_large(value: Any, strategy: Any, name: str) -> errors.ResourceExhaustedError:
    sizes = []
    for label, child in captures.children(value):
        try:
            sizes.append((pickling.measure(child, strategy), label))
        except Exception:  # What cannot be pickled is not what is too large.
            continue
    largest = sorted(sizes, key=lambda pair: -pair[0])[:_NUM_NAMED]
    named = ", ".join(f"{_words(name, label)} has {size / 1e6:.1f} MB" for size, label in largest)
    return errors.ResourceExhaustedError(
        f"A closure may have {pickling.MOST_INLINE_BYTES >> 20} MiB, and "
        f"{pickling.MOST_BYTES >> 30} GiB with its arrays",
        f"{name} has more: {named or 'its own data is too large'}",
        "Keep data in variables or per-worker datasets instead of capturing it.",
    )
