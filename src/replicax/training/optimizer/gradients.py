"""The arguments of `apply_gradients`: one checked gradient per variable, summed over replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from replicax.contexts import frames
from replicax.foundation import errors, jax_compat
from replicax.foundation.options import ReduceOp
from replicax.foundation.types import Tree
from replicax.values.array_surface import ArraySurface, as_operand
from replicax.values.distributed_values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    TracedPerReplica,
    is_array_like,
)
from replicax.values.indexed_slices import IndexedSlices
from replicax.values.regroup import map_structure
from replicax.variables.replicated import VariableComponent
from replicax.variables.sharded import ShardedVariable
from replicax.variables.variable import Variable

# A gradient as an array or as rows; `PerReplica` until the replicas' gradients are summed.
Gradient: TypeAlias = jax.Array | IndexedSlices | Mirrored | PerReplica


def by_variable(
    gradients: Tree, given: Tree, structure: Tree, variables: Sequence[Variable]
) -> list[Gradient | None]:
    """Returns one gradient, or None, for each of `variables`.

    Args:
      gradients: Pairs (gradient, variable), or a structure of gradients.
      given: The structure of variables that goes with the structure of gradients, or None
        for `structure`.
      structure: The structure of the optimizer's variables.
      variables: Its leaves.
    """
    if isinstance(gradients, Iterator):
        gradients = list(gradients)
    if given is None and _are_pairs(gradients):
        pairs = list(gradients)
    else:
        pairs = _zipped(gradients, structure if given is None else given)
    indices = {id(variable): i for i, variable in enumerate(variables)}
    found: list[Gradient | None] = [None] * len(variables)
    seen: set[int] = set()
    for gradient, variable in joined(pairs, indices):
        whole = variable.container if isinstance(variable, VariableComponent) else variable
        index = indices.get(id(whole))
        if index is None or index in seen:
            raise _not_expected(variable, index)
        seen.add(index)
        found[index] = checked(gradient, whole)
    if all(gradient is None for gradient in found):
        raise errors.InvalidArgumentError(
            "`apply_gradients` needs at least one gradient",
            "there is none for any variable",
            "Check that the loss depends on the variables.",
        )
    return found


def joined(
    pairs: list[tuple[Any, Variable]], indices: dict[int, int]
) -> Iterator[tuple[Any, Variable]]:
    """Joins the gradients of the parts of sharded variables that are trained as wholes."""
    parts: dict[int, dict[int, Any]] = {}
    wholes: dict[int, ShardedVariable] = {}
    for gradient, variable in pairs:
        whole = getattr(variable, "container", variable)
        is_trained = id(whole) in indices and whole is not variable
        if not isinstance(whole, ShardedVariable) or not is_trained:
            yield gradient, variable
            continue
        wholes[id(whole)] = whole
        found = parts.setdefault(id(whole), {})
        if id(variable) in found:
            raise _not_expected(variable, 0)
        found[id(variable)] = gradient
    for key, whole in wholes.items():
        yield _joined(whole, [parts[key].get(id(part)) for part in whole.variables]), whole


def _joined(whole: ShardedVariable, gradients: list[Any]) -> Gradient | None:
    if all(gradient is None for gradient in gradients):
        return None
    kinds = {isinstance(gradient, IndexedSlices) for gradient in gradients}
    if None in gradients or len(kinds) > 1:
        raise errors.InvalidArgumentError(
            f"The parts of {whole.name!r} need gradients of one kind: all dense, all "
            "rx.IndexedSlices, or none",
            f"they have {[type(g).__name__ for g in gradients]}",
            "Take the gradients with respect to all parts together.",
        )
    if kinds == {False}:
        return jnp.concatenate([jnp.asarray(as_operand(g)) for g in gradients])
    numbers = []
    for start, part, gradient in zip(whole.starts, whole.variables, gradients, strict=True):
        ids = jnp.asarray(gradient.indices)
        numbers.append(jnp.where((ids >= 0) & (ids < part.shape[0]), ids + start, -1))
    values = [gradient.values for gradient in gradients]
    if all(rows is values[0] for rows in values):
        # One lookup in the whole table: each row belongs to one of the parts.
        return IndexedSlices(values[0], jnp.max(jnp.stack(numbers), axis=0), whole.shape)
    return IndexedSlices(jnp.concatenate(values), jnp.concatenate(numbers), whole.shape)


def _are_pairs(gradients: object) -> bool:
    return isinstance(gradients, list | tuple) and all(
        isinstance(item, list | tuple) and len(item) == 2 and isinstance(item[1], Variable)
        for item in gradients
    )


def _swapped(pairs: list[Any]) -> list[Any]:
    return [pair[::-1] if isinstance(pair, list | tuple) else pair for pair in pairs]


def _zipped(gradients: Tree, variables: Tree) -> list[tuple[Any, Variable]]:
    """Pairs the leaves of two structures."""
    if isinstance(variables, Variable):
        variables = [variables]
    if _is_one_gradient(gradients):
        gradients = [gradients]
    if isinstance(variables, tuple | list) and type(gradients) in (list, tuple):
        # At the top, a list and a tuple match.
        variables, gradients = list(variables), list(gradients)
    pairs: list[tuple[Any, Variable]] = []
    try:
        map_structure(lambda v, g: pairs.append((g, v)), variables, gradients)
    except errors.StructureError:
        found = f"the variables are {_sketch(variables)} and the gradients {_sketch(gradients)}"
        if isinstance(gradients, list) and _are_pairs(_swapped(gradients)):
            found = "each pair has its variable first"
        raise errors.StructureError(
            "`apply_gradients` needs a structure of gradients like that of the variables",
            found,
            "Pass the gradients that `rx.value_and_grad(loss, variables)()` returned, or pairs "
            "(gradient, variable), in this order.",
        ) from None
    return pairs


def _is_one_gradient(value: object) -> bool:
    return is_array_like(value) or isinstance(
        value, IndexedSlices | DistributedValues | ArraySurface
    )


def _sketch(structure: Tree) -> str:
    if isinstance(structure, Mapping):
        return f"a {type(structure).__name__} with keys {sorted(map(str, structure))}"
    if isinstance(structure, list | tuple):
        return f"a {type(structure).__name__} of {len(structure)}"
    return f"a {type(structure).__name__}"


def _not_expected(variable: object, index: int | None) -> errors.DistributeError:
    name = repr(getattr(variable, "name", variable))
    if index is not None:
        found = f"there are two for {name}"
        return errors.InvalidArgumentError(
            "`apply_gradients` needs one gradient per variable", found, "Add them up first."
        )
    return errors.InvalidArgumentError(
        "`apply_gradients` needs variables that the optimizer was made for",
        f"{name} is not one of them",
        "Pass it to rx.optimizers.Optimizer(transformation, variables).",
    )


def checked(gradient: object, variable: Variable) -> Gradient | None:
    """Returns a gradient as arrays, or raises if it does not fit the variable.

    Per-replica values pass; their sum is checked.
    """
    if gradient is None or isinstance(gradient, PerReplica):
        return gradient
    if isinstance(gradient, Mirrored):
        checked(gradient.values[0], variable)
        return gradient
    if isinstance(gradient, IndexedSlices):
        return _checked_slices(gradient, variable)
    gradient = as_operand(gradient)
    if not is_array_like(gradient):
        raise errors.ArgumentTypeError(
            f"The gradient of {variable.name!r} must be an array, rx.IndexedSlices or None",
            f"it is a {type(gradient).__name__}",
            "Pass what `rx.value_and_grad` returned.",
        )
    array = gradient if isinstance(gradient, jax.Array) else jnp.asarray(gradient)
    if array.shape != variable.shape:
        raise _misfit(variable, f"a gradient of shape {variable.shape}", array.shape)
    return _floating(array, variable)


def _checked_slices(slices: IndexedSlices, variable: Variable) -> IndexedSlices:
    slices = slices.map_arrays(lambda x: x if isinstance(x, Mirrored) else jnp.asarray(x))
    ids, rows = slices.indices, slices.values
    if not variable.shape or ids.ndim != 1 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise errors.InvalidArgumentError(
            f"A sparse gradient of {variable.name!r} needs a list of integer row numbers",
            f"they have type {ids.dtype} and shape {ids.shape}; the variable has shape "
            f"{variable.shape}",
            "Pass rx.IndexedSlices(rows, row_numbers).",
        )
    expected = (*ids.shape, *variable.shape[1:])
    if rows.shape != expected:
        raise _misfit(variable, f"gradient rows of shape {expected}", rows.shape)
    return slices.map_values(lambda array: _floating(array, variable))


def _floating(array: jax.Array, variable: Variable) -> jax.Array:
    is_floating = jnp.issubdtype(array.dtype, jnp.inexact)
    return array if is_floating else array.astype(variable.dtype)


def _misfit(
    variable: Variable, required: str, shape: tuple[int, ...]
) -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError(
        f"Variable {variable.name!r} needs {required}",
        f"it has shape {shape}",
        "Check which gradient goes with which variable.",
    )


def summed(pairs: list[tuple[Any, Variable]], is_sum: bool) -> list[Any]:
    """Sums per-replica values over replicas, all in one batch; None stays None.

    Args:
      pairs: Values, each with its variable.
      is_sum: Whether values that are equal on all replicas are summed as well.
    """
    batch = [
        i
        for i, (value, _) in enumerate(pairs)
        if isinstance(value, PerReplica) or (is_sum and value is not None)
    ]
    for value, variable in pairs:
        if isinstance(value, PerReplica) and not isinstance(value, TracedPerReplica):
            _require_from_all(value, variable)
    results = [value for value, _ in pairs]
    if batch:
        chosen = [pairs[i] for i in batch]
        reduced = frames.current().hooks.batch_reduce_to(ReduceOp.SUM, chosen)
        for i, value in zip(batch, reduced, strict=True):
            results[i] = value
    return [_placed(value, target) for value, (_, target) in zip(results, pairs, strict=True)]


def _require_from_all(value: PerReplica, variable: Variable) -> None:
    without = [i for i, component in enumerate(value.values) if component is None]
    if without:
        raise errors.InvalidArgumentError(
            f"The gradient of {variable.name!r} must come from all replicas or from none",
            f"it is None on replica {without[0]}",
            "Pass zeros there.",
        )


def _placed(value: Tree, variable: Variable) -> Tree:
    """Converts a value for the update, and moves it to the device of the variable."""
    if isinstance(value, Mirrored) and isinstance(value.values[0], IndexedSlices):
        copies = value.values
        return IndexedSlices(
            Mirrored([c.values for c in copies]),
            Mirrored([c.indices for c in copies]),
            copies[0].dense_shape,
        )
    is_concrete = not any(map(jax_compat.is_traced, jax.tree.leaves(value)))
    if variable.layout is None and value is not None and is_concrete and jax_compat.is_eager():
        return jax.device_put(value, variable.placement[0])
    return value
