"""`rx.function`: a Python function that reads and writes variables, compiled."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import jax

from replicax.contexts import frames
from replicax.foundation import errors, jax_compat
from replicax.tracing import feeds, signature
from replicax.tracing.program import Program

_log = logging.getLogger(__name__)
_MANY_TRACES = 8


class Function:
    """A compiled function; made by `rx.function`."""

    def __init__(
        self,
        python_function: Callable[..., Any],
        input_signature: Sequence[Any] | None = None,
        name: str | None = None,
    ) -> None:
        functools.update_wrapper(self, python_function)
        self.python_function = python_function
        self.input_signature = None if input_signature is None else tuple(input_signature)
        self.name = name or getattr(python_function, "__name__", "function")
        # Per key of arguments one program, or several that took different data.
        self._programs: dict[Any, list[Program]] = {}
        self._reasons: list[str] = []
        self._has_created = False
        self._has_warned = False
        # One compiled function per strategy that runs this one on its replicas.
        self._per_strategy: weakref.WeakKeyDictionary[Any, Function] = weakref.WeakKeyDictionary()
        # One trace at a time. Taken before the gate.
        self._lock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.input_signature is not None:
            fn, specs = self.python_function, self.input_signature
            args, kwargs = signature.apply_input_signature(fn, specs, args, kwargs), {}
        frame = frames.current()
        # Replica code of several replicas is compiled as a whole, or not at all.
        is_one_of_many = frame.replica_id is not None and frame.strategy.num_replicas_in_sync > 1
        is_inside = frame.overlay is not None or is_one_of_many
        if is_inside or not jax_compat.is_eager() or jax_compat.is_jit_disabled():
            return self.python_function(*args, **kwargs)
        try:
            arguments = signature.Arguments(args, kwargs, frame.layout)
            key = (
                arguments.key,
                frame.mode,
                weakref.ref(frame.strategy),
                jax_compat.caller_settings(),
            )
            programs = self._programs.get(key)
            if programs is None or programs[0].events:
                return self._call_with_data(key, arguments)
        except signature.Ragged:
            self._warn_ragged()
            with _end_of_data(self.name):
                return self.python_function(*args, **kwargs)
        return programs[0](arguments.arrays)

    def _call_with_data(self, key: Any, arguments: signature.Arguments) -> Any:
        """Takes from data iterators what the program of an earlier call took, and runs it.

        If the data is different this time, or there was no call, the function is traced.
        """
        supply = feeds.Supply(arguments.feeds)
        try:
            program = self._program_for(key, supply)
            if program is None:
                with _end_of_data(self.name):
                    program = self._trace(key, arguments, supply)
            result = program([*arguments.arrays, *supply.arrays])
        except BaseException:
            supply.return_all()
            raise
        supply.close()
        return result

    def _program_for(self, key: Any, supply: feeds.Supply) -> Program | None:
        """Takes elements until one program fits them, or none does."""
        fitting = self._programs.get(key, [])
        position = 0
        while fitting:
            if len(fitting[0].events) == position:
                return fitting[0]
            event = supply.take(fitting[0].events[position].origin)
            fitting = [p for p in fitting if p.events[position] == event]
            position += 1
        return None

    def _call_python(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the Python function, with arguments converted to the signature."""
        if self.input_signature is not None:
            fn, specs = self.python_function, self.input_signature
            args, kwargs = signature.apply_input_signature(fn, specs, args, kwargs), {}
        return self.python_function(*args, **kwargs)

    def _trace(self, key: Any, arguments: signature.Arguments, supply: feeds.Supply) -> Program:
        with self._lock:
            # Another thread may have traced meanwhile.
            programs = self._programs.get(key, [])
            if programs and not programs[0].events:
                return programs[0]
            reason = self._reason(key)
            with translated_errors(self.name):
                program = Program(self.python_function, arguments, supply)
            if program.created and self._has_created:
                names = ", ".join(repr(v.name) for v in program.created)
                raise errors.InvalidArgumentError(
                    errors.message(
                        f"{self.name!r} may create variables on its first call only",
                        f"a later trace ({reason}) created {names}",
                        "Keep the variable in an attribute or an outer name and create it "
                        "only if it is not there yet.",
                    )
                )
            self._has_created = self._has_created or bool(program.created)
            self._reasons.append(reason)
            self._programs.setdefault(key, []).append(program)
            if len(self._reasons) == _MANY_TRACES:
                _log.warning(
                    "%s was traced %d times; the last time because %s. Python numbers are "
                    "constants of the trace: pass arrays for values that change.",
                    self.name,
                    _MANY_TRACES,
                    reason,
                )
            return program

    def _reason(self, key: Any) -> str:
        if not self._programs:
            return "first call"
        if key in self._programs:
            return "the elements of a data iterator changed"
        texts = [signature.difference(old[0], key[0]) for old in self._programs]
        return min(texts, key=len) if len(set(texts)) > 1 else texts[-1]

    def explain_traces(self) -> str:
        """Says how often the function was traced, and why each time.

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
        """Returns how often the Python function was traced."""
        inner = [f.experimental_get_tracing_count() for f in self._per_strategy.values()]
        return len(self._reasons) + sum(inner)

    def on_replicas(self, strategy: Any) -> Function:
        """Returns the compiled function that runs this one on all replicas of a strategy."""
        with self._lock:
            found = self._per_strategy.get(strategy)
            if found is None:
                # Weak, or the entry would keep its own key alive.
                owner = weakref.ref(strategy)
                fn = self._call_python

                def run(*args: Any, **kwargs: Any) -> Any:
                    return owner().run(fn, args, kwargs)  # type: ignore[union-attr]

                found = Function(run, name=self.name)
                self._per_strategy[strategy] = found
            return found

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Binds a function that is defined in a class body, once per instance."""
        if instance is None:
            return self
        method = self.python_function.__get__(instance, owner)
        bindings = getattr(instance, "__dict__", {})
        # The id: a subclass may override the method and call this one through super().
        key = f"_rx_function_{id(self)}"
        if key not in bindings:
            bindings[key] = Function(method, self.input_signature, self.name)
        return bindings[key]

    def __repr__(self) -> str:
        return f"<rx.function {self.name}>"

    def _warn_ragged(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s got per-replica arguments of different shapes; such calls run replica by "
                "replica, uncompiled.",
                self.name,
            )


@overload
def function(
    func: Callable[..., Any], *, input_signature: Sequence[Any] | None = None
) -> Function: ...


@overload
def function(
    func: None = None, *, input_signature: Sequence[Any] | None = None
) -> Callable[[Callable[..., Any]], Function]: ...


def function(func: Any = None, *, input_signature: Sequence[Any] | None = None) -> Any:
    """Compiles a function that may read, write and create variables and run replicas.

    Arrays are arguments of the compiled program; Python values are constants of it, and a
    new value means a new trace. `explain_traces()` tells why there was one.

    Args:
      func: The function; leave out to use `function` as a decorator with arguments.
      input_signature: One `TensorSpec` (or structure of them) per argument.

    >>> import replicax as rx
    >>> counter = rx.Variable(0.0)
    >>> @rx.function
    ... def count(step):
    ...     return counter.assign_add(step).read_value()
    >>> count(2.0), count(2.0)
    (Array(2., dtype=float32), Array(4., dtype=float32))
    """
    if func is None:
        return functools.partial(function, input_signature=input_signature)
    if not callable(func):
        raise errors.ArgumentTypeError(
            errors.message(
                "`rx.function` needs a function", f"{func!r} was given", "Pass a callable."
            )
        )
    return Function(func, input_signature)


@contextlib.contextmanager
def _end_of_data(name: str) -> Iterator[None]:
    """Turns the end of an iterator into an error that no loop around the call swallows."""
    try:
        yield
    except signature.EndOfData:
        raise errors.OutOfRangeError(
            errors.message(
                f"{name!r} needs another element",
                "the iterator that it reads has come to its end",
                "Catch rx.errors.OutOfRangeError to end the epoch, or repeat the dataset.",
            )
        ) from None


class translated_errors:
    """Turns JAX's complaint about a traced value used in Python into one of ours."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        is_shape = isinstance(error, TypeError) and "concrete value" in str(error)
        if is_shape or isinstance(
            error,
            jax.errors.ConcretizationTypeError
            | jax.errors.TracerArrayConversionError
            | jax.errors.TracerIntegerConversionError,
        ):
            raise errors.TracedValueError(
                errors.message(
                    f"Compiled code such as {self._name!r} needs values that the compiler can "
                    "follow",
                    "a traced value (the replica id, an argument or a variable) was used as a "
                    f"Python int, bool or NumPy array: {str(error).splitlines()[0]}",
                    "Use jnp.where, jax.lax.cond or array indexing instead, or call "
                    "`strategy.run` with the plain function, which runs replica by replica.",
                )
            ) from error
