"""What is known about names of TensorFlow: which moved, and which calls changed.

Names are written below `tf`, whatever a program calls the module. Names that are not offered are
in `replicax.tf.not_offered`; `names.py` reads both.
"""

from __future__ import annotations

# The packages that `replicax.tf` takes the place of.
ROOTS = ("tensorflow", "replicax.tf")

# Packages around TensorFlow, which import it; what to use instead of them.
OUTSIDE: dict[str, str] = {
    "tensorflow_addons": "Use `tf.keras.optimizers` (AdamW, Lamb) and `tf.keras.layers`, which "
    "have most of it",
    "tensorflow_datasets": "Load the arrays where TensorFlow is installed and save them as .npy or "
    "TFRecord files, or use `tfds.as_numpy` or `tfds.data_source` in a process of its own",
    "tensorflow_hub": "Load the weights with `rx.train.load_tf_checkpoint` or "
    "`tf.keras.models.load_model`",
    "tensorflow_text": "Use a tokenizer in Python, in `dataset.map` or before",
    "tensorflow_probability": "Use `tensorflow_probability.substrates.jax`",
    "tensorflow_io": "Read the files in Python, and use `tf.data.Dataset.from_generator`",
    "tensorflow_transform": "Transform the data beforehand, or use Keras preprocessing layers",
    "tensorflow_estimator": "Write a Keras model and call `model.fit`",
    "tensorflow_model_optimization": "Use `model.quantize('int8')` of Keras",
    "tensorflow_hub.keras_layer": "Use a Keras model",
    "official": "The model garden imports TensorFlow: copy the model, and port the copy",
    "horovod": "Use `tf.distribute.MultiWorkerMirroredStrategy`, which joins the processes and "
    "sums their gradients",
    "byteps": "Use `tf.distribute.MultiWorkerMirroredStrategy`",
}

_SAME_VALUES = (
    "Remove it: variables that are made in `strategy.scope()` have the same values everywhere"
)
_GRADIENTS = (
    "Remove it, and call the step by `strategy.run(step, args=(batch,))`: `apply_gradients` sums "
    "the gradients of all replicas"
)

# Names of packages around TensorFlow, by their last part, and what to write instead.
OUTSIDE_NAMES: dict[str, dict[str, str]] = {
    "horovod": {
        "init": "Write `strategy = tf.distribute.MultiWorkerMirroredStrategy()`",
        "size": "Use `strategy.num_replicas_in_sync`",
        "rank": "Use `strategy.cluster_resolver.task_id`",
        "local_rank": "Remove it: `CUDA_VISIBLE_DEVICES` says which devices a process uses",
        "DistributedGradientTape": _GRADIENTS,
        "DistributedOptimizer": _GRADIENTS,
        "broadcast_variables": _SAME_VALUES,
        "broadcast_global_variables": _SAME_VALUES,
        "BroadcastGlobalVariablesCallback": _SAME_VALUES,
        "MetricAverageCallback": "Remove it: metrics add up what all replicas saw",
        "LearningRateWarmupCallback": "Use a schedule of `tf.keras.optimizers.schedules`",
        "LearningRateScheduleCallback": "Use `tf.keras.callbacks.LearningRateScheduler`",
        "allreduce": "Use `tf.distribute.get_replica_context().all_reduce('SUM', value)`",
        "allgather": "Use `tf.distribute.get_replica_context().all_gather(value, axis=0)`",
    },
}

# Data that `tfds.load` and `tf.keras.datasets` both have.
KERAS_DATASETS = ("mnist", "fashion_mnist", "cifar10", "cifar100")

# Modules whose whole content is now in another one. The longest prefix counts.
MOVED_MODULES: dict[str, str] = {
    "python.keras": "keras",
    "python.util.nest": "nest",
    "python.data.experimental": "data.experimental",
    "python.data": "data",
    "python.framework.constant_op": "",
    "python.framework.dtypes": "",
    "python.framework.errors": "errors",
    "python.framework.errors_impl": "errors",
    "python.framework.ops": "",
    "python.framework.tensor_shape": "",
    "python.framework.tensor_spec": "",
    "python.ops.array_ops": "",
    "python.ops.check_ops": "debugging",
    "python.ops.clip_ops": "",
    "python.ops.control_flow_ops": "",
    "python.ops.image_ops": "image",
    "python.ops.init_ops": "",
    "python.ops.linalg_ops": "linalg",
    "python.ops.math_ops": "",
    "python.ops.nn": "nn",
    "python.ops.nn_ops": "nn",
    "python.ops.random_ops": "random",
    "python.ops.variables": "",
    "python.eager.backprop": "",
    "python.eager.context": "",
    "python.eager.def_function": "",
    "python.distribute.central_storage_strategy": "distribute.experimental",
    "python.distribute.cluster_resolver": "distribute.cluster_resolver",
    **{
        f"python.distribute.cluster_resolver.{name}_cluster_resolver": (
            "distribute.cluster_resolver"
        )
        for name in ("tpu", "tfconfig", "slurm", "kubernetes", "gce")
    },
    "python.distribute.coordinator.cluster_coordinator": "distribute.coordinator",
    "python.distribute.cross_device_ops": "distribute",
    "python.distribute.distribute_lib": "distribute",
    "python.distribute.distribution_strategy_context": "distribute",
    "python.distribute.mirrored_strategy": "distribute",
    "python.distribute.one_device_strategy": "distribute",
    "python.distribute.reduce_util": "distribute",
    "python.profiler.profiler_v2": "profiler.experimental",
    "python.profiler.trace": "profiler.experimental",
    "core.example.example_pb2": "train",
    "core.example.feature_pb2": "train",
    "contrib.cluster_resolver": "distribute.cluster_resolver",
    "contrib.framework.nest": "nest",
    "python.platform.gfile": "io.gfile",
    "python.platform.tf_logging": "compat.v1.logging",
    "compat.v2": "",
    "logging": "compat.v1.logging",
    "flags": "compat.v1.flags",
    "app": "compat.v1.app",
    "initializers": "keras.initializers",
    "keras.layers.experimental.preprocessing": "keras.layers",
    "keras.layers.preprocessing": "keras.layers",
    **{
        f"{root}.utils.{name}": "keras.utils"
        for root in ("keras", "python.keras")
        for name in ("vis_utils", "np_utils", "data_utils", "generic_utils", "layer_utils")
    },
    "keras.layers.merge": "keras.layers",
    "keras.layers.core": "keras.layers",
    "keras.layers.normalization": "keras.layers",
    "keras.layers.convolutional": "keras.layers",
    "keras.layers.recurrent": "keras.layers",
    "keras.mixed_precision.experimental": "keras.mixed_precision",
    "keras.optimizers.experimental": "keras.optimizers",
    "keras.optimizer_v2": "keras.optimizers",
    "keras.callbacks.experimental": "keras.callbacks",
    "distribute.experimental.coordinator": "distribute.coordinator",
}

# Names that moved, with the same meaning and arguments.
MOVED: dict[str, str] = {
    # tf.distribute
    "distribute.experimental.ParameterServerStrategy": "distribute.ParameterServerStrategy",
    "distribute.experimental.CommunicationImplementation": (
        "distribute.experimental.CommunicationImplementation"
    ),
    "distribute.experimental.CollectiveCommunication": (
        "distribute.experimental.CommunicationImplementation"
    ),
    "distribute.experimental.CollectiveHints": "distribute.experimental.CommunicationOptions",
    # tf.data
    "contrib.data.AUTOTUNE": "data.AUTOTUNE",
    "data.experimental.AUTOTUNE": "data.AUTOTUNE",
    "data.experimental.choose_from_datasets": "data.Dataset.choose_from_datasets",
    "data.experimental.sample_from_datasets": "data.Dataset.sample_from_datasets",
    "data.experimental.Counter": "data.Dataset.counter",
    "data.experimental.DistributeOptions": "data.experimental.DistributeOptions",
    "data.experimental.INFINITE_CARDINALITY": "data.INFINITE_CARDINALITY",
    "data.experimental.UNKNOWN_CARDINALITY": "data.UNKNOWN_CARDINALITY",
    # tf.config
    "config.experimental.list_physical_devices": "config.list_physical_devices",
    "config.experimental.list_logical_devices": "config.list_logical_devices",
    "config.experimental.set_visible_devices": "config.set_visible_devices",
    "config.experimental.get_visible_devices": "config.get_visible_devices",
    "config.experimental.set_virtual_device_configuration": (
        "config.set_logical_device_configuration"
    ),
    "config.experimental.get_virtual_device_configuration": (
        "config.get_logical_device_configuration"
    ),
    "config.experimental.VirtualDeviceConfiguration": "config.LogicalDeviceConfiguration",
    "config.experimental_run_functions_eagerly": "config.run_functions_eagerly",
    "config.experimental_functions_run_eagerly": "config.functions_run_eagerly",
    # tf.keras
    "keras.mixed_precision.experimental.set_policy": "keras.mixed_precision.set_global_policy",
    "keras.mixed_precision.experimental.global_policy": "keras.mixed_precision.global_policy",
    "keras.experimental.CosineDecay": "keras.optimizers.schedules.CosineDecay",
    "keras.experimental.CosineDecayRestarts": "keras.optimizers.schedules.CosineDecayRestarts",
    "keras.layers.CuDNNLSTM": "keras.layers.LSTM",
    "keras.layers.CuDNNGRU": "keras.layers.GRU",
    "keras.preprocessing.image_dataset_from_directory": (
        "keras.utils.image_dataset_from_directory"
    ),
    "keras.preprocessing.text_dataset_from_directory": "keras.utils.text_dataset_from_directory",
    "keras.preprocessing.sequence.pad_sequences": "keras.utils.pad_sequences",
    "keras.preprocessing.image.load_img": "keras.utils.load_img",
    "keras.preprocessing.image.img_to_array": "keras.utils.img_to_array",
    "keras.preprocessing.image.array_to_img": "keras.utils.array_to_img",
    "keras.preprocessing.image.save_img": "keras.utils.save_img",
    "keras.utils.np_utils.to_categorical": "keras.utils.to_categorical",
    # tf.random
    "random.experimental.Generator": "random.Generator",
    "random.experimental.get_global_generator": "random.get_global_generator",
    "random.experimental.set_global_generator": "random.set_global_generator",
    "set_random_seed": "random.set_seed",
    "random.set_random_seed": "random.set_seed",
    "random_normal": "random.normal",
    "random_uniform": "random.uniform",
    "random_shuffle": "random.shuffle",
    "truncated_normal": "random.truncated_normal",
    # Private names whose public ones are called otherwise.
    "python.data.ops.dataset_ops.DatasetV2": "data.Dataset",
    "python.data.ops.dataset_ops.Dataset": "data.Dataset",
    "python.framework.tensor_shape.as_shape": "TensorShape",
    "python.ops.math_ops.reduce_euclidean_norm": "math.reduce_euclidean_norm",
    # Names of TensorFlow 1 with the same meaning.
    "ConfigProto": "compat.v1.ConfigProto",
    "GPUOptions": "compat.v1.GPUOptions",
    "FixedLenFeature": "io.FixedLenFeature",
    "VarLenFeature": "io.VarLenFeature",
    "FixedLenSequenceFeature": "io.FixedLenSequenceFeature",
    "parse_single_example": "io.parse_single_example",
    "parse_example": "io.parse_example",
    "parse_tensor": "io.parse_tensor",
    "serialize_tensor": "io.serialize_tensor",
    "decode_raw": "io.decode_raw",
    "decode_csv": "io.decode_csv",
    "read_file": "io.read_file",
    "write_file": "io.write_file",
    "python_io.TFRecordWriter": "io.TFRecordWriter",
    "gfile.GFile": "io.gfile.GFile",
    "gfile.Open": "io.gfile.GFile",
    "gfile.Copy": "io.gfile.copy",
    "gfile.DeleteRecursively": "io.gfile.rmtree",
    "gfile.Exists": "io.gfile.exists",
    "gfile.Glob": "io.gfile.glob",
    "gfile.IsDirectory": "io.gfile.isdir",
    "gfile.ListDirectory": "io.gfile.listdir",
    "gfile.MakeDirs": "io.gfile.makedirs",
    "gfile.MkDir": "io.gfile.mkdir",
    "gfile.Remove": "io.gfile.remove",
    "gfile.Rename": "io.gfile.rename",
    "gfile.Stat": "io.gfile.stat",
    "gfile.Walk": "io.gfile.walk",
    "log": "math.log",
    "log1p": "math.log1p",
    "erf": "math.erf",
    "rsqrt": "math.rsqrt",
    "ceil": "math.ceil",
    "is_nan": "math.is_nan",
    "is_inf": "math.is_inf",
    "is_finite": "math.is_finite",
    "mod": "math.floormod",
    "lgamma": "math.lgamma",
    "digamma": "math.digamma",
    "cumprod": "math.cumprod",
    "unsorted_segment_sum": "math.unsorted_segment_sum",
    "segment_sum": "math.segment_sum",
    "invert_permutation": "math.invert_permutation",
    "global_norm": "linalg.global_norm",
    "diag": "linalg.tensor_diag",
    "diag_part": "linalg.tensor_diag_part",
    "matrix_band_part": "linalg.band_part",
    "matrix_diag": "linalg.diag",
    "matrix_inverse": "linalg.inv",
    "matrix_transpose": "linalg.matrix_transpose",
    "cholesky": "linalg.cholesky",
    "check_numerics": "debugging.check_numerics",
    "string_to_number": "strings.to_number",
    "regex_replace": "strings.regex_replace",
    "string_join": "strings.join",
    "space_to_depth": "nn.space_to_depth",
    "depth_to_space": "nn.depth_to_space",
    "image.resize_image_with_crop_or_pad": "image.resize_with_crop_or_pad",
    "image.resize_image_with_pad": "image.resize_with_pad",
    "lin_space": "linspace",
    "is_numeric_tensor": "debugging.is_numeric_tensor",
}

_LOOKUP = (
    "Keras computes it with TensorFlow: use a Python dict in `dataset.map`, or `vocabulary.index`"
)

# Layers that Keras has, and that import TensorFlow when they are made.
NEED_TENSORFLOW: dict[str, str] = {
    "keras.layers.StringLookup": _LOOKUP,
    "keras.layers.IntegerLookup": _LOOKUP,
    "keras.layers.TextVectorization": "Keras computes it with TensorFlow: split and number the "
    "words with a Python dict, in `dataset.map` or before",
    "keras.layers.Hashing": "Keras computes it with TensorFlow: use `hashlib` in `dataset.map`",
    "keras.layers.HashedCrossing": "Keras computes it with TensorFlow: use `hashlib` in "
    "`dataset.map`",
}

# Constants that Keras 3 writes as strings.
CONSTANTS: dict[str, str] = {
    f"{module}.Reduction.{name}": text
    for module in ("keras.losses", "losses", "keras.utils.losses_utils")
    for name, text in (
        ("NONE", '"none"'),
        ("SUM", '"sum"'),
        ("SUM_OVER_BATCH_SIZE", '"sum_over_batch_size"'),
        ("AUTO", '"sum_over_batch_size"'),
    )
}

# Methods that were renamed: the new name has the same meaning and arguments.
METHODS: dict[str, str] = {
    "experimental_run_v2": "run",
    "experimental_distribute_datasets_from_function": "distribute_datasets_from_function",
    "reset_states": "reset_state",
    "fit_generator": "fit",
    "evaluate_generator": "evaluate",
    "predict_generator": "predict",
}

# Methods that are gone, and what to write.
REFUSED_METHODS: dict[str, str] = {
    "make_initializable_iterator": "Use `iter(dataset)`",
    "predict_classes": "Use `np.argmax(model.predict(x), axis=-1)`",
    "predict_proba": "Use `model.predict(x)`",
    "experimental_make_numpy_dataset": "Use `tf.data.Dataset.from_tensor_slices(arrays)`",
}

# Keywords of calls: (function or family, old keyword, new keyword; "" if it has no effect).
KEYWORDS: tuple[tuple[str, str, str], ...] = (
    ("keras.optimizers.*", "lr", "learning_rate"),
    ("optimizers.*", "lr", "learning_rate"),
    # Names of arguments in version 1.
    ("reduce_*", "reduction_indices", "axis"),
    ("reduce_*", "keep_dims", "keepdims"),
    ("math.reduce_*", "keep_dims", "keepdims"),
    ("argmax", "dimension", "axis"),
    ("argmin", "dimension", "axis"),
    ("expand_dims", "dim", "axis"),
    ("squeeze", "squeeze_dims", "axis"),
    ("nn.softmax", "dim", "axis"),
    ("nn.log_softmax", "dim", "axis"),
    ("nn.l2_normalize", "dim", "axis"),
    ("function", "experimental_relax_shapes", "reduce_retracing"),
    ("function", "experimental_compile", "jit_compile"),
    ("function", "experimental_autograph_options", ""),
    ("function", "experimental_follow_type_hints", ""),
    ("keras.callbacks.ReduceLROnPlateau", "epsilon", "min_delta"),
    ("keras.callbacks.TensorBoard", "write_grads", ""),
    ("keras.callbacks.TensorBoard", "batch_size", ""),
)

# Keywords of methods of models: (method, old keyword, new keyword; "" if it has no effect).
MODEL_KEYWORDS: tuple[tuple[str, str, str], ...] = (
    *(
        (method, keyword, "")
        for method in (
            "fit",
            "evaluate",
            "predict",
            "fit_generator",
            "evaluate_generator",
            "predict_generator",
        )
        for keyword in ("workers", "use_multiprocessing", "max_queue_size")
    ),
    ("fit_generator", "generator", "x"),
    ("evaluate_generator", "generator", "x"),
    ("predict_generator", "generator", "x"),
    ("compile", "experimental_run_tf_function", ""),
    ("compile", "experimental_steps_per_execution", "steps_per_execution"),
    ("compile", "sample_weight_mode", ""),
    ("save", "save_format", ""),
    ("save_weights", "save_format", ""),
)

# Keywords that are gone: (function or family, keyword, what to write).
REFUSED_KEYWORDS: tuple[tuple[str, str, str], ...] = (
    ("losses.*", "predictions", "Use a class of `tf.keras.losses`, called with (labels, outputs)"),
    ("losses.*", "logits", "Use a class of `tf.keras.losses` with from_logits=True"),
    ("data.Dataset.from_generator", "finalizer", "Leave it out"),
)

# Functions of TensorFlow whose results are tensors: `if` on one of them needs its value.
TENSOR_FAMILIES = (
    "reduce_",
    "math.",
    "linalg.",
    "nn.",
    "random.",
    "clip_by_",
    "logical_",
    "keras.losses.",
    "losses.",
    *(
        "norm abs add add_n argmax argmin boolean_mask cast concat constant convert_to_tensor "
        "cumsum divide einsum equal exp expand_dims fill floor gather gather_nd greater "
        "greater_equal identity less less_equal matmul maximum minimum multiply not_equal one_hot "
        "ones ones_like pow range reshape round sigmoid sign sqrt square squeeze stack "
        "stop_gradient subtract tanh tensordot tile transpose where zeros zeros_like"
    ).split(),
)
