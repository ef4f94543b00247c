"""`tf.signal` computes what TensorFlow 2.21 has computed."""

from __future__ import annotations

import numpy as np
import pytest

import replicax.tf as tf
from replicax.tf import dispatch
from tests.fixtures.tf_image import comparing, signals
from tests.fixtures.tf_image.case import Case

CASES: dict[str, list[Case]] = {}
for _case in signals.table.cases:
    CASES.setdefault(_case.path, []).append(_case)


@pytest.mark.parametrize("path", CASES)
def test_results_on_the_host_are_those_of_tensorflow(path: str) -> None:
    assert comparing.problems_on_host(CASES[path]) == []


@pytest.mark.parametrize("path", CASES)
def test_compiled_results_are_those_of_tensorflow(path: str) -> None:
    assert comparing.problems_compiled(CASES[path]) == []


@pytest.mark.slow
@pytest.mark.parametrize("path", CASES)
def test_eager_results_are_those_of_tensorflow(path: str) -> None:
    assert comparing.problems_eager(CASES[path]) == []


@pytest.mark.parametrize("case", signals.gradients.cases, ids=lambda case: case.name)
def test_gradients_are_those_of_tensorflow(case: Case) -> None:
    assert comparing.gradient_problem(case) is None


@pytest.mark.parametrize("path", comparing.public_names("signal"))
def test_functions_have_the_parameters_of_tensorflow(path: str) -> None:
    assert comparing.own_parameters(path) == comparing.parameters()[path]


# TensorFlow has no kernels for these on a CPU: they are compared with NumPy.
@pytest.mark.parametrize("name", ["fftnd", "ifftnd", "rfftnd", "irfftnd"])
@pytest.mark.parametrize("is_host", [True, False])
def test_transforms_over_axes_are_those_of_numpy(name: str, is_host: bool) -> None:
    numpy_name = name.replace("nd", "n")
    x = signals.CUBE[0] if name == "rfftnd" else signals.COMPLEX[0, ..., :4]
    function = getattr(tf.signal, name)
    for length, axes, norm in ((None, None, None), ([4, 6], [1, 2], None), ([5], [0], "ortho")):
        with dispatch.host_mode(is_host):
            found = function(x, length, axes, norm)
        right = getattr(np.fft, numpy_name)(x, length, axes, norm)
        assert found.dtype == ("float32" if name == "irfftnd" else "complex64")
        np.testing.assert_allclose(found.numpy(), right, atol=1e-5)


def test_inverse_transform_gives_the_signal_back() -> None:
    window = tf.signal.inverse_stft_window_fn(4)
    spectrum = tf.signal.stft(signals.WAVE, 16, 4)
    found = tf.signal.inverse_stft(spectrum, 16, 4, window_fn=window)
    np.testing.assert_allclose(found.numpy()[16:-16], signals.WAVE[16:-16], atol=1e-5)
    assert window(16).shape == (16,)


PROPERTIES = {
    "signal.fftnd": test_transforms_over_axes_are_those_of_numpy,
    "signal.ifftnd": test_transforms_over_axes_are_those_of_numpy,
    "signal.rfftnd": test_transforms_over_axes_are_those_of_numpy,
    "signal.irfftnd": test_transforms_over_axes_are_those_of_numpy,
    "signal.inverse_stft_window_fn": test_inverse_transform_gives_the_signal_back,
}


def test_every_public_name_has_a_case() -> None:
    assert set(comparing.public_names("signal")) == {*CASES, *PROPERTIES}
    assert set(tf.signal.__all__) == {path.partition(".")[2] for path in (*CASES, *PROPERTIES)}


def test_unknown_name_says_what_to_use() -> None:
    with pytest.raises(AttributeError, match="hann_window"):
        tf.signal.han_window  # noqa: B018
