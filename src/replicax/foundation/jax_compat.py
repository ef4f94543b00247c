"""The JAX functions whose module or name changes between versions, under one name each."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import operator
import re
import signal
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import jax
import jax.core
import jax.export
import jax.extend.core as jex_core
import jax.numpy
import numpy as np
from jax.sharding import Mesh, PartitionSpec

PyTree = Any
Jaxpr: TypeAlias = jex_core.Jaxpr

if TYPE_CHECKING:

    @runtime_checkable
    class Device(Protocol):
        """The attributes of a JAX device that the library uses."""

        id: int
        platform: str
        process_index: int

else:
    Device = jax.Device


class ScopedSetting(Protocol):
    """A context manager factory such as the one of `jax.make_user_context`."""

    def __call__(self, value: object) -> contextlib.AbstractContextManager[Any]: ...


# Part of the key of every JAX trace cache; see Note [Variables inside nested traces] in
# contexts/overlay.py. Made at import because making one is not thread-safe.
trace_epoch: ScopedSetting = jax.make_user_context(0)  # type: ignore[assignment]

with jax.core.eval_context():
    _EAGER = jex_core.get_opaque_trace_state()


def trace_state() -> object:
    """Returns a comparable token of the current trace."""
    return jex_core.get_opaque_trace_state()


def is_eager() -> bool:
    """Returns whether JAX operations run immediately, outside every transformation."""
    return jex_core.get_opaque_trace_state() == _EAGER


def eagerly() -> contextlib.AbstractContextManager[None]:
    """Runs JAX operations immediately, even during a trace."""
    return jax.core.eval_context()


def is_staging() -> bool:
    """Returns whether JAX operations are recorded, by jit, scan, cond or the like."""
    is_traced_by = jex_core.unsafe_am_i_under_a_jit_DO_NOT_USE  # pyright: ignore[reportPrivateImportUsage]
    return not is_eager() and is_traced_by()


def is_jit_disabled() -> bool:
    """Returns whether the user disabled compilation, with `jax.disable_jit`."""
    return bool(jax.config.jax_disable_jit)  # pyright: ignore[reportAttributeAccessIssue]


def current_trace() -> Any:
    """Returns the current trace."""
    return jex_core.find_top_trace(None)


def in_trace(trace: object) -> contextlib.AbstractContextManager[None]:
    """Makes an outer trace the current one inside the block."""
    return jex_core.set_current_trace(trace)


def is_traced(value: object) -> bool:
    """Returns whether a value is a tracer."""
    return isinstance(value, jax.core.Tracer)


def is_of_current_trace(value: object) -> bool:
    """Returns whether a value is a tracer of the current trace, not of one around it."""
    return isinstance(value, jax.core.Tracer) and value._trace is current_trace()


# Subclasses of the classes of tracers, by class and names of methods, and the methods of each
# tracer of such a class by its id, for as long as it exists.
_tracers_with_methods: dict[tuple[type, tuple[str, ...]], type] = {}
_methods_of_tracers: dict[int, tuple[weakref.ref[Any], Mapping[str, Any]]] = {}


def with_methods(array: jax.Array, methods: Mapping[str, Callable[..., Any]]) -> jax.Array:
    """Adds methods to an array object; JAX treats it as the same array.

    Concrete arrays accept attributes. Tracers have slots instead, so they get a class of the same
    layout that looks the methods up. The object must not be in use as another value already.
    """
    if not is_traced(array):
        for name, method in methods.items():
            setattr(array, name, method)
        return array
    key = (type(array), tuple(methods))
    cls = _tracers_with_methods.get(key)
    if cls is None:
        members = {name: property(functools.partial(_method_of, name)) for name in methods}
        cls = type(key[0].__name__, (key[0],), {"__slots__": (), **members})
        cls = _tracers_with_methods.setdefault(key, cls)
    number = id(array)
    forget = weakref.ref(array, lambda _: _methods_of_tracers.pop(number, None))
    _methods_of_tracers[number] = (forget, methods)
    array.__class__ = cls
    return array


def _method_of(name: str, tracer: object) -> Any:
    return _methods_of_tracers[id(tracer)][1][name]


def alias(array: jax.Array) -> jax.Array:
    """Returns another object for the same array, without a copy of its data."""
    if is_traced(array):
        return jax.numpy.copy(array)
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def is_open_size(value: Any) -> bool:
    """Returns whether a value is a symbolic dimension of an exported program."""
    return jax.export.is_symbolic_dim(value)


def eval_jaxpr(jaxpr: Jaxpr, consts: list[Any], *args: Any) -> list[Any]:
    """Runs a jaxpr operation by operation in the current trace."""
    return jax.core.eval_jaxpr(jaxpr, consts, *args)


def inputs_of(jaxpr: Jaxpr, *outputs: Any) -> set[Any]:
    """Returns the inputs and constants of a program that some of its outputs depend on."""
    wanted = needed_by(jaxpr, outputs)[0]
    return wanted.intersection([*jaxpr.invars, *jaxpr.constvars])


def needed_by(jaxpr: Jaxpr, outputs: Iterable[Any]) -> tuple[set[Any], list[Any]]:
    """Returns the variables of a program that outputs depend on, and their equations."""
    wanted = {v for v in outputs if not hasattr(v, "val")}
    kept: list[Any] = []
    for equation in reversed(jaxpr.eqns):
        if wanted.intersection(equation.outvars):
            wanted.update(v for v in equation.invars if not hasattr(v, "val"))
            kept.append(equation)
    return wanted, kept[::-1]


def dependencies(jaxpr: Jaxpr) -> list[set[int]]:
    """Returns, for each output of a program, the indices of the inputs that it depends on.

    Follows nested calls and branches, so that values that only pass through the same call do not
    count as dependent on each other.
    """
    known: dict[Any, set[int]] = {v: {i} for i, v in enumerate(jaxpr.invars)}

    def of(atom: jex_core.Var | jex_core.Literal) -> set[int]:
        return set() if hasattr(atom, "val") else known.get(atom, set())

    for equation in jaxpr.eqns:
        inputs = [of(atom) for atom in equation.invars]
        name = equation.primitive.name
        bodies: list[Any] = []
        always: set[int] = set()
        if name == "cond":
            always, inputs = inputs[0], inputs[1:]
            bodies = [branch.jaxpr for branch in equation.params["branches"]]
        elif "jaxpr" in equation.params and name in ("jit", "pjit", "closed_call", "remat2"):
            inner = equation.params["jaxpr"]
            bodies = [getattr(inner, "jaxpr", inner)]
        if bodies:
            found = [always.union() for _ in equation.outvars]
            for body in bodies:
                for index, needed in enumerate(dependencies(body)):
                    found[index] |= set().union(*(inputs[i] for i in needed))
        else:
            found = [set().union(*inputs)] * len(equation.outvars)
        known |= dict(zip(equation.outvars, found, strict=True))
    return [of(atom) for atom in jaxpr.outvars]


def part_of_jaxpr(
    jaxpr: Jaxpr, equations: list[Any], outputs: list[Any], inputs: Sequence[Any] = ()
) -> Any:
    """Returns a program of some equations of another one, with other outputs.

    Args:
      jaxpr: The other program.
      equations: Some of its equations, in order.
      outputs: The outputs of the part.
      inputs: Additional inputs, computed by other parts, after those of the whole.
    """
    effects = frozenset().union(*(equation.effects for equation in equations))
    return jaxpr.replace(
        invars=[*jaxpr.invars, *inputs],
        eqns=equations,
        outvars=outputs,
        effects=effects,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


# In bytes. Steps with products of 64x256 gain, with 128x128 they do not, with 256x256 they
# lose 7 %.
_SMALL_PRODUCT = 64 << 10


def _num_bytes(variable: jex_core.Var) -> int:
    aval: Any = variable.aval
    return aval.size * aval.dtype.itemsize


def transposes_after_sums(jaxpr: Jaxpr) -> Any:
    """Returns a program that sums over replicas first, and transposes the sums.

    JAX writes the gradient of a weight as a transposed product. If the sum comes after the
    transpose, XLA's CPU backend fuses both to one product in a layout that its library for small
    products does not support; a small transformer takes a tenth longer. Large products are slower
    with that library, so they are not changed.
    """
    transposes: dict[object, jex_core.JaxprEqn] = {
        e.outvars[0]: e
        for e in jaxpr.eqns
        if e.primitive.name == "transpose" and _num_bytes(e.outvars[0]) <= _SMALL_PRODUCT
    }
    equations: list[Any] = []
    for equation in jaxpr.eqns:
        operand = equation.invars[0] if len(equation.invars) == 1 else None
        is_sum = equation.primitive.name == "psum" and isinstance(operand, jex_core.Var)
        transpose = transposes.get(operand) if is_sum else None
        if transpose is None:
            equations.append(equation)
            continue
        total = jex_core.Var(transpose.invars[0].aval)
        equations.append(equation.replace(invars=transpose.invars, outvars=[total]))
        equations.append(transpose.replace(invars=[total], outvars=equation.outvars))
    return jaxpr.replace(eqns=equations)


def shard_map(
    fn: Callable[..., Any],
    mesh: Mesh,
    in_specs: tuple[PartitionSpec, ...],
    out_specs: tuple[PartitionSpec, ...],
) -> Callable[..., Any]:
    """Maps `fn` over the shards of a mesh, without the check of varying axes.

    The check rejects plain model code, such as a scan whose carry starts from zeros.
    """
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


# The settings of a thread that must hold in the threads that run replicas for it.
_THREAD_SETTINGS = (
    ("jax_enable_x64", jax.enable_x64),
    ("jax_default_matmul_precision", jax.default_matmul_precision),
    ("jax_numpy_dtype_promotion", jax.numpy_dtype_promotion),
    ("jax_numpy_rank_promotion", jax.numpy_rank_promotion),
    ("jax_debug_nans", jax.debug_nans),
    ("jax_debug_infs", jax.debug_infs),
    ("jax_disable_jit", jax.disable_jit),
    ("jax_check_tracer_leaks", jax.check_tracer_leaks),
    ("jax_log_compiles", jax.log_compiles),
    ("jax_default_prng_impl", jax.default_prng_impl),
    ("jax_threefry_partitionable", jax.threefry_partitionable),
    ("jax_transfer_guard", jax.transfer_guard),
)


class _NamedSetting:
    """A setting whose context manager does not tell its value."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def value(self) -> object:
        return getattr(jax.config, self._name, None)


# Most of JAX's context managers hold the value themselves, which is faster than to ask for it by
# name: each call of a compiled function reads all of them.
_SETTING_SOURCES = tuple(
    enter if hasattr(enter, "value") else _NamedSetting(name) for name, enter in _THREAD_SETTINGS
)
_value_of = operator.attrgetter("value")


def thread_settings() -> tuple[Any, ...]:
    """Returns the values of the JAX settings of this thread that affect results."""
    return tuple(map(_value_of, _SETTING_SOURCES))


@contextlib.contextmanager
def settings(values: tuple[Any, ...]) -> Iterator[None]:
    """Enters the settings that `thread_settings` returned in another thread."""
    with contextlib.ExitStack() as stack:
        here = thread_settings()
        for (_, enter), value, present in zip(_THREAD_SETTINGS, values, here, strict=True):
            if value != present and value is not None:
                stack.enter_context(enter(value))
        yield


def uncommitted_view(array: jax.Array) -> jax.Array:
    """Returns a single-device array over the same buffer that is not committed to its device.

    See Note [Uncommitted arrays] in foundation/placement.py. JAX makes such arrays itself, as
    results of computations on a default device, but has no function for it.
    """
    make: Any = type(array)
    return make(array.aval, array.sharding, [array], False, True)  # committed, _skip_checks


def any_dtype(dtype: np.dtype) -> contextlib.AbstractContextManager[Any]:
    """Permits arrays of 64-bit dtypes even where the user did not enable them."""
    is_wide = dtype.itemsize >= 8 and dtype.kind in "iufc"
    return jax.enable_x64(True) if is_wide else contextlib.nullcontext()


def jaxprs_of(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yields a jaxpr and all jaxprs inside it."""
    yield jaxpr
    for inner in jex_core.subjaxprs(jaxpr):
        yield from jaxprs_of(inner)


def shape_of(value: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and weak type of an array, a tracer or a ShapeDtypeStruct."""
    return jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=is_weak(value))


def is_weak(value: object) -> bool:
    """Returns whether the dtype of an array is weak; random keys have no such dtype."""
    return getattr(value, "weak_type", False)


def has_collectives(jaxpr: Jaxpr, axis: str) -> bool:
    """Returns whether a program has collectives over a mapped axis."""
    return any(
        axis in _names(eqn.params.get("axes")) or axis in _names(eqn.params.get("axis_name"))
        for inner in jaxprs_of(jaxpr)
        for eqn in inner.eqns
        if eqn.primitive.name != "axis_index"
    )


def _names(axes: object) -> tuple[object, ...]:
    return axes if isinstance(axes, tuple) else (axes,)


def fingerprint(jaxpr: Jaxpr) -> str:
    """Returns a digest of a program that is equal in all processes that have traced the same.

    Constants are not part of it: they are inputs of the compiled program.
    """
    # Functions in the parameters of operations are shown with their addresses.
    text = re.sub(r"0x[0-9a-f]+", "", str(jaxpr))
    return hashlib.sha256(text.encode()).hexdigest()


# The key under which JAX's preemption service tells all processes when SIGTERM arrived.
_PREEMPTION_KEY = "RECEIVED_PREEMPTION_NOTICE"


def preemption_notice() -> str | None:
    """Returns when a process of the group got SIGTERM, in the format of RFC 3339; None if none."""
    # `multihost_utils.reached_preemption_sync_point` is the public way, but cannot be used; see
    # Note [The common step] in checkpointing/preemption_sync.py.
    state: Any = jax.distributed.initialize.__globals__["global_state"]
    if state.client is None:
        return None
    try:
        return str(state.client.key_value_try_get(_PREEMPTION_KEY))
    except jax.errors.JaxRuntimeError:
        return None


def has_callbacks(jaxpr: Jaxpr) -> bool:
    """Returns whether a program calls back into Python while it runs."""
    return any(
        "callback" in eqn.primitive.name or eqn.primitive.name == "debug_print"
        for inner in jaxprs_of(jaxpr)
        for eqn in inner.eqns
    )


# Several processes.

# JAX's own heartbeats would abort the process; the group has heartbeats that do not.
_NO_HEARTBEAT_S = 10_000_000


def is_backend_started() -> bool:
    """Returns whether JAX has started its devices; then the process cannot join others."""
    name = "jax_num_cpu_devices"
    value: int = getattr(jax.config, name)
    try:
        # The only public trace of it: from then on, another value is rejected.
        jax.config.update(name, value + 1)
    except RuntimeError:
        return True
    jax.config.update(name, value)
    return False


def is_distributed_started() -> bool:
    """Returns whether `jax.distributed` runs in this process."""
    return jax.distributed.is_initialized()


def start_distributed(
    address: str, bind_address: str, count: int, index: int, host: str, seconds: int
) -> None:
    """Starts `jax.distributed` and the devices of this process.

    Args:
      address: The coordination service, as this process reaches it.
      bind_address: Where process 0 starts the service.
      count: The number of processes.
      index: The index of this process.
      host: The address at which other processes reach the collectives of this one. JAX would
        publish what the name of this host resolves to.
      seconds: The time to wait for the other processes.
    """
    native: Any = importlib.import_module("jaxlib._jax")
    # By default, the end of the client waits for all others, and aborts the process if one is lost.
    client = functools.partial(native.get_distributed_runtime_client, shutdown_on_destruction=False)
    before = _swap_handler(None)
    _swap_handler(before)
    with _replaced(native, "get_distributed_runtime_client", client):
        jax.distributed.initialize(
            address,
            count,
            index,
            cluster_detection_method="deactivate",
            initialization_timeout=seconds,
            heartbeat_timeout_seconds=_NO_HEARTBEAT_S,
            coordinator_bind_address=bind_address,
        )
    # JAX has taken SIGTERM, as a notice that nothing may be waiting for.
    _PreemptionSignal.handler = _swap_handler(before)
    gloo = functools.partial(native.make_gloo_tcp_collectives, hostname=host)
    with _replaced(native, "make_gloo_tcp_collectives", gloo):
        jax.devices()


class _PreemptionSignal:
    # The handler of JAX for SIGTERM, as an address; None if `jax.distributed` does not run.
    handler: int | None = None


def watch_preemption_signal() -> None:
    """Makes SIGTERM a notice of preemption; before, it ends the process as usual."""
    if _PreemptionSignal.handler is not None:
        _swap_handler(_PreemptionSignal.handler)


def _swap_handler(address: int | None) -> int | None:
    """Sets the handler of SIGTERM below Python's, and returns the one before; None is default."""
    library = ctypes.CDLL(None)
    library.signal.restype = ctypes.c_void_p
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    before: int | None = library.signal(signal.SIGTERM, address)
    # A handler of Python runs when the main thread returns from a call of the system.
    signal.siginterrupt(signal.SIGTERM, True)
    return before


def drop_distributed() -> None:
    """Ends `jax.distributed` without the wait of `jax.distributed.shutdown` for the others."""
    state: Any = jax.distributed.initialize.__globals__["global_state"]
    manager, state.preemption_sync_manager = state.preemption_sync_manager, None
    if manager is not None:
        manager.shutdown()
    for native in (state.client, state.service):
        # Never destroyed: a client that polls a service that has ended aborts the process.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(native))
    state.client = state.service = None


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
