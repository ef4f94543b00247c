"""The ops of `replicax.tf` compute what TensorFlow 2.21 has computed.

`tests/fixtures/tf_ops` has the calls, and what TensorFlow returned or raised in each. They are
made in eager code on a device, in `tf.function`, and in host mode (as in `dataset.map`).
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

import replicax.tf as tf
from replicax.foundation import errors
from replicax.tf import dispatch, ops
from replicax.tf.tensor import raw
from tests.fixtures.tf_ops import cases
from tests.fixtures.tf_ops.case import Case

RECORDED: dict[str, Any] = json.loads(cases.FILE.read_text())
PATHS = sorted({case.path for case in cases.VALUES})
NARROW = {"float64": "float32", "int64": "int32", "complex128": "complex64", "uint64": "uint32"}
TOLERANCES = {"float16": 2e-3, "bfloat16": 2e-2}
# Errors about a kernel that TensorFlow lacks on a CPU, or about graphs: not compared.
OF_KERNELS = {
    *("NotFoundError", "UnimplementedError", "InternalError", "AbortedError", "RuntimeError"),
    *("AttributeError", "AssertionError", "FailedPreconditionError"),
}
REFUSALS = (ValueError, TypeError, NotImplementedError, IndexError)

# Results that are meant to differ.
DIFFERENT = {
    # Eigen's largest element ignores NaN; all of a row with NaN is NaN here, as on a GPU.
    "math.softmax#4",
    "nn.softmax#4",
    "math.cumulative_logsumexp#10",
}
# Calls that TensorFlow refuses, and that have an obvious result.
ACCEPTED = {
    "constant#36",  # a list of tensors
    "constant#37",
    "one_hot#4",  # dtype=tf.bool without values
    "split#8",  # a number of parts that is a tensor
    "gather#10",  # indices of uint8
}
# Host mode does not know tensors from NumPy arrays, which convert.
ACCEPTED_ON_HOST = {"convert_to_tensor#42"}


def leaves(result: Any) -> list[Any]:
    if isinstance(result, list | tuple) and not isinstance(result, tf.TensorShape):
        return [leaf for part in result for leaf in leaves(part)]
    return [result]


def expected(leaf: Any) -> tuple[str, np.ndarray]:
    dtype, shape, values = leaf
    if dtype == "string":
        found = np.asarray([value.encode() for value in values], object)
    elif dtype.startswith("complex"):
        found = np.asarray([complex(*value) for value in values], dtype)
    else:
        found = np.asarray(values, tf.as_dtype(dtype).as_numpy_dtype)
    return dtype, found.reshape(shape)


def mixes_widths(case: Case) -> bool:
    """Tells whether tensors differ in 32 or 64 bits only, which are the same on devices."""
    names = [tensor.dtype for tensor in case.tensors()]
    return len(set(names)) > 1 and len({NARROW.get(name, name) for name in names}) == 1


def difference(case: Case, leaf: Any, found: Any, *, is_host: bool) -> str | None:
    """Describes how a result differs from the recorded one."""
    if leaf is None or found is None:
        return None if leaf is found else f"{found} instead of {leaf}"
    if not isinstance(found, tf.Tensor):
        return f"{type(found)} instead of a tensor"
    dtype, right = expected(leaf)
    wanted = dtype if is_host else NARROW.get(dtype, dtype)
    value = np.asarray(raw(found))
    if found.dtype.name != wanted or value.shape != right.shape:
        return f"{found.dtype.name}{value.shape} instead of {wanted}{right.shape}"
    if case.compare == "type":
        return None
    if dtype in ("string", "bool") or right.dtype.kind in "iu":
        is_equal = np.array_equal(value, right.astype(value.dtype))
    else:
        wide = np.complex128 if dtype.startswith("complex") else np.float64
        value, right = value.astype(wide), right.astype(wide)
        if case.compare == "abs":
            value, right = np.abs(value), np.abs(right)
        rtol = case.tolerance or TOLERANCES.get(dtype, 1e-5)
        atol = max(rtol / 10, 1e-6)
        is_equal = np.allclose(value, right, rtol=rtol, atol=atol, equal_nan=True)
    return None if is_equal else f"{value.tolist()} instead of {right.tolist()}"


def problem(case: Case, call: Callable[[], Any], *, is_host: bool) -> str | None:
    right = RECORDED["values"][case.name]
    if case.name in DIFFERENT or (is_error(case) and right in OF_KERNELS):
        return None
    try:
        found = leaves(call())
    except Exception as error:
        if is_error(case) and isinstance(error, REFUSALS):
            return None
        return f"{case.name} raised {type(error).__name__}: {error}"
    if is_error(case):
        accepted = ACCEPTED | ACCEPTED_ON_HOST if is_host else ACCEPTED
        if case.name in accepted or mixes_widths(case):
            return None
        return f"{case.name} did not raise: TensorFlow's {right}"
    if len(found) != len(right):
        return f"{case.name} has {len(found)} results instead of {len(right)}"
    for pair in zip(right, found, strict=True):
        if text := difference(case, *pair, is_host=is_host):
            return f"{case.name}: {text}"
    return None


def require_none(problems: Iterable[str | None]) -> None:
    found = [text for text in problems if text]
    assert not found, f"{len(found)} cases differ:\n" + "\n".join(found[:40])


def of_path(path: str) -> list[Case]:
    return [case for case in cases.VALUES if case.path == path]


def test_every_op_has_a_recorded_case() -> None:
    tested = {
        id(case.function(tf)) for case in cases.VALUES if not case.path.startswith("operator")
    }
    without = []
    for module in pkgutil.iter_modules(ops.__path__):
        found = importlib.import_module(f"{ops.__name__}.{module.name}")
        if module.name == "random":
            continue
        for name in getattr(found, "__all__", ()):
            if id(getattr(found, name)) not in tested:
                without.append(f"{module.name}.{name}")
    # Joining shapes is not an op: it has a test below. One is a function of version 1, and one
    # does not run eagerly in TensorFlow.
    assert without == [
        "arrays.broadcast_static_shape",
        "arrays.parallel_stack",
        "clipping.clip_by_average_norm",
    ]


def test_recorded_results_belong_to_the_cases() -> None:
    assert list(RECORDED["values"]) == [case.name for case in cases.VALUES]
    assert list(RECORDED["gradients"]) == [case.name for case in cases.GRADIENTS]
    assert RECORDED["version"].startswith("2.21")


def test_ops_on_the_host_have_the_values_dtypes_and_errors_of_tensorflow() -> None:
    with dispatch.host_mode():
        require_none(
            problem(case, lambda case=case: case.call(tf), is_host=True) for case in cases.VALUES
        )


def is_error(case: Case) -> bool:
    return isinstance(RECORDED["values"][case.name], str)


def one_of_each(found: Iterable[Case], most: int = 1) -> list[Case]:
    """Returns the first cases of each function, whatever its paths are."""
    by_function: dict[int, list[Case]] = {}
    for case in found:
        by_function.setdefault(id(case.function(tf)), []).append(case)
    return [case for own in by_function.values() for case in own[:most]]


def test_ops_on_a_device_have_the_values_and_errors_of_tensorflow() -> None:
    # Values of the other ops are compared in compiled functions, and here in the slow test.
    values = one_of_each(case for case in cases.VALUES if not is_error(case))[::8]
    refused = one_of_each(filter(is_error, cases.VALUES), most=2)
    require_none(
        problem(case, lambda case=case: case.call(tf), is_host=False) for case in values + refused
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_all_cases_on_a_device(path: str) -> None:
    require_none(
        problem(case, lambda case=case: case.call(tf), is_host=False) for case in of_path(path)
    )


# Compiled.


def is_compiled(case: Case) -> bool:
    is_of_numbers = case.tensors() and all(t.dtype != "string" for t in case.tensors())
    return not is_error(case) and bool(is_of_numbers) and case.name not in DIFFERENT


def grouped(found: list[Case], size: int) -> list[list[Case]]:
    return [found[i : i + size] for i in range(0, len(found), size)]


def compiled_results(group: list[Case]) -> list[Any]:
    """Makes the calls of several cases in one compiled function, with tensors as arguments."""

    @tf.function
    def call_all(tensors: Any) -> Any:
        return [leaves(case.call(tf, own)) for case, own in zip(group, tensors, strict=True)]

    return call_all([made_tensors(case) for case in group])


def compiled_problems(subset: list[Case]) -> Iterable[str]:
    for group in grouped(subset, 40):
        for case, found in zip(group, compiled_results(group), strict=True):
            right = RECORDED["values"][case.name]
            assert len(found) == len(right), case.name
            for pair in zip(right, found, strict=True):
                if text := difference(case, *pair, is_host=False):
                    yield f"{case.name}: {text}"


def compiled_cases() -> list[Case]:
    return [case for case in cases.VALUES if is_compiled(case) and not case.is_static]


def test_ops_in_a_compiled_function_have_the_values_of_tensorflow() -> None:
    # The slow test compiles all cases.
    subset = one_of_each(compiled_cases())[::2]
    assert len(subset) > 125
    require_none(compiled_problems(subset))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
def test_all_cases_in_a_compiled_function(number: int) -> None:
    require_none(compiled_problems(compiled_cases()[number::10]))


def test_compiled_functions_refuse_arguments_that_must_be_known() -> None:
    static = [case for case in cases.VALUES if case.is_static and is_compiled(case)]
    assert len(static) > 60
    for case in static:
        with pytest.raises(errors.TracedValueError):
            compiled_results([case])


# Gradients.


def weights(shape: Any) -> Any:
    count = int(np.prod(shape))
    return tf.constant(np.arange(1, count + 1).reshape(shape) / count, tf.float32)


def gradient(case: Case, tensors: list[Any]) -> list[Any]:
    watched = [tensor for tensor in tensors if tensor.dtype.is_floating]
    with tf.GradientTape() as tape:
        tape.watch(watched)
        result = case.call(tf, tensors)
        parts = [part for part in leaves(result) if part.dtype.is_floating]
    return tape.gradient(parts, watched, output_gradients=[weights(p.shape) for p in parts])


def gradient_problems(case: Case, gradients: list[Any]) -> Iterable[str]:
    for leaf, own in zip(RECORDED["gradients"][case.name], gradients, strict=True):
        # The gradient of what rounds is None or zero.
        if leaf is None and (own is None or not np.asarray(raw(own)).any()):
            continue
        if text := difference(case, leaf, own, is_host=False):
            yield f"{case.name}: {text}"


def made_tensors(case: Case) -> list[Any]:
    return [spec.make(tf) for spec in case.tensors()]


def compiled_gradients(group: list[Case]) -> list[Any]:
    @tf.function
    def call_all(tensors: Any) -> Any:
        return [gradient(case, own) for case, own in zip(group, tensors, strict=True)]

    return call_all([made_tensors(case) for case in group])


def test_gradients_in_a_compiled_function_are_those_of_tensorflow() -> None:
    for group in grouped([case for case in cases.GRADIENTS if not case.is_static], 25):
        results = zip(group, compiled_gradients(group), strict=True)
        require_none(text for case, found in results for text in gradient_problems(case, found))


@pytest.mark.slow
def test_gradients_of_ops_with_known_values_are_those_of_tensorflow() -> None:
    for case in cases.GRADIENTS:
        if case.is_static or case.name in ("norm#1", "maximum#0", "clip_by_value#0"):
            require_none(gradient_problems(case, gradient(case, made_tensors(case))))


@pytest.mark.slow
def test_all_gradients_in_eager_code_are_those_of_tensorflow() -> None:
    for case in cases.GRADIENTS:
        require_none(gradient_problems(case, gradient(case, made_tensors(case))))
