"""The names that earlier versions of `tf.keras` had, beside those of Keras 3.

For each namespace below `tf.keras`: names with their source, "module:attribute" or "module".
"""

from __future__ import annotations

_OWN = "replicax.tf.keras"


def _from(module: str, names: str) -> dict[str, str]:
    return {name: f"{module}:{name}" for name in names.split()}


_OPTIMIZERS = "Adadelta Adagrad Adam Adamax Ftrl Nadam Optimizer RMSprop SGD"
_POLICIES = {
    "Policy": "keras:DTypePolicy",
    "set_policy": "keras.mixed_precision:set_global_policy",
    "global_policy": "keras.mixed_precision:dtype_policy",
    "LossScaleOptimizer": "keras.optimizers:LossScaleOptimizer",
}
_SCHEDULES = "keras.optimizers.schedules"
_PREPROCESSING_LAYERS = (
    "CategoryEncoding CenterCrop Discretization Hashing HashedCrossing IntegerLookup Normalization "
    "RandomContrast RandomCrop RandomFlip RandomRotation RandomTranslation RandomZoom Rescaling "
    "Resizing StringLookup TextVectorization"
)
_SHAPES = f"{_OWN}.convolution_shapes"

ADDED: dict[str, dict[str, str]] = {
    "activations": {"swish": "keras.activations:silu"},
    "backend": _from(
        f"{_OWN}.backend_names",
        "batch_get_value batch_set_value conv1d conv2d conv3d count_params ctc_batch_cost dtype "
        "eval get_uid get_value in_test_phase in_top_k in_train_phase int_shape is_sparse "
        "is_tensor learning_phase learning_phase_scope logsumexp manual_variable_initialization "
        "moving_average_update ndim ones placeholder reset_uids set_learning_phase set_value "
        "shape sigmoid softmax track_variable update update_add update_sub variable where zeros",
    ),
    "callbacks.experimental": {"BackupAndRestore": "keras.callbacks:BackupAndRestore"},
    "experimental": {
        **_from(_SCHEDULES, "CosineDecay CosineDecayRestarts"),
    },
    "layers": _from(f"{_OWN}.old_layers", "AbstractRNNCell CuDNNGRU CuDNNLSTM"),
    "layers.experimental": {
        "SyncBatchNormalization": f"{_OWN}.old_layers:SyncBatchNormalization",
        "EinsumDense": "keras.layers:EinsumDense",
    },
    "layers.experimental.preprocessing": {
        **_from("keras.layers", _PREPROCESSING_LAYERS),
        "PreprocessingLayer": "keras.layers:Layer",
    },
    "losses": {
        "huber_loss": "keras.losses:huber",
        "Reduction": f"{_OWN}.old_names:Reduction",
    },
    "mixed_precision.experimental": _POLICIES,
    "mixed_precision.experimental.loss_scale_optimizer": _from(
        "keras.optimizers", "LossScaleOptimizer"
    ),
    "mixed_precision.loss_scale_optimizer": _from("keras.optimizers", "LossScaleOptimizer"),
    "optimizer_v2.adam": {"Adam": "keras.optimizers:Adam"},
    "optimizer_v2.gradient_descent": {"SGD": "keras.optimizers:SGD"},
    "optimizer_v2.learning_rate_schedule": _from(
        _SCHEDULES,
        "CosineDecay CosineDecayRestarts ExponentialDecay InverseTimeDecay LearningRateSchedule "
        "PiecewiseConstantDecay PolynomialDecay",
    ),
    "optimizer_v2.optimizer_v2": {"OptimizerV2": "keras.optimizers:Optimizer"},
    "optimizer_v2.rmsprop": {"RMSprop": "keras.optimizers:RMSprop"},
    "optimizers.experimental": _from("keras.optimizers", f"{_OPTIMIZERS} AdamW"),
    "optimizers.legacy": _from("keras.optimizers", _OPTIMIZERS),
    "utils.data_utils": _from("keras.utils", "get_file Sequence"),
    "utils.conv_utils": _from(
        _SHAPES,
        "conv_output_length convert_data_format normalize_data_format normalize_padding "
        "normalize_tuple",
    ),
    "utils.layer_utils": _from("keras.utils", "get_source_inputs"),
    "utils.experimental": {"DatasetCreator": "replicax.keras:DatasetCreator"},
    "utils.np_utils": _from("keras.utils", "normalize to_categorical"),
}
