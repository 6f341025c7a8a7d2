# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Calling Triton kernels of which each program works for one sequence and head.

Nothing here imports triton or jax_triton before a kernel is called: both are optional, and
jax_triton refuses to be imported next to a jaxlib without CUDA.
"""

import functools
import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from pallas_kernels.varying import match_varying


class Stacked(NamedTuple):
    """An array (or the shape of a result) with one more axis before those of B and H."""

    value: Any


def unsupported(K: int, dtype: Any) -> str | None:
    """Why the kernels cannot run here with this head width and dtype, or None."""
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        return f"the Triton kernels take float32 or bfloat16, not {jnp.dtype(dtype)}"
    if K > 128:
        return f"the Triton kernels take head widths up to 128, not {K}"
    return _missing()


@functools.cache
def _missing() -> str | None:
    try:
        import jax_triton  # noqa: F401
    except ImportError as error:
        return f"jax_triton (pip install 'jaxmodels[triton,cuda]') cannot be imported: {error}"
    found = compute_capability()
    if not 80 <= found < 100:
        # Before Ampere there is no TF32; for Blackwell, Triton writes PTX that is too new for the
        # assembler of CUDA 12, which jaxlib only finds out when a kernel starts.
        return f"the Triton kernels run on compute capability 8.0 to 9.0, not on {found / 10}"
    return None


@functools.cache
def compute_capability() -> int:
    """Of the first GPU, as 80 for 8.0; on a machine without one, which can only compile for
    another, Hopper's 90."""
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError:
        return 90
    major, minor = device.compute_capability.split(".")
    return 10 * int(major) + int(minor)


def precision(dtype: Any) -> str:
    """How float32 tiles are multiplied. Three TF32 products keep float32's accuracy; beside
    bfloat16's 8 bits the 11 of a single one do."""
    return "tf32x3" if dtype == jnp.float32 else "tf32"


def padded(size: int) -> int:
    """The tile size for `size` tokens or features: a power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def result(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """What a kernel writes, without the axes B and H."""
    return jax.ShapeDtypeStruct(shape, dtype)


def spread(x: jax.Array, B: int, H: int) -> jax.Array:
    """(b,) or (H, K) for every sequence and head: (B, H, b) or (B, H, K)."""
    return jnp.broadcast_to(x, (B, H, x.shape[-1]))


def run(
    kernel: str,
    inputs: Sequence[Any],
    results: Sequence[Any],
    *,
    scalars: Sequence[int] = (),
    warps: int,
    stages: int,
    aliases: dict[int, int] | None = None,
    **constants: Any,
) -> list[jax.Array]:
    """The results of the kernel called `module:function`, one program per sequence and head.

    Its arguments are the inputs (B, H, ...), the scalars, the results (from `result`; they get the
    axes B and H) and the constants by name. `Stacked` inputs and results are (., B, H, ...). A
    mapped axis (`vmap`) becomes more programs.
    """
    in_axes = [int(isinstance(x, Stacked)) for x in inputs]
    out_axes = [int(isinstance(x, Stacked)) for x in results]
    arrays = [x.value if isinstance(x, Stacked) else x for x in inputs]
    shapes = [x.value if isinstance(x, Stacked) else x for x in results]
    B, _H = arrays[0].shape[in_axes[0] : in_axes[0] + 2]

    @custom_vmap
    def call(*arrays):
        N = arrays[0].shape[in_axes[0]]
        out = [
            jax.ShapeDtypeStruct((*x.shape[:axis], N, *x.shape[axis:]), x.dtype)
            for x, axis in zip(shapes, out_axes)
        ]
        return launch(kernel, arrays, scalars, out, N, warps, stages, aliases or {}, constants)

    @call.def_vmap
    def _(size, batched, *arrays):
        folded = []
        for x, is_batched, axis in zip(arrays, batched, in_axes):
            x = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            folded.append(_merge(jnp.moveaxis(x, 0, axis), axis))
        out = call(*folded)
        out = [jnp.moveaxis(_split(x, axis, size), axis, 0) for x, axis in zip(out, out_axes)]
        return out, [True] * len(out)

    arrays = [_merge(x, axis) for x, axis in zip(arrays, in_axes)]
    out = match_varying((arrays, call(*arrays)))[1]
    return [_split(x, axis, B) for x, axis in zip(out, out_axes)]


def one_token(kernel, q, k, v, lr, scale, last, state, gamma, beta, *, scalars=(), **constants):
    """A decode step: the outputs (B, H, K) and the new state, which takes the place of the old."""
    B, H, K = q.shape
    per_head = (jnp.broadcast_to(x[:, None], (B, H)) for x in (scale, last.astype(jnp.int32)))
    tokens = [q, k, v, lr, *per_head]
    out, *new = run(
        kernel,
        [*tokens, *state, spread(gamma, B, H), spread(beta, B, H)],
        [result(K, dtype=q.dtype), *(result(*x.shape[2:]) for x in state)],
        scalars=scalars,
        warps=8,
        stages=1,
        aliases={len(tokens) + i: 1 + i for i in range(len(state))},
        **constants,
    )
    return out, type(state)(*new)


def _merge(x, axis):
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _split(x, axis, size):
    return x.reshape(*x.shape[:axis], size, -1, *x.shape[axis + 1 :])


def launch(kernel, arrays, scalars, shapes, programs, warps, stages, aliases, constants):
    """One launch of `programs` programs, through jax_triton."""
    import jax_triton

    module, name = kernel.split(":")
    return jax_triton.triton_call(
        *arrays,
        *scalars,
        kernel=getattr(importlib.import_module(module), name),
        out_shape=shapes,
        grid=programs,
        name=name,
        num_warps=warps,
        num_stages=stages,
        compute_capability=compute_capability(),
        input_output_aliases=aliases,
        **constants,
    )
