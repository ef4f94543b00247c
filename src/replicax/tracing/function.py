"""`rx.function`: a Python function that reads and writes variables, compiled."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar, overload

import jax

from replicax.contexts import frames
from replicax.contexts.frames import Strategy
from replicax.foundation import errors, jax_compat, spans, tracebacks
from replicax.foundation.types import Tree
from replicax.tracing import concrete, feeds, retracing, signature
from replicax.tracing.concrete import ConcreteFunction
from replicax.tracing.iterators import EndOfData
from replicax.tracing.program import Program
from replicax.values.regroup import require_finite
from replicax.variables import read_cache

_log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
_BoundP = ParamSpec("_BoundP")
_BoundR = TypeVar("_BoundR")

# The key of a call: that of its arguments, then the context.
_Key: TypeAlias = tuple[signature.Key, *tuple[Hashable, ...]]


class _Debugging:
    """Whether compiled functions run as plain Python, in all threads."""

    runs_eagerly = False


def run_functions_eagerly(run_eagerly: bool) -> None:
    """Makes all compiled functions run as plain Python, or compiles them again.

    For debugging: prints, breakpoints and Python branches on values work then. Replica code
    runs one replica after the other, as it does under a plain `strategy.run`.

    >>> import replicax as rx
    >>> rx.run_functions_eagerly(True)
    >>> rx.function(lambda x: "positive" if x > 0 else "negative")(rx.Variable(-1.0))
    'negative'
    >>> rx.run_functions_eagerly(False)
    """
    _Debugging.runs_eagerly = bool(run_eagerly)


def functions_run_eagerly() -> bool:
    """Returns whether `run_functions_eagerly(True)` is in force.

    >>> functions_run_eagerly()
    False
    """
    return _Debugging.runs_eagerly


class Function(Generic[P, R]):
    """A compiled function; made by `rx.function`."""

    def __init__(
        self,
        python_function: Callable[P, R],
        input_signature: Sequence[Tree] | None = None,
        name: str | None = None,
        reduce_retracing: bool = False,
        *,
        history: retracing.TraceHistory | None = None,
    ) -> None:
        functools.update_wrapper(self, python_function)
        self.python_function = python_function
        self.input_signature = None if input_signature is None else tuple(input_signature)
        self.name = name or getattr(python_function, "__name__", "function")
        # Per key one program, or several that took different data.
        self._programs: dict[_Key, list[Program]] = {}
        self._reasons: list[str] = []
        self._history = history or retracing.history_of(python_function)
        self.reduce_retracing = reduce_retracing
        self._generalization = retracing.Generalization() if reduce_retracing else None
        # A name that was bound to another object in the last call.
        self._rebound: str | None = None
        self._has_created = False
        self._has_warned = False
        # One compiled function per strategy that runs this one on its replicas.
        self._per_strategy: weakref.WeakKeyDictionary[Strategy, Function[..., Any]] = (
            weakref.WeakKeyDictionary()
        )
        # One trace at a time. Taken before the gate.
        self._lock = threading.RLock()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given: tuple[Tree, ...] = args
            named: dict[str, Tree] = kwargs
            if self.input_signature is not None:
                fn, specs = self.python_function, self.input_signature
                given, named = signature.apply_input_signature(fn, specs, args, kwargs), {}
            frame = frames.current()
            # Replica code of several replicas is compiled as a whole, or not at all.
            is_one_of_many = (
                frame.replica_id is not None and frame.strategy.num_replicas_in_sync > 1
            )
            is_plain = frame.overlay is not None or is_one_of_many or _Debugging.runs_eagerly
            if is_plain or not jax_compat.is_eager() or jax_compat.is_jit_disabled():
                return self.python_function(*given, **named)
            self._history.num_calls += 1
            structure = None
            try:
                arguments = signature.Arguments(given, named, frame.layout)
                if self._generalization is not None:
                    structure = arguments.key[1]
                    numbers = self._generalization.changing(structure, arguments.python_numbers)
                    arguments = signature.Arguments(given, named, frame.layout, numbers)
                key = self._key(arguments, frame)
                programs = self._programs.get(key)
                if not programs or programs[0].events or programs[0].bindings.changed():
                    return self._call_with_data(key, arguments)
            except signature.Ragged:
                self._warn_ragged()
                with _end_of_data(self.name):
                    return self.python_function(*given, **named)
            except errors.TracedValueError:
                if self._generalization is None or not self._generalization.disable(structure):
                    raise
                # The function needs a Python number where it was given an array.
                return self(*args, **kwargs)
            return programs[0](arguments.arrays)
        except Exception as error:
            tracebacks.hide_own_frames(error)
            if isinstance(error, RecursionError):
                require_finite(f"The arguments of {self.name!r}", (args, kwargs))
            raise

    def _key(self, arguments: signature.Arguments, frame: frames.Frame) -> _Key:
        return (
            arguments.key,
            frame.mode,
            weakref.ref(frame.strategy),
            jax_compat.thread_settings(),
            read_cache.open_scope.get() is not None,
        )

    def _call_with_data(self, key: _Key, arguments: signature.Arguments) -> Tree:
        """Takes elements from data iterators as an earlier program did, and runs that program.

        If the elements are of other kinds, or there is no program, the function is traced.
        """
        supply = feeds.Supply(arguments.feeds)
        try:
            program = self._program_for(key, supply)
            if program is None:
                with _end_of_data(self.name):
                    program = self._trace(key, arguments, supply)
            result = program([*arguments.arrays, *map(supply.input_of, program.fed)])
        except BaseException:
            supply.return_all()
            raise
        supply.close()
        return result

    def _program_for(self, key: _Key, supply: feeds.Supply) -> Program | None:
        """Takes elements until one program fits them, or none does."""
        fitting = self._current_programs(key)
        position = 0
        while fitting:
            if len(fitting[0].events) == position:
                return fitting[0]
            event = supply.take(fitting[0].events[position].source)
            fitting = [p for p in fitting if p.events[position] == event]
            position += 1
        return None

    def _current_programs(self, key: _Key) -> list[Program]:
        """Returns the programs for a key whose names are still bound to the same objects."""
        found = self._programs.get(key, [])
        if not any(program.bindings.changed() for program in found):
            return found
        with self._lock:
            rebound = [label for p in found if (label := p.bindings.changed())]
            found = [p for p in found if not p.bindings.changed()]
            self._programs[key] = found
            self._rebound = rebound[-1] if rebound else None
            # Other variables may have to be created.
            self._has_created = False
            return found

    def _call_python(self, *args: Any, **kwargs: Any) -> Tree:
        """Calls the Python function, with arguments converted to the signature."""
        if self.input_signature is not None:
            fn, specs = self.python_function, self.input_signature
            args, kwargs = signature.apply_input_signature(fn, specs, args, kwargs), {}
        return self.python_function(*args, **kwargs)

    def _trace(self, key: _Key, arguments: signature.Arguments, supply: feeds.Supply) -> Program:
        with self._lock:
            # Another thread may have traced meanwhile.
            programs = self._programs.get(key, [])
            if programs and not programs[0].events:
                return programs[0]
            reason = self._reason(key)
            with translated_errors(self.name), spans.block("trace", self.name):
                program = Program(self.name, self.python_function, arguments, supply)
            if program.created and self._has_created:
                names = ", ".join(repr(v.name) for v in program.created)
                raise errors.InvalidArgumentError(
                    f"{self.name!r} may create variables on its first call only",
                    f"a later trace ({reason}) created {names}",
                    "Keep the variable in an attribute or an outer name and create it "
                    "only if it does not exist yet.",
                )
            self._has_created = self._has_created or bool(program.created)
            self._reasons.append(reason)
            self._programs.setdefault(key, []).append(program)
            self._history.note_trace(self.name, reason)
            return program

    def _reason(self, key: _Key) -> str:
        if self._rebound is not None:
            rebound, self._rebound = self._rebound, None
            return f"{rebound!r} is bound to another object now"
        if not self._programs:
            return "first call"
        if key in self._programs:
            return "the elements of a data iterator changed"
        texts = [signature.difference(old[0], key[0]) for old in self._programs]
        # The nearest signature explains it best, and of several the latest.
        return min(reversed(texts), key=len)

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> ConcreteFunction:
        """Compiles the function for one signature, without calling it.

        Args:
          *args: As for a call, with a `TensorSpec` for an array; None in its shape fits any
            size (XLA compiles a program for each size on its first use). Omit them if the
            function has an `input_signature`.
          **kwargs: Further arguments.

        >>> import replicax as rx
        >>> double = rx.function(lambda x: x * 2)
        >>> double.get_concrete_function(rx.TensorSpec((3,))).structured_outputs
        TensorSpec(shape=(3,), dtype=dtype('float32'), name=None)
        """
        given: tuple[Tree, ...] = args
        if self.input_signature is not None and not args and not kwargs:
            given = self.input_signature
        programs = [self._traced(*example) for example in concrete.examples((given, kwargs))]
        return ConcreteFunction(
            self, self.python_function, self.name, given, dict(kwargs), programs
        )

    def _traced(self, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Program:
        """Returns the program for some arguments, without calling it."""
        frame = frames.current()
        if self.input_signature is not None:
            fn, specs = self.python_function, self.input_signature
            args, kwargs = signature.apply_input_signature(fn, specs, args, kwargs), {}
        arguments = signature.Arguments(args, kwargs, frame.layout)
        key = self._key(arguments, frame)
        supply = feeds.Supply(arguments.feeds)
        try:
            return self._program_for(key, supply) or self._trace(key, arguments, supply)
        finally:
            supply.return_all()

    def explain_traces(self) -> str:
        """Returns a text that lists the traces of the function and the reason for each.

        >>> import jax.numpy as jnp
        >>> double = function(lambda x: x * 2)
        >>> _ = double(jnp.ones(3)), double(jnp.ones(4))
        >>> print(double.explain_traces())
        <lambda> was traced 2 times:
          1. first call
          2. argument 0: float32[3] became float32[4]
        """
        times = "once" if len(self._reasons) == 1 else f"{len(self._reasons)} times"
        lines = [f"  {i}. {reason}" for i, reason in enumerate(self._reasons, 1)]
        inner = [f.explain_traces() for f in self._per_strategy.values()]
        return "\n".join([f"{self.name} was traced {times}:", *lines, *inner])

    def experimental_get_tracing_count(self) -> int:
        """Returns the number of traces of the Python function."""
        inner = [f.experimental_get_tracing_count() for f in self._per_strategy.values()]
        return len(self._reasons) + sum(inner)

    def on_replicas(self, strategy: Strategy) -> Function[..., Any]:
        """Returns the compiled function that runs this one on all replicas of a strategy."""
        with self._lock:
            found = self._per_strategy.get(strategy)
            if found is None:
                # Weak, or the entry would keep its own key alive.
                owner = weakref.ref(strategy)
                fn = self._call_python

                def run(*args: Any, **kwargs: Any) -> Tree:
                    strategy = owner()
                    assert strategy is not None
                    return strategy.run(fn, args, kwargs)

                run.__dict__["python_function"] = self.python_function
                found = Function(
                    run,
                    name=self.name,
                    reduce_retracing=self.reduce_retracing,
                    history=self._history,
                )
                self._per_strategy[strategy] = found
            return found

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Function[P, R]: ...

    @overload
    def __get__(
        self: Function[Concatenate[Any, _BoundP], _BoundR],
        instance: object,
        owner: type | None = None,
    ) -> Function[_BoundP, _BoundR]: ...

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Binds a function that is defined in a class body, once per instance."""
        if instance is None:
            return self
        method = self.python_function.__get__(instance, owner)
        bindings = getattr(instance, "__dict__", {})
        # By id: a subclass may override the method and call this one through super().
        key = f"_rx_function_{id(self)}"
        if key not in bindings:
            bindings[key] = Function(
                method, self.input_signature, self.name, reduce_retracing=self.reduce_retracing
            )
        return bindings[key]

    def __reduce__(self) -> tuple[Any, ...]:
        # What was compiled stays here: another process compiles the function for its devices.
        arguments = (self.python_function, self.input_signature, self.name, self.reduce_retracing)
        return Function, arguments

    def __repr__(self) -> str:
        return f"<rx.function {self.name}>"

    def _warn_ragged(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s got per-replica arguments whose shapes, types or structures differ; such calls "
                "run uncompiled, one replica after the other.",
                self.name,
            )


@overload
def function(
    func: Callable[P, R],
    input_signature: Sequence[Tree] | None = None,
    autograph: bool = True,
    jit_compile: bool | None = None,
    reduce_retracing: bool = False,
) -> Function[P, R]: ...


@overload
def function(
    func: None = None,
    input_signature: Sequence[Tree] | None = None,
    autograph: bool = True,
    jit_compile: bool | None = None,
    reduce_retracing: bool = False,
) -> Callable[[Callable[P, R]], Function[P, R]]: ...


def function(
    func: Callable[..., Any] | None = None,
    input_signature: Sequence[Tree] | None = None,
    autograph: bool = True,
    jit_compile: bool | None = None,
    reduce_retracing: bool = False,
) -> Any:
    """Compiles a function that may read, write and create variables and run replicas.

    Arrays and NumPy numbers are arguments of the compiled program; Python values are
    constants of it, and a new value causes a new trace. `explain_traces()` lists the reasons,
    and a function that is traced in many calls in a row logs a warning.

    Args:
      func: The function; leave out to use `function` as a decorator with arguments.
      input_signature: One `TensorSpec` (or structure of them) per argument.
      autograph: Accepted for portability, without effect: Python control flow runs while the
        function is traced. Use `rx.cond` and `rx.while_loop` for values of the program.
      jit_compile: Accepted for portability, without effect: XLA compiles every function.
        `rx.run_functions_eagerly` switches compilation off.
      reduce_retracing: Whether a Python number that changes from call to call becomes an
        array with its second value, where the function can use it as one. Shapes are fixed
        in XLA programs: an array of a new shape always causes a new trace.

    Raises:
      ArgumentTypeError: `func` is not callable.

    >>> import replicax as rx
    >>> counter = rx.Variable(0.0)
    >>> @rx.function
    ... def count(step):
    ...     return counter.assign_add(step).read_value()
    >>> count(2.0), count(2.0)
    (Array(2., dtype=float32), Array(4., dtype=float32))
    """
    if func is None:
        return functools.partial(
            function,
            input_signature=input_signature,
            autograph=autograph,
            jit_compile=jit_compile,
            reduce_retracing=reduce_retracing,
        )
    if not callable(func):
        raise errors.ArgumentTypeError(
            "`rx.function` needs a function", f"{func!r} was given", "Pass a callable."
        )
    return Function(func, input_signature, reduce_retracing=reduce_retracing)


@contextlib.contextmanager
def _end_of_data(name: str) -> Iterator[None]:
    """Turns the end of an iterator into an error that no loop around the call swallows."""
    try:
        yield
    except EndOfData:
        raise errors.OutOfRangeError(
            f"{name!r} needs another element",
            "the iterator that it reads has come to its end",
            "Catch rx.errors.OutOfRangeError to end the epoch, or repeat the dataset.",
        ) from None


_TRACED_VALUE_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


class translated_errors:
    """Translates JAX's errors about traced values that are used in Python."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        is_shape = isinstance(error, TypeError) and "concrete value" in str(error)
        if error is not None and (is_shape or isinstance(error, _TRACED_VALUE_ERRORS)):
            translated = errors.TracedValueError(
                f"Compiled code such as {self._name!r} needs values that the compiler can follow",
                "a traced value (the replica id, an argument or a variable) was used as a "
                f"Python int, bool or NumPy array: {str(error).splitlines()[0]}",
                "Use jnp.where, rx.cond, rx.while_loop or array indexing instead, or call "
                "`strategy.run` with the plain function, which runs replica by replica.",
            )
            # With the frames of the user's code.
            raise translated.with_traceback(error.__traceback__) from error
