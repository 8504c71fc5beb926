"""Speech features: 25 ms frames every 10 ms, 40 coefficients and energy, with their changes.

Frame t covers the samples 160 t .. 160 t + 400 (at 16 kHz). Its power spectrum goes through 40
triangular filters that are evenly spaced on the mel scale, mel(f) = 2595 log10(1 + f / 700); the
logarithms of their outputs (or, as an option, the cosine transform of these: the cepstrum) and of the
frame's energy are 41 numbers. With the slopes of these over five frames, and the slopes of the slopes,
they are 123.
"""

from functools import cache
from typing import Any

import numpy as np

RATE = 16_000
LENGTH, HOP = 400, 160  # samples in a frame, and from one to the next
FILTERS = 40
STATIC = FILTERS + 1
WIDTH = 3 * STATIC
_FFT = 512
_PREEMPHASIS = 0.97
_FLOOR = 1e-8  # of power, so that silence has a logarithm
_REACH = 2  # frames on each side of a slope


def frame_count(samples: int) -> int:
    """Return the number of whole frames in a number of samples."""
    return max(0, 1 + (samples - LENGTH) // HOP)


def frame_centres(count: int) -> np.ndarray:
    """Return the sample in the middle of each frame."""
    return HOP * np.arange(count) + LENGTH // 2


def static_features(samples: Any, *, cepstral: bool = False) -> np.ndarray:
    """Return the 41 coefficients of each frame, (frames, 41) float32.

    >>> import numpy as np
    >>> tone = np.sin(2 * np.pi * 1000 * np.arange(16000) / 16000)
    >>> static_features(tone).shape
    (98, 41)
    """
    samples = np.asarray(samples, np.float64)
    if frame_count(len(samples)) == 0:
        return np.zeros((0, STATIC), np.float32)
    frames = np.lib.stride_tricks.sliding_window_view(samples, LENGTH)[::HOP]
    energy = np.log(np.mean(frames**2, axis=1) + _FLOOR)
    flatter = np.append(samples[0], samples[1:] - _PREEMPHASIS * samples[:-1])
    windowed = np.lib.stride_tricks.sliding_window_view(flatter, LENGTH)[::HOP] * np.hamming(LENGTH)
    power = np.abs(np.fft.rfft(windowed, _FFT)) ** 2 / LENGTH
    coefficients = np.log(power @ mel_filters().T + _FLOOR)
    if cepstral:
        from scipy.fft import dct

        coefficients = np.asarray(dct(coefficients, axis=1, norm="ortho"))
    return np.column_stack([coefficients, energy]).astype(np.float32)


@cache
def mel_filters() -> np.ndarray:
    """Return the filters, (40, 257): triangles with their corners evenly spaced in mel."""
    edges = np.linspace(0, 2595 * np.log10(1 + RATE / 2 / 700), FILTERS + 2)
    corners = 700 * (10 ** (edges / 2595) - 1)
    low, middle, high = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    frequency = np.linspace(0, RATE / 2, _FFT // 2 + 1)
    up, down = (frequency - low) / (middle - low), (high - frequency) / (high - middle)
    return np.maximum(0, np.minimum(up, down))


def with_changes(static: np.ndarray) -> np.ndarray:
    """Return an utterance's coefficients, their slopes, and the slopes of these: (frames, 123)."""
    slope = _slope(static)
    return np.concatenate([static, slope, _slope(slope)], axis=1)


def _slope(x: np.ndarray) -> np.ndarray:
    """The least-squares slope over frames t - 2 .. t + 2; the ends are repeated beyond the ends."""
    padded = np.pad(x, ((_REACH, _REACH), (0, 0)), mode="edge")
    offsets = np.arange(-_REACH, _REACH + 1)
    return sum(
        k / float(np.sum(offsets**2)) * padded[_REACH + k : _REACH + k + len(x)] for k in offsets
    ).astype(np.float32)  # pyright: ignore[reportAttributeAccessIssue]
