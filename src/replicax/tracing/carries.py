"""What a loop carries from round to round: it keeps its structure, shapes and types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from replicax.foundation import errors, jax_compat
from replicax.tracing import bodies
from replicax.tracing.bodies import Body, Structure
from replicax.tracing.feeds import RoundElements
from replicax.values.regroup import map_structure

# How often a carry may change its type until it keeps it: from a Python number to an array.
_MOST_TRACES = 4


def settled(
    what: str,
    fn: Callable[..., tuple[Any, ...]],
    carry: Structure,
    arrays: list[Any],
    others: Sequence[Structure] = (),
    shapes: Sequence[Any] = (),
    elements: RoundElements | None = None,
) -> tuple[Body, list[Any]]:
    """Traces a body whose first result is the next carry.

    Args:
      what: The name of the loop, for messages.
      fn: Takes the carry and values of `others`, and returns a tuple of structures.
      carry: The structure of the carry.
      arrays: The arrays of the first carry.
      others: The structures of what else it takes.
      shapes: The shapes of the arrays in them.
      elements: What gives elements of data iterators to it.

    Returns:
      The body, and the arrays of the first carry, of the types that the carry keeps.
    """
    for _ in range(_MOST_TRACES):
        given = [jax_compat.shape_of(a) for a in arrays]
        body = bodies.trace(what, fn, [carry, *others], [*given, *shapes], elements)
        if not carry.is_like(body.results[0]):
            raise changed_structure(what, carry.skeleton, body.results[0].skeleton)
        returned = body.result_shapes[: carry.count]
        kept = [_kept(what, a, new) for a, new in zip(arrays, returned, strict=True)]
        if all(a is b for a, b in zip(arrays, kept, strict=True)):
            return body, arrays
        arrays = kept
    raise errors.InvalidArgumentError(
        f"The body of {what} must keep the types of what it carries",
        f"they still change after {_MOST_TRACES} rounds",
        "Start from arrays of the types that the body returns.",
    )


def _kept(what: str, array: Any, returned: Any) -> Any:
    """Returns an array of the carry, of the type that the body returns in its place."""
    if array.shape == returned.shape:
        if array.dtype == returned.dtype:
            is_giving_way = jax_compat.is_weak(array) and not jax_compat.is_weak(returned)
            return bodies.strong(array) if is_giving_way else array
        if jax_compat.is_weak(array):
            return jnp.asarray(array, returned.dtype)
    raise errors.InvalidArgumentError(
        f"The body of {what} must keep the shapes and types of what it carries",
        f"{array.dtype}{list(array.shape)} became {returned.dtype}{list(returned.shape)}",
        "Convert what the body returns, or start from an array like it.",
    )


def like(arrays: Sequence[Any], old: Sequence[Any]) -> list[Any]:
    """Makes the arrays of the next carry as weak as those of the last one."""
    pairs = zip(arrays, old, strict=True)
    return [new if jax_compat.is_weak(was) else bodies.strong(new) for new, was in pairs]


def next_carry(what: str, old: Any, new: Any) -> Any:
    """Checks what the body of an eager loop returns, as its compiled form would."""
    before, after = Structure(old), Structure(arrays_of(new))
    if not before.is_like(after):
        raise changed_structure(what, before.skeleton, after.skeleton)
    for array, returned in zip(before.take_arrays(), after.take_arrays(), strict=True):
        _kept(what, array, returned)
    return arrays_of(new)


def changed_structure(what: str, old: Any, new: Any) -> errors.StructureError:
    """Returns the error of a body that returns another structure."""

    def sketch(skeleton: Any) -> Any:
        return map_structure(lambda leaf: _STAR if hasattr(leaf, "index") else leaf, skeleton)

    return errors.StructureError(
        f"The body of {what} must return what it carries in the same structure",
        f"{sketch(old)} became {sketch(new)}",
        "Return the same containers, lengths, keys and Python values.",
    )


class _Star:
    def __repr__(self) -> str:
        return "*"


_STAR = _Star()


def arrays_of(structure: Any) -> Any:
    """Returns a structure with arrays in the place of numbers and variables."""
    return map_structure(bodies.as_array, structure)
