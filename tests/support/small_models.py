# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Small models shared by the tests."""

import jax

import jaxmodels

MIXERS = {
    "attention": jaxmodels.Attention(num_heads=4, num_kv_heads=2),
    "ttt_linear": jaxmodels.TTTLinear(num_heads=4, mini_batch_size=8),
    "ttt_mlp_mamba": jaxmodels.TTTMLP(num_heads=4, mini_batch_size=8, backbone="mamba"),
}
PRE_CONV = {"ttt_mlp_mamba": jaxmodels.CausalConv()}


def tiny(name="ttt_linear", **changes):
    """(model, params) with every parameter away from its starting value, so that none can hide."""
    fields = dict(
        d_model=32,
        num_layers=3,
        inputs=jaxmodels.TokenInputs(vocab_size=50),
        mixer=MIXERS[name],
        channel=jaxmodels.SwiGLU(d_ff=48),
        dtype="float32",
        pre_conv=PRE_CONV.get(name),
    )
    model = jaxmodels.build(jaxmodels.DecoderConfig(**(fields | changes)))
    params = model.init(jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [x + 0.1 * jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves)]
    return model, jax.tree.unflatten(tree, noisy)


def tokens(batch, length, seed=2):
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, 50)
