"""`tf.saved_model`: exports models with their functions, and loads them without their source.

The files are those of `rx.saved_model`, not of TensorFlow. The variables of a SavedModel that
TensorFlow wrote can be read by `tf.train.load_checkpoint`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import replicax.saved_model as rx_saved_model
from replicax.foundation import errors, lazy
from replicax.tensorflow_files import checkpoint_paths
from replicax.tf import dispatch, namespaces, tape_recording, tape_regions
from replicax.tf.arguments import Ignored, PathValue, Structure, Value
from replicax.tf.dispatch import raw_tree, wrap_tree
from replicax.tf.function import TensorFunction
from replicax.tf.io.gfile import path_text
from replicax.tf.tensor_spec import TensorSpec
from replicax.tf.variable import as_tensor_variable
from replicax.tracing.function import Function
from replicax.variables.module import Module
from replicax.variables.variable import Variable

_keras_models = lazy.module("replicax.tf.exported_models")

__all__ = [
    "ASSETS_DIRECTORY",
    "ASSETS_KEY",
    "CLASSIFY_INPUTS",
    "CLASSIFY_METHOD_NAME",
    "CLASSIFY_OUTPUT_CLASSES",
    "CLASSIFY_OUTPUT_SCORES",
    "DEBUG_DIRECTORY",
    "DEBUG_INFO_FILENAME_PB",
    "DEFAULT_SERVING_SIGNATURE_DEF_KEY",
    "GPU",
    "PREDICT_INPUTS",
    "PREDICT_METHOD_NAME",
    "PREDICT_OUTPUTS",
    "REGRESS_INPUTS",
    "REGRESS_METHOD_NAME",
    "REGRESS_OUTPUTS",
    "SAVED_MODEL_FILENAME_PB",
    "SAVED_MODEL_FILENAME_PBTXT",
    "SAVED_MODEL_SCHEMA_VERSION",
    "SERVING",
    "TPU",
    "TRAINING",
    "VARIABLES_DIRECTORY",
    "VARIABLES_FILENAME",
    "Asset",
    "LoadOptions",
    "SaveOptions",
    "contains_saved_model",
    "load",
    "save",
]

ASSETS_DIRECTORY = "assets"
ASSETS_KEY = "saved_model_assets"
CLASSIFY_INPUTS = "inputs"
CLASSIFY_METHOD_NAME = "tensorflow/serving/classify"
CLASSIFY_OUTPUT_CLASSES = "classes"
CLASSIFY_OUTPUT_SCORES = "scores"
DEBUG_DIRECTORY = "debug"
DEBUG_INFO_FILENAME_PB = "saved_model_debug_info.pb"
DEFAULT_SERVING_SIGNATURE_DEF_KEY = "serving_default"
GPU = "gpu"
PREDICT_INPUTS = "inputs"
PREDICT_METHOD_NAME = "tensorflow/serving/predict"
PREDICT_OUTPUTS = "outputs"
REGRESS_INPUTS = "inputs"
REGRESS_METHOD_NAME = "tensorflow/serving/regress"
REGRESS_OUTPUTS = "outputs"
SAVED_MODEL_FILENAME_PB = "saved_model.pb"
SAVED_MODEL_FILENAME_PBTXT = "saved_model.pbtxt"
SAVED_MODEL_SCHEMA_VERSION = 1
SERVING = "serve"
TPU = "tpu"
TRAINING = "train"
VARIABLES_DIRECTORY = "variables"
VARIABLES_FILENAME = "variables"


class VariablePolicy(enum.Enum):
    """Where the devices of variables are saved; accepted for portability.

    >>> VariablePolicy.NONE.value is None
    True
    """

    NONE = None
    SAVE_VARIABLE_DEVICES = "save_variable_devices"
    EXPAND_DISTRIBUTED_VARIABLES = "expand_distributed_variables"


@dataclasses.dataclass
class SaveOptions:
    """Choices of a save; accepted for portability, without effect.

    >>> SaveOptions(experimental_io_device="/job:localhost").save_debug_info
    False
    """

    namespace_whitelist: Any = None
    save_debug_info: bool = False
    function_aliases: Mapping[str, Any] | None = None
    experimental_debug_stripper: bool = False
    experimental_io_device: str | None = None
    experimental_variable_policy: Any = None
    experimental_custom_gradients: bool = True
    experimental_image_format: bool = False
    experimental_skip_saver: bool = False
    experimental_sharding_callback: Any = None
    extra_tags: Any = None


@dataclasses.dataclass
class LoadOptions:
    """Choices of a load; accepted for portability, without effect.

    >>> LoadOptions(experimental_io_device="/job:localhost").allow_partial_checkpoint
    False
    """

    allow_partial_checkpoint: bool = False
    experimental_io_device: str | None = None
    experimental_skip_checkpoint: bool = False
    experimental_variable_policy: Any = None
    experimental_load_function_aliases: bool = False


def save(
    obj: Value, export_dir: PathValue, signatures: Structure = None, options: Ignored = None
) -> None:
    """Saves a module or a Keras model with its variables and functions.

    Functions of a module are saved if they have an `input_signature`; those of a Keras model are
    its call in inference, as "serving_default".

    Args:
      obj: A `tf.Module`, a Keras model or a dict.
      export_dir: The directory; a saved model that is there is replaced.
      signatures: A function, or functions by name: each a `tf.function` with an `input_signature`,
        or what `get_concrete_function` returned.
      options: Accepted for portability.

    >>> import replicax.tf as tf, tempfile
    >>> class Scale(tf.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = tf.Variable(3.0)
    ...     @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    ...     def __call__(self, x):
    ...         return x * self.w
    >>> folder = tempfile.mkdtemp()
    >>> save(Scale(), folder)
    >>> load(folder)(tf.constant([1.0, 2.0])).numpy().tolist()
    [3.0, 6.0]
    """
    del options
    if _is_keras_model(obj):
        obj, own = _keras_models.module_of(obj)
        signatures = own if signatures is None else signatures
    elif isinstance(obj, LoadedModel):
        obj = obj.loaded
    rx_saved_model.save(obj, path_text(export_dir), _signatures(signatures))


def _is_keras_model(obj: Value) -> bool:
    return tape_recording.is_keras_loaded() and _keras_models.is_model(obj)


def _signatures(signatures: Structure) -> Any:
    if isinstance(signatures, Mapping):
        return {name: _signature(value) for name, value in signatures.items()}
    return _signature(signatures)


def _signature(value: Value) -> Any:
    return value.function if isinstance(value, SignatureFunction | _LoadedFunction) else value


class SignatureFunction:
    """A signature of a loaded model: takes arguments by name, and returns a dict of tensors.

    Attributes:
      function: The function of `rx.saved_model`.
    """

    def __init__(self, function: Value) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Calls the function; a result that is not a dict gets names: "output_0" and so on."""
        specs = self.function.input_signature or ()
        if kwargs and len(specs) == 1 and not args:
            # One structure of inputs: a dict by their names, or one tensor of any name.
            spec = specs[0]
            if isinstance(spec, dict):
                args, kwargs = (kwargs,), {}
            elif not isinstance(spec, list | tuple) and len(kwargs) == 1:
                args, kwargs = tuple(kwargs.values()), {}
        found = _call(self.function, *args, **kwargs)
        if isinstance(found, dict):
            return found
        parts = found if isinstance(found, list | tuple) else (found,)
        return {f"output_{i}": part for i, part in enumerate(parts)}

    @property
    def structured_input_signature(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The specs of arguments."""
        return tuple(map(TensorSpec.of, self.function.input_signature or ())), {}

    @property
    def inputs(self) -> list[Any]:
        """The specs of arguments, as a list."""
        return list(self.structured_input_signature[0])

    def __repr__(self) -> str:
        return f"<signature {self.function.name!r} of {self.inputs}>"


def _on_device(value: Value) -> Any:
    return dispatch.default_array(value) if isinstance(value, int | float | list) else value


class LoadedModel:
    """A loaded model: the attributes that were saved, whose functions take and return tensors.

    Attributes:
      loaded: The model of `rx.saved_model`.
    """

    def __init__(self, loaded: Value) -> None:
        self.__dict__["loaded"] = loaded

    @property
    def signatures(self) -> dict[str, SignatureFunction]:
        """The signatures by name."""
        return {name: SignatureFunction(fn) for name, fn in self.loaded.signatures.items()}

    @property
    def variables(self) -> tuple[Any, ...]:
        """All variables."""
        return tuple(map(as_tensor_variable, self.loaded.variables))

    @property
    def trainable_variables(self) -> tuple[Any, ...]:
        """The trainable variables."""
        return tuple(map(as_tensor_variable, self.loaded.trainable_variables))

    def __getattr__(self, name: str) -> Any:
        return _as_loaded(getattr(self.loaded, name))

    def __setattr__(self, name: str, value: Value) -> None:
        setattr(self.loaded, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Arguments of Keras models that the exported call does not have.
        kwargs.pop("training", None)
        function = vars(self.loaded).get("__call__")
        if function is None:
            raise errors.ArgumentTypeError(
                "A loaded model is called if its `__call__` was saved",
                f"{self!r} has none: functions are saved if they have an input_signature",
                "Write `@tf.function(input_signature=[tf.TensorSpec(...)])` above `__call__`, and "
                "save the model again.",
            )
        return _call(function, *args, **kwargs)

    def checkpoint_children(self) -> dict[str, Any]:
        """Returns the parts, for checkpoints."""
        return {
            name: value
            for name, value in vars(self.loaded).items()
            if isinstance(value, Variable | Module | list | dict)
        }

    def __repr__(self) -> str:
        return repr(self.loaded)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function of arrays with tensors, as one node of the tapes that record."""

    def run() -> Any:
        given, named = raw_tree(args), {name: raw_tree(value) for name, value in kwargs.items()}
        return function(*map(_on_device, given), **named)

    if not tape_recording.recording_tapes():
        return wrap_tree(run())
    leaves: list[Any] = []
    tape_recording.map_leaves(leaves.append, (args, kwargs))
    return wrap_tree(tape_regions.run(run, filter(tape_recording.is_tensor, leaves)))


def _as_loaded(value: Value) -> Any:
    if isinstance(value, Variable):
        return as_tensor_variable(value)
    if isinstance(value, Module):
        return LoadedModel(value)
    if isinstance(value, Function) and not isinstance(value, TensorFunction):
        return _LoadedFunction(value)
    if isinstance(value, list | tuple):
        return type(value)(map(_as_loaded, value))
    return value


class _LoadedFunction:
    """A function of a loaded model."""

    def __init__(self, function: Value) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _call(self.function, *args, **kwargs)

    @property
    def input_signature(self) -> Any:
        """The specs of arguments."""
        return self.function.input_signature

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> SignatureFunction:
        """Returns the function; it has one program."""
        del args, kwargs
        return SignatureFunction(self.function)


def load(export_dir: PathValue, tags: Ignored = None, options: Ignored = None) -> Any:
    """Loads a saved model without its source.

    Args:
      export_dir: A directory that `save` wrote.
      tags: Accepted for portability.
      options: Accepted for portability.
    """
    del tags, options
    path = path_text(export_dir)
    is_own = rx_saved_model.contains_saved_model(path)
    if not is_own and checkpoint_paths.find_prefix(path) is not None:
        raise errors.UnsupportedError(
            "`tf.saved_model.load` needs a model that replicax saved",
            f"{path} holds one of TensorFlow, whose functions are graphs",
            "Build the model from its code, and read its weights: "
            "`tf.train.Checkpoint(model).read(path)` or `tf.train.load_checkpoint(path)`.",
        )
    return LoadedModel(rx_saved_model.load(path))


def contains_saved_model(export_dir: PathValue) -> bool:
    """Tells whether a directory holds a saved model, of replicax or of TensorFlow.

    >>> contains_saved_model("/no/such/place")
    False
    """
    path = path_text(export_dir)
    has_own = rx_saved_model.contains_saved_model(path)
    return has_own or checkpoint_paths.find_prefix(f"{path}/{VARIABLES_DIRECTORY}") is not None


class Asset:
    """A file that belongs to a model; only its path is kept.

    >>> Asset("vocabulary.txt").asset_path.numpy()
    b'vocabulary.txt'
    """

    def __init__(self, path: PathValue) -> None:
        self.asset_path = dispatch.wrap_tree(np.array(path_text(path).encode(), dtype=object))


class _Experimental:
    """`tf.saved_model.experimental`."""

    VariablePolicy = VariablePolicy

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return namespaces.refusing(__name__)(f"experimental.{name}")


experimental = _Experimental()
__all__ += ["experimental"]

__getattr__ = namespaces.refusing(__name__)
