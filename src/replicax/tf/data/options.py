"""`tf.data.Options`: the choices of a dataset; those that Grain decides itself are accepted."""

from __future__ import annotations

import enum
from typing import Any

from replicax.foundation import errors
from replicax.foundation.spelling import suggestion
from replicax.input.dataset import options as rx_options
from replicax.input.dataset.options import AutoShardPolicy as AutoShardPolicy
from replicax.input.dataset.options import DistributeOptions as DistributeOptions
from replicax.tf.arguments import Value


class _Choices:
    """Attributes that are kept and have no effect; others are errors."""

    _names: tuple[str, ...] = ()

    def __init__(self, **choices: Any) -> None:
        for name, value in choices.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            return None
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Value) -> None:
        if name not in self._names:
            raise errors.InvalidArgumentError(
                f"`{type(self).__name__}` has the attributes {', '.join(self._names)}",
                f"{name!r} was set",
                suggestion([name], self._names) or "Remove the line.",
            )
        self.__dict__[name] = value


class AutotuneOptions(_Choices):
    """How tf.data tunes itself; accepted for portability.

    >>> AutotuneOptions(enabled=True).enabled
    True
    """

    _names = ("enabled", "cpu_budget", "ram_budget", "autotune_algorithm", "initial_parallelism")


class ThreadingOptions(_Choices):
    """The threads of tf.data; accepted for portability.

    >>> ThreadingOptions(private_threadpool_size=4).private_threadpool_size
    4
    """

    _names = ("max_intra_op_parallelism", "private_threadpool_size")


class OptimizationOptions(_Choices):
    """The graph rewrites of tf.data; accepted for portability.

    >>> OptimizationOptions(map_parallelization=True).map_parallelization
    True
    """

    _names = (
        "apply_default_optimizations",
        "autotune",
        "autotune_buffers",
        "autotune_cpu_budget",
        "autotune_ram_budget",
        "filter_fusion",
        "filter_parallelization",
        "hoist_random_uniform",
        "inject_prefetch",
        "map_and_batch_fusion",
        "map_and_filter_fusion",
        "map_fusion",
        "map_parallelization",
        "map_vectorization",
        "noop_elimination",
        "parallel_batch",
        "seq_interleave_prefetch",
        "shuffle_and_repeat_fusion",
        "warm_start",
    )


class ExternalStatePolicy(enum.Enum):
    """What happens to state outside of a dataset; accepted for portability.

    >>> ExternalStatePolicy.WARN.name
    'WARN'
    """

    WARN = 0
    IGNORE = 1
    FAIL = 2


class AutotuneAlgorithm(enum.Enum):
    """How tf.data tunes itself; accepted for portability.

    >>> AutotuneAlgorithm.DEFAULT.value
    0
    """

    DEFAULT = 0
    HILL_CLIMB = 1
    GRADIENT_DESCENT = 2
    MAX_PARALLELISM = 3
    STAGE_BASED = 4


# Attributes beside `experimental_distribute`, with what makes their default values.
_ACCEPTED: dict[str, Any] = {
    "autotune": AutotuneOptions,
    "dataset_name": lambda: None,
    "deterministic": lambda: None,
    "experimental_deterministic": lambda: None,
    "experimental_external_state_policy": lambda: None,
    "experimental_optimization": OptimizationOptions,
    "experimental_slack": lambda: None,
    "experimental_symbolic_checkpoint": lambda: None,
    "experimental_threading": ThreadingOptions,
    "experimental_warm_start": lambda: None,
    "framework_type": lambda: None,
    "threading": ThreadingOptions,
}


class Options(rx_options.Options):
    """Options of a dataset, set by `Dataset.with_options`.

    `experimental_distribute.auto_shard_policy` has an effect; the other attributes of TensorFlow
    are accepted. The order of elements is always deterministic.

    >>> options = Options()
    >>> options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
    >>> options.deterministic = False
    >>> options.threading.private_threadpool_size = 8
    """

    def __init__(self) -> None:
        super().__init__()
        for name, make in _ACCEPTED.items():
            object.__setattr__(self, name, make())

    def __setattr__(self, name: str, value: Value) -> None:
        if name != "experimental_distribute" and name not in _ACCEPTED:
            known = ["experimental_distribute", *_ACCEPTED]
            raise errors.InvalidArgumentError(
                f"`tf.data.Options` has the attributes {', '.join(known)}",
                f"{name!r} was set",
                suggestion([name], known) or "Remove the line.",
            )
        object.__setattr__(self, name, value)
