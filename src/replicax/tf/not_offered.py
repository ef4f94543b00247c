"""Which names of TensorFlow are not offered, and what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from replicax.foundation import errors
from replicax.foundation.spelling import suggestion
from replicax.tf import moved_names


class NotOfferedError(errors.UnsupportedError, AttributeError):
    """Raised for a name of TensorFlow that `replicax.tf` does not offer.

    >>> import replicax.tf as tf
    >>> hasattr(tf, "estimator")
    False
    """


class NotOfferedImportError(errors.UnsupportedError, ModuleNotFoundError):
    """Raised by `import` and `from ... import` for a module that is not offered."""


_KERAS = "Write a Keras model and call `model.fit`; under a strategy, make it in `strategy.scope()`"
_STEP = (
    "Code runs at once: write a function `step(batch)`, decorate it with `@tf.function`, and call "
    "it with `strategy.run(step, args=(batch,))`"
)
_OPTIMIZER = "Use `tf.keras.optimizers`: `SGD`, `Adam`, `Adagrad`, `RMSprop`, `Ftrl`"
_SCHEDULE = "Use a schedule of `tf.keras.optimizers.schedules`"
_LAYERS = "Use the layers of `tf.keras.layers`"
_RAGGED = (
    "Pad sequences: `dataset.padded_batch(...)` or `tf.keras.utils.pad_sequences`, with "
    "`tf.sequence_mask` for the lengths"
)
_LOOKUP = "Use a Python dict inside `dataset.map(lambda x: table[x.numpy()])`"
_CHECKPOINT = "Use `tf.train.Checkpoint(model=model)` and `tf.train.CheckpointManager`"
_HOOKS = "Use a `tf.keras.callbacks.Callback`, or write the lines into the training loop"
_EXPORT = "Use `tf.saved_model.save(module, directory)` or `model.save('model.keras')`"
_PRIVATE = "This is a private name of TensorFlow: use the public name of the same function"
_PROTO = "Protocol buffers of TensorFlow are not part of this; use the Python API that fills them"
_VARIABLES = (
    "Keep variables as attributes of a `tf.Module` or a Keras model, and use `model.variables` and "
    "`model.trainable_variables`"
)
_METRICS = "Use the classes of `tf.keras.metrics`, such as `tf.keras.metrics.Mean()`"
_LOSSES = "Use `tf.keras.losses`, such as `tf.keras.losses.SparseCategoricalCrossentropy`"
_V1_SUMMARY = (
    "Use `with tf.summary.create_file_writer(directory).as_default(): tf.summary.scalar(...)`"
)
_SPARSE_OPS = (
    "Use dense tensors: `tf.scatter_nd` builds one from indices and values; for rows of a table, "
    "`tf.nn.embedding_lookup` and `tf.IndexedSlices`"
)

# The advice for a name and everything below it; the longest entry that fits is used.
ADVICE: dict[str, str] = {
    "estimator": _KERAS,
    "keras.estimator": _KERAS,
    "compat.v1.estimator": _KERAS,
    "Session": _STEP,
    "InteractiveSession": _STEP,
    "placeholder": f"{_STEP}. The arguments of the function take the place of placeholders",
    "placeholder_with_default": f"{_STEP}. The arguments of the function are its inputs",
    "Graph": _STEP,
    "GraphDef": _EXPORT,
    "GraphKeys": _VARIABLES,
    "Operation": _STEP,
    "get_default_graph": _STEP,
    "get_default_session": _STEP,
    "reset_default_graph": "Remove the line: there is no global graph",
    "import_graph_def": "Use `tf.saved_model.load`, or `tf.train.load_checkpoint` for the weights",
    "gradients": "Use `with tf.GradientTape() as tape:` and `tape.gradient(loss, variables)`",
    "get_variable": "Use `tf.Variable(initial_value, name=...)`",
    "get_local_variable": "Use `tf.Variable(value, trainable=False)`",
    "get_variable_scope": _VARIABLES,
    "variable_scope": "Use `tf.name_scope`, and keep variables as attributes of a `tf.Module`",
    "VariableScope": _VARIABLES,
    "AUTO_REUSE": _VARIABLES,
    "global_variables": _VARIABLES,
    "local_variables": _VARIABLES,
    "trainable_variables": _VARIABLES,
    "all_variables": _VARIABLES,
    "global_variables_initializer": "Remove the line: variables have their values when made",
    "local_variables_initializer": "Remove the line: variables have their values when made",
    "variables_initializer": "Remove the line: variables have their values when made",
    "initialize_all_variables": "Remove the line: variables have their values when made",
    "report_uninitialized_variables": "Remove the line: variables have their values when made",
    "is_variable_initialized": "Remove the line: variables have their values when made",
    "tables_initializer": f"Remove the line. {_LOOKUP}",
    "add_to_collection": _VARIABLES,
    "get_collection": _VARIABLES,
    "get_collection_ref": _VARIABLES,
    "assign": "Use `variable.assign(value)`",
    "assign_add": "Use `variable.assign_add(value)`",
    "assign_sub": "Use `variable.assign_sub(value)`",
    "colocate_with": "Remove the line, or use `tf.device`",
    "fixed_size_partitioner": "Use a partitioner of `tf.distribute.experimental.partitioners`",
    "FIFOQueue": "Use `tf.data.Dataset`, whose `prefetch` reads ahead",
    "py_func": "Use `tf.numpy_function`, or `tf.py_function` for a function of tensors",
    "RunMetadata": "Use `tf.profiler.experimental.Profile(directory)`",
    "OptimizerOptions": "Remove the line: XLA compiles every `tf.function`",
    "Summary": _V1_SUMMARY,
    "SessionLog": _V1_SUMMARY,
    "summary.FileWriter": _V1_SUMMARY,
    "summary.merge_all": _V1_SUMMARY,
    "summary.all_v2_summary_ops": _V1_SUMMARY,
    "summary.trace_on": "Use `tf.profiler.experimental.start(directory)`",
    "summary.trace_export": "Use `tf.profiler.experimental.stop()`",
    "summary.trace_off": "Use `tf.profiler.experimental.stop()`",
    "io.RaggedFeature": _RAGGED,
    "io.SparseFeature": _SPARSE_OPS,
    "io.decode_json_example": "Read the text with `json` and build a `tf.train.Example`",
    "io.decode_proto": "Parse the message with `protobuf` in `tf.numpy_function`",
    "io.encode_proto": "Serialize the message with `protobuf` in `tf.numpy_function`",
    "io.deserialize_many_sparse": _SPARSE_OPS,
    "io.serialize_many_sparse": _SPARSE_OPS,
    "io.serialize_sparse": _SPARSE_OPS,
    "io.write_graph": _EXPORT,
    "train.ClusterDef": "Use `tf.train.ClusterSpec`, whose `as_dict()` has the addresses",
    "train.JobDef": "Use `tf.train.ClusterSpec`",
    "train.ServerDef": "Pass the arguments to `tf.distribute.Server`",
    "train.Coordinator": "Use threads of Python and `threading.Event`; `dataset.prefetch` reads "
    "ahead",
    "train.CheckpointView": "Use `tf.train.list_variables` and `tf.train.load_checkpoint`",
    "layers": _LAYERS,
    "losses.mean_squared_error": "Use `tf.reduce_mean(tf.keras.losses.mean_squared_error(y, x))`",
    "losses.add_loss": "Call `layer.add_loss(value)` in a Keras layer",
    "losses.get_regularization_loss": "Use `tf.add_n(model.losses)`",
    "losses.absolute_difference": _LOSSES,
    "losses.compute_weighted_loss": _LOSSES,
    "losses.cosine_distance": _LOSSES,
    "losses.huber_loss": _LOSSES,
    "losses.sigmoid_cross_entropy": _LOSSES,
    "losses.softmax_cross_entropy": _LOSSES,
    "losses.sparse_softmax_cross_entropy": _LOSSES,
    "metrics.accuracy": _METRICS,
    "metrics.mean": _METRICS,
    "metrics.precision": _METRICS,
    "metrics.recall": _METRICS,
    "feature_column": "Use `tf.keras.layers.Normalization`, `Discretization`, `CategoryEncoding` "
    "and `Embedding`",
    "keras.layers.DenseFeatures": "Use Keras preprocessing layers and `Concatenate`",
    "lookup": _LOOKUP,
    "ragged": _RAGGED,
    "RaggedTensor": _RAGGED,
    "RaggedTensorSpec": _RAGGED,
    "data.experimental.dense_to_ragged_batch": _RAGGED,
    "sparse": _SPARSE_OPS,
    "SparseTensorSpec": _SPARSE_OPS,
    "sparse_to_dense": _SPARSE_OPS,
    "sparse_tensor_to_dense": _SPARSE_OPS,
    "sets": "Use Python sets or NumPy in `tf.py_function`",
    "load_op_library": "Write the op with `jax.numpy`, or as a host function with "
    "`tf.numpy_function`; a kernel in C++ is registered with `jax.ffi`",
    "load_library": "Write the op with `jax.numpy` or `tf.numpy_function`",
    "lite": "Export with `tf.saved_model.save`, and convert the weights where TensorFlow is "
    "installed",
    "experimental.dtensor": "Use a strategy, or `jax.sharding` directly",
    "data.experimental.service": "Read in each worker: "
    "`strategy.distribute_datasets_from_function(fn)` shards by `InputContext`",
    "data.TableRecordDataset": "Export the table to TFRecord files",
    "data.experimental.make_csv_dataset": "Read the file with `csv` or pandas and use "
    "`tf.data.Dataset.from_tensor_slices(dict(frame))`",
    "data.experimental.CsvDataset": "Use `tf.data.TextLineDataset(files).skip(1).map(lambda line: "
    "tf.io.decode_csv(line, record_defaults))`",
    "data.make_initializable_iterator": "Use `iter(dataset)`",
    "contrib.distribute": "Use the name of `tf.distribute` with the same purpose",
    "contrib.distribute.DistributeConfig": _KERAS,
    "contrib.distribute.Monitor": "Write a loop over steps",
    "contrib.distribute.Step": "Write a function that calls `call_for_each_tower`",
    "contrib.distribute.StandardInputStep": "Write a function that calls `call_for_each_tower` "
    "with `iterator.get_next()`",
    "contrib.distribute.StandardSingleLossStep": "Compute the loss in a `tf.GradientTape`, and "
    "apply its gradients with a Keras optimizer",
    "contrib.distribute.TPUStrategy": "Use `tf.distribute.TPUStrategy`",
    "contrib.distribute.initialize_tpu_system": "Use `tf.tpu.experimental.initialize_tpu_system`",
    "contrib.distribute.python": "Use the names of `tf.contrib.distribute`, such as "
    "`AllReduceCrossTowerOps`",
    "contrib.cluster_resolver": "Use `tf.distribute.cluster_resolver`",
    "contrib.data": "Use the methods of `tf.data.Dataset`",
    "contrib.summary": _V1_SUMMARY,
    "contrib.tpu": "Use `tf.distribute.TPUStrategy` with a Keras model",
    "contrib.framework.nest": "Use `tf.nest`",
    "contrib.mixed_precision": "Use `tf.keras.mixed_precision`",
    "contrib.rnn": "Use the recurrent layers of `tf.keras.layers`",
    "contrib.opt": _OPTIMIZER,
    "contrib.layers": _LAYERS,
    "contrib": "tf.contrib ended with TensorFlow 1: use the name of TensorFlow 2, or Keras",
    "python.client.session": _STEP,
    "python": _PRIVATE,
    "core": _PROTO,
    "compiler": _PRIVATE,
    "compat.v1.disable_eager_execution": _STEP,
    "compat.v1.disable_v2_behavior": _STEP,
    "disable_eager_execution": _STEP,
    "compat.v1.data.make_initializable_iterator": "Use `iter(dataset)`",
    "compat.v1.graph_util": _EXPORT,
    "compat.v1.layers": _LAYERS,
    "compat.v1.lite": "Export with `tf.saved_model.save`",
    "profiler.ProfileOptionBuilder": "Use `tf.profiler.experimental.ProfilerOptions`",
    "profiler.profile": "Use `tf.profiler.experimental.Profile(directory)`, or "
    "`jax.jit(f).lower(...).cost_analysis()` for the number of operations",
    "profiler.Profiler": "Use `tf.profiler.experimental.Profile(directory)`",
    "compat.v1.tpu": "Use `tf.distribute.TPUStrategy`; `tf.tpu.experimental` has its set-up",
    "compat.v1.saved_model": _EXPORT,
    "compat.v1.distributions": "Use `jax.random` or NumPy for random numbers of this distribution",
    "compat.v1.mixed_precision": "Use `tf.keras.mixed_precision.set_global_policy`",
    "graph_util": _EXPORT,
    "saved_model.signature_constants": "Use the name of `tf.saved_model`, such as "
    "`tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY`",
    "saved_model.tag_constants": "Use the name of `tf.saved_model`, such as "
    "`tf.saved_model.SERVING`",
    "saved_model.builder": _EXPORT,
    "saved_model.Builder": _EXPORT,
    "saved_model.loader": "Use `tf.saved_model.load(directory)`",
    "saved_model.signature_def_utils": _EXPORT,
    "saved_model.utils": _EXPORT,
    "saved_model.predict_signature_def": _EXPORT,
    "train.Saver": _CHECKPOINT,
    "train.NewCheckpointReader": "Use `tf.train.load_checkpoint(prefix)`",
    "train.Scaffold": _KERAS,
    "train.MonitoredSession": _STEP,
    "train.MonitoredTrainingSession": _STEP,
    "train.SessionRunHook": _HOOKS,
    "train.SessionRunArgs": _HOOKS,
    "train.LoggingTensorHook": _HOOKS,
    "train.ProfilerHook": _HOOKS,
    "train.SecondOrStepTimer": _HOOKS,
    "train.StopAtStepHook": _HOOKS,
    "train.SummarySaverHook": _HOOKS,
    "train.CheckpointSaverHook": _CHECKPOINT,
    "train.Optimizer": _OPTIMIZER,
    "train.AdadeltaOptimizer": _OPTIMIZER,
    "train.AdagradOptimizer": _OPTIMIZER,
    "train.AdamAsyncOptimizer": _OPTIMIZER,
    "train.AdamOptimizer": _OPTIMIZER,
    "train.FtrlOptimizer": _OPTIMIZER,
    "train.GradientDescentOptimizer": _OPTIMIZER,
    "train.MomentumOptimizer": _OPTIMIZER,
    "train.RMSPropOptimizer": _OPTIMIZER,
    "train.SyncReplicasOptimizer": "A strategy averages gradients: use `strategy.run`",
    "train.exponential_decay": _SCHEDULE,
    "train.piecewise_constant": _SCHEDULE,
    "train.polynomial_decay": _SCHEDULE,
    "train.get_global_step": "Use `optimizer.iterations`",
    "train.get_or_create_global_step": "Use `optimizer.iterations`",
    "train.import_meta_graph": "Use `tf.train.load_checkpoint` for the weights",
    "train.export_meta_graph": _EXPORT,
    "train.write_graph": _EXPORT,
    "train.init_from_checkpoint": "Use `tf.train.Checkpoint(model=model).restore(prefix)`",
    "train.generate_checkpoint_state_proto": _CHECKPOINT,
    "train.TrackableView": "Use `model.variables`, or `tf.train.list_variables` for a checkpoint",
    "train.summary_iterator": "Read event files with the package `tensorboard`",
    "train.experimental.enable_mixed_precision_graph_rewrite": "Use "
    "`tf.keras.mixed_precision.set_global_policy('mixed_bfloat16')`",
    "python_io.TableReader": "Export the table to TFRecord files",
    "python_io.TableWriter": "Use `tf.io.TFRecordWriter`",
    "nn.rnn_cell": "Use `tf.keras.layers.LSTMCell`, `GRUCell` and `RNN`",
    "nn.dynamic_rnn": "Use `tf.keras.layers.RNN`",
    "nn.bidirectional_dynamic_rnn": "Use `tf.keras.layers.Bidirectional`",
    "autograph.to_graph": "Use `tf.function`; write conditions on tensors with `tf.cond`",
    "xla.experimental.jit_scope": "Use `@tf.function`, which XLA always compiles",
    "tpu.CrossShardOptimizer": "Remove it: a strategy adds gradients of all replicas",
    "tpu.bfloat16_scope": "Use `tf.keras.mixed_precision.set_global_policy('mixed_bfloat16')`",
    "tpu.cross_replica_sum": "Use `tf.distribute.get_replica_context().all_reduce('SUM', x)`",
    "tools": "Remove the decorator: it only marks documentation",
    "sysconfig": "Write the op with `jax.numpy`, or register a kernel in C++ with `jax.ffi`",
    "mlir": "Use `jax.jit(f).lower(...)`, whose `as_text()` shows the program",
    "tpu.XLAOptions": "Remove it: XLA compiles every `tf.function`",
    "tpu.experimental.DeviceAssignment": "Pass devices to `tf.distribute.TPUStrategy`",
    "tpu.experimental.HardwareFeature": "Use `tf.nn.embedding_lookup`; tables are sharded by "
    "`ParameterServerStrategy`",
    "tpu.experimental.HardWareFeature": "Use `tf.nn.embedding_lookup`",
    "tpu.experimental.embedding": "Use `tf.keras.layers.Embedding`, sharded by "
    "`ParameterServerStrategy`",
    "keras.utils.multi_gpu_model": "Use `with tf.distribute.MirroredStrategy().scope():`",
    "keras.preprocessing.text": "Number the words with a Python dict, in `dataset.map` or before",
    "keras.wrappers.scikit_learn": "Use `tf.keras.wrappers.SKLearnClassifier`",
    "keras.backend": "Use the op of `tf.*` or `tf.keras.ops` with the same purpose",
    "keras.optimizer_v2": "Use `tf.keras.optimizers`",
    "raw_ops": "Use the public op of `tf.*` with the same purpose",
    "debugging.experimental": "Use `jax.debug` or `tf.debugging.enable_check_numerics()`",
    "quantization": "Use the quantization of Keras: `model.quantize('int8')`",
    "experimental.tensorrt": "Export with `tf.saved_model.save`",
    "audio": "Read the file with the package `soundfile` in `tf.py_function`",
    "strings.unicode_script": "Look the script up with the package `regex` in `tf.py_function`",
    "image.decode_jxl": "Convert the files to PNG, and use `tf.image.decode_png`",
    "io.decode_jxl": "Convert the files to PNG, and use `tf.io.decode_png`",
    "image.generate_bounding_box_proposals": "Decode the boxes, then use "
    "`tf.image.non_max_suppression_padded` or `combined_non_max_suppression`",
    "qint8": "Use `tf.int8`",
    "qint16": "Use `tf.int16`",
    "qint32": "Use `tf.int32`",
    "quint8": "Use `tf.uint8`",
    "quint16": "Use `tf.uint16`",
    "resource": "Use `tf.Variable` directly",
    "variant": "Use Python objects on the host",
    "TypeSpec": "Use `tf.TensorSpec`",
    "type_spec_from_value": "Use `tf.TensorSpec.from_tensor`",
    "make_tensor_proto": "Use `tensor.numpy().tobytes()`, or `tf.io.serialize_tensor`",
    "make_ndarray": "Use `tensor.numpy()`, or `tf.io.parse_tensor`",
    "edit_distance": "Compute it in `tf.py_function`",
    "DeviceSpec": "Write the name of the device, such as '/gpu:0', to `tf.device`",
    "Dimension": "Sizes are ints, or None",
    "contrib.eager": "Remove the prefix: code runs eagerly",
}

ADVICE |= moved_names.ADVICE
# Families of names that are not offered, by what to do.
_FAMILIES: dict[str, str] = {
    "Use `tf.data.Dataset`, whose `prefetch` reads ahead": (
        "FixedLengthRecordReader IdentityReader LMDBReader PaddingFIFOQueue PriorityQueue "
        "QueueBase RandomShuffleQueue ReaderBase TFRecordReader TextLineReader WholeFileReader "
        "io.PaddingFIFOQueue io.PriorityQueue io.QueueBase io.RandomShuffleQueue queue "
        "train.QueueRunner train.add_queue_runner train.batch train.batch_join "
        "train.input_producer train.limit_epochs train.maybe_batch train.queue_runner "
        "train.range_input_producer train.shuffle_batch train.shuffle_batch_join "
        "train.slice_input_producer train.start_queue_runners train.string_input_producer"
    ),
    _SPARSE_OPS: (
        "SparseFeature SparseTensorValue deserialize_many_sparse serialize_many_sparse "
        "serialize_sparse sparse_add sparse_concat sparse_fill_empty_rows sparse_mask "
        "sparse_matmul sparse_maximum sparse_merge sparse_minimum sparse_reduce_max "
        "sparse_reduce_sum sparse_reorder sparse_reshape sparse_retain sparse_segment_mean "
        "sparse_segment_sqrt_n sparse_segment_sum sparse_slice sparse_softmax sparse_split "
        "sparse_tensor_dense_matmul sparse_to_indicator sparse_transpose "
        "data.experimental.dense_to_sparse_batch"
    ),
    "Use the method of the variable, such as `variable.scatter_update(tf.IndexedSlices(...))`": (
        "batch_scatter_update scatter_add scatter_div scatter_max scatter_min scatter_mul "
        "scatter_nd_add scatter_nd_sub scatter_nd_update scatter_sub scatter_update"
    ),
    "Use the quantization of Keras: `model.quantize('int8')`": (
        "QUANTIZED_DTYPES dequantize fake_quant_with_min_max_args fake_quant_with_min_max_vars "
        "fake_quant_with_min_max_vars_per_channel quantize quantize_v2 quantized_concat"
    ),
    _HOOKS: (
        "train.CheckpointSaverListener train.FeedFnHook train.FinalOpsHook "
        "train.GlobalStepWaiterHook "  # codespell:ignore
        "train.NanTensorHook train.SessionRunContext train.SessionRunValues train.StepCounterHook"
    ),
    _STEP: (
        "Event NodeDef add_to_collections container get_session_handle get_session_tensor "
        "make_template op_scope train.ChiefSessionCreator train.SessionCreator "
        "train.SessionManager train.SingularMonitoredSession train.Supervisor "
        "train.WorkerSessionCreator train.basic_train_loop variable_op_scope wrap_function"
    ),
    _SCHEDULE: (
        "train.cosine_decay train.cosine_decay_restarts train.inverse_time_decay "
        "train.linear_cosine_decay train.natural_exp_decay train.noisy_linear_cosine_decay "
        "train.piecewise_constant_decay"
    ),
    _OPTIMIZER: (
        "train.AdagradDAOptimizer train.ProximalAdagradOptimizer "
        "train.ProximalGradientDescentOptimizer"
    ),
    "Use `optimizer.iterations`": "train.assert_global_step train.create_global_step "
    "train.global_step",
    "A strategy places variables: use `tf.distribute.ParameterServerStrategy`": (
        "train.replica_device_setter min_max_variable_partitioner variable_axis_size_partitioner"
    ),
    _LOOKUP: (
        "data.experimental.DatasetInitializer data.experimental.index_table_from_dataset "
        "data.experimental.table_from_dataset"
    ),
    "Register the class as a pytree: `jax.tree_util.register_dataclass`": (
        "experimental.BatchableExtensionType experimental.ExtensionType "
        "experimental.ExtensionTypeBatchEncoder experimental.ExtensionTypeSpec "
        "experimental.extension_type"
    ),
    "Call your own function instead of the op": (
        "experimental.dispatch_for_api experimental.dispatch_for_binary_elementwise_apis "
        "experimental.dispatch_for_unary_elementwise_apis experimental.unregister_dispatch_for"
    ),
    _RAGGED: (
        "experimental.DynamicRaggedShape experimental.RowPartition experimental.StructuredTensor "
        "ragged_fill_empty_rows"
    ),
    "Use `tf.TensorSpec`": "IndexedSlicesSpec NoneTensorSpec OptionalSpec TensorArraySpec",
    "Use `tf.custom_gradient`": "RegisterGradient",
    "Use two tapes: `outer.jacobian(inner.gradient(y, x), x)`": "hessians",
    "Use `tf.GradientTape`, or `jax.jvp` for forward mode": "autodiff",
    "Use `@tf.function(jit_compile=True)`": "xla",
    "Give the class a method `__array__`": "register_tensor_conversion_function",
    "Use a `threading.Lock`": "CriticalSection",
    "Use `tf.identity`": "guarantee_const",
    "Use the layer or function of `tf.nn` with the same purpose": (
        "conv conv2d_backprop_filter_v2 conv2d_backprop_input_v2 extract_volume_patches"
    ),
    "Use `jax.numpy.fft` in `tf.function`": "fftnd ifftnd irfftnd rfftnd",
    "Use `jax.dlpack`": "experimental.dlpack",
    "Use `jax.sharding` or a strategy": "dtensor",
    "Use `tf.io.TFRecordWriter`": "data.experimental.TFRecordWriter",
    "Read the rows with `sqlite3` in `tf.data.Dataset.from_generator`": (
        "data.experimental.SqlDataset"
    ),
    "Use `dataset.group_by_window`, or a dict in `dataset.reduce`": (
        "data.experimental.Reducer data.experimental.group_by_reducer"
    ),
    "Use `dataset.skip(i).take(1)`": "data.experimental.at",
    "Put the iterator into `tf.train.Checkpoint`": (
        "data.experimental.make_saveable_from_iterator"
    ),
    "Use `dataset.save(path)`": "data.experimental.distributed_save",
    "Use `tf.data.DatasetSpec`": "data.IteratorSpec",
    "Use `dataset.element_spec`": (
        "data.get_output_classes data.get_output_shapes data.get_output_types"
    ),
    "Remove it: the files of checkpoints are split by size": (
        "train.experimental.MaxShardSizePolicy train.experimental.ShardByTaskPolicy "
        "train.experimental.ShardableTensor train.experimental.ShardingCallback"
    ),
    "Use `tf.keras.mixed_precision`": (
        "train.experimental.DynamicLossScale train.experimental.FixedLossScale "
        "train.experimental.LossScale train.experimental.MixedPrecisionLossScaleOptimizer "
        "train.experimental.disable_mixed_precision_graph_rewrite"
    ),
}
ADVICE |= {name: text for text, names in _FAMILIES.items() for name in names.split()}
ADVICE |= {"compat.v1.losses": _LOSSES, "compat.v1.metrics": _METRICS}
# `tf.losses` and `tf.metrics` are those of Keras; in version 1 they were functions.
ADVICE |= {
    f"keras.{name}": text
    for name, text in ADVICE.items()
    if name.startswith(("losses.", "metrics."))
    and name not in ("losses.huber_loss", "losses.mean_squared_error")
}


def advice(path: str) -> str:
    """Returns what to write instead of a name; empty if the table has nothing about it.

    Args:
      path: The name below `tf`, such as "compat.v1.Session".

    >>> advice("estimator.Estimator").startswith("Write a Keras model")
    True
    """
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        found = ADVICE.get(".".join(parts[:length]))
        if found is not None:
            return found
    if parts[:2] == ["compat", "v1"]:
        return advice(".".join(parts[2:])) if len(parts) > 2 else ""
    return ""


def is_listed(path: str) -> bool:
    """Tells whether the table has a name itself, not only a namespace above it.

    >>> is_listed("Session"), is_listed("compat.v1.Session"), is_listed("Session.run")
    (True, True, False)
    """
    return path in ADVICE or path.removeprefix("compat.v1.") in ADVICE


def error(path: str, known: Callable[[], Iterable[str]] = tuple) -> NotOfferedError:
    """Returns the error for a name that is not offered.

    Args:
      path: The name below `tf`.
      known: Returns the names of its namespace, for a suggestion.
    """
    return NotOfferedError(*_parts(path, known))


def import_error(path: str) -> NotOfferedImportError:
    """Returns the error for the import of a module that is not offered."""
    return NotOfferedImportError(*_parts(path, tuple))


def _parts(path: str, known: Callable[[], Iterable[str]]) -> tuple[str, str, str]:
    namespace, _, name = f"tf.{path}".rpartition(".")
    found = advice(path)
    if found:
        return (
            f"`{namespace}` has the names that programs under strategies need",
            f"`tf.{path}` is not offered",
            f"{found}.",
        )
    todo = suggestion([name], known())
    return (
        f"`{namespace}` must have the name",
        f"it has no {name!r}",
        todo or "Use `jax.numpy` or `tf.numpy_function` for it; see docs/guides/tf-programs.md.",
    )
