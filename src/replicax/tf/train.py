"""`tf.train`: checkpoints, examples and the description of a cluster, with TensorFlow's arguments.

Checkpoints are those of replicax; a path of `restore` may also be that of a TensorFlow checkpoint.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from replicax.checkpointing import checkpoint as rx_checkpoint
from replicax.checkpointing import manager as rx_manager
from replicax.checkpointing import reading, sources
from replicax.checkpointing.directory import steps_in
from replicax.checkpointing.graph import Graph
from replicax.checkpointing.status import RestoreStatus
from replicax.checkpointing.tensorflow_checkpoint import TensorFlowCheckpoint
from replicax.cluster.spec import ClusterSpec as ClusterSpec
from replicax.foundation import errors
from replicax.process.server import Server as Server
from replicax.tensorflow_files.example_values import BytesList as BytesList
from replicax.tensorflow_files.example_values import FloatList as FloatList
from replicax.tensorflow_files.example_values import Int64List as Int64List
from replicax.tensorflow_files.examples import Example as Example
from replicax.tensorflow_files.examples import Feature as Feature
from replicax.tensorflow_files.examples import FeatureList as FeatureList
from replicax.tensorflow_files.examples import FeatureLists as FeatureLists
from replicax.tensorflow_files.examples import Features as Features
from replicax.tensorflow_files.examples import SequenceExample as SequenceExample
from replicax.tf import namespaces
from replicax.tf.arguments import Ignored, Number, PathValue, Value
from replicax.tf.io import gfile
from replicax.tf.io.gfile import path_text
from replicax.tf.tensor import Tensor, raw
from replicax.tf.variable import as_tensor_variable
from replicax.training.moving_average import ExponentialMovingAverage as _MovingAverage

__all__ = [
    "BytesList",
    "Checkpoint",
    "CheckpointManager",
    "CheckpointOptions",
    "CheckpointReader",
    "CheckpointState",
    "ClusterSpec",
    "Example",
    "ExponentialMovingAverage",
    "Feature",
    "FeatureList",
    "FeatureLists",
    "Features",
    "FloatList",
    "Int64List",
    "SequenceExample",
    "Server",
    "checkpoint_exists",
    "checkpoints_iterator",
    "experimental",
    "get_checkpoint_state",
    "latest_checkpoint",
    "list_variables",
    "load_checkpoint",
    "load_variable",
]


# What TensorFlow writes behind the path of a variable.
_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"


@dataclasses.dataclass
class CheckpointOptions:
    """Choices of a save or restore; accepted for portability, without effect.

    >>> CheckpointOptions(experimental_io_device="/job:localhost").enable_async
    False
    """

    experimental_io_device: str | None = None
    enable_async: bool = False
    experimental_enable_async_checkpoint: bool = False
    experimental_write_callbacks: list[Callable[..., object]] | None = None
    experimental_sharding_callback: object = None
    experimental_skip_slot_variables: bool = False


class Checkpoint(rx_checkpoint.Checkpoint):
    """Saves named objects to disk and restores them.

    Args:
      root: An object whose parts are saved without a name in front.
      **kwargs: Objects by name.

    >>> import replicax.tf as tf, tempfile
    >>> step = tf.Variable(3)
    >>> checkpoint = Checkpoint(step=step)
    >>> path = checkpoint.save(tempfile.mkdtemp() + "/ckpt")
    >>> _ = step.assign(0)
    >>> _ = checkpoint.restore(path).assert_consumed()
    >>> step.numpy()
    np.int32(3)
    """

    def __init__(self, root: object = None, **kwargs: object) -> None:
        self.__dict__["_root"] = root
        super().__init__(**{name: _plain(value) for name, value in kwargs.items()})

    @override
    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, _plain(value))

    @override
    def _walk(self) -> Graph:
        graph = super()._walk()
        root = self.__dict__["_root"]
        if root is None:
            return graph
        if not graph.add("", root, lambda new: None):
            raise errors.ArgumentTypeError(
                "The root of a Checkpoint needs parts that can be saved",
                f"it is a {type(root).__name__}",
                "Pass a tf.Module or a Keras model, or objects by name.",
            )
        return graph

    @property
    @override
    def save_counter(self) -> Any:
        """The number of the last save, as a tensor."""
        return Tensor(np.asarray(super().save_counter, np.int64))

    @override
    def save(self, file_prefix: PathValue, options: Ignored = None) -> str:
        """Saves to `file_prefix-<number>`, with the next number; returns that path."""
        del options
        prefix = path_text(file_prefix)
        number = super().save(prefix).rpartition("-")[2]
        return _own_path(f"{prefix}-{number}")

    @override
    def write(self, file_prefix: PathValue, options: Ignored = None) -> str:  # type: ignore[override]
        """Saves to exactly this path."""
        del options
        path = path_text(file_prefix)
        super().write(path)
        return _own_path(path)

    @override
    def restore(self, save_path: PathValue, options: Ignored = None) -> RestoreStatus:  # type: ignore[override]
        """Restores all objects that a checkpoint has values for; None does nothing."""
        del options
        found = None if save_path is None else Path(path_text(save_path))
        if found is not None and found.is_dir() and not sources.tensorflow_prefix(found):
            # As in TensorFlow, the directory of checkpoints means its newest one.
            newest = next(iter(reversed(steps_in(found).values())), None)
            found = found if newest is None else newest
        return super().restore(found)

    read = restore


def _own_path(path: str) -> str:
    """Returns the path that a task has asked for, in a directory that exists.

    The chief is the only one that writes, where it was asked to. Other tasks of TensorFlow programs
    write to directories of their own, which they remove afterwards: they must exist, and must not
    be that of the chief.
    """
    gfile.makedirs(os.path.dirname(path) or ".")
    return path


def _plain(value: object) -> object:
    return raw(value) if isinstance(value, Tensor) else value


class CheckpointManager(rx_manager.CheckpointManager):
    """Saves numbered checkpoints into a directory, and removes old ones.

    Args:
      checkpoint: The `tf.train.Checkpoint`.
      directory: Where they are saved.
      max_to_keep: How many are kept; None for all.
      keep_checkpoint_every_n_hours: Keeps one of each such time for ever.
      checkpoint_name: The prefix of names.
      step_counter: A variable that counts steps, for `checkpoint_interval`.
      checkpoint_interval: The least number of steps between two saves.
      init_fn: Called by `restore_or_initialize` if there is no checkpoint.
      last_checkpoint_step: Accepted for portability, without effect.

    >>> import replicax.tf as tf, tempfile
    >>> manager = CheckpointManager(Checkpoint(v=tf.Variable(1.0)), tempfile.mkdtemp(), 3)
    >>> manager.save().endswith("ckpt-1")
    True
    >>> manager.latest_checkpoint == manager.checkpoints[-1]
    True
    """

    def __init__(
        self,
        checkpoint: rx_checkpoint.Checkpoint,
        directory: PathValue,
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: Ignored = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], object] | None = None,
        last_checkpoint_step: Ignored = None,
        **own: Any,
    ) -> None:
        del last_checkpoint_step
        self._own_directory = path_text(directory)
        super().__init__(
            checkpoint,
            self._own_directory,
            None if not max_to_keep else int(max_to_keep),
            keep_checkpoint_every_n_hours,
            checkpoint_name,
            step_counter,
            checkpoint_interval,
            init_fn,
            **own,
        )

    @override
    def save(  # type: ignore[override]
        self,
        checkpoint_number: Number = None,
        check_interval: bool = True,
        options: Ignored = None,
        **own: Any,
    ) -> str | None:
        """Saves a checkpoint; returns its path, or None if it was not time yet."""
        del options
        path = super().save(checkpoint_number, check_interval, **own)
        if path is None:
            return None
        return _own_path(os.path.join(self._own_directory, os.path.basename(path)))

    sync = rx_manager.CheckpointManager.wait


class CheckpointReader:
    """Reads the arrays of a checkpoint by name.

    >>> import replicax.tf as tf, tempfile
    >>> reader = load_checkpoint(Checkpoint(v=tf.Variable([1.0])).save(tempfile.mkdtemp() + "/c"))
    >>> reader.get_variable_to_shape_map(), reader.get_tensor("v")
    ({'v': [1]}, array([1.], dtype=float32))
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._listed = {n: (shape, kind) for n, shape, kind in reading.list_variables(path)}

    def has_tensor(self, name: str) -> bool:
        """Tells whether there is an array of this name."""
        return name.removesuffix(_VALUE) in self._listed

    def get_tensor(self, name: str) -> Any:
        """Returns an array."""
        return load_variable(self._path, name)

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        """Returns the shapes of all arrays."""
        return {name: list(shape) for name, (shape, _) in self._listed.items()}

    def get_variable_to_dtype_map(self) -> dict[str, str]:
        """Returns the names of the types of all arrays."""
        return {name: kind for name, (_, kind) in self._listed.items()}

    def debug_string(self) -> bytes:
        """Returns one line per array, as bytes."""
        lines = [f"{n} ({kind}) {list(shape)}" for n, (shape, kind) in self._listed.items()]
        return "\n".join(lines).encode()


def _checkpoint_path(path: PathValue) -> str:
    """Returns the path of a checkpoint; that of a directory means its newest one."""
    text = path_text(path)
    if Path(text).is_dir() and sources.tensorflow_prefix(Path(text)) is None:
        return next((str(p) for p in reversed(steps_in(Path(text)).values())), text)
    return text


def load_checkpoint(ckpt_dir_or_file: PathValue) -> CheckpointReader | TensorFlowCheckpoint:
    """Returns a reader of a checkpoint, or of the newest one in a directory.

    Args:
      ckpt_dir_or_file: The path of a checkpoint of replicax or TensorFlow, or a directory of them.
    """
    path = _checkpoint_path(ckpt_dir_or_file)
    prefix = sources.tensorflow_prefix(Path(path))
    return CheckpointReader(path) if prefix is None else TensorFlowCheckpoint(prefix)


def list_variables(ckpt_dir_or_file: PathValue) -> list[tuple[str, list[int]]]:
    """Returns name and shape of each array of a checkpoint, by name.

    >>> import replicax.tf as tf, tempfile
    >>> list_variables(Checkpoint(v=tf.Variable([1.0])).save(tempfile.mkdtemp() + "/c"))
    [('v', [1])]
    """
    found = reading.list_variables(_checkpoint_path(ckpt_dir_or_file))
    return [(name, list(shape)) for name, shape, _ in found]


def load_variable(ckpt_dir_or_file: PathValue, name: str) -> Any:
    """Returns one array of a checkpoint.

    >>> import replicax.tf as tf, tempfile
    >>> load_variable(Checkpoint(v=tf.Variable(2.0)).save(tempfile.mkdtemp() + "/c"), "v")
    np.float32(2.0)
    """
    path = _checkpoint_path(ckpt_dir_or_file)
    is_own = sources.tensorflow_prefix(Path(path)) is None
    found = reading.load_variable(path, name.removesuffix(_VALUE) if is_own else name)
    return found if found.shape else found[()]


def latest_checkpoint(checkpoint_dir: PathValue, latest_filename: str | None = None) -> str | None:
    """Returns the path of the newest checkpoint of a directory; None if there is none.

    >>> import tempfile
    >>> latest_checkpoint(tempfile.mkdtemp()) is None
    True
    """
    del latest_filename
    return reading.latest_checkpoint(path_text(checkpoint_dir))


def checkpoint_exists(checkpoint_prefix: PathValue) -> bool:
    """Tells whether there is a checkpoint at a path.

    >>> checkpoint_exists("/no/such/checkpoint")
    False
    """
    path = Path(path_text(checkpoint_prefix))
    return path.exists() or sources.tensorflow_prefix(path) is not None


def checkpoints_iterator(
    checkpoint_dir: PathValue,
    min_interval_secs: float = 0,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
) -> Iterator[str]:
    """Yields each new checkpoint of a directory; of several, only the newest.

    Args:
      checkpoint_dir: The directory; it need not exist yet.
      min_interval_secs: The least time between two checkpoints.
      timeout: The seconds to wait for a new one; None for no limit.
      timeout_fn: Called after a timeout; ends the iteration if it returns True.
    """
    return reading.checkpoints_iterator(
        path_text(checkpoint_dir), min_interval_secs, timeout, timeout_fn
    )


@dataclasses.dataclass
class CheckpointState:
    """The checkpoints of a directory.

    >>> CheckpointState("run/ckpt-2", ["run/ckpt-1", "run/ckpt-2"]).model_checkpoint_path
    'run/ckpt-2'
    """

    model_checkpoint_path: str
    all_model_checkpoint_paths: list[str]


def get_checkpoint_state(
    checkpoint_dir: PathValue, latest_filename: str | None = None
) -> CheckpointState | None:
    """Returns the checkpoints of a directory; None if there is none.

    >>> import tempfile
    >>> get_checkpoint_state(tempfile.mkdtemp()) is None
    True
    """
    del latest_filename
    folder = path_text(checkpoint_dir)
    newest = reading.latest_checkpoint(folder)
    if newest is None:
        return None
    own = [os.fspath(path) for path in steps_in(Path(folder)).values()]
    return CheckpointState(newest, own or [newest])


class ExponentialMovingAverage(_MovingAverage):
    """Keeps exponential moving averages of variables; they are `tf.Variable`s.

    Args:
      decay: The weight of the old average; close to 1.
      num_updates: If given, limits the decay to `(1 + num_updates) / (10 + num_updates)`.
      zero_debias: Accepted for portability.
      name: Part of the names of averages.

    >>> import replicax.tf as tf
    >>> w = tf.Variable(0.0)
    >>> ema = ExponentialMovingAverage(0.5)
    >>> ema.apply([w])
    >>> _ = w.assign(1.0)
    >>> ema.apply([w])
    >>> ema.average(w).numpy()
    np.float32(0.5)
    """

    @override
    def average(self, var: Value) -> Any:
        """Returns the average of a variable; None if it was never passed to `apply`."""
        found = super().average(var)
        return None if found is None else as_tensor_variable(found)


class PythonState:
    """An object whose state is a string, for checkpoints: subclass it.

    >>> class Name(PythonState):
    ...     text = "a"
    ...     def serialize(self):
    ...         return self.text
    ...     def deserialize(self, string_value):
    ...         self.text = string_value
    >>> Name().get_state()
    'a'
    """

    def serialize(self) -> str:
        """Returns the state."""
        raise NotImplementedError

    def deserialize(self, string_value: str) -> None:
        """Takes a state."""
        raise NotImplementedError

    def get_state(self) -> str:
        """Returns the state, for checkpoints."""
        return self.serialize()

    def set_state(self, state: str) -> None:
        """Takes the state of a checkpoint."""
        self.deserialize(state)


class _Experimental:
    """`tf.train.experimental`."""

    PythonState = PythonState

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return namespaces.refusing(__name__)(f"experimental.{name}")


experimental = _Experimental()

__getattr__ = namespaces.refusing(__name__)
