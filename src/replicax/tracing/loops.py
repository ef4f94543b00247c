"""Compiled loops: carries that keep their structure and types, and loops that count their rounds.

The elements that the body of a counted loop takes from data iterators in all rounds are stacked and
become rows of the loop. Elements of another kind, such as the last, partial batch, become the
rounds of a further loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from replicax.contexts.overlay import Overlay
from replicax.foundation import errors, jax_compat
from replicax.foundation.types import Tree
from replicax.tracing import bodies, iterators
from replicax.tracing.bodies import Body, Carried
from replicax.tracing.feeds import FeedInputs, RoundElements
from replicax.tracing.iterators import Feed
from replicax.tracing.structures import Structure, as_array
from replicax.values.regroup import map_structure

# The number of traces after which a carry must keep its types: Python numbers become arrays.
_MOST_TRACES = 4
# The most rounds of a loop over a dataset: an endless one must not fill the memory.
_MOST_ROUNDS = 1 << 20


def settled(
    what: str,
    fn: Callable[..., tuple[Tree, ...]],
    carry: Structure,
    arrays: list[jax.Array],
    others: Sequence[Structure] = (),
    shapes: Sequence[jax.ShapeDtypeStruct] = (),
    elements: RoundElements | None = None,
) -> tuple[Body, list[jax.Array]]:
    """Traces a body whose first result is the next carry.

    Args:
      what: The name of the loop, for error messages.
      fn: Takes the carry and values of `others`, and returns a tuple of structures.
      carry: The structure of the carry.
      arrays: The arrays of the first carry.
      others: The structures of further arguments.
      shapes: The shapes of the arrays in them.
      elements: The data elements of a round.

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
        f"The body of {what} must keep the types of its carry",
        f"they still change after {_MOST_TRACES} rounds",
        "Start from arrays of the types that the body returns.",
    )


def _kept(what: str, array: jax.Array, returned: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """Returns an array of the carry with the type of the array that the body returns."""
    if array.shape == returned.shape:
        if array.dtype == returned.dtype:
            becomes_strong = jax_compat.is_weak(array) and not jax_compat.is_weak(returned)
            return bodies.strong(array) if becomes_strong else array
        if jax_compat.is_weak(array):
            return jnp.asarray(array, returned.dtype)
    raise errors.InvalidArgumentError(
        f"The body of {what} must keep the shapes and types of its carry",
        f"{array.dtype}{list(array.shape)} became {returned.dtype}{list(returned.shape)}",
        "Convert what the body returns, or start from an array like it.",
    )


def like(arrays: Sequence[jax.Array], old: Sequence[jax.Array]) -> list[jax.Array]:
    """Makes the arrays of the next carry as weak as those of the last one."""
    pairs = zip(arrays, old, strict=True)
    return [new if jax_compat.is_weak(was) else bodies.strong(new) for new, was in pairs]


def next_carry(what: str, old: Tree, new: Tree) -> Tree:
    """Checks the result of an eager loop's body as the compiled loop would."""
    before, after = Structure(old), Structure(arrays_of(new))
    if not before.is_like(after):
        raise changed_structure(what, before.skeleton, after.skeleton)
    for array, returned in zip(before.take_arrays(), after.take_arrays(), strict=True):
        _kept(what, array, returned)
    return arrays_of(new)


def changed_structure(what: str, old: Tree, new: Tree) -> errors.StructureError:
    """Returns the error of a body that returns another structure."""

    def sketch(skeleton: Tree) -> Tree:
        return map_structure(lambda leaf: _STAR if hasattr(leaf, "index") else leaf, skeleton)

    return errors.StructureError(
        f"The body of {what} must return its carry in the same structure",
        f"{sketch(old)} became {sketch(new)}",
        "Return the same containers, lengths, keys and Python values.",
    )


class _Star:
    def __repr__(self) -> str:
        return "*"


_STAR = _Star()


def arrays_of(structure: Tree) -> Tree:
    """Returns a structure with its numbers and variables converted to arrays."""
    return map_structure(as_array, structure)


@dataclasses.dataclass
class Rows:
    """The inputs of a loop's rounds.

    Attributes:
      structure: The structure of the input of one round.
      columns: Its arrays for all rounds; empty if a round takes its number.
      count: The number of rounds; None for as many as there are elements.
      first: The first number.
    """

    structure: Structure
    columns: list[jax.Array]
    count: int | None
    first: jax.Array | None = None

    @property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of the input of one round."""
        if self.first is not None:
            return [jax.ShapeDtypeStruct((), self.first.dtype)]
        return [
            jax.ShapeDtypeStruct(a.shape[1:], a.dtype, weak_type=jax_compat.is_weak(a))
            for a in self.columns
        ]


class CountedLoop:
    """A loop whose rounds are counted: `fn(carry, x)` returns the next carry and a result."""

    def __init__(
        self,
        what: str,
        fn: Callable[[Tree, Tree], tuple[Tree, Tree]],
        rows: Rows,
        unroll: int | bool,
        reverse: bool = False,
    ) -> None:
        self._what, self._fn, self._rows = what, fn, rows
        self._unroll, self._reverse = unroll, reverse
        # The results of each part of the loop, in order of time.
        self._parts: list[list[jax.Array]] = []

    def run(self, outer: Overlay, init: Tree, feed: Feed | None = None) -> tuple[Tree, Tree]:
        """Emits the loop into the current trace; returns the last carry and all results.

        Args:
          outer: The overlay around the loop.
          init: The first carry.
          feed: The iterator whose end is the end of the loop, if there is no count.
        """
        rows, carry = self._rows, Structure(init)
        arrays, results, done = carry.take_arrays(), None, 0
        while results is None or rows.count is None or done < rows.count:
            elements = self._elements(outer)
            if feed is not None and (elements is None or elements.is_at_end(feed)):
                break
            body, arrays = settled(
                self._what, self._fn, carry, arrays, [rows.structure], rows.shapes, elements
            )
            results = self._checked(results, body)
            count, fed = self._take_rounds(elements, done)
            carried = Carried(outer, [body])
            arrays, own = self._emit(body, carried, arrays, fed, done, count)
            carried.store(own)
            done += count
        return carry.filled(arrays), None if results is None else self._joined(results)

    def _elements(self, outer: Overlay) -> RoundElements | None:
        inputs = iterators.inputs_of(outer)
        if isinstance(inputs, FeedInputs) and self._rows.count != 0:
            return RoundElements(inputs)
        return None

    def _checked(self, results: Structure | None, body: Body) -> Structure:
        if results is not None and not results.is_like(body.results[1]):
            raise changed_structure(self._what, results.skeleton, body.results[1].skeleton)
        return results or body.results[1]

    def _take_rounds(
        self, elements: RoundElements | None, done: int
    ) -> tuple[int, list[jax.Array]]:
        """Returns how many rounds the traced body fits, and the elements of all of them."""
        total = self._rows.count
        if elements is None or elements.is_empty:
            assert total is not None
            return total - done, []
        if total is None and done >= _MOST_ROUNDS:
            raise errors.TracingError(
                f"A compiled loop over a dataset can have {_MOST_ROUNDS:,} rounds",
                "the dataset has more elements: is it endless?",
                "Call next(iterator) in rx.fori_loop with a known number of rounds.",
            )
        count = elements.count_rounds((_MOST_ROUNDS if total is None else total) - done)
        return count, elements.stacks(count)

    def _emit(
        self,
        body: Body,
        carried: Carried,
        arrays: list[jax.Array],
        fed: list[jax.Array],
        done: int,
        count: int,
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Emits `count` rounds; returns the carry and the variables after them."""
        rows, size = self._rows, len(arrays)
        columns = rows.columns
        if columns and rows.count != count:
            start = rows.count - done - count if self._reverse and rows.count else done
            columns = [column[start : start + count] for column in columns]
        if self._reverse:
            # Elements come in the order of time.
            fed = [jnp.flip(stack, 0) for stack in fed]
        number = () if rows.first is None else (rows.first + done,)

        def step(state: Tree, row: Tree) -> Tree:
            carry, own, number = state
            own, outs = carried.run(body, own, [*carry, *row[0], *number], row[1])
            state = like(outs[:size], carry), own, tuple(n + 1 for n in number)
            return state, outs[size:]

        (last, own, _), stacks = jax.lax.scan(
            step,
            (arrays, carried.values, number),
            (columns, fed),
            count,
            self._reverse,
            self._unroll,
        )
        # JAX returns rows that the body passes on as they are; results must be other arrays.
        given = {id(array) for array in (*columns, *fed)}
        self._parts.append([jnp.copy(a) if id(a) in given else a for a in stacks])
        return last, own

    def _joined(self, results: Structure) -> Tree:
        parts = self._parts[::-1] if self._reverse else self._parts
        stacks = []
        for pieces in zip(*parts, strict=True):
            shapes = {piece.shape[1:] for piece in pieces}
            if len(shapes) > 1:
                raise errors.InvalidArgumentError(
                    f"The results of all rounds of {self._what} must have one shape",
                    f"elements of different shapes lead to {sorted(shapes)}",
                    "Return sums or means instead of one value per row, or drop the last "
                    "partial batch.",
                )
            stacks.append(pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces))
        return results.filled_with_stacks(stacks)
