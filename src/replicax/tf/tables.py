"""Where the names of the namespaces of `replicax.tf` come from.

A source is a module below `replicax.tf` with names of its `__all__`. Namespaces that have code of
their own (`data`, `io`, `image`, ...) are modules and packages beside this one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from replicax.tf.namespaces import Table

# Namespaces that are files or packages of their own.
MODULES = (
    "data",
    "debugging",
    "distribute",
    "dtypes",
    "errors",
    "image",
    "io",
    "keras",
    "nest",
    "saved_model",
    "signal",
    "sparse",
    "strings",
    "summary",
    "train",
)


def _from(module: str, names: str) -> dict[str, str]:
    return {name: f"{module}:{name}" for name in names.split()}


_TYPES = _from(
    ".dtypes",
    "DType as_dtype bfloat16 bool complex128 complex64 double float16 float32 float64 half int16 "
    "int32 int64 int8 string uint16 uint32 uint64 uint8",
)

_TOP = {
    **_TYPES,
    **_from(
        ".ops.maths",
        "abs acos acosh add add_n asin asinh atan atan2 atanh cos cosh divide exp floor maximum "
        "minimum multiply negative pow realdiv round scalar_mul sigmoid sign sin sinh sqrt square "
        "subtract tan tanh truediv truncatediv truncatemod",
    ),
    **_from(
        ".ops.reductions",
        "argmax argmin cumsum reduce_all reduce_any reduce_logsumexp reduce_max reduce_mean "
        "reduce_min reduce_prod reduce_sum",
    ),
    **_from(".ops.sorting", "argsort sort unique unique_with_counts"),
    **_from(
        ".ops.blocks",
        "batch_to_space required_space_to_batch_paddings space_to_batch space_to_batch_nd",
    ),
    **_from(
        ".ops.indexing",
        "boolean_mask dynamic_partition dynamic_stitch gather gather_nd scatter_nd searchsorted "
        "tensor_scatter_nd_add tensor_scatter_nd_max tensor_scatter_nd_min tensor_scatter_nd_sub "
        "tensor_scatter_nd_update unravel_index where",
    ),
    **_from(".ops.clipping", "clip_by_global_norm clip_by_norm clip_by_value norm"),
    **_from(".ops.complex_numbers", "complex"),
    **_from(".ops.linalg", "eig eigvals"),
    "matrix_square_root": ".ops.linalg:sqrtm",
    **_from(".ops.matrices", "einsum matmul tensordot"),
    **_from(
        ".ops.comparisons",
        "equal greater greater_equal less less_equal logical_and logical_not logical_or not_equal",
    ),
    **_from(".ops.counting", "histogram_fixed_width histogram_fixed_width_bins"),
    **_from(
        ".control_flow", "case cond foldl foldr map_fn scan switch_case vectorized_map while_loop"
    ),
    **_from(".function", "function"),
    **_from(".tape", "GradientTape UnconnectedGradients"),
    **_from(".tensor", "Tensor TensorShape"),
    **_from(".tensor_array", "TensorArray"),
    **_from(".tensor_spec", "TensorSpec"),
    **_from(".variable", "Variable"),
    **_from(".module", "Module"),
    **_from(".sparse", "SparseTensor"),
    **_from(".strings", "as_string"),
    **_from(".debugging", "Assert assert_equal assert_greater assert_less assert_rank"),
    **_from(
        "replicax", "IndexedSlices VariableAggregation VariableSynchronization device "
        "variable_creator_scope"
    ),
}  # fmt: skip

_CONFIG_EXPERIMENTAL = {
    **_from(
        ".device_config",
        "enable_op_determinism enable_tensor_float_32_execution get_device_details "
        "get_memory_growth get_memory_info get_memory_usage get_visible_devices "
        "list_logical_devices list_physical_devices set_memory_growth set_visible_devices "
        "tensor_float_32_execution_enabled get_synchronous_execution set_synchronous_execution "
        "get_device_policy set_device_policy ClusterDeviceFilters reset_memory_stats "
        "enable_mlir_bridge disable_mlir_bridge",
    ),
    "VirtualDeviceConfiguration": ".device_config:LogicalDeviceConfiguration",
    "get_virtual_device_configuration": ".device_config:get_logical_device_configuration",
    "set_virtual_device_configuration": ".device_config:set_logical_device_configuration",
}

_KERAS_INITIALIZERS = "replicax.tf.keras.initializers"

# Namespaces whose names are those of other modules, by path.
_PATHS: dict[str, Table] = {
    "math": Table(
        {
            **_from(".ops.complex_numbers", "angle conj imag real"),
            **_from(".ops.sorting", "approx_max_k approx_min_k in_top_k top_k"),
            **_from(".ops.counting", "bincount confusion_matrix"),
            **_from(
                ".ops.comparisons",
                "equal greater greater_equal is_non_decreasing is_strictly_increasing less "
                "less_equal logical_and logical_not logical_or logical_xor not_equal",
            ),
            **_from(".ops.indexing", "invert_permutation"),
            **_from(".ops.clipping", "l2_normalize"),
            **_from(".ops.activations", "log_sigmoid log_softmax softmax softplus softsign"),
        },
        (".ops.maths", ".ops.reductions", ".ops.special", ".ops.guarded", ".ops.segments"),
        ["special"],
    ),
    "math.special": Table(modules=(".ops.special",)),
    "linalg": Table(
        {
            "eye": ".ops.creation:eye",
            **_from(".ops.clipping", "global_norm l2_normalize norm normalize"),
        },
        (".ops.matrices", ".ops.linalg"),
    ),
    "nn": Table(
        {
            **_from(".ops.sorting", "approx_max_k approx_min_k in_top_k top_k"),
            **_from(".ops.blocks", "depth_to_space space_to_batch space_to_depth"),
            **_from(".ops.clipping", "l2_normalize"),
            **_from(".ops.maths", "sigmoid tanh"),
            **_from(".ops.reductions", "zero_fraction"),
            "dropout": ".ops.random:dropout",
            "embedding_lookup_sparse": "replicax.nn:embedding_lookup_sparse",
            "safe_embedding_lookup_sparse": "replicax.nn:safe_embedding_lookup_sparse",
            "experimental": ".nn.experimental",
        },
        (".ops.activations", ".ops.convolutions", ".ops.pooling", ".ops.nn"),
        ["experimental"],
    ),
    "nn.experimental": Table({"stateless_dropout": ".ops.random:stateless_dropout"}),
    "random": Table(
        _from(
            ".ops.random",
            "categorical fold_in gamma normal poisson set_seed shuffle split stateless_binomial "
            "stateless_categorical stateless_gamma stateless_normal stateless_poisson "
            "stateless_truncated_normal stateless_uniform truncated_normal uniform",
        ),
        (".random_generator",),
        ["experimental"],
    ),
    "random.experimental": Table(
        {
            "stateless_fold_in": ".ops.random:experimental_stateless_fold_in",
            "stateless_shuffle": ".ops.random:experimental_stateless_shuffle",
            "stateless_split": ".ops.random:experimental_stateless_split",
        },
        (".random_generator",),
    ),
    "bitwise": Table(
        _from(
            ".ops.comparisons",
            "bitwise_and bitwise_or bitwise_xor invert left_shift right_shift",
        )
    ),
    "config": Table(
        {
            **_from(
                ".device_config",
                "LogicalDevice LogicalDeviceConfiguration PhysicalDevice "
                "experimental_connect_to_cluster experimental_connect_to_host "
                "experimental_list_devices functions_run_eagerly "
                "get_logical_device_configuration get_soft_device_placement get_visible_devices "
                "list_logical_devices list_physical_devices run_functions_eagerly "
                "set_logical_device_configuration set_soft_device_placement set_visible_devices",
            ),
            "experimental_functions_run_eagerly": ".device_config:functions_run_eagerly",
            "experimental_run_functions_eagerly": ".device_config:run_functions_eagerly",
        },
        children=["experimental", "optimizer", "threading"],
    ),
    "config.experimental": Table(_CONFIG_EXPERIMENTAL),
    "config.optimizer": Table(
        _from(
            ".device_config",
            "get_experimental_options set_experimental_options get_jit set_jit",
        )
    ),
    "config.threading": Table(
        _from(
            ".device_config",
            "get_inter_op_parallelism_threads get_intra_op_parallelism_threads "
            "set_inter_op_parallelism_threads set_intra_op_parallelism_threads",
        )
    ),
    "autograph": Table(modules=(".autograph_settings",), children=["experimental"]),
    "autograph.experimental": Table(modules=(".autograph_settings",)),
    "profiler": Table(children=["experimental"]),
    "profiler.experimental": Table(modules=(".profiling",)),
    "tpu": Table(children=["experimental"]),
    "tpu.experimental": Table(modules=(".tpu_systems",)),
    "test": Table(modules=(".testing",)),
    "version": Table(modules=(".versions",)),
    "experimental": Table(modules=(".async_execution",), children=["numpy"]),
    "experimental.numpy": Table(modules=(".numpy_names",), children=["random"]),
    "experimental.numpy.random": Table(modules=(".numpy_random",)),
    "types": Table(children=["experimental"]),
    "types.experimental": Table(
        {
            "Callable": ".function:TensorFunction",
            "ConcreteFunction": "replicax.tracing.concrete:ConcreteFunction",
            "GenericFunction": ".function:TensorFunction",
            "PolymorphicFunction": ".function:TensorFunction",
            "TensorLike": ".tensor:Tensor",
        },
        children=["distributed"],
    ),
    "types.experimental.distributed": Table(
        _from("replicax.values.distributed_values", "Mirrored PerReplica")
    ),
    "contrib": Table(children=["distribute"]),
    "contrib.distribute": Table(modules=("replicax.contrib.distribute",)),
    "python": Table(children=["client"]),
    "python.client": Table(children=["device_lib"]),
    "python.client.device_lib": Table(modules=(".device_list",)),
    "compat": Table({"v2": "replicax.tf"}, (".compat_strings",), ["v1"]),
}


@functools.cache
def tables() -> dict[str, Table]:
    """Returns the tables by path below `tf`; "" is `tf` itself."""
    top = Table(
        {**_TOP, "newaxis": ".running:newaxis", "split": ".ops.arrays:split"},
        (
            ".ops.creation",
            ".ops.arrays",
            ".running",
            ".host_functions",
            ".custom_gradients",
            ".initializer_names",
        ),
        _first(_PATHS) | {*MODULES, "compat"},
    )
    paths = {**_PATHS, "": top}
    for name in ("initializers", "losses", "metrics", "optimizers"):
        top.names[name] = f"replicax.tf.keras.{name}"
    # In version 1, most namespaces have the names of version 2.
    v1 = {name: f"replicax.tf.{name}" for name in top.children - {"contrib"}}
    paths["compat.v1"] = Table(
        {**v1, **top.names, **_V1_NAMES},
        top.modules,
        _V1_CHILDREN,
        (".v1.ops", ".v1.random_ops", ".v1.settings", ".v1.initializers"),
    )
    for name in _V1_CHILDREN - {"losses", "metrics", "nn", "random"}:
        paths[f"compat.v1.{name}"] = Table(overrides=(f".v1.{name}",))
    paths["compat.v1.distribute"].children = frozenset({"experimental"})
    paths["compat.v1.distribute.experimental"] = Table(modules=(".v1.distribute_experimental",))
    # Their names are those of other functions in Keras.
    paths["compat.v1.losses"] = Table({"Reduction": "replicax.tf.keras.losses:Reduction"})
    paths["compat.v1.metrics"] = Table()
    random = _PATHS["random"]
    paths["compat.v1.random"] = Table(
        {
            **random.names,
            **_from(".v1.random_ops", "get_seed multinomial set_random_seed"),
            "experimental": "replicax.tf.random.experimental",
        },
        random.modules,
    )
    nn = _PATHS["nn"]
    paths["compat.v1.nn"] = Table(nn.names, nn.modules, overrides=(".v1.nn",))
    return paths


# Names of version 1 that moved, or with which code under a strategy was written.
_V1_NAMES = {
    "__version__": ".versions:VERSION",
    **_from(
        ".versions",
        "COMPILER_VERSION GIT_VERSION GRAPH_DEF_VERSION GRAPH_DEF_VERSION_MIN_CONSUMER "
        "GRAPH_DEF_VERSION_MIN_PRODUCER VERSION",
    ),
    **_from(
        ".ops.maths",
        "accumulate_n ceil expm1 floordiv floormod is_finite is_inf is_nan log log1p reciprocal "
        "rint rsqrt squared_difference",
    ),
    **_from(".ops.reductions", "cumprod"),
    **_from(".ops.special", "betainc digamma erf erfc igamma igammac lbeta lgamma polygamma zeta"),
    "div_no_nan": ".ops.guarded:divide_no_nan",
    **_from(
        ".ops.segments",
        "segment_max segment_mean segment_min segment_prod segment_sum unsorted_segment_max "
        "unsorted_segment_mean unsorted_segment_min unsorted_segment_prod "
        "unsorted_segment_sqrt_n unsorted_segment_sum",
    ),
    **_from(".ops.complex_numbers", "angle conj imag real"),
    **_from(".ops.comparisons", "is_non_decreasing is_strictly_increasing logical_xor"),
    **_from(".ops.counting", "bincount confusion_matrix"),
    **_from(".ops.indexing", "invert_permutation"),
    **_from(".ops.clipping", "global_norm"),
    **_from(".ops.activations", "log_sigmoid"),
    **_from(".ops.blocks", "depth_to_space space_to_depth"),
    "batch_to_space_nd": ".ops.blocks:batch_to_space",
    **_from(".ops.linalg", "cholesky cholesky_solve qr svd"),
    "matrix_determinant": ".ops.linalg:det",
    "matrix_inverse": ".ops.linalg:inv",
    "matrix_solve": ".ops.linalg:solve",
    "matrix_solve_ls": ".ops.linalg:lstsq",
    "matrix_triangular_solve": ".ops.linalg:triangular_solve",
    "self_adjoint_eig": ".ops.linalg:eigh",
    "self_adjoint_eigvals": ".ops.linalg:eigvalsh",
    **_from(".ops.matrices", "cross matrix_transpose trace"),
    "diag": ".ops.matrices:tensor_diag",
    "diag_part": ".ops.matrices:tensor_diag_part",
    "matrix_band_part": ".ops.matrices:band_part",
    "matrix_diag": ".ops.matrices:diag",
    "matrix_diag_part": ".ops.matrices:diag_part",
    "matrix_set_diag": ".ops.matrices:set_diag",
    "lin_space": ".ops.creation:linspace",
    "tensor_scatter_add": ".ops.indexing:tensor_scatter_nd_add",
    "tensor_scatter_sub": ".ops.indexing:tensor_scatter_nd_sub",
    "tensor_scatter_update": ".ops.indexing:tensor_scatter_nd_update",
    "where_v2": ".ops.indexing:where",
    **_from(".signal", "fft fft2d fft3d ifft ifft2d ifft3d"),
    "spectral": "replicax.tf.signal",
    **_from(
        ".io.parsing",
        "FixedLenFeature FixedLenSequenceFeature VarLenFeature decode_raw parse_example "
        "parse_single_example parse_single_sequence_example parse_tensor serialize_tensor",
    ),
    **_from(
        ".io.files", "decode_base64 decode_csv encode_base64 matching_files read_file write_file"
    ),
    "python_io": "replicax.tf.io",
    **_from(
        ".debugging",
        "assert_greater_equal assert_integer assert_less_equal assert_near assert_negative "
        "assert_non_negative assert_non_positive assert_none_equal assert_positive "
        "assert_proper_iterable assert_rank_at_least assert_rank_in assert_same_float_dtype "
        "assert_scalar assert_type check_numerics is_numeric_tensor",
    ),
    **_from(".strings", "regex_replace substr reduce_join"),
    "string_join": ".strings:join",
    "string_strip": ".strings:strip",
    "string_to_hash_bucket": ".strings:to_hash_bucket",
    "string_to_hash_bucket_fast": ".strings:to_hash_bucket_fast",
    "string_to_number": ".strings:to_number",
    "OpError": ".errors:OpError",
    "dimension_at_index": ".compat_strings:dimension_at_index",
    "dimension_value": ".compat_strings:dimension_value",
    "get_variable": ".v1.variables:get_variable",
    "get_tower_context": "replicax.contrib.distribute:get_tower_context",
}
_V1_CHILDREN = frozenset(
    {"app", "distribute", "flags", "gfile", "image", "logging", "losses", "metrics", "nn", "random"}
)


def _first(paths: Iterable[str]) -> set[str]:
    return {path.partition(".")[0] for path in paths}
