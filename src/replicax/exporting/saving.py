"""`rx.saved_model.save`: writes an object with its variables and functions."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.bundle.writers import Writers
from replicax.contexts.frames import Frame
from replicax.exporting import files
from replicax.exporting.loaded_program import LoadedProgram
from replicax.exporting.object_graph import LoadedModule, ObjectGraph, attributes_of
from replicax.exporting.portable import PortableProgram, portable
from replicax.foundation import errors
from replicax.foundation.types import Tree
from replicax.tracing.function import Function
from replicax.tracing.signature import TensorSpec
from replicax.variables.variable import Variable

DEFAULT_SIGNATURE = "serving_default"


def save(obj: object, export_dir: str | os.PathLike[str], signatures: object, frame: Frame) -> None:
    """Saves an object; `frame` is the frame of code that runs under no strategy.

    Of several processes that call this together, the chief writes.
    """
    if signatures is None and isinstance(obj, LoadedModule):
        signatures = obj.signatures
    elif signatures is None:
        signatures = _only_function(obj)
    asked = {name: _resolve(name, given) for name, given in _by_name(signatures).items()}
    specs = {id(fn): own for fn, own in reversed(asked.values())}

    def specs_of(function: Function) -> Sequence[Tree] | None:
        own = function.input_signature
        return specs.get(id(function)) if own is None else own

    graph = ObjectGraph(lambda function: specs_of(function) is not None)
    graph.add_root(obj)
    writers = _writers(graph)
    writers.from_chief("saved_model.save", lambda: files.require_target(Path(export_dir)), None)
    # Exports each function once per list of specs.
    functions: dict[tuple[int, str], tuple[Callable[..., Tree], Sequence[Tree]]] = {}
    for fn in graph.functions.values():
        own = specs_of(fn)
        assert own is not None, "the graph has exported functions only"
        functions[_key(fn, own)] = fn, own
    functions |= {_key(fn, own): (fn, own) for fn, own in asked.values()}
    numbers = {key: number for number, key in enumerate(functions)}
    for node in graph.nodes:
        if "function" in node:
            fn = graph.functions[node["function"]]
            node["function"] = numbers[_key(fn, specs_of(fn))]
    programs = _programs(list(functions.values()), graph, frame)
    exported = [_function_entry(program, graph) for program in programs]
    # Last: functions may use variables that no attribute leads to.
    entries = list(map(_variable_entry, graph.variables, graph.paths))
    named = {name: numbers[_key(fn, own)] for name, (fn, own) in asked.items()}
    values = [_value(variable, frame) for variable in graph.variables]
    contents = files.Contents(graph.nodes, named, exported, entries)
    blobs = [program.blob for program in programs]
    writers.from_chief(
        "saved_model.save to disk", lambda: files.write(export_dir, contents, values, blobs), None
    )


def _writers(graph: ObjectGraph) -> Writers:
    """Returns the processes that save this together: the peers of its variables."""
    layouts = [v.owner.layout for v in graph.variables if v.owner is not None]
    peers = [layout.peers for layout in layouts if layout is not None]
    return Writers(next((one for one in peers if one is not None), None))


def _only_function(obj: object) -> Function | None:
    """Returns the function of an object that has exactly one with an input_signature."""
    if not isinstance(obj, Mapping) and not hasattr(obj, "__dict__"):
        return None
    attributes = obj if isinstance(obj, Mapping) else attributes_of(obj)
    signed = {
        id(value): value
        for value in attributes.values()
        if isinstance(value, Function) and value.input_signature is not None
    }
    return next(iter(signed.values())) if len(signed) == 1 else None


def _by_name(signatures: object) -> Mapping[str, object]:
    if signatures is None:
        return {}
    if not isinstance(signatures, Mapping):
        return {DEFAULT_SIGNATURE: signatures}
    for name in signatures:
        if not isinstance(name, str):
            raise errors.ArgumentTypeError(
                "`signatures` must map names to functions",
                f"{name!r} is not a name",
                "Use text as keys.",
            )
    return signatures


def _resolve(name: str, given: object) -> tuple[Callable[..., Tree], tuple[Tree, ...]]:
    """Returns a requested function, and the specs of its arguments."""
    fn, specs = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    if not callable(fn):
        raise errors.ArgumentTypeError(
            f"Signature {name!r} must be a function, or a pair (function, specs)",
            f"{type(fn).__name__} was given",
            "Pass an rx.function with an input_signature.",
        )
    if specs is None:
        specs = getattr(fn, "input_signature", None)
    if specs is None:
        raise errors.InvalidArgumentError(
            f"An exported function such as {name!r} needs an input_signature; traces of "
            "earlier calls belong to their strategy",
            "it has none",
            "Pass input_signature=[rx.TensorSpec(...)] to rx.function, or the pair "
            "(function, [rx.TensorSpec(...)]) in `signatures`.",
        )
    is_one = isinstance(specs, TensorSpec | jax.ShapeDtypeStruct)
    return fn, (specs,) if is_one else tuple(specs)


def _key(fn: Callable[..., Tree], specs: Sequence[Tree] | None) -> tuple[int, str]:
    return id(fn), repr(specs)


def _programs(
    functions: Sequence[tuple[Callable[..., Tree], Sequence[Tree]]],
    graph: ObjectGraph,
    frame: Frame,
) -> list[PortableProgram]:
    found = [v.owner for v in graph.variables if v.is_per_replica and v.owner is not None]
    owners = list({id(owner): owner for owner in found}.values())
    programs: list[PortableProgram] = []
    for fn, specs in functions:
        inner = getattr(fn, "python_function", None)
        if isinstance(inner, LoadedProgram) and specs == getattr(fn, "input_signature", None):
            # A function of a loaded model is exported already.
            programs.append(inner.program)
            continue
        name = getattr(fn, "name", None) or getattr(fn, "__name__", type(fn).__name__)
        programs.append(portable(fn, specs, name, frame, owners))
    return programs


def _function_entry(program: PortableProgram, graph: ObjectGraph) -> dict[str, Any]:
    def numbers(variables: tuple[Variable, ...]) -> list[int]:
        # The path of a variable that no attribute leads to.
        return [graph.add_variable(v, f"{program.facts['name']}()/{v.name}") for v in variables]

    return {**program.facts, "read": numbers(program.read), "written": numbers(program.written)}


def _variable_entry(variable: Variable, path: str) -> dict[str, Any]:
    entry = {
        "path": path,
        "name": variable.name,
        "shape": list(variable.shape),
        "dtype": str(variable.dtype),
        "trainable": variable.trainable,
        "synchronization": variable.synchronization.name,
        "aggregation": variable.aggregation.name,
    }
    if jnp.issubdtype(variable.dtype, jax.dtypes.prng_key):
        entry["key_impl"] = str(jax.random.key_impl(variable.read_copy(0)))
    return entry


def _value(variable: Variable, frame: Frame) -> np.ndarray:
    """Returns a variable as one logical array, as if nothing were distributed."""
    # Copies that differ are combined; of equal copies the first is taken.
    value = variable.read(frame) if variable.is_per_replica else variable.read_copy(0)
    if jnp.issubdtype(variable.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)
