"""Detects iterators and random state that a function consumes while it is traced.

A trace runs the function once; the program runs many times. An element that the trace took
from a generator, or a number that it drew from `np.random`, would be a constant of the
program: every call would compute with the same one. So the state of all objects that the
function can reach is compared before and after the trace.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias

import numpy as np

from replicax.foundation import errors
from replicax.tracing.iterators import Feed, is_iterator
from replicax.tracing.reach import NumberGenerator, Reach

# The nesting depth of iterators that are compared.
_MOST_LEVELS = 8
_ATOMS = (bool, int, float, complex, str, bytes, type(None), np.generic)

_ProfileEvent: TypeAlias = Literal["call", "return", "c_call", "c_return", "c_exception"]
# A value that is equal as long as an iterator or generator has not moved.
Position: TypeAlias = object


class UnknownPosition(Exception):
    """Raised for an iterator whose position cannot be read."""


class Consumption:
    """The iterators and random state that the trace of one function must not consume.

    Args:
      name: The name of the function, for error messages.
      reach: The objects that its code can reach.
    """

    def __init__(self, name: str, reach: Reach) -> None:
        self._name = name
        self._watched: list[tuple[str, str, Callable[[], Position], Position]] = []
        self._resumptions = _Resumptions()
        for label, iterator in reach.iterators.values():
            if isinstance(iterator, types.GeneratorType):
                self._watch("iterator", label, self._resumptions.counter(iterator))
                continue
            try:
                self._watch("iterator", label, lambda it=iterator: position_of(it))
            except UnknownPosition:
                raise self._iterator_error(label, iterator, "uses") from None
        for label, generator in reach.generators.values():
            self._watch("random", label, lambda g=generator: _state_of(g))
        for module in sorted(_modules_to_watch(reach)):
            self._watch("random", module, _MODULE_STATES[module])

    def _watch(self, kind: str, label: str, position: Callable[[], Position]) -> None:
        self._watched.append((kind, label, position, position()))

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Returns the context in which the trace must run."""
        return self._resumptions.counted()

    def require_none(self) -> None:
        """Raises if the trace consumed something."""
        for kind, label, position, before in self._watched:
            if position() == before:
                continue
            if kind == "iterator":
                raise self._iterator_error(label, None, "advances")
            raise errors.TracingError(
                f"{self._name!r} is traced once, and its program runs in every call: the "
                "numbers that it draws in Python would be constants",
                f"the trace draws from {label}",
                "Draw with `jax.random` and a key from `rx.random.Generator` or "
                "`rx.random.replica_key`, or pass the numbers, or the iterator that draws, as "
                "arguments. For the initial value of a variable, pass a function: "
                "rx.Variable(lambda: ...).",
            )

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Allows code to consume that runs once, not in each call of the function."""
        is_untouched = [position() == before for _, _, position, before in self._watched]
        yield
        for i, (kind, label, position, _) in enumerate(self._watched):
            if is_untouched[i]:
                self._watched[i] = (kind, label, position, position())

    def _iterator_error(self, label: str, iterator: object, verb: str) -> errors.TracingError:
        kind = "an iterator" if iterator is None else f"a {type(iterator).__name__}"
        return errors.TracingError(
            f"{self._name!r} is traced once, and its program runs in every call: the elements "
            "of an iterator that it refers to by name would be constants",
            f"the trace {verb} {label!r}, {kind} of Python or another library",
            "Pass the iterator as an argument of the function, or use `iter` of an "
            "rx.data.Dataset, which may also be captured.",
        )


class _Resumptions:
    """Counts how often generators are resumed, which their own state does not show.

    Where there is a generator, the interpreter reports every call. That makes the trace
    slower, and functions that can reach a generator are few.
    """

    def __init__(self) -> None:
        # By the frame that a generator runs in.
        self._counts: dict[types.FrameType, int] = {}

    def counter(self, generator: types.GeneratorType) -> Callable[[], int]:
        """Returns a function that returns how often a generator was resumed."""
        frame = generator.gi_frame
        if frame is None:
            return lambda: 0  # The generator is exhausted.
        self._counts[frame] = 0
        return lambda: self._counts[frame]

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Counts while the code inside runs, in this thread."""
        if not self._counts:
            yield
            return
        previous = sys.getprofile()
        # cProfile.Profile is not a function to which events can be passed on: it is paused.
        resume: Callable[[], None] | None = getattr(previous, "enable", None)
        pass_on = previous if resume is None else None

        def note(frame: types.FrameType, event: _ProfileEvent, argument: object) -> None:
            if event == "call" and frame in self._counts:
                self._counts[frame] += 1
            if pass_on is not None:
                pass_on(frame, event, argument)

        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(pass_on)
            if resume is not None:
                resume()


def position_of(iterator: object, level: int = 0) -> Position:
    """Returns a value that changes when an iterator advances.

    >>> numbers = enumerate("ab")
    >>> before = position_of(numbers)
    >>> position_of(numbers) == before
    True
    >>> _ = next(numbers)
    >>> position_of(numbers) == before
    False
    """
    if isinstance(iterator, Feed):
        # Each call takes elements from it.
        return "feed"
    if level == _MOST_LEVELS:
        raise UnknownPosition
    if isinstance(iterator, types.GeneratorType):
        return _position_of_generator(iterator, level)
    own = getattr(iterator, "__dict__", None)
    if isinstance(own, dict) and own:
        return {name: _sketch(value, level) for name, value in own.items()}
    try:
        with warnings.catch_warnings():
            # Python 3.12 and 3.13 announce that some iterators will not be copied any more.
            warnings.simplefilter("ignore", DeprecationWarning)
            reduced = iterator.__reduce__()
    except TypeError:
        raise UnknownPosition from None
    if not isinstance(reduced, tuple):
        raise UnknownPosition
    return tuple(_sketch_of_part(part, level) for part in reduced)


def _sketch_of_part(part: object, level: int) -> Position:
    """Sketches what `__reduce__` returned, which may be new objects."""
    if isinstance(part, tuple):
        return tuple(_sketch_of_part(item, level) for item in part)
    if isinstance(part, range | list | dict | set):
        return type(part), len(part)
    return _sketch(part, level)


def _position_of_generator(generator: types.GeneratorType, level: int) -> Position:
    """Returns the position of a generator inside another iterator, by its local names."""
    frame = generator.gi_frame
    if frame is None:
        return "finished"
    return frame.f_lasti, {name: _sketch(v, level) for name, v in frame.f_locals.items()}


def _sketch(value: object, level: int) -> Position:
    if isinstance(value, _ATOMS):
        return (type(value), repr(value))
    if isinstance(value, tuple):
        return tuple(_sketch(item, level) for item in value)
    if is_iterator(value):
        with contextlib.suppress(UnknownPosition):
            return position_of(value, level + 1)
    size = len(value) if isinstance(value, list | dict | set) else None
    return _Same(value, size)


class _Same:
    """Equal to another if both hold the same object, of the same size."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: object, size: int | None) -> None:
        self._value, self._size = value, size

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return False
        return self._value is other._value and self._size == other._size


def _state_of(generator: NumberGenerator) -> bytes:
    """Returns the state of a random number generator."""
    if isinstance(generator, random.Random):
        try:
            return pickle.dumps(generator.getstate())
        except NotImplementedError:
            # The operating system's randomness has no state.
            return b""
    if isinstance(generator, np.random.Generator):
        return pickle.dumps(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return pickle.dumps(generator.get_state(legacy=False))
    if isinstance(generator, np.random.BitGenerator):
        return pickle.dumps(generator.state)
    if isinstance(generator, np.random.SeedSequence):
        return pickle.dumps(generator.n_children_spawned)
    return bytes(generator.get_state().numpy())


def _state_of_torch() -> bytes:
    torch = sys.modules.get("torch")
    return b"" if torch is None else bytes(torch.random.get_rng_state().numpy())


_MODULE_STATES: dict[str, Callable[[], bytes]] = {
    "random": lambda: pickle.dumps(random.getstate()),
    "np.random": lambda: pickle.dumps(np.random.get_state(legacy=False)),
    "torch": _state_of_torch,
}


def _modules_to_watch(reach: Reach) -> set[str]:
    """Returns the modules whose random state must not change during the trace.

    Those that the code mentions: other threads, such as readers of data, and libraries draw
    numbers too. In a process with one thread, only the function draws from np.random.
    """
    alone = threading.active_count() == 1
    return reach.modules | ({"np.random"} if alone else set())
