# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Kernels, one folder per operation. Knows nothing of models; importing has no side effect."""
