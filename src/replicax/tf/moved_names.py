"""Names of TensorFlow 1 that have another name in version 2, and what to write for them."""

from __future__ import annotations

# Names of TensorFlow 1, by the namespace of version 2 that has them.
_MOVED: dict[str, str] = {
    "math": (
        "betainc bincount ceil confusion_matrix count_nonzero cumprod digamma erf "
        "erfc expm1 floordiv floormod igamma igammac imag invert_permutation is_finite is_inf "
        "is_nan is_non_decreasing is_strictly_increasing lbeta lgamma log log1p log_sigmoid "
        "logical_xor polygamma real reciprocal rint rsqrt segment_max segment_mean "
        "segment_min segment_prod segment_sum squared_difference unsorted_segment_max "
        "unsorted_segment_mean unsorted_segment_min unsorted_segment_prod "
        "unsorted_segment_sqrt_n unsorted_segment_sum zeta"
    ),
    "linalg": "cholesky cholesky_solve cross global_norm qr svd trace",
    "io": (
        "FixedLenFeature FixedLenSequenceFeature VarLenFeature decode_base64 decode_csv "
        "decode_raw encode_base64 matching_files parse_example parse_single_example "
        "parse_single_sequence_example parse_tensor read_file serialize_tensor write_file"
    ),
    "strings": "reduce_join regex_replace substr",
    "debugging": (
        "assert_greater_equal assert_integer assert_less_equal assert_near assert_negative "
        "assert_non_negative assert_non_positive assert_none_equal assert_positive "
        "assert_proper_iterable assert_rank_at_least assert_rank_in assert_same_float_dtype "
        "assert_scalar assert_type check_numerics is_numeric_tensor"
    ),
    "nn": "depth_to_space space_to_depth",
    "signal": "fft fft2d fft3d ifft ifft2d ifft3d",
    "version": "COMPILER_VERSION GIT_VERSION GRAPH_DEF_VERSION VERSION",
    "compat.v1": (
        "ConfigProto GPUOptions GraphOptions Print RunOptions app batch_gather div flags "
        "get_seed glorot_normal_initializer glorot_uniform_initializer logging mod "
        "orthogonal_initializer to_bfloat16 to_double to_float to_int32 to_int64 "
        "truncated_normal_initializer variance_scaling_initializer"
    ),
}
ADVICE: dict[str, str] = {
    name: f"Use `tf.{namespace}.{name}`"
    for namespace, names in _MOVED.items()
    for name in names.split()
}
# Names of TensorFlow 1 that have another name now.
ADVICE |= {
    old: f"Use `tf.{new}`"
    for old, new in {
        "gfile.Copy": "io.gfile.copy",
        "gfile.DeleteRecursively": "io.gfile.rmtree",
        "gfile.Exists": "io.gfile.exists",
        "gfile.FastGFile": "io.gfile.GFile",
        "gfile.GFile": "io.gfile.GFile",
        "gfile.Glob": "io.gfile.glob",
        "gfile.IsDirectory": "io.gfile.isdir",
        "gfile.ListDirectory": "io.gfile.listdir",
        "gfile.MakeDirs": "io.gfile.makedirs",
        "gfile.MkDir": "io.gfile.mkdir",
        "gfile.Open": "io.gfile.GFile",
        "gfile.Remove": "io.gfile.remove",
        "gfile.Rename": "io.gfile.rename",
        "gfile.Stat": "io.gfile.stat",
        "gfile.Walk": "io.gfile.walk",
        "gfile": "io.gfile",
        "io.gfile.open": "io.gfile.GFile",
        "image.resize_area": "image.resize(images, size, 'area')",
        "image.resize_bicubic": "image.resize(images, size, 'bicubic')",
        "image.resize_bilinear": "image.resize(images, size)",
        "image.resize_image_with_crop_or_pad": "image.resize_with_crop_or_pad",
        "image.resize_image_with_pad": "image.resize_with_pad",
        "image.resize_images": "image.resize",
        "image.resize_nearest_neighbor": "image.resize(images, size, 'nearest')",
        "nn.softmax_cross_entropy_with_logits_v2": "nn.softmax_cross_entropy_with_logits",
        "arg_max": "argmax",
        "arg_min": "argmin",
        "diag": "linalg.tensor_diag",
        "diag_part": "linalg.tensor_diag_part",
        "div_no_nan": "math.divide_no_nan",
        "floor_div": "math.floordiv",
        "get_static_shape": "TensorShape(x.shape).as_list()",
        "lin_space": "linspace",
        "matrix_band_part": "linalg.band_part",
        "matrix_determinant": "linalg.det",
        "matrix_diag": "linalg.diag",
        "matrix_diag_part": "linalg.diag_part",
        "matrix_inverse": "linalg.inv",
        "matrix_set_diag": "linalg.set_diag",
        "matrix_solve": "linalg.solve",
        "matrix_transpose": "linalg.matrix_transpose",
        "matrix_triangular_solve": "linalg.triangular_solve",
        "multinomial": "random.categorical",
        "python_io": "io",
        "random_crop": "image.random_crop",
        "random_gamma": "random.gamma",
        "random_normal": "random.normal",
        "random_poisson": "random.poisson",
        "random_shuffle": "random.shuffle",
        "random_uniform": "random.uniform",
        "reverse_v2": "reverse",
        "self_adjoint_eig": "linalg.eigh",
        "set_random_seed": "random.set_seed",
        "string_join": "strings.join",
        "string_split": "strings.split",
        "string_strip": "strings.strip",
        "string_to_hash_bucket": "strings.to_hash_bucket",
        "string_to_hash_bucket_fast": "strings.to_hash_bucket_fast",
        "string_to_number": "strings.to_number",
        "tensor_scatter_update": "tensor_scatter_nd_update",
        "truncated_normal": "random.truncated_normal",
        "backend_config.epsilon": "keras.backend.epsilon",
        "backend_config": "keras.backend",
        "random.set_random_seed": "random.set_seed",
        "random.stateless_shuffle": "random.experimental.stateless_shuffle",
    }.items()
}
ADVICE |= {
    name: "Remove the line: code runs by the rules of version 2"
    for name in (
        "enable_control_flow_v2",
        "enable_eager_execution",
        "enable_resource_variables",
        "enable_v2_behavior",
        "enable_v2_tensorshape",
    )
}
