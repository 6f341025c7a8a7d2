# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""How far two arrays are apart. Every comparison also demands equal shapes and finite values."""

import numpy as np


def _pair(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    assert np.isfinite(got).all() and np.isfinite(want).all(), "not finite"
    return got, want


def max_abs(got, want):
    """Largest absolute difference."""
    got, want = _pair(got, want)
    return float(np.max(np.abs(got - want), initial=0.0))


def max_rel(got, want):
    """Largest absolute difference over the largest absolute value of the reference."""
    got, want = _pair(got, want)
    return float(
        np.max(np.abs(got - want), initial=0.0) / (np.max(np.abs(want), initial=0.0) + 1e-30)
    )


def rms_rel(got, want):
    """RMS of the difference over RMS of the reference."""
    got, want = _pair(got, want)
    return float(np.sqrt(np.mean((got - want) ** 2)) / (np.sqrt(np.mean(want**2)) + 1e-8))
