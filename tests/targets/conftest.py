# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Compiling for hardware that is not here; without the compilers the tests are skipped."""

import os

# libtpu would look for the machine's own TPU, and wait for an answer.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-16")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
# Several test processes may load it at once.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
