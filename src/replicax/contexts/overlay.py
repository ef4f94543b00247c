"""Values that variables have inside a trace or a gradient, before they are stored.

Note [Variables inside nested traces]
    JAX caches the bodies of jit, scan, cond and while by the identity of the Python
    function. A body that reads a variable would keep the value that it had when it was traced.
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
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
from jax.typing import ArrayLike

from replicax.foundation import errors, jax_compat
from replicax.foundation.types import Tree
from replicax.values.layout import ReplicaLayout

if TYPE_CHECKING:
    from replicax.contexts.frames import Frame

_epochs = itertools.count(2)


class _Epoch:
    """The newest epoch; the lock protects the move to the next one."""

    lock = threading.Lock()
    # Never the default value of `trace_epoch`, which code without an overlay runs under.
    newest = 1


class View(enum.Enum):
    """The kind of value that an overlay holds for a variable."""

    LOCAL = "local"  # one replica's copy, in code that runs once per replica
    STORED = "stored"  # the stored array, in compiled code that acts for all replicas
    READ = "read"  # what a read returns, in eager code that acts for all replicas


class TracedState(Protocol):
    """The part of `rx.Variable` that overlays use."""

    name: str
    shape: tuple[int, ...]
    is_per_replica: bool

    @property
    def device(self) -> str: ...

    @property
    def replicas(self) -> ReplicaLayout: ...

    @property
    def components(self) -> tuple[TracedState, ...]: ...

    def read_value(self) -> jax.Array: ...

    def follows(self, change: Change) -> bool: ...

    def value_after(self, change: Change, value: Tree) -> Tree: ...


class ChangeTarget(Protocol):
    """Remote state that a change is made to."""

    @property
    def name(self) -> str: ...

    def touches(self, variable: object) -> bool: ...

    def apply_directly(self, frame: Frame, kind: str, payload: Tree) -> None: ...


class Change(NamedTuple):
    """An update of remote state, sent off after the program has run.

    Attributes:
      target: A remote variable, or an optimizer whose state is remote.
      kind: The kind of update.
      payload: Its arrays.
      condition: Whether it is made at all, if that is computed by the program.
    """

    target: ChangeTarget
    kind: str
    payload: Tree
    condition: Tree = None


class UnsharedState:
    """Base of state that only changes of itself affect."""

    __slots__ = ()

    def touches(self, variable: object) -> bool:
        """Returns whether a change of this state also changes `variable`."""
        return variable is self

    def follows(self, change: Change) -> bool:
        """Returns whether `value_after` can compute the effect of a change."""
        return change.target is self

    def value_after(self, change: Change, value: Tree) -> Tree:
        """Returns the value after a change."""
        raise NotImplementedError


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
        self.values: dict[TracedState, Tree] = {}
        self.written: dict[TracedState, None] = {}
        # Updates of remote state, in order.
        self.changes: list[Change] = []
        # How many of them are sent off before the next fetch.
        self.num_sent = 0
        # First reads in scopes of `cache_variable_reads`, by scope and variable.
        self.kept_reads: dict[tuple[object, TracedState], Tree] = {}
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

    def read(self, variable: TracedState) -> Tree:
        """Returns the value of a variable in this trace."""
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

    def unsent(self, *variables: TracedState) -> list[Change]:
        """Returns the changes of variables that a fetch would not include."""
        recent = self.changes[self.num_sent :]
        return [c for c in recent if any(c.target.touches(v) for v in variables)]

    def send_changes(self, variable: TracedState) -> None:
        """Schedules all changes before the fetch of a variable, if this trace can wait."""
        raise errors.UnsupportedError(
            f"The value of {variable.name!r} after `apply_gradients` is computed on "
            f"{variable.device}, where the optimizer runs",
            "a function that is being differentiated, or that runs replica by replica, "
            "applies the gradients and reads it",
            "Apply the gradients outside of that function, or read the value before.",
        )

    def read_rows(self, variable: TracedState, ids: ArrayLike) -> jax.Array:
        """Returns rows of a remote variable in this trace."""
        if self.parent is not None and not self.has_used(variable) and self.is_current_trace():
            return self.parent.read_rows(variable, ids)
        return variable.read_value()[ids]

    def note_slice(self, variable: TracedState) -> None:
        """Records that rows were read by an index, the gradient of which is an array."""

    def holds(self, variable: TracedState) -> bool:
        """Tells whether this trace has a value of its own for a variable as a whole."""
        return variable in self.values or (self.parent is not None and self.parent.holds(variable))

    def has_used(self, variable: TracedState) -> bool:
        """Tells whether this trace has read or changed a variable, or a part of it."""
        mine = (variable, *variable.components)
        is_read = any(v in self.values for v in mine)
        return is_read or any(c.target.touches(v) for c in self.changes for v in mine)

    def first_read(self, variable: TracedState) -> Tree:
        """Returns the value of a variable at the first read in this trace."""
        if self.parent is not None:
            return self.parent.read(variable)
        raise NotImplementedError

    def write(self, variable: TracedState, value: Tree) -> None:
        """Sets the value of a variable in this trace."""
        self._require_own_trace(variable)
        self.values[variable] = value
        self.written[variable] = None
        self._forget_inner_reads()

    def record(self, change: Change) -> None:
        """Records an update of remote state; later reads in this trace include it."""
        self._require_own_trace(change.target)
        for variable in [v for v in self.values if change.target.touches(v)]:
            if variable.follows(change):
                self.values[variable] = variable.value_after(change, self.values[variable])
            else:
                # Computed by the servers only; `read` fetches it.
                del self.values[variable]
        self.changes.append(change)
        self._forget_inner_reads()

    def _require_own_trace(self, target: ChangeTarget | TracedState) -> None:
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
        """Returns a context for code that no program repeats: initial values, data iterators."""
        return contextlib.nullcontext() if self.parent is None else self.parent.outside_program()

    def note_creation(self, variable: object) -> None:
        """Records that a variable was created inside the trace."""
        if self.parent is not None:
            self.parent.note_creation(variable)

    def adopt(self, variable: TracedState, initial_value: jax.Array) -> None:
        """Adds a variable that was created inside the trace."""
        if self.parent is None:
            raise errors.TracingError(
                f"Variable {variable.name!r} must be created outside of a gradient, or "
                "inside `rx.function`",
                "its initial value is being differentiated",
                "Create the variable before calling `rx.value_and_grad`.",
            )
        self.parent.adopt(variable, initial_value)


class EagerReads:
    """Makes reads safe that eager replica code does in traces of its own, such as a scan.

    See Note [Variables inside nested traces].

    Attributes:
      has_inner_reads: Whether there were such reads since the last `renew`.
    """

    def __init__(self) -> None:
        self.has_inner_reads = False
        self._epochs = contextlib.ExitStack()

    def note(self) -> None:
        """Records a read inside a trace."""
        self.has_inner_reads = True

    def renew(self) -> None:
        """Invalidates the traces that read variables, after variables were written."""
        if self.has_inner_reads:
            self.has_inner_reads = False
            self._epochs.enter_context(jax_compat.trace_epoch(next_epoch()))

    def __enter__(self) -> EagerReads:
        self._epochs.enter_context(jax_compat.trace_epoch(_Epoch.newest))
        return self

    def __exit__(self, *_: object) -> None:
        self._epochs.close()
        if self.has_inner_reads:
            next_epoch()


def next_epoch() -> int:
    """Moves on to an epoch in which no JAX trace is cached."""
    with _Epoch.lock:
        _Epoch.newest = next(_epochs)
        return _Epoch.newest
