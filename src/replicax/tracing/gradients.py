"""Gradients with respect to variables.

Rows that are looked up in a table pass through a tap: the identity, whose backward pass passes the
cotangent of the rows to Python. The table itself is not differentiated there, so no array of the
table's size is ever made.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from replicax.contexts import frames
from replicax.contexts.frames import Mode
from replicax.contexts.overlay import Change, ChangeTarget, Overlay, TracedState, View
from replicax.foundation import errors, jax_compat
from replicax.foundation.options import VariableAggregation
from replicax.foundation.types import Tree
from replicax.values.distributed_values import is_array_like
from replicax.values.indexed_slices import IndexedSlices, concatenate
from replicax.values.regroup import leaves_of, map_structure
from replicax.variables import row_numbers, updates
from replicax.variables.remote import RemoteVariable, RemoteVariableBase
from replicax.variables.sharded import ShardedVariable
from replicax.variables.variable import Variable

# The gradient of a variable: an array, or some of its rows.
Gradient: TypeAlias = jax.Array | IndexedSlices


class RowTaps:
    """The lookups made while one function is being differentiated."""

    def __init__(self) -> None:
        # Per lookup: the variable, its ids, and a cell for the cotangent of its rows.
        self._lookups: list[tuple[Variable, jax.Array, list[jax.Array]]] = []
        # Variables that were read as a whole, each with a cell for its cotangent.
        self._whole: dict[Variable, list[jax.Array]] = {}
        # A differentiated zero: without one JAX would not compute the cotangent of rows
        # that depend on no differentiated input.
        self.anchor: jax.Array | None = None

    def tapped(self, variable: Variable, ids: ArrayLike, rows: jax.Array) -> jax.Array:
        """Returns rows that were looked up; `rows_of` returns their gradient."""
        cell: list[jax.Array] = []
        self._lookups.append((variable, jnp.asarray(ids), cell))
        return _tap(cell.append)(rows, self.anchor)

    def whole(self, variable: Variable, value: jax.Array) -> jax.Array:
        """Returns the value of a variable; `whole_of` returns its gradient."""
        cell = self._whole[variable] = []
        return _tap(cell.append)(jax.lax.stop_gradient(value), self.anchor)

    def whole_of(self, variable: Variable) -> jax.Array | None:
        """Returns the gradient of a value that was read as a whole, or None."""
        cell = self._whole.get(variable)
        return cell[0] if cell else None

    def rows_of(self, variable: Variable) -> IndexedSlices | None:
        """Returns the gradient rows of all lookups in a variable, or None if there were none."""
        values, indices = [], []
        row_shape = variable.shape[1:]
        for looked_up, ids, cell in self._lookups:
            if looked_up is not variable:
                continue
            rows = cell[0] if cell else jnp.zeros((*ids.shape, *row_shape), variable.dtype)
            values.append(rows.reshape((-1, *row_shape)))
            indices.append(ids.reshape(-1))
        if not values:
            return None
        if len(values) == 1:
            return IndexedSlices(values[0], indices[0], variable.shape)
        return IndexedSlices(jnp.concatenate(values), jnp.concatenate(indices), variable.shape)


def _tap(record: Callable[[jax.Array], None]) -> Callable[..., jax.Array]:
    @jax.custom_vjp
    def tap(rows: jax.Array, anchor: jax.Array) -> jax.Array:
        del anchor
        return rows

    def forward(rows: jax.Array, anchor: jax.Array) -> tuple[jax.Array, None]:
        del anchor
        return rows, None

    def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        record(cotangent)
        return jnp.zeros_like(cotangent), jnp.zeros(())

    tap.defvjp(forward, backward)
    return tap


class GradientOverlay(Overlay):
    """Values of variables while a function of them is being differentiated."""

    def __init__(self, frame: frames.Frame, remote: Sequence[Variable] = ()) -> None:
        parent = frame.overlay
        if parent is not None:
            view, meets = parent.view, parent.meets_other_replicas
        else:
            view = View.READ if frame.replica_id is None else View.LOCAL
            layout = frame.layout
            meets = frame.mode is not Mode.REPLICA or layout is None or layout.num_replicas == 1
        super().__init__(parent, view, meets)
        self._frame = frame
        self.taps = RowTaps()
        # Differentiated variables that were read as a whole.
        self.read_whole: set[TracedState] = set()
        # Differentiated remote variables: their values are fetched, and become inputs of the
        # differentiated function, only if it reads them.
        self._remote: set[TracedState] = set(remote)
        # Those of them that were indexed: rows are fetched, but the gradient is an array.
        self._sliced: set[TracedState] = set()

    def read(self, variable: TracedState) -> jax.Array:
        self.read_whole.add(variable)
        return super().read(variable)

    def first_read(self, variable: TracedState) -> jax.Array:
        assert isinstance(variable, Variable)
        whole = getattr(variable, "container", variable)
        if isinstance(whole, ShardedVariable) and whole is not variable and whole in self._remote:
            return whole.piece_of(variable, self.read(whole))
        # The frame has the overlay around this one.
        value = variable.read(self._frame)
        return self.taps.whole(variable, value) if variable in self._remote else value

    def holds(self, variable: TracedState) -> bool:
        return variable in self._remote or super().holds(variable)

    def read_rows(self, variable: TracedState, ids: ArrayLike) -> jax.Array:
        """Returns rows of a remote variable, with a gradient by rows where that is possible."""
        assert isinstance(variable, RemoteVariableBase)
        is_direct = self.is_current_trace() and not isinstance(self.parent, GradientOverlay)
        if not is_direct or self.has_used(variable):
            return row_numbers.take(variable.read(frames.current()), ids)
        # Row numbers have no gradient, so they belong to the trace around this one.
        around = contextlib.nullcontext()
        if self.parent is not None:
            around = jax_compat.in_trace(self.parent.trace)
        with around:
            rows = variable.read_rows(self._frame, ids)
        if not self._remote.intersection((variable, *variable.components)):
            return rows
        return self.taps.tapped(variable, ids, rows)

    def note_slice(self, variable: TracedState) -> None:
        self._sliced.update((variable, *variable.components))

    def lookup(self, variable: Variable, ids: ArrayLike) -> jax.Array:
        """Returns rows of a variable, with a gradient by rows where that is possible."""
        is_direct = variable in self.values and variable not in self.written
        # Tapped rows are not differentiated again.
        is_direct = is_direct and not isinstance(self.parent, GradientOverlay)
        is_direct = is_direct and not self.holds_all_copies(variable)
        if is_direct and self.is_current_trace():
            table = jax.lax.stop_gradient(self.values[variable])
            return self.taps.tapped(variable, ids, row_numbers.take(table, ids))
        return row_numbers.take(variable.read(frames.current()), ids)

    def holds_all_copies(self, variable: Variable) -> bool:
        """Returns whether the value here is that of all copies, which a read combines."""
        is_outside = self._frame.mode is Mode.CROSS_REPLICA or self._frame.is_default
        return variable.is_per_replica and self.view is View.STORED and is_outside

    def input_of(self, variable: Variable) -> jax.Array:
        """Returns the value of a variable as an input of the differentiated function."""
        variable.check_frame(self._frame, "The gradient of")
        if self.holds_all_copies(variable):
            assert self.parent is not None
            return self.parent.read(variable)
        return variable.read(self._frame)

    def gradient(self, variable: Variable, dense: jax.Array) -> Gradient:
        """Returns the whole gradient of a local variable, given that of its whole reads."""
        if self.holds_all_copies(variable):
            copies = dense.reshape((-1, *variable.shape))
            # A mean spreads the gradient of the combined value over the copies; with a sum each
            # copy has it, and with the first copy alone, the first one.
            is_mean = variable.aggregation is VariableAggregation.MEAN
            return copies.sum(0) if is_mean else copies[0]
        rows = self.taps.rows_of(variable)
        if rows is None:
            return dense
        if variable not in self.read_whole:
            return rows
        return updates.apply("scatter_add", dense, rows)

    def remote_gradient(self, variable: Variable) -> Gradient:
        """Returns the gradient of a remote variable."""
        rows = self.taps.rows_of(variable)
        whole = getattr(variable, "container", variable)
        if isinstance(whole, ShardedVariable) and whole is not variable:
            of_whole = self.taps.rows_of(whole)
            pieces = [rows, of_whole and whole.piece_of(variable, of_whole)]
            found = [piece for piece in pieces if piece is not None]
            rows = concatenate(found) if found else None
        dense = self.taps.whole_of(variable)
        if rows is None:
            return jnp.zeros(variable.shape, variable.dtype) if dense is None else dense
        if dense is None and variable in self._sliced:
            dense = jnp.zeros(variable.shape, variable.dtype)
        # Row numbers of other parts are outside of this one here.
        return rows if dense is None else updates.apply("scatter_add", dense, rows)


def value_and_grad(
    fun: Callable[..., Any], variables: Tree = None, *, has_aux: bool = False
) -> Callable[..., Any]:
    """Returns a function that computes `fun` and its gradients with respect to variables.

    Inside `strategy.run` the gradients are this replica's own; combine them with
    `all_reduce`. A variable read only through `rx.nn.embedding_lookup` gets
    `IndexedSlices`. Variables may be written inside `fun`.

    Args:
      fun: Returns a scalar, or a pair (scalar, anything) with `has_aux`.
      variables: A variable or a structure of them; gradients have the same structure, with
        None instead of leaves that are no variables, such as the functions of an equinox module.
      has_aux: Whether `fun` returns more than the scalar.

    Raises:
      ArgumentTypeError: `variables` is left out, or holds something else.
      InvalidArgumentError: The function does not return a scalar.

    >>> import replicax as rx
    >>> w = rx.Variable(3.0)
    >>> rx.value_and_grad(lambda x: w * w * x, w)(2.0)
    (Array(18., dtype=float32), Array(12., dtype=float32))
    """
    named: list[Variable] = []
    # Variables of other libraries name the one that holds their value.
    variables = map_structure(lambda v: getattr(v, "replicax_variable", v), variables)
    map_structure(functools.partial(_collect, named), variables)
    if not named and leaves_of(variables):
        raise _nothing_to_differentiate(variables)
    flat = [v for v in dict.fromkeys(named) if not v.is_remote]
    remote = [v for v in dict.fromkeys(named) if v.is_remote]

    @functools.wraps(fun)
    def differentiated(*args: Any, **kwargs: Any) -> tuple[Tree, Tree]:
        frame = frames.current()
        overlay = GradientOverlay(frame, remote)
        for variable in remote:
            variable.check_frame(frame, "The gradient of")
        # Reads come before the transformation: they belong to the trace around it.
        inputs = [overlay.input_of(variable) for variable in flat]
        written: list[Variable] = []
        targets: list[tuple[ChangeTarget, str]] = []
        wrapping: list[Any] = []

        def pure(inputs: list[jax.Array], anchor: jax.Array) -> tuple[jax.Array, Tree]:
            overlay.values.update(zip(flat, inputs, strict=True))
            overlay.taps.anchor = anchor
            inner = frame.with_overlay(overlay)
            with overlay.opened(), frames.pushed(inner):
                out = fun(*args, **kwargs)
                loss, aux = out if has_aux else (out, None)
                loss = loss.read(inner) if isinstance(loss, Variable) else loss
            written[:] = [v for v in overlay.written if isinstance(v, Variable)]
            kept = [jax.lax.stop_gradient(overlay.values[v]) for v in written]
            targets[:] = [(change.target, change.kind) for change in overlay.changes]
            changed = [
                (jax.lax.stop_gradient(change.payload), change.condition)
                for change in overlay.changes
            ]
            return _scalar(_unwrapped(loss, wrapping)), (aux, kept, changed)

        (loss, (aux, kept, changed)), (dense, _) = jax.value_and_grad(pure, (0, 1), has_aux=True)(
            inputs, jnp.zeros(())
        )
        for variable, value in zip(written, kept, strict=True):
            variable.store(frame, value)
        # Eager replicas have combined their changes; the first one makes them.
        if overlay.meets_other_replicas or not frame.replica_id:
            for (target, kind), (payload, condition) in zip(targets, changed, strict=True):
                _pass_on(frame, Change(target, kind, payload, condition))
        gradients = {v: overlay.gradient(v, g) for v, g in zip(flat, dense, strict=True)}
        gradients |= {v: overlay.remote_gradient(v) for v in remote}
        grads = map_structure(
            lambda leaf: gradients[leaf] if isinstance(leaf, Variable) else None, variables
        )
        value: Tree = jax.tree.unflatten(wrapping[0], [loss]) if wrapping else loss
        return ((value, aux) if has_aux else value), grads

    return differentiated


def _pass_on(frame: frames.Frame, change: Change) -> None:
    """Makes a change that a differentiated function recorded."""
    if change.condition is not None and frame.overlay is not None:
        frame.overlay.record(change)
    elif change.condition is None or change.condition:
        change.target.apply_directly(frame, change.kind, change.payload)


def grad(
    fun: Callable[..., Any], variables: Tree = None, *, has_aux: bool = False
) -> Callable[..., Any]:
    """Like `value_and_grad`, but returns the gradients only (and aux, if there is any).

    Raises:
      ArgumentTypeError: `variables` is left out, or holds something else.
      InvalidArgumentError: The function does not return a scalar.

    >>> import replicax as rx
    >>> w = rx.Variable(3.0)
    >>> rx.grad(lambda: w * w, w)()
    Array(6., dtype=float32)
    """
    both = value_and_grad(fun, variables, has_aux=has_aux)

    @functools.wraps(fun)
    def differentiated(*args: Any, **kwargs: Any) -> Tree:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return differentiated


# A table: a variable, also a sharded one, an array, or the parts of a table in order.
Table: TypeAlias = Variable | ArrayLike | Sequence[Variable | ArrayLike]


def embedding_lookup(params: Table, ids: ArrayLike | Sequence[int]) -> jax.Array:
    """Returns rows of a table by id; the gradient of a variable comes by rows.

    >>> import replicax as rx
    >>> table = rx.Variable([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])
    >>> rx.nn.embedding_lookup(table, [2, 0])
    Array([[2., 2.],
           [0., 0.]], dtype=float32)
    """
    if isinstance(params, list | tuple):
        params = _one_table(params)
    if not isinstance(params, Variable):
        table = jnp.asarray(params)
        return row_numbers.take(table, row_numbers.checked("embedding_lookup", table, ids))
    is_known = not any(map(jax_compat.is_traced, jax.tree.leaves(ids)))
    # The program that uses the rows need not compute known row numbers.
    numbers = np.asarray(ids) if params.is_remote and is_known else jnp.asarray(ids)
    numbers = row_numbers.checked("embedding_lookup", params, numbers)
    frame = frames.current()
    params.check_frame(frame, "A lookup in")
    if isinstance(params, RemoteVariable | ShardedVariable):
        return params.read_rows(frame, numbers)
    if isinstance(frame.overlay, GradientOverlay):
        return frame.overlay.lookup(params, numbers)
    return row_numbers.take(params.read(frame), numbers)


def _one_table(params: Sequence[Any]) -> Variable | ArrayLike:
    """Returns the table of which a list holds the only part, or all parts in order."""
    whole = getattr(params[0], "container", params[0]) if params else None
    if isinstance(whole, ShardedVariable) and whole.consists_of(params):
        return whole
    if len(params) == 1:
        return params[0]
    return ShardedVariable(params)


def _collect(found: list[Variable], leaf: object) -> None:
    if not isinstance(leaf, Variable):
        # Leaves that `make_variables` does not convert have no gradient; an array is a mistake.
        if isinstance(leaf, jax.Array | np.ndarray):
            raise _nothing_to_differentiate(leaf)
        return
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise errors.InvalidArgumentError(
            "Gradients need variables of floating type",
            f"variable {leaf.name!r} has type {leaf.dtype}",
            "Leave it out of `variables`.",
        )
    found.append(leaf)


def _nothing_to_differentiate(found: object) -> errors.ArgumentTypeError:
    return errors.ArgumentTypeError(
        "Gradients need variables to be taken with respect to",
        f"{type(found).__name__} was given",
        "Pass `variables=` a variable or a structure of variables; for arrays use "
        "jax.value_and_grad.",
    )


def _unwrapped(loss: Tree, wrapping: list[Any]) -> Tree:
    """Returns the array of an object around one, such as a tensor; notes what was around it."""
    if is_array_like(loss) or isinstance(loss, list | tuple | dict):
        return loss
    leaves, structure = jax.tree.flatten(loss)
    if len(leaves) != 1:
        return loss
    wrapping[:] = [structure]
    return leaves[0]


def _scalar(loss: Tree) -> jax.Array:
    if not is_array_like(loss) or jnp.shape(loss) != ():
        found = f"shape {jnp.shape(loss)}" if is_array_like(loss) else type(loss).__name__
        raise errors.InvalidArgumentError(
            "A function to be differentiated must return a scalar",
            f"it returned {found}",
            "Sum or average the losses.",
        )
    return jnp.asarray(loss)
