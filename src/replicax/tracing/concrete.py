"""`get_concrete_function`: a compiled function with one fixed signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from replicax.foundation import errors
from replicax.foundation.types import Tree
from replicax.tracing import signature
from replicax.tracing.iterators import Feed
from replicax.tracing.program import Program
from replicax.tracing.signature import PerReplicaSpec, TensorSpec
from replicax.values.distributed_values import PerReplica
from replicax.values.regroup import leaves_of, map_structure
from replicax.variables.variable import Variable

# Two sizes to trace with instead of an open one: sizes of results that differ are open too.
_SIZES = (2, 3)


class ConcreteFunction:
    """A compiled function for one signature; made by `get_concrete_function`.

    It takes the array arguments of its signature, by position or by name; Python values are
    part of it and may be left out.

    >>> import replicax as rx
    >>> scale = rx.function(lambda x, factor: x * factor)
    >>> triple = scale.get_concrete_function(rx.TensorSpec((None,)), 3)
    >>> triple([1.0, 2.0]), triple.pretty_printed_signature()
    (Array([3., 6.], dtype=float32), '<lambda>(x: float32[None], factor: 3) -> float32[None]')
    """

    def __init__(
        self,
        function: Callable[..., Any],
        python_function: Callable[..., Any],
        name: str,
        args: tuple[Tree, ...],
        kwargs: dict[str, Tree],
        programs: Sequence[Program],
    ) -> None:
        self.name = name
        self._function = function
        self._args: tuple[Tree, ...] = tuple(map_structure(_spec_of, a) for a in args)
        self._kwargs = {key: map_structure(_spec_of, kwargs[key]) for key in kwargs}
        self._names = _parameter_names(python_function, len(args))
        self._programs = list(programs)
        taken = [n for n, a in zip(self._names, self._args, strict=True) if _has_arrays(a)]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.__name__ = name
        self.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in taken])

    @property
    def input_signature(self) -> tuple[Tree, ...] | None:
        """The specs of the arrays it takes, by position; None if some are taken by name only."""
        if any(map(_has_arrays, self._kwargs.values())):
            return None
        return tuple(spec for spec in self._args if _has_arrays(spec))

    @property
    def structured_input_signature(self) -> tuple[tuple[Tree, ...], dict[str, Tree]]:
        """The positional and the named arguments, with a `TensorSpec` for each array."""
        return self._args, dict(self._kwargs)

    @property
    def structured_outputs(self) -> Tree:
        """The structure of the results, with a `TensorSpec` for each array."""
        found = [program.structured_outputs for program in self._programs]
        return found[0] if len(found) == 1 else map_structure(_common_spec, *found)

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The variables that the function reads, writes or creates."""
        return self._programs[0].variables

    @property
    def trainable_variables(self) -> tuple[Variable, ...]:
        """Those of `variables` that optimizers change."""
        return tuple(v for v in self.variables if v.trainable)

    @property
    def captured_inputs(self) -> tuple[Variable | ArrayLike, ...]:
        """The inputs of the program besides its arguments: variables, then captured arrays."""
        return (*self.variables, *self._programs[0].constants)

    def pretty_printed_signature(self) -> str:
        """Describes arguments and results in one line."""
        named = [f"{n}: {_show(a)}" for n, a in zip(self._names, self._args, strict=True)]
        named += [f"{name}: {_show(value)}" for name, value in self._kwargs.items()]
        return f"{self.name}({', '.join(named)}) -> {_show(self.structured_outputs)}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            given = self._bind(args, kwargs, [True] * len(self._args))
        except errors.DistributeError:
            # The arrays alone, without the Python values between them.
            is_array = [_has_arrays(spec) for spec in self._args]
            if all(is_array):
                raise
            given = self._bind(args, kwargs, is_array)
        return self._function(*given[0], **given[1])

    def _bind(
        self, args: tuple[Tree, ...], kwargs: dict[str, Tree], takes: list[bool]
    ) -> tuple[list[Tree], dict[str, Tree]]:
        """Assigns arguments to the parameters that are taken by position, then by name."""
        rest, named = list(args), dict(kwargs)
        positional = [
            self._fitted(name, spec, rest.pop(0) if rest and takes_it else _take(named, name, spec))
            for name, spec, takes_it in zip(self._names, self._args, takes, strict=True)
        ]
        # Arrays that the signature names may be given by position, too.
        by_name = {
            name: self._fitted(
                name,
                spec,
                rest.pop(0)
                if rest and name not in named and _has_arrays(spec)
                else _take(named, name, spec),
            )
            for name, spec in self._kwargs.items()
        }
        if rest or named:
            raise errors.ArgumentTypeError(
                f"`{self.name}` takes {', '.join([*self._names, *self._kwargs]) or 'nothing'}",
                f"{len(args)} positional arguments and {sorted(kwargs)} were given",
                "Leave the others out.",
            )
        return positional, by_name

    def _fitted(self, name: str, spec: Tree, value: Tree) -> Tree:
        if value is _MISSING:
            raise errors.ArgumentTypeError(
                f"`{self.name}` needs the argument {name!r}",
                "it was not given",
                f"Pass {_show(spec)}.",
            )

        def fit(spec: object, value: Tree) -> Tree:
            if isinstance(spec, TensorSpec | PerReplicaSpec):
                return signature.fitted(f"`{self.name}`", spec, value)
            if isinstance(spec, Feed) and isinstance(value, Feed):
                return value
            if spec is not value and signature.static_key(spec) != signature.static_key(value):
                raise errors.InvalidArgumentError(
                    f"`{self.name}` was compiled with {name} = {spec!r}",
                    f"{value!r} was given",
                    "Leave the argument out, or get another concrete function for it.",
                )
            return spec

        return map_structure(fit, spec, value)

    def __repr__(self) -> str:
        return f"<rx.ConcreteFunction {self.pretty_printed_signature()}>"


_MISSING = object()


def examples(structure: Tree) -> list[Tree]:
    """Returns arguments that a signature describes: one set, or two if a size is open."""
    is_open = any(
        isinstance(leaf, TensorSpec | PerReplicaSpec) and None in (leaf.shape or ())
        for leaf in leaves_of(structure)
    )
    sizes = _SIZES if is_open else _SIZES[:1]
    return [map_structure(lambda leaf, n=n: _example(leaf, n), structure) for n in sizes]


def _example(leaf: object, size: int) -> object:
    if isinstance(leaf, PerReplicaSpec):
        return PerReplica([_example(own, size) for own in leaf.value_specs])
    if isinstance(leaf, jax.ShapeDtypeStruct):
        leaf = TensorSpec(leaf.shape, leaf.dtype)
    if not isinstance(leaf, TensorSpec):
        return leaf
    if leaf.shape is None:
        raise errors.InvalidArgumentError(
            "A concrete function needs the number of dimensions of each argument",
            "a TensorSpec with shape None was given",
            "Pass a shape; None inside it stands for any size.",
        )
    return np.zeros([size if n is None else n for n in leaf.shape], leaf.dtype)


def _spec_of(leaf: object) -> Tree:
    """Returns the spec of an array; other arguments are part of the signature themselves."""
    if isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return TensorSpec(leaf.shape, leaf.dtype)
    if signature.is_numpy_number(leaf):
        return TensorSpec((), leaf.dtype)
    if isinstance(leaf, PerReplica):
        return PerReplicaSpec(tuple(_spec_of(value) for value in leaf.values))
    return leaf


def _common_spec(one: Tree, other: Tree) -> Tree:
    """Returns a spec that fits results of both sizes."""
    if isinstance(one, PerReplicaSpec):
        pairs = zip(one.value_specs, other.value_specs, strict=True)
        return PerReplicaSpec(tuple(_common_spec(a, b) for a, b in pairs))
    if not isinstance(one, TensorSpec) or one.shape is None:
        return one
    sizes = zip(one.shape, other.shape, strict=True)
    return TensorSpec(tuple(a if a == b else None for a, b in sizes), one.dtype)


def _has_arrays(structure: Tree) -> bool:
    kinds = (TensorSpec, PerReplicaSpec, Feed)
    return any(isinstance(leaf, kinds) for leaf in leaves_of(structure))


def _take(named: dict[str, Tree], name: str, spec: Tree) -> Tree:
    """Returns a named argument, or the Python value that the signature has for it."""
    return named.pop(name, _MISSING if _has_arrays(spec) else spec)


def _parameter_names(fn: Callable[..., Any], count: int) -> list[str]:
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_POSITIONAL]
    return [names[i] if i < len(names) else f"arg{i}" for i in range(count)]


def _show(structure: Tree) -> str:
    def text(leaf: object) -> object:
        if isinstance(leaf, PerReplicaSpec):
            return _Text(f"PerReplica({text(leaf.value_specs[0])})")
        if isinstance(leaf, TensorSpec):
            return _Text(f"{leaf.dtype}[{','.join(map(str, leaf.shape or ()))}]")
        return leaf

    return repr(map_structure(text, structure))


class _Text(str):
    """Shows without quotes inside a structure."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
