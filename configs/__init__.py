# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""One small Python file per published recipe or experiment; each has `experiment()`."""
