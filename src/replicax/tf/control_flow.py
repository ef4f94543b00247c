"""Branches and loops on tensors: in compiled code as parts of the program, eagerly as Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.foundation import errors, jax_compat, lazy
from replicax.tf import carries, dispatch, tape_recording, tape_regions
from replicax.tf.arguments import DTypeLike, Ignored, Value
from replicax.tf.dispatch import array_dtype, on_host, op, raw_tree, wrap_tree, xp
from replicax.tf.tensor import Tensor, raw
from replicax.tf.tensor_array import TensorArray
from replicax.tracing import control_flow as rx_control_flow

# Imports Keras.
_keras_scopes = lazy.module("replicax.tf.tape_keras_scopes")

__all__ = [
    "TensorArray",
    "case",
    "cond",
    "foldl",
    "foldr",
    "map_fn",
    "scan",
    "switch_case",
    "vectorized_map",
    "while_loop",
]


def _is_compiled() -> bool:
    return not on_host() and jax_compat.is_staging()


def _recorded(run: Callable[[], Any], known: Value = ()) -> Any:
    """Runs code of JAX as one node, if tapes record; returns a structure of tensors."""
    if not tape_recording.recording_tapes():
        return wrap_tree(run())
    leaves = [leaf for leaf in _leaves(known) if isinstance(leaf, Tensor)]
    with tape_regions.explaining_loops():
        return wrap_tree(tape_regions.run(run, leaves))


def _leaves(tree: Value) -> list[Any]:
    found: list[Any] = []
    tape_recording.map_leaves(found.append, tree)
    return found


def cond(
    pred: Value,
    true_fn: Callable[[], Any] | None = None,
    false_fn: Callable[[], Any] | None = None,
    name: str | None = None,
) -> Any:
    """Calls one of two functions, chosen by a scalar.

    In compiled code both are traced, and must return equal structures, shapes and dtypes.

    >>> cond(Tensor(jnp.asarray(1.0)) > 0, lambda: 1, lambda: 2)
    1
    """
    del name
    if true_fn is None or false_fn is None:
        raise errors.ArgumentTypeError(
            "`tf.cond` needs two functions",
            f"true_fn is {true_fn!r} and false_fn is {false_fn!r}",
            "Pass functions without arguments.",
        )
    chosen = raw(pred)
    if not jax_compat.is_traced(chosen):
        return true_fn() if bool(chosen) else false_fn()
    _require_scalar("tf.cond", chosen)

    def run() -> Any:
        is_true = jnp.asarray(raw(pred)).astype(bool)
        return _chosen(
            lambda fns: rx_control_flow.cond(is_true, *fns), [_plain(true_fn), _plain(false_fn)]
        )

    return _recorded(run, pred)


def _chosen(choice: Callable[[Any], Any], fns: list[Callable[[], Any]]) -> Any:
    """Returns what a choice between functions returns; they may assign variables of Keras."""
    if not tape_recording.is_keras_loaded():
        return choice(fns)
    return _keras_scopes.choose(choice, fns)


def _require_scalar(what: str, array: Value) -> None:
    if np.shape(array):
        raise errors.InvalidArgumentError(
            f"`{what}` needs a scalar",
            f"the tensor has shape {np.shape(array)}",
            "Reduce it with tf.reduce_all or tf.reduce_any, or use tf.where for each element.",
        )


def _plain(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of arrays that returns arrays."""

    def call(*args: Any) -> Any:
        return raw_tree(tape_recording.map_leaves(_strong, fn(*wrap_tree(args))))

    return call


def _strong(leaf: Value) -> Any:
    """Gives Python numbers the dtypes of TensorFlow."""
    if isinstance(leaf, bool) or not isinstance(leaf, int | float):
        return leaf
    return jnp.asarray(leaf, jnp.int32 if isinstance(leaf, int) else jnp.float32)


def case(
    pred_fn_pairs: Value,
    default: Callable[[], Any] | None = None,
    exclusive: bool = False,
    strict: bool = False,
    name: str = "case",
) -> Any:
    """Calls the function of the first pair whose condition holds, or the default.

    >>> case([(False, lambda: 1), (True, lambda: 2)])
    2
    """
    del exclusive, strict
    items = pred_fn_pairs.items() if isinstance(pred_fn_pairs, Mapping) else pred_fn_pairs
    pairs = [(p.deref() if hasattr(p, "deref") else p, fn) for p, fn in items]
    if not pairs:
        raise errors.InvalidArgumentError("`tf.case` needs pairs", "it got none", "Pass some.")
    # Without a default the last function stands for it, as none of the others is chosen.
    rest = default or pairs[-1][1]
    for pred, fn in reversed(pairs if default is not None else pairs[:-1]):
        rest = _either(pred, fn, rest)
    is_known = not any(jax_compat.is_traced(raw(p)) for p, _ in pairs)
    if default is None and is_known and not any(bool(raw(p)) for p, _ in pairs):
        raise errors.InvalidArgumentError(
            f"One condition of `tf.{name}` must hold, or there must be a default",
            "none holds",
            "Pass `default=`.",
        )
    return rest() if len(pairs) > 1 or default is not None else pairs[0][1]()


def _either(pred: Value, fn: Callable[[], Any], rest: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: cond(pred, fn, rest)


def switch_case(
    branch_index: Value,
    branch_fns: Value,
    default: Callable[[], Any] | None = None,
    name: str = "switch_case",
) -> Any:
    """Calls the function with a number; the default, or the last one, for other numbers.

    >>> switch_case(1, [lambda: "a", lambda: "b"])
    'b'
    """
    del name
    fns = list(branch_fns)
    if isinstance(branch_fns, Mapping) or (fns and isinstance(fns[0], tuple)):
        numbered = dict(branch_fns)
        missing = default or numbered[max(numbered)]
        fns = [numbered.get(i, missing) for i in range(max(numbered) + 1)]
    fns.append(default or fns[-1])
    chosen = raw(branch_index)
    if not jax_compat.is_traced(chosen):
        number = int(chosen)
        return fns[number if 0 <= number < len(fns) - 1 else -1]()

    def run() -> Any:
        index = jnp.asarray(raw(branch_index))
        inside = (index >= 0) & (index < len(fns) - 1)
        number = jnp.where(inside, index, len(fns) - 1)
        return _chosen(lambda fns: rx_control_flow.switch(number, fns), list(map(_plain, fns)))

    return _recorded(run, branch_index)


def while_loop(
    cond: Callable[..., Any],
    body: Callable[..., Any],
    loop_vars: Value,
    shape_invariants: Ignored = None,
    parallel_iterations: int = 10,
    back_prop: bool = True,
    swap_memory: bool = False,
    maximum_iterations: Value = None,
    name: str | None = None,
) -> Any:
    """Calls `body(*loop_vars)` while `cond(*loop_vars)` holds.

    In compiled code the variables keep their shapes and dtypes. A tape can differentiate such a
    loop if `maximum_iterations` is known.

    >>> i = while_loop(lambda i: i < 3, lambda i: [i + 1], [Tensor(jnp.asarray(0))])
    >>> int(i[0])
    3
    """
    del shape_invariants, parallel_iterations, back_prop, swap_memory, name
    is_sequence = isinstance(loop_vars, list | tuple)
    first = list(loop_vars) if is_sequence else [loop_vars]

    def step(values: list[Any]) -> list[Any]:
        found = body(*values)
        found = list(found) if isinstance(found, list | tuple) else [found]
        if len(found) != len(values):
            raise errors.StructureError(
                f"The body of tf.while_loop must return {len(values)} values",
                f"it returned {len(found)}",
                "Return all loop variables.",
            )
        return found

    most = None if maximum_iterations is None else int(raw(maximum_iterations))
    if _is_compiled():
        final = _compiled_while(cond, step, first, most)
    else:
        final, rounds = first, 0
        while (most is None or rounds < most) and bool(raw(cond(*final))):
            final, rounds = step(final), rounds + 1
        final = tape_recording.map_leaves(_as_tensor, final)
    return type(loop_vars)(final) if is_sequence else final[0]


def _as_tensor(value: Value) -> Any:
    """Returns a tensor for what a loop in Python ended with: a number or an array."""
    is_value = isinstance(value, bool | int | float | np.ndarray | np.generic)
    return Tensor(dispatch.default_array(value)) if is_value else value


def _compiled_while(
    holds: Callable[..., Any],
    step: Callable[[list[Any]], list[Any]],
    first: list[Any],
    most: int | None,
) -> list[Any]:
    first = tape_recording.map_leaves(_strong, first)
    started = carries.with_rows(first, step)

    def arrays(values: list[Any]) -> list[Any]:
        return [carries.arrays(value) for value in values]

    def test(values: list[Any]) -> Any:
        return jnp.asarray(raw(holds(*carries.tensors(values)))).astype(bool)

    def advance(values: list[Any]) -> list[Any]:
        return arrays(tape_recording.map_leaves(_strong, step(carries.tensors(values))))

    def run() -> list[Any]:
        if most is None:
            return jax.tree.leaves(rx_control_flow.while_loop(test, advance, arrays(started)))

        def round_(i: Value, values: list[Any]) -> list[Any]:
            del i
            return rx_control_flow.cond(test(values), advance, lambda same: same, values)

        return jax.tree.leaves(rx_control_flow.fori_loop(0, most, round_, arrays(started)))

    return carries.like(started, _recorded(run, carries.known(started)))


# Rows.


def _num_rows(what: str, elems: Value) -> int:
    sizes = {np.shape(raw(leaf))[0] if np.ndim(raw(leaf)) else None for leaf in _leaves(elems)}
    if len(sizes) != 1 or None in sizes:
        raise errors.InvalidArgumentError(
            f"`tf.{what}` needs tensors with one number of rows",
            f"their first dimensions are {sorted(map(str, sizes))}",
            "Check the shapes.",
        )
    return sizes.pop() or 0


def _as_tensors(elems: Value) -> Any:
    def tensor(leaf: Value) -> Any:
        if isinstance(leaf, Tensor) or tape_recording.is_variable(leaf):
            return leaf
        return Tensor(xp().asarray(leaf, dtype=array_dtype(np.asarray(leaf).dtype)))

    return elems if isinstance(elems, Tensor) else tape_recording.map_leaves(tensor, elems)


def _row_of(elems: Value, index: Value) -> Any:
    return tape_recording.map_leaves(lambda leaf: leaf[index], elems)


@op(name="stack")
def _stack(rows: Value) -> Any:
    return xp().stack(rows)


def _stacked(rows: Sequence[Any]) -> Any:
    columns = [_leaves(row) for row in rows]
    found: Iterator[Any] = iter([_stack(list(column)) for column in zip(*columns, strict=True)])
    return tape_recording.map_leaves(lambda _: next(found), rows[0])


def map_fn(
    fn: Callable[[Any], Any],
    elems: Value,
    dtype: DTypeLike = None,
    parallel_iterations: int | None = None,
    back_prop: bool = True,
    swap_memory: bool = False,
    infer_shape: bool = True,
    name: str | None = None,
    fn_output_signature: Ignored = None,
) -> Any:
    """Calls a function for each row, and stacks the results.

    >>> map_fn(lambda x: x * 2, Tensor(jnp.asarray([1, 2]))).numpy().tolist()
    [2, 4]
    """
    del dtype, parallel_iterations, back_prop, swap_memory, infer_shape, name, fn_output_signature
    elems = _as_tensors(_listed(elems))
    count = _num_rows("map_fn", elems)
    if not _is_compiled() and count:
        return _stacked([fn(_row_of(elems, i)) for i in range(count)])

    def run() -> Any:
        def step(_: None, row: Value) -> tuple[None, Any]:
            return None, _plain(fn)(row)

        return rx_control_flow.scan(step, None, raw_tree(elems), length=count)[1]

    return _recorded(run, elems)


def _listed(elems: Value) -> Any:
    """Returns one array for a list of numbers; a list of tensors is a structure."""
    leaves = _leaves(elems)
    is_numbers = all(isinstance(leaf, int | float | bool) for leaf in leaves)
    return np.asarray(elems) if isinstance(elems, list) and is_numbers else elems


def vectorized_map(
    fn: Callable[[Any], Any], elems: Value, fallback_to_while_loop: bool = True, warn: bool = True
) -> Any:
    """Calls a function once for all rows together, by `jax.vmap`.

    >>> vectorized_map(lambda x: x * 2, Tensor(jnp.asarray([1, 2]))).numpy().tolist()
    [2, 4]
    """
    del fallback_to_while_loop, warn
    if on_host():
        return map_fn(fn, elems)
    elems = _as_tensors(_listed(elems))
    _num_rows("vectorized_map", elems)
    return _recorded(lambda: jax.vmap(_plain(fn))(raw_tree(elems)), elems)


def scan(
    fn: Callable[[Any, Any], Any],
    elems: Value,
    initializer: Value = None,
    parallel_iterations: int = 10,
    back_prop: bool = True,
    swap_memory: bool = False,
    infer_shape: bool = True,
    reverse: bool = False,
    name: str | None = None,
) -> Any:
    """Returns all values of an accumulation over rows, stacked.

    >>> scan(lambda a, x: a + x, Tensor(jnp.asarray([1, 2, 3]))).numpy().tolist()
    [1, 3, 6]
    """
    del parallel_iterations, back_prop, swap_memory, infer_shape, name
    elems = _as_tensors(_listed(elems))
    numbers = list(range(_num_rows("scan", elems)))
    if reverse:
        numbers.reverse()
    if not _is_compiled():
        value, found = initializer, []
        for i in numbers:
            row = _row_of(elems, i)
            value = row if value is None else fn(value, row)
            found.append(value)
        return _stacked(found[::-1] if reverse else found)
    known = (elems, initializer)

    def run() -> Any:
        rows, start = raw_tree(elems), initializer
        if start is None:
            edge = -1 if reverse else 0
            start = jax.tree.map(lambda a: a[edge], rows)
            kept = slice(None, -1) if reverse else slice(1, None)
            rows = jax.tree.map(lambda a: a[kept], rows)

        def step(value: Value, row: Value) -> tuple[Any, Any]:
            new = raw_tree(tape_recording.map_leaves(_strong, fn(*wrap_tree((value, row)))))
            return new, new

        first = raw_tree(tape_recording.map_leaves(_strong, start))
        found = rx_control_flow.scan(step, first, rows, reverse=reverse)[1]
        if initializer is not None:
            return found
        parts = (lambda a, b: [b, a[None]]) if reverse else (lambda a, b: [a[None], b])
        return jax.tree.map(lambda a, b: jnp.concatenate(parts(a, b)), first, found)

    return _recorded(run, known)


def foldl(
    fn: Callable[[Any, Any], Any],
    elems: Value,
    initializer: Value = None,
    parallel_iterations: int = 10,
    back_prop: bool = True,
    swap_memory: bool = False,
    name: str | None = None,
) -> Any:
    """Returns the last value of an accumulation over rows, from the first to the last.

    >>> int(foldl(lambda a, x: a * 10 + x, Tensor(jnp.asarray([1, 2, 3]))))
    123
    """
    del parallel_iterations, back_prop, swap_memory, name
    return _fold(fn, elems, initializer, is_reversed=False)


def foldr(
    fn: Callable[[Any, Any], Any],
    elems: Value,
    initializer: Value = None,
    parallel_iterations: int = 10,
    back_prop: bool = True,
    swap_memory: bool = False,
    name: str | None = None,
) -> Any:
    """Returns the last value of an accumulation over rows, from the last to the first.

    >>> int(foldr(lambda a, x: a * 10 + x, Tensor(jnp.asarray([1, 2, 3]))))
    321
    """
    del parallel_iterations, back_prop, swap_memory, name
    return _fold(fn, elems, initializer, is_reversed=True)


def _fold(
    fn: Callable[[Any, Any], Any], elems: Value, initializer: Value, is_reversed: bool
) -> Any:
    values = scan(fn, elems, initializer, reverse=is_reversed)
    return tape_recording.map_leaves(lambda leaf: leaf[0 if is_reversed else -1], values)
