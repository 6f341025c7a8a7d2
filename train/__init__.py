# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The training application: one loop, its data, its command line."""
