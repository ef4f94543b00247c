"""Messages and switches of version 1: configurations are kept and mostly have no effect."""

from __future__ import annotations

from typing import Any

from replicax.tf.arguments import Value

__all__ = [
    "AttrValue",
    "ConfigProto",
    "GPUOptions",
    "GraphOptions",
    "HistogramProto",
    "MetaGraphDef",
    "OptimizerOptions",
    "RewriterConfig",
    "RunOptions",
    "control_flow_v2_enabled",
    "disable_control_flow_v2",
    "disable_resource_variables",
    "disable_tensor_equality",
    "disable_v2_tensorshape",
    "enable_control_flow_v2",
    "enable_eager_execution",
    "enable_resource_variables",
    "enable_tensor_equality",
    "enable_v2_behavior",
    "enable_v2_tensorshape",
    "executing_eagerly_outside_functions",
    "resource_variables_enabled",
]


class _Items(list[Any]):
    """A repeated field of messages."""

    def add(self, **fields: Any) -> Message:
        """Appends a message, and returns it."""
        self.append(Message(**fields))
        return self[-1]


class Message:
    """Settings: fields can be set and read, and a field that was not set is a message, too.

    >>> config = Message(allow_soft_placement=True)
    >>> config.gpu_options.allow_growth = True
    >>> config.allow_soft_placement, config.gpu_options.allow_growth
    (True, True)
    """

    def __init__(self, *args: Any, **fields: Any) -> None:
        del args
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = Message()
        self.__dict__[name] = found
        return found

    def CopyFrom(self, other: Message) -> None:
        """Takes the fields of another message."""
        self.__dict__.clear()
        self.__dict__.update(other.__dict__)

    def MergeFrom(self, other: Message) -> None:
        """Adds the fields of another message."""
        self.__dict__.update(other.__dict__)

    def append(self, item: Value) -> None:
        """Adds an item, if this is a repeated field."""
        self.__dict__.setdefault("items", _Items()).append(item)

    def extend(self, items: Value) -> None:
        """Adds items, if this is a repeated field."""
        for item in items:
            self.append(item)

    def add(self, **fields: Any) -> Message:
        """Adds a message, if this is a repeated field."""
        found = Message(**fields)
        self.append(found)
        return found

    def __setitem__(self, key: Value, value: Value) -> None:
        self.__dict__.setdefault("entries", {})[key] = value

    def __getitem__(self, key: Value) -> Any:
        return self.__dict__.setdefault("entries", {})[key]

    def __bool__(self) -> bool:
        return bool(self.__dict__)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"{type(self).__name__}({fields})"


class ConfigProto(Message):
    """The settings of a session. XLA decides about threads, memory and placement itself.

    For a limit of GPU memory, set XLA_PYTHON_CLIENT_MEM_FRACTION.

    >>> config = ConfigProto(allow_soft_placement=True, log_device_placement=False)
    >>> config.gpu_options.allow_growth = True
    >>> config.device_filters.append("/job:ps")
    """


class GPUOptions(Message):
    """The settings of GPUs in a `ConfigProto`; without effect.

    >>> GPUOptions(allow_growth=True).allow_growth
    True
    """


class GraphOptions(Message):
    """The settings of graphs in a `ConfigProto`; without effect.

    >>> GraphOptions(place_pruned_graph=True).place_pruned_graph
    True
    """


class OptimizerOptions(Message):
    """The settings of the graph optimizer; without effect, as XLA optimizes every function.

    >>> OptimizerOptions(global_jit_level=OptimizerOptions.ON_1).global_jit_level
    1
    """

    DEFAULT = 0
    OFF = -1
    ON_1 = 1
    ON_2 = 2
    L0 = -1
    L1 = 0


class RewriterConfig(Message):
    """The settings of graph rewrites; without effect.

    >>> RewriterConfig(layout_optimizer=RewriterConfig.OFF).layout_optimizer
    2
    """

    DEFAULT, ON, OFF, AGGRESSIVE = 0, 1, 2, 3


class RunOptions(Message):
    """The settings of `Session.run`; without effect.

    >>> RunOptions(trace_level=RunOptions.FULL_TRACE).trace_level
    3
    """

    NO_TRACE, SOFTWARE_TRACE, HARDWARE_TRACE, FULL_TRACE = 0, 1, 2, 3


class AttrValue(Message):
    """The value of an attribute; kept without effect.

    >>> AttrValue(i=3).i
    3
    """


class HistogramProto(Message):
    """A histogram as a message; kept without effect.

    >>> HistogramProto(min=0.0).min
    0.0
    """


class MetaGraphDef(Message):
    """The description of a graph; kept without effect.

    >>> bool(MetaGraphDef())
    False
    """


def _switch(name: str) -> Any:
    def switch(*args: Any, **kwargs: Any) -> None:
        del args, kwargs

    switch.__name__ = switch.__qualname__ = name
    switch.__doc__ = "Does nothing: code runs by the rules of version 2."
    return switch


enable_eager_execution = _switch("enable_eager_execution")
enable_v2_behavior = _switch("enable_v2_behavior")
enable_resource_variables = _switch("enable_resource_variables")
enable_tensor_equality = _switch("enable_tensor_equality")
enable_v2_tensorshape = _switch("enable_v2_tensorshape")
enable_control_flow_v2 = _switch("enable_control_flow_v2")
disable_control_flow_v2 = _switch("disable_control_flow_v2")
disable_resource_variables = _switch("disable_resource_variables")
disable_tensor_equality = _switch("disable_tensor_equality")
disable_v2_tensorshape = _switch("disable_v2_tensorshape")


def control_flow_v2_enabled() -> bool:
    """Tells that branches and loops are those of version 2.

    >>> control_flow_v2_enabled()
    True
    """
    return True


def resource_variables_enabled() -> bool:
    """Tells that variables are those of version 2.

    >>> resource_variables_enabled()
    True
    """
    return True


def executing_eagerly_outside_functions() -> bool:
    """Tells that code runs eagerly outside of functions.

    >>> executing_eagerly_outside_functions()
    True
    """
    return True
