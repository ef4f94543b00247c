"""Loops and branches whose bodies may read and write variables, in eager and compiled code.

Eager code runs them as Python does. In compiled code they are `jax.lax` loops and branches that
carry the variables that their bodies write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from replicax.collectives import in_replica
from replicax.contexts import frames
from replicax.contexts.frames import Frame
from replicax.contexts.overlay import Overlay, View
from replicax.foundation import errors, jax_compat
from replicax.foundation.types import Tree
from replicax.tracing import bodies
from replicax.tracing.bodies import Body, Carried
from replicax.tracing.iterators import Feed, is_iterator
from replicax.tracing.loops import (
    CountedLoop,
    Rows,
    arrays_of,
    changed_structure,
    like,
    next_carry,
    settled,
)
from replicax.tracing.structures import Structure, as_array
from replicax.values.distributed_values import Mirrored, PerReplica
from replicax.values.layout import AXIS
from replicax.values.regroup import leaves_of, map_structure

C = TypeVar("C")
Choice = TypeVar("Choice", bound=ArrayLike)


def fori_loop(
    lower: ArrayLike,
    upper: ArrayLike,
    body_fun: Callable[[jax.Array, C], C],
    init_val: C,
    *,
    unroll: int | bool | None = None,
) -> C:
    """Calls `body_fun(i, value)` for each i from `lower` to `upper`; `jax.lax.fori_loop`.

    Unlike there, the body may read and write variables, apply an optimizer, update metrics
    and combine values of replicas. In cross-replica code it may call `strategy.run`, and, if
    the bounds are known, `next(iterator)`: one call of a function then trains on many batches,
    which are on the devices together. If the data ends before, the call has no effect.

    Args:
      lower: The first i.
      upper: The end, which is excluded.
      body_fun: Takes i and the value so far, and returns the next one: of the same
        structure, shapes and types.
      init_val: The first value.
      unroll: The number of rounds that are compiled into one.

    >>> import replicax as rx
    >>> total = rx.Variable(0)
    >>> @rx.function
    ... def count(n):
    ...     return rx.fori_loop(0, n, lambda i, last: total.assign_add(i), 0)
    >>> count(5)
    Array(10, dtype=int32)
    """
    outer = _compiled_around()
    if outer is None:
        if jax_compat.is_staging():
            return jax.lax.fori_loop(lower, upper, body_fun, init_val, unroll=unroll)
        value = arrays_of(init_val)
        for i in range(_as_int(lower), _as_int(upper)):
            value = next_carry("rx.fori_loop", value, body_fun(jnp.asarray(i), value))
        return value
    what = "rx.fori_loop"
    index = jax.ShapeDtypeStruct((), jnp.result_type(lower, upper))
    number = Structure(jnp.zeros((), index.dtype))
    number.take_arrays()
    if not jax_compat.is_traced(lower) and not jax_compat.is_traced(upper):
        count = max(0, _as_int(upper) - _as_int(lower))
        first = jnp.asarray(lower, index.dtype)
        rows = Rows(number, [], count, first)
        loop = CountedLoop(what, lambda c, i: (body_fun(i, c), None), rows, unroll or 1)
        return loop.run(outer, init_val)[0]
    carry = Structure(init_val)
    body, arrays = settled(
        what, lambda c, i: (body_fun(i, c),), carry, carry.take_arrays(), [number], [index]
    )
    carried = Carried(outer, [body])
    if _needs_agreement([body]):
        lower, upper = (_agreed(bound) for bound in (lower, upper))

    def step(i: jax.Array, state: Tree) -> Tree:
        own, outs = carried.run(body, state[1], [*state[0], i])
        return like(outs, state[0]), own

    final, own = jax.lax.fori_loop(lower, upper, step, (arrays, carried.values), unroll=unroll)
    carried.store(own)
    return carry.filled(final)


def scan(
    f: Callable[[C, Any], tuple[C, Any]],
    init: C,
    xs: Tree = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[C, Any]:
    """Calls `f(carry, x)` for each row of `xs` and stacks what it returns; `jax.lax.scan`.

    Unlike there, `f` may read and write variables, apply an optimizer, update metrics and
    combine values of replicas. In cross-replica code it may call `strategy.run` and
    `next(iterator)`; see `rx.fori_loop`.

    Args:
      f: Takes the carry and a row of `xs`, and returns the next carry and a result.
      init: The first carry.
      xs: Arrays with one row per round, or None; or a dataset or an iterator over one, each
        element of which is an `x` (without elements, the stacked result is None).
      length: The number of rounds, if `xs` is None.
      reverse: Whether to start from the last row.
      unroll: The number of rounds that are compiled into one.

    Raises:
      InvalidArgumentError: `xs` and `length` do not give one number of rounds.
      ArgumentTypeError: The body does not return a pair.
      TracingError: The iterator is captured, not an argument of the compiled function.

    >>> import numpy as np, replicax as rx
    >>> total = rx.Variable(0.0)
    >>> @rx.function
    ... def running_sums(x):
    ...     return rx.scan(lambda _, x: (None, total.assign_add(x).read_value()), None, x)[1]
    >>> running_sums(np.float32([1, 2, 3]))
    Array([1., 3., 6.], dtype=float32)
    """
    outer = _compiled_around()
    if outer is None and jax_compat.is_staging():
        return jax.lax.scan(f, init, xs, length, reverse, unroll)
    if is_iterator(xs) or hasattr(xs, "open_feed"):
        return _scan_data(outer, f, init, xs, reverse, unroll)
    structure = Structure(xs)
    columns = structure.take_arrays()
    count = _num_rounds(structure, columns, length)
    if outer is None:
        order = range(count)[:: -1 if reverse else 1]
        return _scan_eagerly(f, init, structure, columns, order)
    rows = Rows(structure, columns, count)
    loop = CountedLoop("rx.scan", lambda c, x: _pair(f(c, x)), rows, unroll, reverse)
    return loop.run(outer, init)


def reduce_elements(data: Iterable[Tree], initial_state: C, fn: Callable[[C, Tree], C]) -> C:
    """Folds `fn(state, element)` over the elements of a dataset; one loop in compiled code."""
    if _compiled_around() is not None:
        return scan(lambda state, element: (fn(state, element), None), initial_state, data)[0]
    state = initial_state
    for element in data:
        state = fn(state, element)
    return state


def _scan_data(
    outer: Overlay | None,
    f: Callable[[Tree, Tree], tuple[Tree, Tree]],
    init: Tree,
    data: Iterable[Tree],
    reverse: bool,
    unroll: int | bool,
) -> tuple[Tree, Tree]:
    """Calls `f` for each element of a dataset, or of the rest of an iterator."""
    if reverse:
        raise errors.InvalidArgumentError(
            "rx.scan takes the elements of a dataset in their order",
            "`reverse` is set",
            "Leave it out.",
        )
    if outer is None:
        carry, results = arrays_of(init), []
        for element in data:
            new, result = _pair(f(carry, element))
            carry = next_carry("rx.scan", carry, new)
            results.append(arrays_of(result))
        return carry, map_structure(_stacked, *results) if results else None
    feed = iter(data)
    if not isinstance(feed, Feed):
        raise errors.TracingError(
            "rx.scan in compiled code takes an iterator that is an argument of the function",
            f"it was given a {type(data).__name__} that the function captures",
            "Pass the iterator to the compiled function.",
        )
    nothing = Rows(Structure(None), [], None)
    loop = CountedLoop("rx.scan", lambda c, _: _pair(f(c, next(feed))), nothing, unroll)
    return loop.run(outer, init, feed)


def while_loop(cond_fun: Callable[[C], ArrayLike], body_fun: Callable[[C], C], init_val: C) -> C:
    """Calls `body_fun(value)` as long as `cond_fun(value)` holds; `jax.lax.while_loop`.

    Unlike there, both may read variables and the body may write them. In compiled replica
    code, the first replica decides for all replicas if the body combines their values.

    Args:
      cond_fun: Takes the value and returns a boolean scalar.
      body_fun: Takes the value and returns the next one: of the same structure, shapes and
        types.
      init_val: The first value.

    Raises:
      TracingError: The condition writes variables.
      ArgumentTypeError: It does not return a boolean scalar.

    >>> import replicax as rx
    >>> v = rx.Variable(100.0)
    >>> @rx.function
    ... def halve(limit):
    ...     return rx.while_loop(lambda x: x > limit, lambda x: v.assign(x / 2), v)
    >>> halve(10.0), float(v)
    (Array(6.25, dtype=float32), 6.25)
    """
    outer = _compiled_around()
    if outer is None:
        if jax_compat.is_staging():
            return jax.lax.while_loop(cond_fun, body_fun, init_val)
        value = arrays_of(init_val)
        while bool(cond_fun(value)):
            value = next_carry("rx.while_loop", value, body_fun(value))
        return value
    what = "rx.while_loop"
    carry = Structure(init_val)
    body, arrays = settled(what, lambda c: (body_fun(c),), carry, carry.take_arrays())
    shapes = [jax_compat.shape_of(a) for a in arrays]
    test = bodies.trace(f"{what}'s condition", lambda c: (cond_fun(c),), [carry], shapes)
    _require_condition(test)
    carried = Carried(outer, [body, test])
    is_common = _needs_agreement([body, test])

    def holds(state: Tree) -> ArrayLike:
        (result,) = carried.run(test, state[1], state[0])[1]
        return _agreed(result) if is_common else result

    def step(state: Tree) -> Tree:
        own, outs = carried.run(body, state[1], state[0])
        return like(outs, state[0]), own

    final, own = jax.lax.while_loop(holds, step, (arrays, carried.values))
    carried.store(own)
    return carry.filled(final)


def cond(
    pred: ArrayLike, true_fun: Callable[..., Any], false_fun: Callable[..., Any], *operands: Any
) -> Any:
    """Calls `true_fun(*operands)` or `false_fun(*operands)`; `jax.lax.cond`.

    Unlike there, the functions may read and write variables. In compiled replica code, the
    first replica decides for all replicas if a branch combines their values (in `all_reduce`,
    or by a write of a mirrored variable).

    Args:
      pred: A boolean scalar.
      true_fun: Called if it is true.
      false_fun: Called if it is false; returns the same structure, shapes and types.
      *operands: The arguments of the functions.

    Raises:
      InvalidArgumentError: `pred` is not a scalar.

    >>> import numpy as np, replicax as rx
    >>> v = rx.Variable(1.0)
    >>> @rx.function
    ... def keep_smaller(x):
    ...     return rx.cond(x < v, lambda: v.assign(x), lambda: v)
    >>> float(keep_smaller(np.float32(3))), float(keep_smaller(np.float32(0.5)))
    (1.0, 0.5)
    """
    return _branch("rx.cond", as_array(pred), [false_fun, true_fun], operands)


def switch(index: ArrayLike, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """Calls `branches[index](*operands)`, with the index clamped; `jax.lax.switch`.

    Unlike there, the branches may read and write variables; see `rx.cond`.

    Args:
      index: An integer scalar.
      branches: The functions; all return the same structure, shapes and types.
      *operands: Their arguments.

    Raises:
      InvalidArgumentError: `index` is not a scalar, or there are no branches.
      ArgumentTypeError: `index` is not an integer.

    >>> import numpy as np, replicax as rx
    >>> v = rx.Variable(1.0)
    >>> changes = [lambda: v.assign_add(1.0), lambda: v.assign_sub(1.0), lambda: v.assign(0.0)]
    >>> rx.function(lambda i: rx.switch(i, changes))(np.int32(1))
    Array(0., dtype=float32)
    """
    number = as_array(index)
    if not jnp.issubdtype(number.dtype, jnp.integer):
        raise errors.ArgumentTypeError(
            "`rx.switch` needs an integer index",
            f"it has type {number.dtype}",
            "Convert it, or use `rx.cond` for a boolean.",
        )
    if not branches:
        raise errors.InvalidArgumentError(
            "`rx.switch` needs branches", "there are none", "Pass functions."
        )
    return _branch("rx.switch", number, list(branches), operands)


def _branch(
    what: str, index: jax.Array, branches: list[Callable[..., Tree]], operands: tuple[Tree, ...]
) -> Tree:
    """Calls the branch at an index, or 0 or 1 for a boolean."""
    if jnp.ndim(index) != 0:
        raise errors.InvalidArgumentError(
            f"`{what}` chooses by a scalar",
            f"an array of shape {jnp.shape(index)} was given",
            "Use jnp.where to choose element by element.",
        )
    outer = _compiled_around()
    if outer is None:
        if jax_compat.is_staging():
            return _choose(index, branches, *operands)
        number = int(bool(index)) if what == "rx.cond" else int(index)
        chosen = branches[min(max(number, 0), len(branches) - 1)]
        return arrays_of(chosen(*map(arrays_of, operands)))
    given = Structure(operands)
    arrays = given.take_arrays()
    shapes = [jax_compat.shape_of(a) for a in arrays]
    traced = [bodies.trace(what, _called_with(b), [given], shapes) for b in branches]
    dtypes = _common_types(what, traced)
    carried = Carried(outer, traced)
    if _needs_agreement(traced):
        index = _agreed(index)

    def runner(body: Body) -> Callable[..., Tree]:
        def run(values: list[jax.Array], args: list[jax.Array]) -> Tree:
            own, outs = carried.run(body, values, args)
            pairs = zip(outs, dtypes, strict=True)
            return own, [bodies.strong(jnp.asarray(out, dtype)) for out, dtype in pairs]

        return run

    own, outs = _choose(index, [runner(body) for body in traced], carried.values, arrays)
    carried.store(own)
    return traced[0].results[0].filled(outs)


def _choose(index: ArrayLike, branches: list[Callable[..., Tree]], *operands: Tree) -> Tree:
    if len(branches) == 2 and not jnp.issubdtype(jnp.result_type(index), jnp.integer):
        return jax.lax.cond(index, branches[1], branches[0], *operands)
    return jax.lax.switch(index, branches, *operands)


def _called_with(branch: Callable[..., Tree]) -> Callable[[Tree], tuple[Tree]]:
    return lambda operands: (branch(*operands),)


def _compiled_around() -> Overlay | None:
    """Returns the overlay of the function being compiled; None in eager code."""
    return frames.current().overlay if jax_compat.is_staging() else None


def _common_types(what: str, branches: list[Body]) -> list[DTypeLike]:
    """Returns the types of the results of all branches; strong types win over weak ones."""
    first = branches[0].results[0]
    for body in branches[1:]:
        if not first.is_like(body.results[0]):
            raise changed_structure(what, first.skeleton, body.results[0].skeleton)
    dtypes = []
    for column in zip(*(body.result_shapes for body in branches), strict=True):
        types = {c.dtype for c in column if not c.weak_type} or {jnp.result_type(*column)}
        if len({c.shape for c in column}) > 1 or len(types) > 1:
            found = " and ".join(dict.fromkeys(f"{c.dtype}{list(c.shape)}" for c in column))
            raise errors.InvalidArgumentError(
                f"The branches of {what} must return arrays of one shape and type",
                f"they return {found}",
                "Convert them.",
            )
        dtypes.append(types.pop())
    return dtypes


def _require_condition(test: Body) -> None:
    found = test.result_shapes
    is_scalar = [(s.shape, s.dtype) for s in found] == [((), jnp.dtype(bool))]
    if test.captured.written:
        names = ", ".join(repr(v.name) for v in test.captured.written)
        raise errors.TracingError(
            "The condition of rx.while_loop can read variables",
            f"it writes {names}",
            "Write in the body.",
        )
    if not is_scalar:
        raise errors.ArgumentTypeError(
            "The condition of rx.while_loop must return a boolean scalar",
            f"it returned {[f'{s.dtype}{list(s.shape)}' for s in found] or 'no array'}",
            "Return the result of a comparison.",
        )


# Replicas that must agree.


def _needs_agreement(traced: list[Body]) -> bool:
    """Returns whether bodies combine values of several replicas, in compiled replica code."""
    frame: Frame = frames.current()
    layout = frame.layout
    is_shared = frame.overlay is not None and frame.overlay.view is View.LOCAL
    if not is_shared or layout is None or layout.num_replicas == 1 or frame.replica_id is not None:
        return False
    return any(jax_compat.has_collectives(body.captured.jaxpr, AXIS) for body in traced)


def _agreed(choice: Choice) -> Choice | jax.Array:
    """Returns the choice of the first replica: different choices would deadlock."""
    return in_replica.first_replica(choice) if jax_compat.is_traced(choice) else choice


# Eager loops.


def _as_int(bound: ArrayLike) -> int:
    return int(np.asarray(bound))


def _pair(result: object) -> tuple[Tree, Tree]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise errors.ArgumentTypeError(
            "The body of rx.scan must return a pair: the next carry, and a result",
            f"it returned {type(result).__name__}",
            "Return (carry, None) if there is no result.",
        )
    return result


def _num_rounds(rows: Structure, columns: list[jax.Array], length: int | None) -> int:
    is_distributed = any(getattr(leaf, "layout", None) for leaf in leaves_of(rows.skeleton))
    if is_distributed or any(not a.shape for a in columns):
        raise errors.InvalidArgumentError(
            "`xs` of rx.scan must be arrays with one row per round",
            "a scalar or a distributed value was given",
            "Pass arrays, or index inside of the body.",
        )
    found = {a.shape[0] for a in columns} | ({length} if length is not None else set())
    if len(found) != 1:
        raise errors.InvalidArgumentError(
            "rx.scan needs one number of rounds",
            f"`xs` and `length` give {sorted(found) or 'none'}",
            "Pass `xs` with equal first dimensions, or `length`.",
        )
    return int(found.pop())


def _scan_eagerly(
    f: Callable[[Tree, Tree], tuple[Tree, Tree]],
    init: Tree,
    rows: Structure,
    columns: list[jax.Array],
    order: range,
) -> tuple[Tree, Tree]:
    carry, results = arrays_of(init), []
    if not order:
        example = rows.filled([jnp.zeros(a.shape[1:], a.dtype) for a in columns])
        _, shapes = jax.eval_shape(lambda c, x: _pair(f(c, x)), carry, example)
        return carry, jax.tree.map(lambda s: jnp.zeros((0, *s.shape), s.dtype), shapes)
    for i in order:
        new, result = _pair(f(carry, rows.filled([a[i] for a in columns])))
        carry = next_carry("rx.scan", carry, new)
        results.append(arrays_of(result))
    in_order = results if order.step > 0 else results[::-1]
    return carry, map_structure(_stacked, *in_order)


def _stacked(*leaves: Tree) -> Tree:
    first = leaves[0]
    if isinstance(first, PerReplica | Mirrored):
        copies = [
            jnp.stack(column) for column in zip(*(leaf.values for leaf in leaves), strict=True)
        ]
        return Mirrored(copies) if isinstance(first, Mirrored) else PerReplica(copies, first.layout)
    return jnp.stack(leaves) if isinstance(first, jax.Array) else first
