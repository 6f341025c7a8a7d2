# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Interleaving sources in exact proportions, with random access."""

import fractions
import heapq
import math
import sys
from collections.abc import Sequence
from typing import Any

import grain


class Interleave(grain.transforms.DatasetSelectionMap):
    """Index in a mixture -> (source, index in that source), in proportion to weights.

    A binary tree over the sources splits any number of rows exactly: of the first n rows at a node,
    round(n * left / (left + right)) go left and the rest go right. So every index is found without
    counting from 0, each source is read in order without gaps, and among the first n rows the
    number from a source of share w differs from n w by at most 1/2 for two sources, and by less
    than 2 for any number (the tree is Huffman's, where no inner node takes more than 2/3 of its
    parent). Weights are taken as the decimals they are written as, in integer arithmetic, so the
    counts are exact whenever n w is an integer for all of them.

    `grain.MapDataset.mix` would round weights to multiples of 1 % of the smallest.
    """

    def __init__(self, weights: Sequence[float]):
        exact = [fractions.Fraction(str(w)) for w in weights]
        scale = math.lcm(*(w.denominator for w in exact))
        # (weight, tie break, source or (left, right, weight of left, weight of both))
        heap: list[tuple[int, int, Any]] = [(int(w * scale), i, i) for i, w in enumerate(exact)]
        heapq.heapify(heap)
        while len(heap) > 1:
            left, right = heapq.heappop(heap), heapq.heappop(heap)
            both = left[0] + right[0]
            node = (left[2], right[2], left[0], both)
            heapq.heappush(heap, (both, len(weights) + right[1], node))
        self._root = heap[0][2]

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> tuple[int, int]:
        node = self._root
        while not isinstance(node, int):
            left, right, weight, both = node
            before = (2 * index * weight + both) // (2 * both)
            after = (2 * (index + 1) * weight + both) // (2 * both)
            node, index = (left, before) if after > before else (right, index - before)
        return node, index
