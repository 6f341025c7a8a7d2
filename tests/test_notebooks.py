# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Every notebook runs from start to end, offline, and is the same as its text form."""

import importlib.util
import os
import pathlib
import re
import subprocess

import jupytext
import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
REPOSITORY = "https://github.com/jaxmodels/jaxmodels/blob/main/"
SECONDS = 900
"""A cell that takes longer hangs; a whole notebook takes a tenth of it."""

# Loaded by the kernel at its start: nothing may be installed, and no other machine asked.
NO_NETWORK = """
import socket, sys
def refuse(self, address, _connect=socket.socket.connect):
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
        raise OSError(f"the notebook asked for {address}")
    return _connect(self, address)
socket.socket.connect = refuse
"""
NO_PIP = "raise SystemExit('the notebook called pip')"


def read(path):
    return nbformat.read(path, as_version=4)


def cells(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.fixture
def kernel_environment(tmp_path, monkeypatch):
    """What the kernel inherits: none of the test's flags, no user settings, no network, no pip."""
    blocks = tmp_path / "blocks"
    blocks.mkdir()
    (blocks / "sitecustomize.py").write_text(NO_NETWORK)
    (blocks / "pip.py").write_text(NO_PIP)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(blocks), str(ROOT))))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    for name in ("XLA_FLAGS", "MPLBACKEND", "JUPYTER_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name in ("JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_and_leaves_nothing(path, tmp_path, kernel_environment):
    folder = tmp_path / "empty"
    folder.mkdir()
    before = sorted(path.parent.rglob("*"))
    notebook = read(path)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None

    nbclient.NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    ).execute()  # raises for the first cell that fails

    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert code[0].outputs == []
    assert not [output for output in outputs(notebook) if output.get("name") == "stderr"]
    pictures = [output for output in outputs(notebook) if "image/png" in output.get("data", {})]
    assert len(pictures) == path.with_suffix(".py").read_text().count("plt.show()") > 0
    assert list(folder.iterdir()) == []
    assert sorted(path.parent.rglob("*")) == before


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_text_form_holds_the_same_cells(path):
    notebook = read(path)
    assert notebook.metadata["jupytext"]["formats"] == "ipynb,py:percent"
    assert cells(jupytext.read(path.with_suffix(".py"))) == cells(notebook)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_first_cell_opens_this_notebook_in_colab(path):
    badge = read(path).cells[0]
    assert badge.cell_type == "markdown"
    colab = REPOSITORY.replace("github.com/", "colab.research.google.com/github/")
    assert badge.source.startswith("[![Open in Colab](")
    assert badge.source.endswith(f"]({colab}{path.relative_to(ROOT).as_posix()})")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.parametrize("present", [True, False])
def test_second_cell_installs_only_what_is_missing(path, present, monkeypatch):
    calls = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if present else None)
    monkeypatch.setattr(subprocess, "check_call", calls.append)
    exec(read(path).cells[1].source, {})
    assert [call[1:] for call in calls] == (
        [] if present else [["-m", "pip", "install", "--quiet", "jaxmodels[notebooks]"]]
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_form(path):
    """Small, run from top to bottom without an error, naming no folder of a machine."""
    notebook = read(path)
    assert path.stat().st_size < 400_000
    assert outputs(notebook)
    assert all(output.output_type != "error" for output in outputs(notebook))
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    printed = "".join(output.get("text", "") for output in outputs(notebook))
    assert not re.search(r"(/home/|/tmp/|/usr/|/opt/|/root/|site-packages)", printed)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_into_the_repository_exist(path):
    text = "".join(cell.source for cell in read(path).cells)
    links = re.findall(rf"{REPOSITORY}([^)\s]+)", text)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link
