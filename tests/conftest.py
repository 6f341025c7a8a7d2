# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Test set-up: 8 virtual CPU devices, exact float32 products, offline."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling takes most of the time of these tests, and LLVM's optimisations most of the compiling.
os.environ["XLA_FLAGS"] = " ".join(
    (
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        os.environ.get("XLA_FLAGS", ""),  # the last one wins
    )
)
os.environ["HF_HUB_OFFLINE"] = "1"

import jax
import numpy as np
import pytest

jax.config.update("jax_default_matmul_precision", "highest")

GOLDENS = pathlib.Path(__file__).parent / "goldens"


@pytest.fixture(scope="session")
def golden():
    """golden("ttt/pt_core_linear_d16_b16") -> dict of the arrays of one file (read once)."""
    cache = {}

    def load(name):
        if name not in cache:
            with np.load(GOLDENS / f"{name}.npz") as file:
                cache[name] = {key: file[key] for key in file.files}
        return cache[name]

    return load
