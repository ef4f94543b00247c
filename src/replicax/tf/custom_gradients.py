"""Gradients that a program defines: `tf.custom_gradient`, `tf.recompute_grad` and the like."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.foundation import errors
from replicax.tf import dispatch, tape_recording, tape_regions
from replicax.tf.arguments import Structure, Value
from replicax.tf.dispatch import raw_tree, wrap_tree
from replicax.tf.tape import GradientTape
from replicax.tf.tape_recording import Inputs, Node
from replicax.tf.tensor import raw

__all__ = [
    "NoGradient",
    "NotDifferentiable",
    "custom_gradient",
    "grad_pass_through",
    "no_gradient",
    "recompute_grad",
]


def custom_gradient(f: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Makes a function with a gradient of its own.

    Variables that the function reads are known to the tape: their gradient is what `grad_fn`
    returns for its argument `variables`. In `rx.value_and_grad`, pass variables as arguments.

    Args:
      f: Returns a pair: the result, and a function `grad_fn` of one gradient for each result, which
        returns one gradient for each argument. If `f` reads variables, `grad_fn` also takes
        `variables=` and returns a pair: the gradients of arguments, and those of the variables.

    >>> import replicax.tf as tf
    >>> @custom_gradient
    ... def clipped(x):
    ...     return x * 10.0, lambda dy: tf.minimum(dy * 10.0, 1.0)
    >>> x = tf.constant(2.0)
    >>> with tf.GradientTape() as tape:
    ...     tape.watch(x)
    ...     y = clipped(x)
    >>> float(y), float(tape.gradient(y, x))
    (20.0, 1.0)
    """
    if f is None:
        return custom_gradient

    @functools.wraps(f, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        if dispatch.on_host() or dispatch.has_symbolic((args, kwargs)):
            return f(*args, **kwargs)[0]
        if tape_recording.recording_tapes():
            return _recorded(f, args, kwargs)
        return _differentiated(f, args, kwargs)

    return call


def _differentiated(f: Callable[..., Any], args: Structure, kwargs: Structure) -> Any:
    """Calls a function so that transformations of JAX use its gradient."""
    leaves, structure = _split(args)
    inexact = [leaf for leaf in leaves if tape_recording.is_inexact(leaf)]
    if not inexact:
        return wrap_tree(raw_tree(f(*args, **kwargs)[0]))

    def pair(arrays: Sequence[Any]) -> Any:
        given = wrap_tree(_joined(structure, _placed(leaves, arrays)))
        return f(*given, **kwargs)

    @jax.custom_vjp
    def run(*arrays: Any) -> Any:
        with _alone():
            return raw_tree(pair(arrays)[0])

    def forward(*arrays: Any) -> Any:
        return run(*arrays), arrays

    def backward(arrays: Value, cotangents: Value) -> Any:
        # Calls the function once more: its gradient may use what it computed. XLA merges both.
        with _alone():
            result, grad_fn = pair(arrays)
            given = _flat(cotangents) if isinstance(result, list | tuple) else [cotangents]
            found = _sequence(grad_fn(*map(wrap_tree, given)))
            gradients = _matched(found, leaves)
            return tuple(_gradient_of(g, a) for g, a in zip(gradients, arrays, strict=True))

    run.defvjp(forward, backward)
    return wrap_tree(run(*inexact))


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Runs a body that JAX differentiates by itself: no tape records it, no region replaces arrays.

    In it, an argument may be the very array that a region around it stands for by an input.
    """
    with tape_recording.suspended(), tape_recording.entered(None):
        yield


def _placed(leaves: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """Returns leaves with other arrays in the places of the floating ones."""
    given = iter(arrays)
    return [next(given) if tape_recording.is_inexact(leaf) else leaf for leaf in leaves]


def _matched(found: list[Any], leaves: Sequence[Any]) -> list[Any]:
    """Returns the gradients of floating leaves, given those of all."""
    if len(found) != len(leaves):
        raise errors.StructureError(
            f"`grad_fn` must return one gradient for each of {len(leaves)} arguments",
            f"it returned {len(found)}",
            "Return None for an argument without a gradient.",
        )
    pairs = zip(found, leaves, strict=True)
    return [gradient for gradient, leaf in pairs if tape_recording.is_inexact(leaf)]


def _recorded(f: Callable[..., Any], args: Structure, kwargs: Structure) -> Any:
    """Calls a function as one node of the tapes that record."""
    tapes = tape_recording.recording_tapes()
    with GradientTape() as watching:
        result, grad_fn = f(*args, **kwargs)
    arguments = _leaves(args)
    variables = _variables_beside(watching, arguments)
    _require_variables_argument(grad_fn, variables)
    inputs = Inputs(tapes)
    slots = [inputs.slot_for(leaf) for leaf in (*arguments, *variables)]
    numbers = [_Number(i) for i in range(len(inputs.arrays))]
    places = tape_recording.filled(slots, numbers)
    results = _leaves(result)
    # Own arrays: the results must not be known as what the body recorded.
    outputs = tuple(jnp.array(raw(leaf), copy=True) for leaf in results)
    differentiable = [i for i, out in enumerate(outputs) if tape_recording.is_inexact(out)]

    def pullback(cotangents: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        given: list[Any] = [jnp.zeros_like(output) for output in outputs]
        for index, cotangent in zip(differentiable, cotangents, strict=True):
            given[index] = cotangent
        named = {"variables": variables} if variables else {}
        with tape_recording.suspended():
            found = grad_fn(*map(wrap_tree, given), **named)
        of_arguments, of_variables = found if variables else (found, [])
        gradients = [*_sequence(of_arguments), *_sequence(of_variables)]
        if len(gradients) != len(slots):
            raise errors.StructureError(
                f"`grad_fn` must return one gradient for each of {len(slots)} arguments and "
                "variables",
                f"it returned {len(gradients)}",
                "Return None for an argument without a gradient.",
            )
        totals: list[Any] = [jnp.zeros_like(array) for array in inputs.arrays]
        for place, gradient in zip(places, gradients, strict=True):
            if isinstance(place, _Number) and gradient is not None:
                total = totals[place.number]
                totals[place.number] = total + _gradient_of(gradient, total)
        return tuple(totals)

    if inputs.arrays and differentiable:
        node = Node(
            _function_of(f, args, kwargs, slots, differentiable),
            pullback,
            tuple(inputs.arrays),
            tuple(inputs.sources),
            tuple(outputs[i] for i in differentiable),
            tuple(inputs.kept),
        )
        for tape in tapes:
            if any(map(tape.tracks, node.sources)):
                tape.add(node)
    found = iter(outputs)
    return wrap_tree(tape_recording.map_leaves(lambda _: next(found), result))


def _variables_beside(tape: GradientTape, arguments: Sequence[Any]) -> list[Any]:
    """Returns the variables that a function has read, without those among its arguments."""
    given = {id(tape_recording.identity_of(a)) for a in arguments if _is_variable(a)}
    found = tape.watched_variables()
    return [v for v in found if id(tape_recording.identity_of(v)) not in given]


def _require_variables_argument(grad_fn: Callable[..., Any], variables: Sequence[Any]) -> None:
    if not variables or _takes_variables(grad_fn):
        return
    raise errors.InvalidArgumentError(
        "`grad_fn` needs an argument `variables`, as the function reads variables",
        f"it reads {', '.join(v.name for v in variables)}",
        "Write `def grad(dy, variables=None)` and return a pair: the gradients of arguments and "
        "those of variables.",
    )


class _Number:
    """The number of an input of a node."""

    def __init__(self, number: int) -> None:
        self.number = number


def _function_of(
    f: Callable[..., Any],
    args: Structure,
    kwargs: Structure,
    slots: Sequence[Any],
    differentiable: Sequence[int],
) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns the outputs as a function of the inputs of the node, for second derivatives."""
    count = len(_leaves(args))

    def function(*arrays: Any) -> tuple[jax.Array, ...]:
        with tape_recording.suspended():
            leaves = tape_recording.filled(list(slots[:count]), arrays)
            given = iter(leaves)
            plain = tape_recording.map_leaves(lambda _: next(given), args)
            found = _leaves(_differentiated(f, wrap_tree(plain), kwargs))
        return tuple(raw(found[i]) for i in differentiable)

    return function


def _takes_variables(grad_fn: Callable[..., Any]) -> bool:
    parameters = inspect.signature(grad_fn).parameters.values()
    return any(p.name == "variables" or p.kind is p.VAR_KEYWORD for p in parameters)


def _is_variable(value: Value) -> bool:
    return tape_recording.is_variable(value)


def _sequence(value: Value) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value)
    return [value]


def _leaves(tree: Structure) -> list[Any]:
    found: list[Any] = []
    tape_recording.map_leaves(found.append, tree)
    return found


_flat = _leaves


def _split(args: Structure) -> tuple[list[Any], Any]:
    leaves = [
        dispatch.default_array(raw(leaf)) if _is_number(raw(leaf)) else raw(leaf)
        for leaf in _leaves(args)
    ]
    return [leaf if hasattr(leaf, "dtype") else np.asarray(leaf) for leaf in leaves], args


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float | complex | np.ndarray | np.generic)


def _joined(structure: Structure, leaves: Sequence[Any]) -> Any:
    given = iter(leaves)
    return tape_recording.map_leaves(lambda _: next(given), structure)


def _gradient_of(gradient: Value, array: Value) -> Any:
    """Returns a gradient as an array that fits; zeros for None."""
    if gradient is None:
        return jnp.zeros_like(array)
    if hasattr(gradient, "to_dense"):
        gradient = gradient.to_dense()
    found = jnp.asarray(raw(gradient))
    return jnp.broadcast_to(found, np.shape(array)).astype(array.dtype)


def grad_pass_through(f: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function whose gradient is that of the identity.

    >>> import replicax.tf as tf
    >>> x = tf.constant(1.7)
    >>> with tf.GradientTape() as tape:
    ...     tape.watch(x)
    ...     y = grad_pass_through(tf.floor)(x)
    >>> float(y), float(tape.gradient(y, x))
    (1.0, 1.0)
    """

    @custom_gradient
    def call(*args: Any, **kwargs: Any) -> Any:
        def grad(*dy: Any, variables: Value = None) -> Any:
            if variables is not None:
                return dy, [None] * len(variables)
            return dy

        return f(*args, **kwargs), grad

    return functools.wraps(f, updated=())(call)


def recompute_grad(f: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function that is computed again for its gradient, to save memory.

    The function must not assign variables.

    >>> import replicax.tf as tf
    >>> x = tf.constant(3.0)
    >>> with tf.GradientTape() as tape:
    ...     tape.watch(x)
    ...     y = recompute_grad(lambda v: v * v)(x)
    >>> float(tape.gradient(y, x))
    6.0
    """

    @functools.wraps(f, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        if dispatch.on_host() or dispatch.has_symbolic((args, kwargs)):
            return f(*args, **kwargs)

        def run() -> Any:
            leaves, structure = _split(args)

            def body(arrays: Value) -> Any:
                return raw_tree(f(*wrap_tree(_joined(structure, arrays)), **kwargs))

            return jax.checkpoint(body)(leaves)

        if not tape_recording.recording_tapes():
            return wrap_tree(run())
        known = [leaf for leaf in _leaves(args) if tape_recording.is_tensor(leaf)]
        return wrap_tree(tape_regions.run(run, known))

    return call


def no_gradient(op_type: str) -> None:
    """Does nothing: kernels are not registered by name.

    >>> no_gradient("Size")
    """
    del op_type


NoGradient = NotDifferentiable = no_gradient
