"""`tf.function`: compiles a function of tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from typing_extensions import override

from replicax.contexts import frames
from replicax.foundation import errors
from replicax.tf import loops, tape_recording
from replicax.tf.arguments import Ignored, Value
from replicax.tf.dispatch import on_host, wrap_tree
from replicax.tf.distributed_tensors import as_tensors
from replicax.tf.dtypes import as_dtype, device_dtype
from replicax.tf.tensor import TensorShape
from replicax.tf.variable import value_of
from replicax.tracing.bodies import takes_data_in_loop
from replicax.tracing.concrete import ConcreteFunction
from replicax.tracing.function import Function, functions_run_eagerly
from replicax.tracing.signature import PerReplicaSpec
from replicax.tracing.signature import TensorSpec as PlainSpec
from replicax.variables.sharded import ShardedVariable


class TensorFunction(Function[..., Any]):
    """A compiled function of tensors; made by `tf.function`."""

    def __init__(
        self,
        python_function: Callable[..., Any],
        input_signature: Sequence[Any] | None = None,
        name: str | None = None,
        reduce_retracing: bool = False,
        finds_loops: bool = True,
    ) -> None:
        self._finds_loops = finds_loops
        self._original = python_function
        self._converted: loops.Converted | None = None

        @functools.wraps(python_function)
        def with_tensors(*args: Any, **kwargs: Any) -> Any:
            given, named = wrap_tree(args), {k: wrap_tree(v) for k, v in kwargs.items()}
            # Arrays: the program's results need not be taken apart in each call.
            return loops.raw_tree_of_tensors(_results(self._loops().function(*given, **named)))

        super().__init__(with_tensors, input_signature, name, reduce_retracing)
        if input_signature is not None:
            self.input_signature = tape_recording.map_leaves(_plain_spec, tuple(input_signature))

    def _loops(self) -> loops.Converted:
        if self._converted is None:
            found = loops.Converted(self._original) if self._finds_loops else None
            self._converted = found or loops.Unconverted(self._original)
        return self._converted

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if on_host():
            # For elements of datasets: values are known, and Python's loops and branches work.
            return self._original(*args, **kwargs)
        converted = self._loops()
        if functions_run_eagerly():
            return converted.function(*args, **kwargs)
        if tape_recording.recording_tapes():
            return _results(converted.function(*args, **kwargs))
        is_outermost = frames.current().overlay is None and not loops.on_host()
        if is_outermost and converted.runs_on_host(args, kwargs):
            return self._call_on_host(args, kwargs)
        given, named = loops.raw_tree_of_tensors((args, kwargs))
        try:
            # Also what is not a tensor in the function, such as the product of two numbers.
            return as_tensors(super().__call__(*given, **named))
        except TypeError:
            _refuse_strings(self.name, (given, named))
            raise
        except errors.TracingError as error:
            if not is_outermost or not converted.has_loops or not takes_data_in_loop(error):
                raise
        # A loop over `tf.range` calls a function that takes data, which its source does not show.
        # The call has changed nothing, so it starts again, with the loop on the host.
        converted.takes_data = True
        return self._call_on_host(args, kwargs)

    def _call_on_host(self, args: Any, kwargs: Any) -> Any:
        function = self._loops().function
        return _results(loops.call_on_host(function, wrap_tree(args), wrap_tree(kwargs)))

    @override
    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        bindings = getattr(instance, "__dict__", {})
        # By id: a subclass may override the method and call this one through super().
        key = f"_rx_function_{id(self)}"
        if key not in bindings:
            bindings[key] = TensorFunction(
                self._original.__get__(instance, owner),
                self.input_signature,
                self.name,
                self.reduce_retracing,
                self._finds_loops,
            )
        return bindings[key]

    @override
    def get_concrete_function(self, *args: Any, **kwargs: Any) -> Any:
        """Compiles the function for one signature, without calling it."""
        given, named = tape_recording.map_leaves(_plain_spec, (args, kwargs))
        found = super().get_concrete_function(*given, **named)
        found.__class__ = TensorConcreteFunction
        return found

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return TensorFunction, (
            self._original,
            self.input_signature,
            self.name,
            self.reduce_retracing,
            self._finds_loops,
        )

    def __repr__(self) -> str:
        return f"<tf.function {self.name}>"


class TensorConcreteFunction(ConcreteFunction):
    """A function that was compiled for one signature; takes and returns tensors."""

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given, named = loops.raw_tree_of_tensors((args, kwargs))
        return as_tensors(super().__call__(*given, **named))


def function(
    func: Callable[..., Any] | None = None,
    input_signature: Sequence[Any] | None = None,
    autograph: bool = True,
    jit_compile: bool | None = None,
    reduce_retracing: bool = False,
    experimental_implements: str | None = None,
    experimental_autograph_options: Ignored = None,
    experimental_attributes: Ignored = None,
    experimental_relax_shapes: bool | None = None,
    experimental_compile: bool | None = None,
    experimental_follow_type_hints: bool | None = None,
) -> Any:
    """Compiles a function that may read and write variables, and run replicas.

    Python code runs while the function is traced. Loops over `tf.range` and over datasets become
    loops of the program or of the host. A Python `if` or `while` on a tensor raises an error; use
    `tf.cond` and `tf.while_loop`.

    Args:
      func: The function; leave out to use `function` as a decorator with arguments.
      input_signature: One `tf.TensorSpec` (or structure of them) per argument.
      autograph: Whether loops over `tf.range` and datasets are found.
      jit_compile: Accepted for portability, without effect: XLA compiles every function.
      reduce_retracing: As for `rx.function`.
      experimental_implements: Accepted for portability, without effect.
      experimental_autograph_options: Accepted for portability, without effect.
      experimental_attributes: Accepted for portability, without effect.
      experimental_relax_shapes: The older name of `reduce_retracing`.
      experimental_compile: The older name of `jit_compile`.
      experimental_follow_type_hints: Accepted for portability, without effect.

    >>> import jax.numpy as jnp
    >>> from replicax.tf.tensor import Tensor
    >>> @function
    ... def double(x):
    ...     return x * 2
    >>> double(Tensor(jnp.asarray([1, 2])))
    <tf.Tensor: shape=(2,), dtype=int32, numpy=array([2, 4], dtype=int32)>
    """
    del jit_compile, experimental_implements, experimental_autograph_options
    del experimental_attributes, experimental_compile, experimental_follow_type_hints
    reduces = reduce_retracing or bool(experimental_relax_shapes)
    if func is None:
        return functools.partial(
            function,
            input_signature=input_signature,
            autograph=autograph,
            reduce_retracing=reduces,
        )
    if isinstance(func, TensorFunction):
        return func
    if not callable(func):
        raise errors.ArgumentTypeError(
            "`tf.function` needs a function", f"{func!r} was given", "Pass a callable."
        )
    return TensorFunction(func, input_signature, None, reduces, autograph)


def _results(tree: Value) -> Any:
    """Replaces variables by their values: what a function has returned does not change later.

    Sharded variables stay, as they do in TensorFlow: their parts need not fit on one device.
    """
    return tape_recording.map_leaves(_result, tree)


def _result(leaf: Value) -> Any:
    is_read = tape_recording.is_variable(leaf) and not isinstance(leaf, ShardedVariable)
    return value_of(leaf) if is_read else leaf


def _refuse_strings(name: str, arguments: Value) -> None:
    for leaf in jax.tree.leaves(arguments):
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSU":
            raise errors.ArgumentTypeError(
                f"A compiled function takes tensors of numbers: {name!r}",
                "a tensor of strings was given",
                "Convert strings in `dataset.map`, or pass a Python str, which stays as it is.",
            )


def _plain_spec(spec: Value) -> Any:
    """Returns a spec with the shapes and dtypes that compiled functions take."""
    if isinstance(spec, PerReplicaSpec):
        return PerReplicaSpec(tuple(map(_plain_spec, spec.value_specs)))
    if not (hasattr(spec, "shape") and hasattr(spec, "dtype")):
        return spec
    if hasattr(spec, "__array__") or hasattr(spec, "read_value"):
        return tape_recording.array_of(spec)
    if as_dtype(spec.dtype).dtype.kind in "OSU":
        # No array has it: the argument is refused, with advice.
        return spec
    shape = TensorShape(spec.shape)
    name = getattr(spec, "name", None)
    return PlainSpec(
        None if shape.rank is None else tuple(shape), device_dtype(as_dtype(spec.dtype)), name
    )
