# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Blocks with no knowledge of any model: norms, rotary, attention, channel mixers, embeddings."""
