"""Functions of `tf.compat.v1.nn` whose arguments differ from those of version 2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from replicax.foundation import errors
from replicax.tf.arguments import Value
from replicax.tf.ops import activations, clipping, convolutions, creation, matrices, nn, pooling
from replicax.tf.ops import random as tf_random
from replicax.tf.v1.ops import either

__all__ = [
    "avg_pool",
    "avg_pool_v2",
    "conv2d",
    "conv2d_backprop_input",
    "depthwise_conv2d",
    "depthwise_conv2d_native",
    "dropout",
    "embedding_lookup",
    "l2_normalize",
    "log_softmax",
    "max_pool",
    "max_pool_v2",
    "moments",
    "relu_layer",
    "separable_conv2d",
    "softmax",
    "softmax_cross_entropy_with_logits",
    "softmax_cross_entropy_with_logits_v2",
    "xw_plus_b",
]


def dropout(
    x: Value,
    keep_prob: Value = None,
    noise_shape: Value = None,
    seed: int | None = None,
    name: str | None = None,
    rate: Value = None,
) -> Any:
    """Sets elements to zero at random.

    Args:
      x: A tensor.
      keep_prob: The share of elements that stay; `1 - rate`.
      noise_shape: The shape of the random choices.
      seed: A seed.
      name: Accepted for portability.
      rate: The share of elements that become zero.

    >>> dropout([1.0, 2.0], keep_prob=1.0).numpy().tolist()
    [1.0, 2.0]
    """
    del name
    if (keep_prob is None) == (rate is None):
        raise errors.InvalidArgumentError(
            "`dropout` needs one of `keep_prob` and `rate`",
            "both or none were given",
            "Pass `rate`.",
        )
    found = rate if keep_prob is None else 1 - keep_prob
    return tf_random.dropout(x, found, noise_shape, seed)


def softmax(
    logits: Value, axis: int | None = None, name: str | None = None, dim: int | None = None
) -> Any:
    """Returns probabilities from logits.

    >>> softmax([[0.0, 0.0]], dim=-1).numpy().tolist()
    [[0.5, 0.5]]
    """
    del name
    return activations.softmax(logits, either(axis, dim, -1))


def log_softmax(
    logits: Value, axis: int | None = None, name: str | None = None, dim: int | None = None
) -> Any:
    """Returns logarithms of probabilities from logits.

    >>> log_softmax([[0.0]]).numpy().tolist()
    [[0.0]]
    """
    del name
    return activations.log_softmax(logits, either(axis, dim, -1))


def softmax_cross_entropy_with_logits_v2(
    labels: Value,
    logits: Value,
    axis: int | None = None,
    name: str | None = None,
    dim: Value = None,
) -> Any:
    """Returns the cross entropy of logits and probabilities.

    >>> softmax_cross_entropy_with_logits_v2([[1.0, 0.0]], [[3.0, 1.0]]).shape.as_list()
    [1]
    """
    del name
    return nn.softmax_cross_entropy_with_logits(labels, logits, either(axis, dim, -1))


def softmax_cross_entropy_with_logits(
    _sentinel: None = None,
    labels: Value = None,
    logits: Value = None,
    dim: int = -1,
    name: str | None = None,
    axis: int | None = None,
) -> Any:
    """Returns the cross entropy of logits and probabilities, which are constants for gradients.

    >>> softmax_cross_entropy_with_logits(labels=[[1.0]], logits=[[0.0]]).shape.as_list()
    [1]
    """
    del _sentinel
    fixed = creation.stop_gradient(labels)
    return softmax_cross_entropy_with_logits_v2(fixed, logits, either(axis, dim), name)


def moments(
    x: Value,
    axes: Value,
    shift: Value = None,
    name: str | None = None,
    keep_dims: bool | None = None,
    keepdims: bool | None = None,
) -> Any:
    """Returns mean and variance.

    >>> [part.numpy().item() for part in moments([1.0, 3.0], [0])]
    [2.0, 1.0]
    """
    del shift, name
    return nn.moments(x, axes, keepdims=bool(either(keepdims, keep_dims, False)))


def l2_normalize(
    x: Value,
    axis: Value = None,
    epsilon: float = 1e-12,
    name: str | None = None,
    dim: Value = None,
) -> Any:
    """Divides by the Euclidean norm.

    >>> l2_normalize([0.0, 2.0], dim=0).numpy().tolist()
    [0.0, 1.0]
    """
    del name
    return clipping.l2_normalize(x, either(axis, dim), epsilon)


def embedding_lookup(
    params: Value,
    ids: Value,
    partition_strategy: str = "mod",
    name: str | None = None,
    validate_indices: bool = True,
    max_norm: float | None = None,
) -> Any:
    """Returns rows of a table.

    >>> embedding_lookup([[1.0], [2.0]], [1]).numpy().tolist()
    [[2.0]]
    """
    del partition_strategy, validate_indices, name
    return nn.embedding_lookup(params, ids, max_norm=max_norm)


def conv2d(
    input: Value,
    filter: Value = None,
    strides: Value = None,
    padding: Value = None,
    use_cudnn_on_gpu: bool = True,
    data_format: str = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
    filters: Value = None,
) -> Any:
    """Convolves images with filters.

    >>> import numpy as np
    >>> image, kernel = np.ones((1, 2, 2, 1), np.float32), np.ones((1, 1, 1, 1), np.float32)
    >>> conv2d(image, kernel, [1, 1, 1, 1], "SAME").shape.as_list()
    [1, 2, 2, 1]
    """
    del use_cudnn_on_gpu, name
    return convolutions.conv2d(
        input, either(filter, filters), strides, padding, data_format, list(dilations)
    )


def conv2d_backprop_input(
    input_sizes: Value,
    filter: Value = None,
    out_backprop: Value = None,
    strides: Value = None,
    padding: Value = None,
    use_cudnn_on_gpu: bool = True,
    data_format: str = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
    filters: Value = None,
) -> Any:
    """Returns the gradient of a convolution with respect to its input."""
    del use_cudnn_on_gpu, name
    return convolutions.conv2d_transpose(
        out_backprop,
        either(filter, filters),
        input_sizes,
        strides,
        padding,
        data_format,
        list(dilations),
    )


def depthwise_conv2d(
    input: Value,
    filter: Value,
    strides: Value,
    padding: Value,
    rate: Value = None,
    name: str | None = None,
    data_format: str | None = None,
    dilations: Value = None,
) -> Any:
    """Convolves each channel of images with filters of its own."""
    del name
    return convolutions.depthwise_conv2d(
        input, filter, strides, padding, data_format, either(dilations, rate)
    )


depthwise_conv2d_native = depthwise_conv2d


def separable_conv2d(
    input: Value,
    depthwise_filter: Value,
    pointwise_filter: Value,
    strides: Value,
    padding: Value,
    rate: Value = None,
    name: str | None = None,
    data_format: str | None = None,
    dilations: Value = None,
) -> Any:
    """Convolves channels one by one, and then combines them."""
    del name
    return convolutions.separable_conv2d(
        input,
        depthwise_filter,
        pointwise_filter,
        strides,
        padding,
        data_format,
        either(dilations, rate),
    )


def max_pool(
    value: Value = None,
    ksize: Value = None,
    strides: Value = None,
    padding: Value = None,
    data_format: str = "NHWC",
    name: str | None = None,
    input: Value = None,
) -> Any:
    """Returns the largest element of each window of images.

    >>> import numpy as np
    >>> max_pool(np.ones((1, 2, 2, 1), np.float32), [1, 2, 2, 1], [1, 2, 2, 1], "SAME").shape
    TensorShape([1, 1, 1, 1])
    """
    del name
    return pooling.max_pool2d(either(value, input), ksize, strides, padding, data_format)


def avg_pool(
    value: Value = None,
    ksize: Value = None,
    strides: Value = None,
    padding: Value = None,
    data_format: str = "NHWC",
    name: str | None = None,
    input: Value = None,
) -> Any:
    """Returns the mean of each window of images."""
    del name
    return pooling.avg_pool2d(either(value, input), ksize, strides, padding, data_format)


max_pool_v2, avg_pool_v2 = pooling.max_pool, pooling.avg_pool


def xw_plus_b(x: Value, weights: Value, biases: Value, name: str | None = None) -> Any:
    """Returns `x @ weights + biases`.

    >>> xw_plus_b([[1.0]], [[2.0]], [3.0]).numpy().tolist()
    [[5.0]]
    """
    del name
    return nn.bias_add(matrices.matmul(x, weights), biases)


def relu_layer(x: Value, weights: Value, biases: Value, name: str | None = None) -> Any:
    """Returns `relu(x @ weights + biases)`.

    >>> relu_layer([[1.0]], [[-2.0]], [1.0]).numpy().tolist()
    [[0.0]]
    """
    return activations.relu(xw_plus_b(x, weights, biases, name))
