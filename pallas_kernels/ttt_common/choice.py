# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Which implementation of a TTT operation runs.

An operation is a package with one module per implementation, imported when it is wanted.
"""

import functools
import importlib
import logging

import jax

KERNELS = {"tpu": "pallas_tpu", "cuda": "triton_gpu"}
"""The implementation written for each platform; any other runs "xla"."""

IMPLEMENTATIONS = ("xla", *KERNELS.values(), "reference")
"""By name. "reference" goes token by token and is for tests."""


def load(package: str, implementation: str):
    """The module of one implementation."""
    return importlib.import_module(f"{package}.{implementation}")


def check(package, implementation, sizes, refused):
    """ValueError where `implementation` is unknown, or cannot do what is asked.

    `sizes` are the arguments of a kernel's `unsupported`, and `refused` says what of the call no
    kernel does, or is None.
    """
    if implementation is None:
        return
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r}: one of {IMPLEMENTATIONS} or None")
    if implementation in KERNELS.values():
        why = refused or load(package, implementation).unsupported(*sizes)
        if why is not None:
            raise ValueError(
                f"implementation={implementation!r} cannot run this: {why}; "
                "take 'xla', or None for the best that can"
            )


def dispatch(package, implementation, function, sizes, *args, **options):
    """Calls `function` of the implementation; with None, of the best for the platform that the
    program is lowered for. `sizes` as in `check`.

    Kernels are traced only for platforms in sight: those of the mesh that the arguments live on,
    else JAX's default one. Programs lowered elsewhere (for another platform and without a mesh)
    get "xla", unless a kernel is named.
    """
    if implementation is not None:
        return getattr(load(package, implementation), function)(*args, **options)
    default = functools.partial(getattr(load(package, "xla"), function), **options)
    meshes = {jax.sharding.get_abstract_mesh()}
    meshes |= {jax.typeof(x).sharding.mesh for x in jax.tree.leaves(args)}
    branches = {}
    for platform in _platforms(meshes) & KERNELS.keys():
        kernel = load(package, KERNELS[platform])
        why = kernel.unsupported(*sizes) or _split(meshes)
        if why is None:
            branches[platform] = functools.partial(getattr(kernel, function), **options)
        else:
            _say_once(package, KERNELS[platform], platform, why)
    if not branches:
        return default(*args)
    return jax.lax.platform_dependent(*args, default=default, **branches)


def _platforms(meshes) -> set[str]:
    devices = {mesh.abstract_device for mesh in meshes} - {None}
    names = {device.platform for device in devices} or {jax.default_backend()}
    return {"cuda" if name == "gpu" else name for name in names}


def _split(meshes) -> str | None:
    for mesh in meshes:
        if any(size > 1 and axis not in mesh.manual_axes for axis, size in mesh.shape.items()):
            return "XLA cannot split a kernel over a mesh: call the operation inside shard_map"
    return None


@functools.cache
def _say_once(package, kernel, platform, why):
    logging.getLogger(__name__).warning(
        "%s on %s runs as 'xla', not as %r: %s", package, platform, kernel, why
    )
