"""Exports functions with their variables, and loads them without their source."""

from __future__ import annotations

import os
from typing import Any

from replicax.contexts import frames, guards
from replicax.contexts.frames import Frame
from replicax.exporting import files, loading, saving
from replicax.foundation import errors, jax_compat
from replicax.foundation.public_names import show_as_public
from replicax.strategies.default import DefaultStrategy

__all__ = ["contains_saved_model", "load", "save"]


def __dir__() -> list[str]:
    return __all__


# The current strategy of exported code, whatever strategy the model belongs to.
_alone = DefaultStrategy()


def save(obj: object, export_dir: str | os.PathLike[str], signatures: object = None) -> None:
    """Saves the variables and functions of an object, as if they were not distributed.

    Functions that have an `input_signature` are traced once more, as the code of one
    replica, and saved as portable programs. Sizes that are None stay open; on axis 0 they
    are the batch, and equal for all arguments. Each variable is one array: the common value
    of mirrored copies, the combined value of ON_READ copies. An existing saved model is
    replaced in one step, when the new one is complete. Of a strategy over several workers, all
    workers call this; the chief writes, in the directory that it was given.

    Args:
      obj: An `rx.Module`, another object with attributes, or a dict.
      export_dir: A new or empty directory, or one that holds a saved model.
      signatures: Functions to export by name, or one function: each an `rx.function` with
        an `input_signature`, or a pair of any function and its list of TensorSpecs. A
        TensorSpec in such a list may name sizes: equal names mean equal sizes. One function,
        also if it is the only one of `obj` with an `input_signature` and none is given here,
        gets the name "serving_default".

    Raises:
      InvalidArgumentError: If a function in `signatures` has no specs, or cannot be the
        code of one replica, or `export_dir` holds something else.
      CheckpointError: If the files cannot be written.
      ContextError: This code is being compiled, or is replica code.

    >>> import tempfile
    >>> import replicax as rx
    >>> class Scale(rx.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = rx.Variable(3.0)
    ...     @rx.function(input_signature=[rx.TensorSpec((None,))])
    ...     def __call__(self, x):
    ...         return x * self.w
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rx.saved_model.save(Scale(), folder)
    ...     model = rx.saved_model.load(folder)
    >>> model([1.0, 2.0])
    Array([3., 6.], dtype=float32)
    """
    _require_eager("save")
    saving.save(obj, export_dir, signatures, _frame())


def load(export_dir: str | os.PathLike[str]) -> Any:
    """Loads a saved model, without its source code.

    The result is an `rx.Module` with the attributes that were saved: variables, lists,
    dicts, submodules and functions, which take and return what they did before. Inside
    `strategy.scope()` its variables are those of the strategy.

    Functions run in replica code, eager and compiled, and inside `rx.function`; gradients
    with respect to variables and arguments work if JAX could derive them when the model
    was saved. What a function writes in the code of several replicas is combined by the
    aggregation of each variable: MEAN averages the new values, SUM adds up what each
    replica added, ONLY_FIRST_REPLICA uses that of the first; without an aggregation the
    write raises an error. An empty batch gives empty results; a function with other results, or
    with writes, raises an error.

    Args:
      export_dir: A directory that `save` wrote.

    Raises:
      NotFoundError: If there is no saved model.
      DataLossError: If a file is not what was written.
      CheckpointError: If a file cannot be read, or has a newer format.
      ContextError: This code is being compiled, or is replica code.

    >>> import tempfile
    >>> import replicax as rx
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rx.saved_model.save({"layers": [rx.Variable(1.0, name="w")]}, folder)
    ...     rx.saved_model.load(folder).layers[0].name
    'w'
    """
    _require_eager("load")
    return loading.load(export_dir)


def contains_saved_model(export_dir: str | os.PathLike[str]) -> bool:
    """Returns whether a directory holds a saved model.

    >>> contains_saved_model("/no/such/place")
    False
    """
    return files.contains(export_dir)


def _frame() -> Frame:
    return _alone.extended.scope_frame(frames.caller_location())


def _require_eager(api: str) -> None:
    guards.require_cross_replica(f"saved_model.{api}")
    if frames.current().overlay is not None or not jax_compat.is_eager():
        raise errors.ContextError(
            f"`saved_model.{api}` needs values, not traces",
            "it is called inside rx.function or a JAX transformation",
            "Call it outside.",
        )


show_as_public(__name__)
