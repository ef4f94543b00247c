"""Calls exported programs: on replicas, under gradients, with empty batches."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from replicax.contexts import frames
from replicax.contexts.frames import Mode
from replicax.exporting import structures
from replicax.exporting.portable import PortableProgram
from replicax.foundation import errors
from replicax.foundation.options import VariableAggregation
from replicax.foundation.types import Tree
from replicax.variables.variable import Variable

# Arrays in any sequence: JAX passes lists and tuples.
Arrays = Sequence[jax.Array]


class LoadedProgram:
    """The Python function behind a function of a loaded model."""

    def __init__(self, program: PortableProgram) -> None:
        self.program = program
        facts = program.facts
        self.__name__: str = facts["name"]
        if facts["parameters"] is not None:
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            names = facts["parameters"]
            self.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])
        self._arguments = facts["arguments"]
        self._results = facts["results"]
        self._open_sizes = [
            (leaf["leaf"], axis, size)
            for leaf in structures.leaves_of(self._arguments)
            for axis, size in enumerate(leaf["shape"])
            if isinstance(size, str)
        ]

    def __call__(self, *args: Tree) -> Tree:
        where = f"The arguments of {self.__name__!r}"
        leaves = [jnp.asarray(leaf) for leaf in structures.flatten(self._arguments, args, where)]
        sizes = self._sizes(leaves)
        if 0 in sizes.values():
            return self._empty_results(sizes)
        values = [variable.read_value() for variable in self.program.read]
        outs = self._call(*values, *leaves)
        for variable, new in zip(self.program.written, outs, strict=False):
            _store(variable, new)
        results = outs[len(self.program.written) :]
        return structures.build(self._results, lambda leaf: results[leaf["leaf"]])

    @functools.cached_property
    def _call(self) -> Callable[..., Any]:
        # Deserialized and compiled once, at the first use.
        return jax.jit(
            _callable(jax.export.deserialize(bytearray(self.program.blob)), self.__name__)
        )

    def _sizes(self, leaves: Sequence[jax.Array]) -> dict[str, int]:
        """Returns the sizes that the signature leaves open; equal names need equal sizes."""
        sizes: dict[str, int] = {}
        for leaf, axis, symbol in self._open_sizes:
            size = leaves[leaf].shape[axis]
            if sizes.setdefault(symbol, size) != size:
                raise errors.InvalidArgumentError(
                    f"All arguments of {self.__name__!r} must agree on the size {symbol!r}",
                    f"it is {sizes[symbol]} and {size}",
                    "Pass batches of one size.",
                )
        return sizes

    def _empty_results(self, sizes: dict[str, int]) -> Tree:
        """Returns results without elements; exported programs do not accept empty batches.

        Raises if there are results with elements, such as a mean, or new values of variables:
        they are undefined for an empty batch.
        """

        def make(leaf: dict[str, Any]) -> Any:
            shape = [sizes.get(size, size) for size in leaf["shape"]]
            if 0 not in shape or any(isinstance(size, str) for size in shape):
                raise self._no_rows(f"a result of shape {leaf['shape']} needs at least one")
            return jnp.zeros(shape, jnp.dtype(leaf["dtype"]))

        if self.program.written:
            names = ", ".join(repr(v.name) for v in self.program.written)
            raise self._no_rows(f"the new value of {names} needs at least one")
        return structures.build(self._results, make)

    def _no_rows(self, found: str) -> errors.InvalidArgumentError:
        return errors.InvalidArgumentError(
            f"{self.__name__!r} of a loaded model must give the same for an empty batch as the "
            "original",
            f"the batch has no rows and {found}",
            "Leave empty batches out, or export a function that returns one row per row.",
        )


def _store(variable: Variable, new: jax.Array) -> None:
    """Stores the new value of a variable; see docs/design/0007-writes-of-loaded-models.md."""
    frame = frames.current()
    layout = frame.layout
    is_one_of_many = frame.mode is Mode.REPLICA and layout is not None and layout.num_replicas > 1
    is_sum = variable.aggregation is VariableAggregation.SUM and not variable.is_per_replica
    if is_one_of_many and is_sum and variable.dtype != bool:
        # Sums what each replica added. The sum of new values would count the old value once per
        # replica.
        variable.assign_add(new - variable.read_value())
    else:
        variable.assign(new)


def _callable(exported: jax.export.Exported, name: str) -> Callable[..., Any]:
    """Returns a function that JAX can map and differentiate.

    An exported program has no batching rule: under `jax.vmap`, which virtual replicas use,
    it runs once per replica, in turn. The gradient is a program of its own, with the
    same limit, so `custom_vjp` has to be the outermost layer.
    """
    forward = jax.custom_batching.sequential_vmap(exported.call)
    run = jax.custom_vjp(lambda *inputs: forward(*inputs))
    is_float_out = [jnp.issubdtype(a.dtype, jnp.inexact) for a in exported.out_avals]
    is_float_in = [jnp.issubdtype(a.dtype, jnp.inexact) for a in exported.in_avals]

    def run_forward(*inputs: jax.Array) -> tuple[Arrays, tuple[Arrays, Arrays]]:
        if not exported.has_vjp():
            raise errors.UnsupportedError(
                f"Differentiating {name!r} needs a gradient that was saved with it",
                "JAX could not derive one when the model was saved",
                "Save a function without jax.lax.while_loop and the like.",
            )
        outs = forward(*inputs)
        return outs, (inputs, [o for o, f in zip(outs, is_float_out, strict=True) if not f])

    @jax.custom_batching.sequential_vmap
    def pull_back(inputs: Arrays, numbers: Arrays, floats: Arrays) -> list[jax.Array]:
        # Results that are not floats have cotangents of dtype float0.
        others, own = iter(numbers), iter(floats)
        cotangents = [
            next(own) if is_float else np.zeros(next(others).shape, jax.dtypes.float0)
            for is_float in is_float_out
        ]
        found = exported.vjp().call(*inputs, *cotangents)
        return [g for g, is_float in zip(found, is_float_in, strict=True) if is_float]

    def run_backward(
        kept: tuple[Arrays, Arrays], cotangents: Arrays
    ) -> tuple[jax.Array | None, ...]:
        floats = [c for c, is_float in zip(cotangents, is_float_out, strict=True) if is_float]
        found = iter(pull_back(*kept, floats))
        return tuple(next(found) if is_float else None for is_float in is_float_in)

    run.defvjp(run_forward, run_backward)
    return run
