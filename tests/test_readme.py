# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The Python in the README files runs as printed; what they link to exists."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = ["README.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "jaxmodels").rglob("README.md"))]
PAGES += [str(p.relative_to(ROOT)) for p in (ROOT / "pallas_kernels").rglob("README.md")]


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run(page):
    for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        exec(compile(block, page, "exec"), {})


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "benchmarks/README.md"])
def test_links_exist(page):
    for link in re.findall(r"\]\(([^)#:]+)", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / link).exists(), link
