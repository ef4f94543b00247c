"""`rx.saved_model.load`: restores variables and functions, without their source."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.bundle.manifest import FILE_NAME
from replicax.exporting import files, object_graph, structures
from replicax.exporting.loaded_program import LoadedProgram
from replicax.exporting.object_graph import LoadedModule
from replicax.exporting.portable import PortableProgram
from replicax.foundation import errors, jax_compat
from replicax.foundation.options import VariableAggregation, VariableSynchronization
from replicax.tracing.function import Function
from replicax.tracing.signature import TensorSpec
from replicax.variables.variable import Variable

# Errors that a malformed manifest can cause.
_MALFORMED = (AttributeError, IndexError, KeyError, TypeError, RecursionError, ValueError)


def load(export_dir: str | os.PathLike[str]) -> LoadedModule:
    """Loads a saved object; the current strategy creates its variables."""
    try:
        contents, values, blobs = files.read(export_dir)
        variables = [
            _variable(entry, value) for entry, value in zip(contents.variables, values, strict=True)
        ]
        functions = [
            _function(entry, blob, variables)
            for entry, blob in zip(contents.functions, blobs, strict=True)
        ]
        root = object_graph.build(contents.nodes, variables, functions)
        signatures = {name: functions[i] for name, i in contents.signatures.items()}
        reachable = set(root.variables)
    except errors.DistributeError:
        raise
    except _MALFORMED as error:
        path = str(Path(export_dir) / FILE_NAME)
        raise errors.DataLossError(
            f"{path!r} must describe a saved model",
            f"it does not: {type(error).__name__} {error}",
            "Save the model again.",
        ) from error
    hidden = [v for v in variables if v not in reachable]
    vars(root).update({"_captured": hidden} if hidden else {}, signatures=signatures)
    return root


def _variable(entry: dict[str, Any], value: np.ndarray) -> Variable:
    initial: np.ndarray | jax.Array = value
    if "key_impl" in entry:
        initial = jax.random.wrap_key_data(jnp.asarray(value), impl=entry["key_impl"])
    with jax_compat.any_dtype(value.dtype):
        variable = Variable(
            initial,
            entry["trainable"],
            name=entry["name"],
            synchronization=VariableSynchronization[entry["synchronization"]],
            aggregation=VariableAggregation[entry["aggregation"]],
        )
        if variable.is_per_replica:
            # Each copy started from the whole; the copies have to add up to it.
            variable.assign(initial)
    return variable


def _function(entry: dict[str, Any], blob: bytes, variables: list[Variable]) -> Function:
    read = tuple(variables[i] for i in entry["read"])
    written = tuple(variables[i] for i in entry["written"])
    program = LoadedProgram(PortableProgram(blob, read, written, entry))
    return Function(program, structures.build(entry["arguments"], _spec), entry["name"])


def _spec(leaf: dict[str, Any]) -> TensorSpec:
    shape = tuple(None if isinstance(size, str) else size for size in leaf["shape"])
    return TensorSpec(shape, jnp.dtype(leaf["dtype"]))
