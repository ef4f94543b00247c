"""Ops in functional Keras models: a call on inputs without values becomes a node of the model.

inputs = tf.keras.Input((4,))
outputs = tf.nn.relu(inputs) + 1.0
model = tf.keras.Model(inputs, outputs)
"""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np

from replicax.foundation import errors
from replicax.tf import dispatch, tape_keras_internals, tape_recording
from replicax.tf.arguments import Value
from replicax.tf.dtypes import DType, as_dtype
from replicax.tf.tensor import TensorShape, raw


def call(op: dispatch.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls an op with inputs or outputs of Keras layers among its arguments.

    >>> from replicax.tf.ops import maths
    >>> call(maths.square, (keras.Input((3,)),), {}).shape
    (None, 3)
    """
    tensors: list[Any] = []

    def placed(leaf: Value) -> Any:
        if isinstance(leaf, keras.KerasTensor):
            tensors.append(leaf)
            return Place(len(tensors) - 1)
        return leaf

    template = tape_recording.map_leaves(placed, (args, kwargs))
    body = op.raw
    return OpNode(f"{body.__module__}:{body.__qualname__}", template)(*tensors)


class Place:
    """Stands for a tensor among the arguments of an op."""

    def __init__(self, index: int) -> None:
        self.index = index


@keras.saving.register_keras_serializable(package="replicax")
class OpNode(keras.Operation):
    """An op of a functional model.

    Args:
      op: The module and the name of the op.
      template: Its positional and keyword arguments, with a `Place` for each tensor.
      name: The name in the model.
    """

    def __init__(self, op: str, template: Value, name: str | None = None) -> None:
        module, _, attribute = op.partition(":")
        if name is None:
            short = attribute.rpartition(".")[2].strip("_")
            name = f"{short}_{keras.backend.get_uid(short)}"
        super().__init__(name=name)
        self._path = op
        self._op = dispatch.find_op(module, attribute)
        self._template = template

    def call(self, *tensors: Any) -> Any:
        """Computes the op; takes and returns arrays."""

        def filled(leaf: Value) -> Any:
            return dispatch.wrap_tree(tensors[leaf.index]) if isinstance(leaf, Place) else leaf

        args, kwargs = tape_recording.map_leaves(filled, self._template)
        return dispatch.raw_tree(self._op(*args, **kwargs))

    def compute_output_spec(self, *tensors: Any) -> Any:
        """Returns the shapes and types of the results."""
        # Keras takes a product with a number for a sparse tensor, which it is not.
        plain = [keras.KerasTensor(tensor.shape, tensor.dtype) for tensor in tensors]
        return tape_keras_internals.output_spec(self.call, *plain)

    def get_config(self) -> dict[str, Any]:
        """Returns the op and its arguments, for a saved model."""
        return {"name": self.name, "op": self._path, "template": _encoded(self._template)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> OpNode:
        """Makes the node of a saved model."""
        return cls(config["op"], _decoded(config["template"]), config["name"])


def _encoded(value: Value) -> Any:
    """Returns an argument as JSON has it: a list of its kind and its content."""
    if value is None or isinstance(value, bool | int | float | str):
        return ["plain", value]
    if isinstance(value, Place):
        return ["place", value.index]
    if value is Ellipsis:
        return ["ellipsis"]
    if isinstance(value, slice):
        return ["slice", [_encoded(part) for part in (value.start, value.stop, value.step)]]
    if isinstance(value, TensorShape):
        return ["shape", list(value)]
    if isinstance(value, list | tuple):
        return ["list" if isinstance(value, list) else "tuple", [_encoded(v) for v in value]]
    if isinstance(value, dict):
        return ["dict", [[name, _encoded(part)] for name, part in value.items()]]
    if isinstance(value, DType):
        return ["dtype", value.name]
    found = raw(value)
    if isinstance(found, np.ndarray | np.generic | jax.Array):
        array = np.asarray(found)
        return ["array", array.dtype.name, list(array.shape), array.reshape(-1).tolist()]
    raise errors.UnsupportedError(
        "A model with ops can be saved if their arguments are tensors, numbers, strings and dtypes",
        f"one of them is {value!r}",
        "Put the op into the `call` of a layer class of your own.",
    )


def _decoded(value: list[Any]) -> Any:
    kind, *content = value
    if kind == "place":
        return Place(content[0])
    if kind == "ellipsis":
        return Ellipsis
    if kind == "slice":
        return slice(*map(_decoded, content[0]))
    if kind == "shape":
        return TensorShape(content[0])
    if kind in ("list", "tuple"):
        parts = list(map(_decoded, content[0]))
        return parts if kind == "list" else tuple(parts)
    if kind == "dict":
        return {name: _decoded(part) for name, part in content[0]}
    if kind == "dtype":
        return as_dtype(content[0])
    if kind == "array":
        dtype, shape, numbers = content
        return np.asarray(numbers, dtype=as_dtype(dtype).as_numpy_dtype).reshape(shape)
    return content[0]
