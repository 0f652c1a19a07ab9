"""Statistics of a leaf, which are read without numpy and jax."""

from __future__ import annotations

from typing import NamedTuple

BINS = 12
"""Bins of a histogram, of equal width from the minimum to the maximum."""


class LeafSample(NamedTuple):
    """Statistics of the finite values in a sample of a leaf.

    Attributes:
        size: Number of values that this process saved.
        sampled: Number of values in the sample; equal to `size` if all.
        norm: Root of the sum of squares, scaled up to all values.
        mean: Mean; 0 without any, as the next two.
        nonfinite: Number of NaNs and infinities in the sample.
        histogram: Number of values in each of `BINS` bins.
    """

    size: int
    sampled: int
    norm: float
    mean: float
    min: float
    max: float
    nonfinite: int
    histogram: tuple[int, ...]
