"""Values that variables have inside a trace or a gradient, before they are stored.

Note [Variables inside nested traces]
    JAX caches the bodies of jit, scan, cond and while by the identity of the Python
    function. A body that reads a variable would keep the value of the day it was traced.
    So code that has an overlay runs under `jax_compat.trace_epoch`, which is part of the
    key of those caches, and the epoch moves on when a variable that was read in an inner
    trace is written, and when an overlay with such reads closes.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from replicax.foundation import errors, jax_compat

_epochs = itertools.count(2)


class _Epoch:
    """The newest epoch; the lock protects the move to the next one."""

    lock = threading.Lock()
    # Never the default value of `trace_epoch`, which code without an overlay runs under.
    newest = 1


class View(enum.Enum):
    """What a value in an overlay is a value of."""

    LOCAL = "local"  # one replica's copy, in code that runs once per replica
    STORED = "stored"  # the stored array, in compiled code that acts for all replicas
    READ = "read"  # what a read returns, in eager code that acts for all replicas


class Change(NamedTuple):
    """An update of something that lives elsewhere, which is told of it afterwards.

    Attributes:
      target: A remote variable, or an optimizer whose state is remote.
      kind: How it changes.
      payload: By what: a structure of arrays.
      condition: Whether it is made at all, if that is not known before the program has run.
    """

    target: Any
    kind: str
    payload: Any
    condition: Any = None


class Overlay:
    """The values of variables in one trace; reads fall through to the trace around it.

    Attributes:
      view: What the values are values of.
      meets_other_replicas: Whether `merge_call` can be made with values of this trace.
    """

    def __init__(
        self, parent: Overlay | None, view: View, meets_other_replicas: bool = True
    ) -> None:
        self.parent = parent
        self.view = view
        self.meets_other_replicas = meets_other_replicas
        # Current value per variable, in the view of this trace. Insertion order is the
        # order of first use, which fixes the order of a program's inputs.
        self.values: dict[Any, Any] = {}
        self.written: dict[Any, None] = {}
        # What is to be changed elsewhere, in order.
        self.changes: list[Change] = []
        # So many of them are sent off before what is read from now on is fetched.
        self.num_sent = 0
        # What reads in a scope of `cache_variable_reads` gave first, by scope and variable.
        self.kept_reads: dict[tuple[Any, Any], Any] = {}
        self.trace: Any = None
        self._state: object = None
        self._has_inner_reads = False
        self._epoch_stack = contextlib.ExitStack()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Binds the overlay to the trace that JAX operations go to now."""
        self.trace = jax_compat.current_trace()
        self._state = jax_compat.trace_state()
        with self._epoch_stack:
            self._epoch_stack.enter_context(jax_compat.trace_epoch(_Epoch.newest))
            yield
        self.trace = None
        if self._has_inner_reads:
            next_epoch()

    def is_current_trace(self) -> bool:
        """Tells whether JAX operations go to this overlay's trace, not to one inside it."""
        return jax_compat.trace_state() == self._state

    def read(self, variable: Any) -> Any:
        """Returns the value of a variable as this trace sees it."""
        if not self.is_current_trace():
            self._has_inner_reads = True
        value = self.values.get(variable)
        if value is None:
            with jax_compat.in_trace(self.trace):
                unsent = self.unsent(variable)
                if not all(variable.follows(change) for change in unsent):
                    self.send_changes(variable)
                    unsent = []
                value = self.first_read(variable)
                for change in unsent:
                    value = variable.value_after(change, value)
                self.values[variable] = value
        return value

    def unsent(self, *variables: Any) -> list[Change]:
        """Returns the changes of variables that what is fetched now does not show."""
        recent = self.changes[self.num_sent :]
        return [c for c in recent if any(c.target.touches(v) for v in variables)]

    def send_changes(self, variable: Any) -> None:
        """Has all changes sent off before the variable is fetched, if this trace can wait."""
        raise errors.UnsupportedError(
            f"The value of {variable.name!r} after `apply_gradients` is known on "
            f"{variable.device}, where the optimizer runs",
            "a function that is being differentiated, or that runs replica by replica, "
            "applies the gradients and asks for it",
            "Apply the gradients outside of that function, or read the value before.",
        )

    def read_rows(self, variable: Any, ids: Any) -> Any:
        """Returns rows of a remote variable as this trace sees them."""
        if self.parent is not None and not self.knows(variable) and self.is_current_trace():
            return self.parent.read_rows(variable, ids)
        return variable.read_value()[ids]

    def note_slice(self, variable: Any) -> None:
        """Notes that rows were read by an index, the gradient of which is an array."""

    def holds(self, variable: Any) -> bool:
        """Tells whether this trace has a value of its own for a variable as a whole."""
        return variable in self.values or (self.parent is not None and self.parent.holds(variable))

    def knows(self, variable: Any) -> bool:
        """Tells whether this trace has read or changed a variable, or a part of it."""
        mine = (variable, *variable.components)
        is_read = any(v in self.values for v in mine)
        return is_read or any(c.target.touches(v) for c in self.changes for v in mine)

    def first_read(self, variable: Any) -> Any:
        """Brings the value of a variable into this trace."""
        if self.parent is not None:
            return self.parent.read(variable)
        raise NotImplementedError

    def write(self, variable: Any, value: Any) -> None:
        """Sets the value of a variable as this trace sees it."""
        self._require_own_trace(variable)
        self.values[variable] = value
        self.written[variable] = None
        self._forget_inner_reads()

    def record(self, change: Change) -> None:
        """Notes an update of something elsewhere; later reads in this trace see it."""
        self._require_own_trace(change.target)
        for variable in [v for v in self.values if change.target.touches(v)]:
            if variable.follows(change):
                self.values[variable] = variable.value_after(change, self.values[variable])
            else:
                # Known only on the servers; `read` fetches it, should it be asked for.
                del self.values[variable]
        self.changes.append(change)
        self._forget_inner_reads()

    def _require_own_trace(self, target: Any) -> None:
        if not self.is_current_trace():
            raise errors.TracingError(
                f"A write to {target.name!r} must happen where its result can be kept",
                "it happens inside a jax.lax loop, branch or a nested transformation",
                "Use rx.scan, rx.fori_loop, rx.while_loop, rx.cond or rx.switch, which carry "
                "variables, or return the new value and assign it afterwards.",
            )

    def _forget_inner_reads(self) -> None:
        if self._has_inner_reads:
            self._has_inner_reads = False
            self._epoch_stack.enter_context(jax_compat.trace_epoch(next_epoch()))

    def outside_program(self) -> contextlib.AbstractContextManager[None]:
        """Is entered while code runs that no program repeats: initial values, data iterators."""
        return contextlib.nullcontext() if self.parent is None else self.parent.outside_program()

    def note_creation(self, variable: Any) -> None:
        """Notes that a variable was created inside the trace."""
        if self.parent is not None:
            self.parent.note_creation(variable)

    def adopt(self, variable: Any, initial_value: Any) -> None:
        """Takes in a variable that was created inside the trace."""
        if self.parent is None:
            raise errors.TracingError(
                f"Variable {variable.name!r} must be created outside of a gradient, or "
                "inside `rx.function`",
                "its initial value is being differentiated",
                "Create the variable before calling `rx.value_and_grad`.",
            )
        self.parent.adopt(variable, initial_value)


class EagerReads:
    """Remembers that eager replica code read variables in traces of its own, such as a scan.

    While it is entered, such reads are safe: see Note [Variables inside nested traces].
    """

    def __init__(self) -> None:
        self._has_inner_reads = False
        self._epochs = contextlib.ExitStack()

    def note(self) -> None:
        """Notes a read inside a trace."""
        self._has_inner_reads = True

    def renew(self) -> None:
        """Forgets the traces that read variables, after variables were written."""
        if self._has_inner_reads:
            self._has_inner_reads = False
            self._epochs.enter_context(jax_compat.trace_epoch(next_epoch()))

    def __enter__(self) -> EagerReads:
        self._epochs.enter_context(jax_compat.trace_epoch(_Epoch.newest))
        return self

    def __exit__(self, *_: object) -> None:
        self._epochs.close()
        if self._has_inner_reads:
            next_epoch()


def next_epoch() -> int:
    """Moves on to an epoch in which no JAX trace is cached."""
    with _Epoch.lock:
        _Epoch.newest = next(_epochs)
        return _Epoch.newest
