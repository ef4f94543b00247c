"""`tf.signal`: Fourier and cosine transforms, windows, frames and spectrograms."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from replicax.foundation import errors
from replicax.tf import dtypes, namespaces
from replicax.tf.dispatch import op
from replicax.tf.ops.operands import Array, Value, integer, static, xp
from replicax.tf.signal_frames import frame, framed, overlap_and_add, overlapped
from replicax.tf.signal_transforms import (
    dct,
    dct_of,
    fft,
    fft2d,
    fft3d,
    fftnd,
    fftshift,
    idct,
    ifft,
    ifft2d,
    ifft3d,
    ifftnd,
    ifftshift,
    irfft,
    irfft2d,
    irfft3d,
    irfftnd,
    rfft,
    rfft2d,
    rfft3d,
    rfftnd,
    signal_array,
)
from replicax.tf.signal_windows import (
    hamming_window,
    hann_window,
    kaiser_bessel_derived_window,
    kaiser_window,
    vorbis_window,
    window_of,
)

__all__ = [
    "dct",
    "fft",
    "fft2d",
    "fft3d",
    "fftnd",
    "fftshift",
    "frame",
    "hamming_window",
    "hann_window",
    "idct",
    "ifft",
    "ifft2d",
    "ifft3d",
    "ifftnd",
    "ifftshift",
    "inverse_mdct",
    "inverse_stft",
    "inverse_stft_window_fn",
    "irfft",
    "irfft2d",
    "irfft3d",
    "irfftnd",
    "kaiser_bessel_derived_window",
    "kaiser_window",
    "linear_to_mel_weight_matrix",
    "mdct",
    "mfccs_from_log_mel_spectrograms",
    "overlap_and_add",
    "rfft",
    "rfft2d",
    "rfft3d",
    "rfftnd",
    "stft",
    "vorbis_window",
]

# A window function: of a length and `dtype=`.
WindowFunction = Callable[..., Value]
_MEL_BREAK = 700.0
_MEL_HIGH = 1127.0


def _power_of_two(length: int) -> int:
    return 1 << max(0, length - 1).bit_length()


@op
def stft(
    signals: Value,
    frame_length: Value,
    frame_step: Value,
    fft_length: Value = None,
    window_fn: WindowFunction | None = hann_window,
    pad_end: bool = False,
    name: str | None = None,
) -> Array:
    """Returns the short-time Fourier transform of signals: (..., frames, frequencies).

    Args:
      signals: (..., samples), real.
      frame_length: The samples of a frame.
      frame_step: The samples between the beginnings of two frames.
      fft_length: The length of the transform; by default the next power of two.
      window_fn: Makes the window that frames are multiplied by; None for no window.
      pad_end: Whether the last frames are filled with zeros.
      name: Accepted for portability.

    >>> stft(np.ones(16, np.float32), 8, 4).shape
    TensorShape([3, 5])
    """
    length, step = integer(frame_length, "frame_length"), integer(frame_step, "frame_step")
    size = _power_of_two(length) if fft_length is None else integer(fft_length, "fft_length")
    ns, x = signal_array(signals, "stft", "f")
    frames = framed(ns, x, length, step, pad_end)
    if window_fn is not None:
        frames = frames * window_of(ns, window_fn, length, x.dtype)
    found = ns.fft.rfft(_cut_to(frames, size), size)
    return found.astype(np.complex128 if x.dtype == np.float64 else np.complex64)


def _cut_to(frames: Array, size: int) -> Array:
    return frames[..., :size] if frames.shape[-1] > size else frames


@op
def inverse_stft(
    stfts: Value,
    frame_length: Value,
    frame_step: Value,
    fft_length: Value = None,
    window_fn: WindowFunction | None = hann_window,
    name: str | None = None,
) -> Array:
    """Returns the signals of short-time Fourier transforms.

    Use `inverse_stft_window_fn` to get the signals back exactly.

    Args:
      stfts: (..., frames, frequencies), complex.
      frame_length: The samples of a frame.
      frame_step: The samples between the beginnings of two frames.
      fft_length: The length of the transform; by default the next power of two.
      window_fn: Makes the window that frames are multiplied by; None for no window.
      name: Accepted for portability.
    """
    length, step = integer(frame_length, "frame_length"), integer(frame_step, "frame_step")
    size = _power_of_two(length) if fft_length is None else integer(fft_length, "fft_length")
    ns, x = signal_array(stfts, "inverse_stft", "c")
    kind = np.float64 if x.dtype == np.complex128 else np.float32
    frames = ns.fft.irfft(x, size).astype(kind)
    if length <= size:
        frames = frames[..., :length]
    else:
        frames = ns.pad(frames, [(0, 0)] * (frames.ndim - 1) + [(0, length - size)])
    if window_fn is not None:
        frames = frames * window_of(ns, window_fn, length, np.dtype(kind))
    return overlapped(ns, frames, step)


def inverse_stft_window_fn(
    frame_step: Value,
    forward_window_fn: WindowFunction = hann_window,
    name: str | None = None,
) -> WindowFunction:
    """Returns the window function for `inverse_stft` that gives the signals back.

    >>> window = inverse_stft_window_fn(4)(8)
    >>> x = np.linspace(0, 1, 24, dtype=np.float32)
    >>> back = inverse_stft(stft(x, 8, 4), 8, 4, window_fn=inverse_stft_window_fn(4))
    >>> bool(np.allclose(back.numpy()[4:-4], x[4:-4], atol=1e-5))
    True
    """
    step = integer(frame_step, "frame_step")

    def window(frame_length: Value, dtype: Value = dtypes.float32) -> Value:
        return _inverse_window(forward_window_fn, frame_length, step, dtype)

    return window


@op
def _inverse_window(forward: WindowFunction, length: Value, step: int, dtype: Value) -> Array:
    size = integer(length, "frame_length")
    kind = dtypes.as_dtype(dtype).dtype
    given = window_of(xp(), forward, size, kind)
    ns = xp(given)
    overlaps = -(-size // step)
    total = ns.pad(ns.square(given), (0, overlaps * step - size)).reshape(overlaps, step).sum(0)
    return given / ns.tile(total, overlaps)[:size]


# Spectrograms.


@op
def linear_to_mel_weight_matrix(
    num_mel_bins: Value = 20,
    num_spectrogram_bins: Value = 129,
    sample_rate: Value = 8000,
    lower_edge_hertz: Value = 125.0,
    upper_edge_hertz: Value = 3800.0,
    dtype: Value = dtypes.float32,
    name: str | None = None,
) -> Array:
    """Returns the matrix (spectrogram bins, mel bins) that sums frequencies to bands.

    Args:
      num_mel_bins: The number of bands, equally wide on the mel scale.
      num_spectrogram_bins: The number of frequencies of the spectrogram.
      sample_rate: Samples per second.
      lower_edge_hertz: Where the lowest band begins.
      upper_edge_hertz: Where the highest band ends.
      dtype: The type of the matrix.
      name: Accepted for portability.

    >>> linear_to_mel_weight_matrix(4, 9).shape
    TensorShape([9, 4])
    """
    bands = integer(num_mel_bins, "num_mel_bins")
    bins = integer(num_spectrogram_bins, "num_spectrogram_bins")
    rate, low, high = (
        float(static(value, name))
        for value, name in (
            (sample_rate, "sample_rate"),
            (lower_edge_hertz, "lower_edge_hertz"),
            (upper_edge_hertz, "upper_edge_hertz"),
        )
    )
    if bands <= 0 or not 0 <= low < high <= rate / 2:
        raise errors.InvalidArgumentError(
            "There must be bands, between 0 Hz and half of the sample rate",
            f"there are {bands} from {low} Hz to {high} Hz at {rate} samples per second",
            "Correct the edges.",
        )
    frequencies = _mel(np.linspace(0.0, rate / 2, bins)[1:])[:, None]
    edges = np.linspace(_mel(np.asarray(low)), _mel(np.asarray(high)), bands + 2)
    begin, centre, end = edges[:-2], edges[1:-1], edges[2:]
    rising = (frequencies - begin) / (centre - begin)
    falling = (end - frequencies) / (end - centre)
    weights = np.maximum(0.0, np.minimum(rising, falling))
    # The constant part of a signal belongs to no band.
    found = np.pad(weights, [(1, 0), (0, 0)])
    return xp().asarray(found.astype(dtypes.as_dtype(dtype).dtype))


def _mel(hertz: np.ndarray) -> np.ndarray:
    return _MEL_HIGH * np.log1p(hertz / _MEL_BREAK)


@op
def mfccs_from_log_mel_spectrograms(log_mel_spectrograms: Value, name: str | None = None) -> Array:
    """Returns mel-frequency cepstral coefficients of logarithmic mel spectrograms.

    >>> mfccs_from_log_mel_spectrograms(np.ones((3, 8), np.float32)).shape
    TensorShape([3, 8])
    """
    ns, x = signal_array(log_mel_spectrograms, "mfccs_from_log_mel_spectrograms", "f")
    bands = x.shape[-1]
    if not bands:
        raise errors.InvalidArgumentError(
            "Spectrograms must have bands", f"the shape is {tuple(x.shape)}", "Check it."
        )
    return dct_of(ns, x, 2) * np.asarray(1 / math.sqrt(2.0 * bands), x.dtype)


# The modified discrete cosine transform.


@op
def mdct(
    signals: Value,
    frame_length: Value,
    window_fn: WindowFunction | None = vorbis_window,
    pad_end: bool = False,
    norm: str | None = None,
    name: str | None = None,
) -> Array:
    """Returns the modified discrete cosine transform: (..., frames, frame_length // 2).

    Args:
      signals: (..., samples), real.
      frame_length: The samples of a frame, a multiple of 4; frames overlap by half.
      window_fn: Makes the window that frames are multiplied by; None for a factor of sqrt(1/2).
      pad_end: Whether the last frames are filled with zeros.
      norm: None or "ortho".
      name: Accepted for portability.
    """
    length = integer(frame_length, "frame_length")
    if length % 4:
        raise errors.InvalidArgumentError(
            "`frame_length` must be a multiple of 4", f"it is {length}", "Pass 256."
        )
    ns, x = signal_array(signals, "mdct", "f")
    frames = framed(ns, x, length, length // 2, pad_end)
    if window_fn is not None:
        frames = frames * window_of(ns, window_fn, length, x.dtype)
    else:
        frames = frames * np.asarray(math.sqrt(0.5), x.dtype)
    quarter = length // 4
    a, b, c, d = (frames[..., i * quarter : (i + 1) * quarter] for i in range(4))
    folded = ns.concatenate([-c[..., ::-1] - d, a - b[..., ::-1]], axis=-1)
    return dct_of(ns, folded, 4, norm)


@op
def inverse_mdct(
    mdcts: Value,
    window_fn: WindowFunction | None = vorbis_window,
    norm: str | None = None,
    name: str | None = None,
) -> Array:
    """Returns the signals of modified discrete cosine transforms.

    >>> x = np.linspace(0, 1, 32, dtype=np.float32)
    >>> bool(np.allclose(inverse_mdct(mdct(x, 8)).numpy()[4:-4], x[4:-4], atol=1e-5))
    True
    """
    ns, x = signal_array(mdcts, "inverse_mdct", "f")
    half = x.shape[-1]
    folded = dct_of(ns, x, 4, norm)
    if norm is None:
        folded = folded * np.asarray(0.5 / half, x.dtype)
    first, second = folded[..., : half // 2], folded[..., half // 2 :]
    parts = [second, -second[..., ::-1], -first[..., ::-1], -first]
    frames = ns.concatenate(parts, axis=-1)
    if window_fn is not None:
        frames = frames * window_of(ns, window_fn, 2 * half, x.dtype)
    else:
        frames = frames * np.asarray(math.sqrt(0.5), x.dtype)
    return overlapped(ns, frames, half)


__getattr__ = namespaces.refusing(__name__)
