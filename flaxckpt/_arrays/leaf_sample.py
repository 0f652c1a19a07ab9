"""Statistics of a leaf, which are read without numpy and jax."""

from __future__ import annotations

from typing import NamedTuple

BINS = 12
"""Bins of a histogram, of equal width from the minimum to the maximum."""


class LeafSample(NamedTuple):
    """Statistics of a leaf from a sample of its values.

    Attributes:
        size: Number of values that this process saved.
        sampled: Number of values in the sample; equal to `size` if all.
        norm: Root of the sum of squares, scaled up from the finite values.
        mean: Mean of the finite values; 0 without any, as the next two.
        min: The smallest finite value.
        max: The largest finite value.
        nonfinite: Number of NaNs and infinities in the sample.
        histogram: Number of finite values in each of `BINS` bins.
    """

    size: int
    sampled: int
    norm: float
    mean: float
    min: float
    max: float
    nonfinite: int
    histogram: tuple[int, ...]
