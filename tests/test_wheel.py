# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The wheel, installed alone with the base dependencies, imports and runs outside the
repository."""

import pathlib
import subprocess
import sys
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
USE = """
import jax, jaxmodels
from flax import nnx
config = jaxmodels.ttt.ttt_linear(
    d_model=32, num_layers=2, num_heads=2, d_ff=64, vocab_size=256, dtype="float32"
)
model = jaxmodels.build(config)
params = model.init(jax.random.key(0))
tokens = jax.numpy.arange(40)[None]
out = model.apply(params, tokens)
assert out.shape == (1, 40, 256) and bool(jax.numpy.isfinite(out).all())
assert jaxmodels.generate(model, params, [[1, 2, 3]], max_new_tokens=3).shape == (1, 3)
import importlib.util
for name in ("grain", "tyro", "torch", "tensorboard"):
    assert importlib.util.find_spec(name) is None, name
print(jaxmodels.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_wheel_contains_the_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {
        "pallas_kernels",
        "jaxmodels",
        "train",
        "configs",
    }
    for package in ("pallas_kernels", "jaxmodels", "train", "configs"):
        assert f"{package}/py.typed" in names


@pytest.mark.slow
def test_wheel_runs_with_base_dependencies_only(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, cwd=tmp_path)
    done = subprocess.run([python, "-c", USE], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout, "imported from somewhere else"
    cli = subprocess.run(
        [tmp_path / "env" / "bin" / "jaxmodels", "train", "x.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert cli.returncode == 2 and "jaxmodels[train]" in cli.stderr
    assert "Traceback" not in cli.stderr
