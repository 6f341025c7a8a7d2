# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""What the arguments of a TTT operation must look like; the first misfit is named."""

import jax.numpy as jnp


def check(
    weight_shapes, q, k, v, lr, pos_scale, state, ln_scale, ln_bias, phase, valid, reset, every
):
    """`weight_shapes` per sequence and head, one for each weight of the state. ValueError."""
    if q.ndim != 4 or 0 in q.shape:
        raise ValueError(f"q has shape {q.shape}, expected (B, H, T, K), none of them 0")
    if pos_scale.ndim != 1 or pos_scale.size == 0:
        raise ValueError(f"pos_scale has shape {pos_scale.shape}, expected (b,) with b at least 1")
    B, H, T, K = q.shape
    expected = {
        "k": (k, (B, H, T, K)),
        "v": (v, (B, H, T, K)),
        "lr": (lr, (B, H, T)),
        "ln_scale": (ln_scale, (H, K)),
        "ln_bias": (ln_bias, (H, K)),
        "phase": (phase, (B,)),
        "valid": (valid, (B, T)),
        "reset": (reset, (B, -(-T // pos_scale.size))),
    }
    for (name, array), shape in zip(state._asdict().items(), 2 * tuple(weight_shapes)):
        expected[f"state.{name}"] = array, (B, H, *shape)
    for name, (array, shape) in expected.items():
        if array is not None and array.shape != shape:
            raise ValueError(
                f"{name} has shape {array.shape}, expected {shape} because q is {q.shape} and "
                f"pos_scale {pos_scale.shape}"
            )
    floats = {"q": q, "k": k, "v": v, "lr": lr, "pos_scale": pos_scale}
    floats |= {"ln_scale": ln_scale, "ln_bias": ln_bias}
    floats |= {f"state.{name}": x for name, x in state._asdict().items()}
    for name, array in floats.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {array.dtype}, expected a float dtype")
    if phase is not None and not jnp.issubdtype(phase.dtype, jnp.integer):
        raise ValueError(f"phase has dtype {phase.dtype}, expected an integer dtype")
    for name, array in {"valid": valid, "reset": reset}.items():
        if array is not None and array.dtype != bool:
            raise ValueError(f"{name} has dtype {array.dtype}, expected bool")
    if reset is not None and (phase is not None or valid is not None):
        raise ValueError(
            "reset goes with sequences laid on whole mini-batches: not with phase or valid"
        )
    if every < 1:
        raise ValueError(f"checkpoint_every={every} must be at least 1")
