"""Paths of models and weights as TensorFlow programs write them, without a suffix of Keras 3.

`save("dir")` writes the directory format of Keras, which `load_model("dir")` reads.
`save_weights("dir/ckpt")` writes a checkpoint of replicax with that path, which
`tf.train.latest_checkpoint("dir")` finds; `load_weights` reads it, and checkpoints that TensorFlow
wrote. `save_weights("name.h5")` writes the HDF5 format of Keras 2.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from replicax.checkpointing.sources import file_of, tensorflow_prefix
from replicax.foundation import errors
from replicax.foundation.replacements import Replace
from replicax.keras import saving
from replicax.tf.keras import internals
from replicax.tf.keras.argument_types import FilePath, KerasModel, KerasObject, Value
from replicax.train import Checkpoint

_H5 = (".h5", ".hdf5")
# Short names of functions, which Keras does not find again when it reads HDF5 files.
_SHORT_NAMES = ("mse", "mae", "mape", "msle", "kld")
_NATIVE = (".weights.h5", ".weights.json", ".keras")


def install(replace: Replace) -> None:
    """Lets models be saved to and loaded from the paths that earlier versions took."""
    replace(keras.Model, "save", _saving)
    replace(keras.Model, "save_weights", _saving_weights)
    replace(keras.Model, "load_weights", _loading_weights)
    for module in (keras.saving, keras.models):
        replace(module, "save_model", _saving)
        replace(module, "load_model", _loading)


def _saving(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save(model: KerasModel, filepath: FilePath, overwrite: bool = True, **kwargs: Any) -> Any:
        path, format_ = str(filepath), kwargs.pop("save_format", None)
        for name in ("signatures", "options", "save_traces"):
            kwargs.pop(name, None)
        if path.endswith((*_H5, ".keras")) or "zipped" in kwargs:
            return original(model, filepath, overwrite=overwrite, **kwargs)
        if format_ in ("h5", "hdf5"):
            return original(model, f"{path}.h5", overwrite=overwrite, **kwargs)
        kwargs.pop("include_optimizer", None)
        _clear(model, path)
        return original(model, filepath, overwrite=overwrite, zipped=False, **kwargs)

    return save


@saving.by_chief
def _clear(model: KerasModel, path: str) -> None:
    """Removes the part of a saved model that Keras does not overwrite."""
    del model
    if (Path(path) / "config.json").exists():
        shutil.rmtree(Path(path) / "assets", ignore_errors=True)


def _loading(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_model(
        filepath: FilePath,
        custom_objects: KerasObject = None,
        compile: bool = True,
        safe_mode: bool = True,
        options: KerasObject = None,
    ) -> Any:
        del options
        path = Path(str(filepath))
        if not path.exists() and Path(f"{path}.h5").exists():
            filepath = f"{path}.h5"
        if (path / "saved_model.pb").exists():
            raise errors.UnsupportedError(
                "`load_model` needs a model that Keras 3 has saved",
                f"{path} is a SavedModel of TensorFlow",
                "Make the model by its code, and load its weights with "
                f"`model.load_weights({str(path / 'variables' / 'variables')!r})`.",
            )
        if str(filepath).endswith(_H5):
            functions = {name: keras.losses.get(name) for name in _SHORT_NAMES}
            custom_objects = {**functions, **(custom_objects or {})}
        return original(filepath, custom_objects, compile, safe_mode)

    return load_model


def _saving_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save_weights(
        self: Any,
        filepath: FilePath,
        overwrite: bool = True,
        save_format: str | None = None,
        options: KerasObject = None,
        max_shard_size: Value = None,
    ) -> Any:
        del options
        path = str(filepath)
        if path.endswith(_NATIVE) or max_shard_size is not None:
            return original(self, filepath, overwrite, max_shard_size)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if path.endswith(_H5) or save_format in ("h5", "hdf5"):
            return _write_old_weights(self, path if path.endswith(_H5) else f"{path}.h5")
        Checkpoint(model=self).write(path)
        saving.by_chief(_note_latest)(self, path)
        return None

    return save_weights


@saving.by_chief
def _write_old_weights(model: KerasModel, path: str) -> None:
    model.jax_state_sync()
    internals.save_old_weights(model, path)


def _note_latest(model: KerasModel, path: str) -> None:
    """Writes the file in which TensorFlow names the latest checkpoint of a directory."""
    del model
    name = Path(path).name
    state = f'model_checkpoint_path: "{name}"\nall_model_checkpoint_paths: "{name}"\n'
    (Path(path).parent / "checkpoint").write_text(state)


def _loading_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_weights(
        self: Any,
        filepath: FilePath,
        skip_mismatch: bool = False,
        by_name: bool = False,
        options: KerasObject = None,
        **kwargs: Any,
    ) -> Any:
        del options
        path = str(filepath)
        if by_name:
            kwargs["by_name"] = True
        if not path.endswith((*_NATIVE, *_H5)):
            if is_checkpoint(path):
                status = Checkpoint(model=self).restore(path)
                if self.weights and not status.restored:
                    # Another model: nothing would be loaded, without a word.
                    status.assert_existing_objects_matched()
                return status
            for suffix in (".h5", ".weights.h5"):
                if Path(path + suffix).exists():
                    path += suffix
                    break
        return original(self, path, skip_mismatch, **kwargs)

    return load_weights


def is_checkpoint(path: str) -> bool:
    """Tells whether a checkpoint of this library or of TensorFlow is at a path."""
    found = Path(path)
    return tensorflow_prefix(found) is not None or file_of(found).is_file()
