"""Rotary position embedding: the angle per token of each pair of a head's dimensions.

All arithmetic is in float32, step by step as the models were trained with, so that angles at position 8,000
still agree with other implementations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Llama3Scaling:
    """The frequency scaling of Llama 3.1 and later: long wavelengths are stretched, short ones kept.

    Attributes:
        factor: by how much wavelengths beyond `original_context_tokens / low_freq_factor` are stretched.
        low_freq_factor: turns over the original context below which a frequency is stretched in full.
        high_freq_factor: turns over the original context above which a frequency is kept.
        original_context_tokens: context that the model was trained with before it was extended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int


MOST_STRETCHED = 2.0**20
"""Most that a wavelength may be stretched or shortened by; with more angles may overflow."""


def is_factor(factor: float) -> bool:
    """Whether wavelengths can be stretched by so much."""
    return 1 / MOST_STRETCHED <= factor <= MOST_STRETCHED


def is_base(base: float) -> bool:
    """Whether float32 holds the frequencies of a base."""
    return 1e-6 <= base <= 1e30


def inverse_frequencies(head_dim: int, base: float) -> Float32Array:
    """Angle per token of each of the `head_dim / 2` pairs: `base ** (-2 i / head_dim)`."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    result: Float32Array = np.float32(1.0) / np.power(np.float32(base), exponents)
    return result


def scale_linear(frequencies: Float32Array, factor: float) -> Float32Array:
    """Linear scaling: every angle divided by `factor`, as if positions lay closer together."""
    result: Float32Array = frequencies / np.float32(factor)
    return result


def scale_llama3(frequencies: Float32Array, scaling: Llama3Scaling) -> Float32Array:
    """The scaling of Llama 3.1: between the two wavelength bounds the stretch fades in linearly."""
    context, low, high = scaling.original_context_tokens, scaling.low_freq_factor, scaling.high_freq_factor
    factor = np.float32(scaling.factor)
    wavelengths = np.float32(2 * math.pi) / frequencies
    is_long = wavelengths > np.float32(context / low)
    is_short = wavelengths < np.float32(context / high)
    stretched = np.where(is_long, frequencies / factor, frequencies)
    smooth = (np.float32(context) / wavelengths - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1) - smooth) * stretched / factor + smooth * stretched
    result: Float32Array = np.where(~is_long & ~is_short, blended, stretched)
    return result


def scale_by_factors(frequencies: Float32Array, factors: Float32Array) -> Float32Array:
    """Each angle divided by its own factor (GGUF keeps any scaling so, in `rope_freqs.weight`)."""
    result: Float32Array = frequencies / factors
    return result
