# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Dependencies run one way, and importing the library does nothing else."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
MAY_IMPORT = {
    "pallas_kernels": {"pallas_kernels"},
    "jaxmodels": {"pallas_kernels", "jaxmodels"},
    "train": {"pallas_kernels", "jaxmodels", "train"},
    "configs": {"pallas_kernels", "jaxmodels", "train", "configs"},
}


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_run_one_way(package):
    files = list((ROOT / package).rglob("*.py"))
    assert files
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in imported(path)
        if name in MAY_IMPORT and name not in MAY_IMPORT[package]
    ]
    assert not wrong


PROBE = """
import logging, os, sys, warnings
import jax
def watched():
    root = logging.getLogger()
    flags = dict(jax.config.values)
    return dict(os.environ), root.level, list(root.handlers), list(warnings.filters), flags
import flax, optax, numpy, safetensors.numpy, flax.nnx
before = watched()
import {package}
assert watched() == before, "importing changed the environment, the logging or the flags"
from jax._src import xla_bridge
assert not xla_bridge._backends, "importing started a backend"
heavy = [name for name in ("orbax", "grain", "tyro", "tensorboard", "torch") if name in sys.modules]
assert {heavy_allowed} or not heavy, heavy
"""


@pytest.mark.parametrize("package", ["pallas_kernels.ttt_linear", "jaxmodels"])
def test_importing_has_no_side_effect(package):
    # flax pulls in orbax where it is installed; what matters is that we add nothing to that.
    probe = PROBE.format(package=package, heavy_allowed="'orbax' in heavy and heavy == ['orbax']")
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
