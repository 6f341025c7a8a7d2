# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Inside a caller's `shard_map`: replicated values next to sharded ones."""

from typing import Any

import jax


def match_varying(tree: Any) -> Any:
    """Marks every leaf as varying over all manual mesh axes that any of them varies over.

    A scan wants that of its carry, and a custom VJP of its cotangents. Done before a custom VJP,
    the cotangent of a replicated leaf is summed over the mesh by the transpose. Identity elsewhere.
    """
    wanted = frozenset().union(*(_varying(leaf) for leaf in jax.tree.leaves(tree)))

    def cast(leaf):
        missing = tuple(sorted(wanted - _varying(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, tree) if wanted else tree


def _varying(leaf) -> frozenset:
    return jax.typeof(leaf).manual_axis_type.varying
