"""The files of a saved model: a bundle of its variables and its programs.

The bytes of each program are an array of their own, `@functions/0` and so on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from replicax.bundle import names
from replicax.bundle.dtypes import name_of_dtype
from replicax.bundle.manifest import FILE_NAME, SAVED_MODEL
from replicax.bundle.publishing import BundleWriter
from replicax.bundle.reading import Bundle
from replicax.foundation import errors

# The manifest of the format before bundles.
_OLD_MANIFEST = "saved_model.json"
# The kind stands behind the checksum, near the beginning of a manifest.
_HEAD_BYTES = 64
# How often a read starts again because another save replaced the model meanwhile.
_MAX_READS = 3


class Contents(msgspec.Struct, forbid_unknown_fields=True):
    """The contents of the manifest of a saved model.

    Attributes:
      nodes: The objects of the model; see `object_graph`.
      signatures: The index of a function, by name.
      functions: Facts about each function, and the name of the array of its bytes.
      variables: Facts about each variable, and the name of its array.
    """

    nodes: list[dict[str, Any]]
    signatures: dict[str, int]
    functions: list[dict[str, Any]]
    variables: list[dict[str, Any]]


def contains(export_dir: str | os.PathLike[str]) -> bool:
    """Returns whether a directory holds a saved model."""
    try:
        with (Path(export_dir) / FILE_NAME).open("rb") as file:
            return f'"kind":"{SAVED_MODEL.name}"'.encode() in file.read(_HEAD_BYTES)
    except OSError:
        return False


def write(
    export_dir: str | os.PathLike[str],
    contents: Contents,
    variables: Sequence[np.ndarray],
    functions: Sequence[bytes],
) -> None:
    """Writes a saved model, whole or not at all.

    Args:
      export_dir: A directory that does not exist, is empty, or holds a saved model.
      contents: The contents of the manifest; the names of arrays are added to it.
      variables: The value of each variable.
      functions: The bytes of each function.

    Raises:
      CheckpointError: It cannot be written; what was there before is unchanged.
    """
    target = Path(export_dir)
    require_target(target)
    arrays: dict[str, tuple[str, np.ndarray]] = {}
    for entry, value in zip(contents.variables, variables, strict=True):
        dtype = name_of_dtype(value.dtype)
        assert dtype is not None, value.dtype
        entry["array"] = _unused_name(names.child_path("", entry["path"]), arrays)
        arrays[entry["array"]] = dtype, value
    for number, (entry, blob) in enumerate(zip(contents.functions, functions, strict=True)):
        entry["array"] = f"@functions/{number}"
        arrays[entry["array"]] = "uint8", np.frombuffer(blob, np.uint8)
    with BundleWriter(target, SAVED_MODEL) as writer:
        writer.write_arrays(arrays)
        writer.publish(contents)


def _unused_name(name: str, used: dict[str, tuple[str, np.ndarray]]) -> str:
    """Returns a name, with a number if it is used: hidden variables may have equal names."""
    number, found = 1, name
    while found in used:
        number += 1
        found = f"{name}#{number}"
    return found


def require_target(target: Path) -> None:
    """Raises if saving there would destroy something that is not a saved model."""
    found = ""
    if target.exists() and not target.is_dir():
        found = "it is a file"
    elif target.is_dir() and not contains(target):
        with contextlib.suppress(OSError):
            found = "it holds other files" if any(target.iterdir()) else ""
    if found:
        raise errors.InvalidArgumentError(
            f"{str(target)!r} must be a new or empty directory, or hold a saved model",
            found,
            "Choose another directory.",
        )


def read(export_dir: str | os.PathLike[str]) -> tuple[Contents, list[np.ndarray], list[bytes]]:
    """Reads a saved model: its manifest, the values of its variables, the bytes of its functions.

    Raises:
      NotFoundError: There is no saved model.
      DataLossError: A byte is not as it was written.
      CheckpointError: It cannot be read, or has another format.
    """
    folder = Path(export_dir)
    _require_model(folder)
    for attempt in range(_MAX_READS):
        with Bundle(folder, SAVED_MODEL) as bundle:
            try:
                bundle.check_files()
                contents = bundle.contents(Contents)
                arrays = bundle.read(bundle.arrays)
            except errors.DataLossError:
                if attempt + 1 < _MAX_READS and bundle.is_replaced():
                    continue
                raise
        variables = [arrays[entry["array"]] for entry in contents.variables]
        functions = [arrays[entry["array"]].tobytes() for entry in contents.functions]
        return contents, variables, functions
    raise AssertionError("unreachable")


def _require_model(folder: Path) -> None:
    if (folder / _OLD_MANIFEST).exists() and not (folder / FILE_NAME).exists():
        raise errors.CheckpointError(
            f"{str(folder)!r} must hold a saved model of the format replicax.bundle",
            f"it holds {_OLD_MANIFEST}, of the format replicax.saved_model 1",
            "It was written by an older, unreleased replicax: save the model again.",
        )
    if not (folder / FILE_NAME).exists():
        raise errors.NotFoundError(
            f"A saved model must be in {str(folder)!r}",
            f"there is no {FILE_NAME}",
            "Pass the directory that `rx.saved_model.save` wrote.",
        )
