"""`tf.test`: assertions on tensors, and what devices there are."""

from __future__ import annotations

import platform
import random
import re
import shutil
import sys
import tempfile
import unittest
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock as mock

import jax
import numpy as np

from replicax.foundation import errors
from replicax.tf import device_config, tape_recording
from replicax.tf.arguments import DTypeLike, Ignored, Number, Structure, Value
from replicax.tf.ops import random as tf_random
from replicax.tf.tape import GradientTape
from replicax.tf.tensor import Tensor, raw

__all__ = [
    "Benchmark",
    "TestCase",
    "assert_equal_graph_def",
    "compute_gradient",
    "create_local_cluster",
    "disable_with_predicate",
    "get_temp_dir",
    "gpu_device_name",
    "is_built_with_cuda",
    "is_built_with_gpu_support",
    "is_built_with_rocm",
    "is_built_with_xla",
    "is_cpu_target_available",
    "is_gpu_available",
    "main",
    "mock",
    "with_eager_op_as_function",
]


def is_gpu_available(
    cuda_only: bool = False, min_cuda_compute_capability: tuple[int, int] | None = None
) -> bool:
    """Tells whether there is a GPU.

    >>> isinstance(is_gpu_available(), bool)
    True
    """
    del cuda_only, min_cuda_compute_capability
    return bool(device_config.list_physical_devices("GPU"))


def gpu_device_name() -> str:
    """Returns the name of the first GPU; empty if there is none.

    >>> isinstance(gpu_device_name(), str)
    True
    """
    return "/device:GPU:0" if is_gpu_available() else ""


def is_built_with_cuda() -> bool:
    """Tells whether JAX can use GPUs of NVIDIA.

    >>> isinstance(is_built_with_cuda(), bool)
    True
    """
    return is_gpu_available() and "rocm" not in _version()


def is_built_with_rocm() -> bool:
    """Tells whether JAX can use GPUs of AMD.

    >>> isinstance(is_built_with_rocm(), bool)
    True
    """
    return is_gpu_available() and "rocm" in _version()


def _version() -> str:
    return jax.devices()[0].client.platform_version.lower()


def is_built_with_gpu_support() -> bool:
    """Tells whether JAX can use GPUs.

    >>> is_built_with_gpu_support() == is_gpu_available()
    True
    """
    return is_gpu_available()


def is_built_with_xla() -> bool:
    """Tells that XLA compiles programs.

    >>> is_built_with_xla()
    True
    """
    return True


def is_cpu_target_available(target: str) -> bool:
    """Tells whether XLA compiles for a processor: that of this machine.

    >>> is_cpu_target_available("no such processor")
    False
    """
    machine = {"x86_64": "x86", "AMD64": "x86", "arm64": "aarch64"}
    return target in (platform.machine(), machine.get(platform.machine(), ""))


def get_temp_dir() -> str:
    """Returns a new directory for files of tests.

    >>> isinstance(get_temp_dir(), str)
    True
    """
    return tempfile.mkdtemp()


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the tests of the main module."""
    unittest.main(argv=list(argv or sys.argv))


def create_local_cluster(*args: object, **kwargs: object) -> Any:
    """Not offered: clusters of processes are started by the launcher."""
    raise errors.UnsupportedError(
        "Servers run in processes of their own",
        "tf.test.create_local_cluster was called",
        "Start the tasks by `replicax launch`, or test with `replicax.testing`.",
    )


def assert_equal_graph_def(*args: object, **kwargs: object) -> Any:
    """Not offered: there are no graphs."""
    raise errors.UnsupportedError(
        "Programs are compiled from functions, without GraphDef messages",
        "assert_equal_graph_def was called",
        "Compare results: `self.assertAllClose(f(x), g(x))`.",
    )


def disable_with_predicate(pred: Value, skip_message: str) -> Any:
    """Skips a test where a function returns True.

    >>> disable_with_predicate(lambda: False, "")(len)([1])
    1
    """
    return unittest.skipIf(pred(), skip_message)


def with_eager_op_as_function(cls: Any = None, only_as_function: bool = False) -> Any:
    """Returns the class: ops always run the same way.

    >>> with_eager_op_as_function(int) is int
    True
    """
    del only_as_function
    return cls


def compute_gradient(f: Value, x: Sequence[Any], delta: float | None = None) -> Any:
    """Returns the Jacobians of a function by its gradient, and by differences.

    Args:
      f: A function of tensors that returns a tensor.
      x: Its arguments.
      delta: The size of a difference.

    Returns:
      Two lists with a matrix, of `argument.size` columns, for each argument.
    """
    step = 1 / 1024 if delta is None else delta
    given = [Tensor(jax.numpy.asarray(np.asarray(raw(value)))) for value in x]
    with GradientTape(persistent=True) as tape:
        tape.watch(given)
        y = f(*given)
    rows = int(np.prod(y.shape, dtype=int))
    exact = [
        np.zeros((rows, a.numpy().size)) if j is None else np.reshape(j.numpy(), (rows, -1))
        for a, j in zip(given, tape.jacobian(y, given), strict=True)
    ]
    return exact, [_differences(f, given, i, step, rows) for i in range(len(given))]


def _differences(f: Value, given: list[Any], index: int, step: float, rows: int) -> np.ndarray:
    value = np.asarray(given[index].numpy())
    columns = []
    for place in range(value.size):
        shifted = []
        for sign in (1, -1):
            moved = value.copy()
            moved.reshape(-1)[place] += sign * step
            arguments = [*given[:index], Tensor(jax.numpy.asarray(moved)), *given[index + 1 :]]
            shifted.append(np.reshape(f(*arguments).numpy(), rows))
        columns.append((shifted[0] - shifted[1]) / (2 * step))
    return np.stack(columns, axis=1) if columns else np.zeros((rows, 0))


def _array(value: Value) -> np.ndarray:
    if isinstance(value, list | tuple):
        return np.asarray([_array(item) for item in value])
    return np.asarray(tape_recording.map_leaves(raw, value))


class TestCase(unittest.TestCase):
    """A test case with assertions on tensors, arrays and structures of them.

    >>> case = TestCase()
    >>> case.assertAllClose([1.0, 2.0], np.array([1.0, 2.0 + 1e-9]))
    >>> case.assertAllEqual({"a": [1]}, {"a": np.array([1])})
    """

    # Not a test of this package.
    __test__ = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__test__ = True

    def setUp(self) -> None:
        """Sets all seeds."""
        super().setUp()
        random.seed(1)
        np.random.seed(1)
        tf_random.set_seed(1)
        self._temporary: str | None = None

    def tearDown(self) -> None:
        """Removes the files of the test."""
        if getattr(self, "_temporary", None) is not None:
            shutil.rmtree(str(self._temporary), ignore_errors=True)
        super().tearDown()

    def get_temp_dir(self) -> str:
        """Returns a directory for the files of this test."""
        if getattr(self, "_temporary", None) is None:
            self._temporary = tempfile.mkdtemp()
        return str(self._temporary)

    def evaluate(self, tensors: Structure) -> Any:
        """Returns the values of tensors, as NumPy arrays."""

        def value(leaf: Value) -> Any:
            if not isinstance(leaf, Tensor) and not tape_recording.is_variable(leaf):
                return leaf
            found = np.asarray(raw(leaf))
            return found if found.shape else found[()]

        return tape_recording.map_leaves(value, tensors)

    @contextmanager
    def session(self, *args: object, **kwargs: object) -> Iterator[TestCase]:
        """Runs a block; code always runs eagerly."""
        del args, kwargs
        yield self

    cached_session = session

    def test_session(self, *args: object, **kwargs: object) -> Any:
        """Runs a block, as `session` does; test runners take it for a test."""
        if self._testMethodName == "test_session":
            self.skipTest("Not a test.")
        return self.session(*args, **kwargs)

    def assertAllEqual(self, a: Structure, b: Structure, msg: str | None = None) -> None:
        """Fails unless two structures have equal arrays."""
        self._compare(a, b, msg, lambda x, y: np.testing.assert_array_equal(x, y, str(msg or "")))

    def assertNotAllEqual(self, a: Structure, b: Structure, msg: str | None = None) -> None:
        """Fails if two values are equal."""
        try:
            self.assertAllEqual(a, b)
        except AssertionError:
            return
        self.fail(msg or "The two values are equal at all elements")

    def assertAllClose(
        self,
        a: Structure,
        b: Structure,
        rtol: float = 1e-6,
        atol: float = 1e-6,
        msg: str | None = None,
    ) -> None:
        """Fails unless two structures have arrays that are almost equal."""

        def check(x: np.ndarray, y: np.ndarray) -> None:
            small = any(v.dtype.itemsize == 2 and v.dtype.kind in "fV" for v in (x, y))
            relative, absolute = (max(rtol, 1e-3), max(atol, 1e-3)) if small else (rtol, atol)
            x, y = (np.asarray(v, np.float64) if v.dtype.kind in "fV" else v for v in (x, y))
            np.testing.assert_allclose(x, y, relative, absolute, err_msg=str(msg or ""))

        self._compare(a, b, msg, check)

    def assertNotAllClose(self, a: Structure, b: Structure, **kwargs: Any) -> None:
        """Fails if two values are almost equal."""
        message = kwargs.pop("msg", None)
        try:
            self.assertAllClose(a, b, **kwargs)
        except AssertionError:
            return
        self.fail(message or "The two values are close at all elements")

    def assertAllCloseAccordingToType(
        self, a: Structure, b: Structure, rtol: float = 1e-6, atol: float = 1e-6, **_: Any
    ) -> None:
        """Fails unless two values are almost equal, for the precision of their types."""
        self.assertAllClose(a, b, rtol, atol)

    def _compare(self, a: Structure, b: Structure, msg: str | None, check: Value) -> None:
        if isinstance(a, Mapping) or isinstance(b, Mapping):
            both = isinstance(a, Mapping) and isinstance(b, Mapping)
            self._check(both, msg, "Only one of them is a dict")
            self._check(set(a) == set(b), msg, f"Keys {set(a)} and {set(b)} differ")
            for key in a:
                self._compare(a[key], b[key], msg, check)
            return
        if _is_uneven(a) or _is_uneven(b):
            self._check(len(a) == len(b), msg, f"Lengths {len(a)} and {len(b)} differ")
            for one, other in zip(a, b, strict=True):
                self._compare(one, other, msg, check)
            return
        one, other = _array(a), _array(b)
        shapes = f"Shapes {one.shape} and {other.shape} differ"
        self._check(one.shape == other.shape, msg, shapes)
        check(one, other)

    def assertShapeEqual(self, input_a: Value, input_b: Value, msg: str | None = None) -> None:
        """Fails unless two arrays have one shape."""
        one, other = np.shape(_array(input_a)), np.shape(_array(input_b))
        self._check(one == other, msg, f"Shapes {one} and {other} differ")

    def assertDTypeEqual(self, target: Value, expected_dtype: DTypeLike) -> None:
        """Fails unless an array has a type."""
        found, expected = _array(target).dtype, np.dtype(expected_dtype)
        self._check(found == expected, None, f"The type is {found}, not {expected}")

    def assertAllInRange(
        self,
        target: Value,
        lower_bound: Number,
        upper_bound: Number,
        open_lower_bound: bool = False,
        open_upper_bound: bool = False,
    ) -> None:
        """Fails unless all elements are between two bounds."""
        found = _array(target)
        low = found > lower_bound if open_lower_bound else found >= lower_bound
        high = found < upper_bound if open_upper_bound else found <= upper_bound
        self._check(np.all(low & high), None, f"{found} is not in the range")

    def assertAllInSet(self, target: Value, expected_set: Value) -> None:
        """Fails unless all elements are in a set."""
        others = set(_array(target).reshape(-1).tolist()) - set(expected_set)
        self._check(not others, None, f"{others} are not in the set")

    def assertAllGreater(self, a: Structure, comparison_target: Number) -> None:
        """Fails unless all elements are greater than a number."""
        found = _array(a)
        self._check(np.all(found > comparison_target), None, f"Not all of {found} are")

    def assertAllGreaterEqual(self, a: Structure, comparison_target: Number) -> None:
        """Fails unless all elements are at least a number."""
        found = _array(a)
        self._check(np.all(found >= comparison_target), None, f"Not all of {found} are")

    def assertAllLess(self, a: Structure, comparison_target: Number) -> None:
        """Fails unless all elements are less than a number."""
        found = _array(a)
        self._check(np.all(found < comparison_target), None, f"Not all of {found} are")

    def assertAllLessEqual(self, a: Structure, comparison_target: Number) -> None:
        """Fails unless all elements are at most a number."""
        found = _array(a)
        self._check(np.all(found <= comparison_target), None, f"Not all of {found} are")

    def assertArrayNear(
        self, farray1: Value, farray2: Value, err: float, msg: Ignored = None
    ) -> None:
        """Fails unless the elements of two lists differ by less than a bound."""
        for one, other in zip(_array(farray1), _array(farray2), strict=True):
            self.assertNear(one, other, err, msg)

    def assertNear(self, f1: Value, f2: Value, err: float, msg: Ignored = None) -> None:
        """Fails unless two numbers differ by less than a bound."""
        self._check(abs(float(f1) - float(f2)) <= err, msg, f"{f1} and {f2} are not near")

    def assertStartsWith(self, actual: str, expected_start: str, msg: Ignored = None) -> None:
        """Fails unless a text starts with another one."""
        text = f"{actual!r} does not start with {expected_start!r}"
        self._check(actual.startswith(expected_start), msg, text)

    def assertEmpty(self, container: Value, msg: Ignored = None) -> None:
        """Fails unless a container is empty."""
        self._check(len(container) == 0, msg, f"There are {len(container)} elements")

    def assertLen(self, container: Value, expected_len: int, msg: Ignored = None) -> None:
        """Fails unless a container has a length."""
        text = f"There are {len(container)} elements, not {expected_len}"
        self._check(len(container) == expected_len, msg, text)

    @contextmanager
    def assertRaisesWithPredicateMatch(
        self, exception_type: Value, expected_err_re_or_predicate: Value
    ) -> Iterator[None]:
        """Fails unless a block raises an error that fits."""
        expected = expected_err_re_or_predicate
        try:
            yield
        except exception_type as error:
            fits = expected(error) if callable(expected) else re.search(expected, str(error))
            self._check(fits, None, f"The error does not fit: {error}")
            return
        self.fail(f"{exception_type} was not raised")

    def _check(self, holds: Value, msg: Ignored, default: str) -> None:
        if not holds:
            self.fail(default if msg is None else f"{msg}: {default}")


def _is_uneven(value: Value) -> bool:
    """Tells whether a sequence has parts of different shapes, or dicts."""
    if not isinstance(value, list | tuple) or not value:
        return False
    if any(isinstance(item, Mapping) or _is_uneven(item) for item in value):
        return True
    return len({np.shape(_array(item)) for item in value}) > 1


class Benchmark:
    """Measures parts of a program; only what subclasses define.

    >>> Benchmark().report_benchmark(iters=1)
    """

    def report_benchmark(self, **results: Any) -> None:
        """Accepts results."""
        del results
