# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Where activations live, without the library knowing any mesh.

Modules name the axes of their activations (`constrain(x, "batch", "sequence", None)`). A program
that owns a mesh says what the names mean (`with use_rules(table): ...` around tracing). Without
rules or without a mesh the names cost nothing, so every module runs alone, under an Auto mesh,
under an Explicit mesh and inside `shard_map`.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.sharding import get_abstract_mesh

Rules = Mapping[str, str | tuple[str, ...] | None]

_rules: contextvars.ContextVar[Rules | None] = contextvars.ContextVar("rules", default=None)


@contextlib.contextmanager
def use_rules(rules: Rules) -> Iterator[None]:
    """Maps logical activation names to mesh axes for everything traced inside the block."""
    token = _rules.set(rules)
    try:
        yield
    finally:
        _rules.reset(token)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrains the sharding of an activation, one logical name (or None) per axis.

    Identity without rules, without a mesh, on an Explicit mesh (whose types already say it) and for
    mesh axes that a caller's `shard_map` holds. Raises ValueError for a name that the rules do not
    know.
    """
    rules, mesh = _rules.get(), get_abstract_mesh()
    if rules is None or mesh.empty or mesh.explicit_axes:
        return x
    if unknown := [name for name in names if name is not None and name not in rules]:
        raise ValueError(f"no sharding rule for {unknown}; known names: {sorted(rules)}")
    free = set(mesh.axis_names) - set(mesh.manual_axes)
    return jax.lax.with_sharding_constraint(x, _spec(names, rules, free)) if free else x


def local(fn: Callable, in_names: Any, out_names: Any) -> Callable:
    """`fn` run by every device on its own part of the arguments (a `shard_map` around a kernel).

    `in_names` and `out_names` give the logical names of the leading axes of each argument and
    result (or of all leaves of one); axes without a name are whole on every device. The function
    itself where `constrain` is the identity, or where the names split nothing.
    """
    rules, mesh = _rules.get(), get_abstract_mesh()
    if rules is None or mesh.empty or mesh.explicit_axes:
        return fn
    free = {axis for axis in mesh.axis_names if axis not in mesh.manual_axes}
    specs = lambda args: tuple(_spec(names, rules, free) for names in args)
    in_specs, out_specs = specs(in_names), specs(out_names)
    used = {axis for names in in_names for name in names for axis in _axes_of(name, rules, free)}
    if all(mesh.shape[axis] == 1 for axis in used):
        return fn
    return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, axis_names=free)


def _spec(names, rules, free) -> P:
    return P(*(_axes_of(name, rules, free) or None for name in names))


def _axes_of(name, rules, free) -> tuple[str, ...]:
    """The mesh axes of a logical name that no caller's `shard_map` holds."""
    entry = None if name is None else rules[name]
    entry = (entry,) if isinstance(entry, str) else (entry or ())
    return tuple(axis for axis in entry if axis in free)


def any_mesh(out_specs: Callable[[Any], Any]) -> Callable[[Callable], Callable]:
    """Lets a module's method `call(self, x, **options)`, written for automatic sharding, run on an
    Explicit mesh.

    `out_specs(batch)` gives the PartitionSpecs of the result, as a tree prefix, from the mesh axes
    of x's batch. On any other mesh, or none, the method runs untouched.
    """

    def decorate(method):
        @functools.wraps(method)
        def call(self, x, **options):
            if not get_abstract_mesh().explicit_axes:
                return method(self, x, **options)
            if getattr(options.get("tap"), "names", None):
                raise ValueError("on an Explicit mesh, take taps from the whole decoder (taps=...)")
            graphdef, weights = nnx.split(self)
            arrays, static = {}, {}
            for name, value in options.items():
                leaves = jax.tree.leaves(value)
                dynamic = leaves and all(hasattr(leaf, "dtype") for leaf in leaves)
                (arrays if dynamic else static)[name] = value

            def run(x, weights, arrays):
                return method(nnx.merge(graphdef, weights), x, **arrays, **static)

            spec = jax.typeof(x).sharding.spec
            out = out_specs(spec[0] if spec else None)
            return jax.sharding.auto_axes(run, out_sharding=out)(x, weights, arrays)

        return call

    return decorate
