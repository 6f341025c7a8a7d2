# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The dense baseline against two official codes: Hugging Face LLaMA, and the TTT authors'
Transformer."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from measure import max_abs, max_rel

import jaxmodels
from jaxmodels import losses, transformer

# Names of the TTT authors' Transformer (Flax, matrices [in, out]) -> the LLaMA names of our table.
FLAX_NAMES = {
    "seq_norm.kernel": "input_layernorm.weight",
    "ffn_norm.kernel": "post_attention_layernorm.weight",
    "feed_forward.w1.kernel": "mlp.gate_proj.weight",
    "feed_forward.w2.kernel": "mlp.down_proj.weight",
    "feed_forward.w3.kernel": "mlp.up_proj.weight",
    "seq_modeling_block.wq.kernel": "self_attn.q_proj.weight",
    "seq_modeling_block.wk.kernel": "self_attn.k_proj.weight",
    "seq_modeling_block.wv.kernel": "self_attn.v_proj.weight",
    "seq_modeling_block.wo.kernel": "self_attn.o_proj.weight",
}


def arrays(file, prefix):
    return {k.removeprefix(prefix): v for k, v in file.items() if k.startswith(prefix)}


def test_matches_hugging_face_llama(golden):
    file = golden("patchlm/fwd_k1")
    weights = arrays(file, "param/")
    config, params = transformer.from_official(json.loads(str(file["config"])), weights)
    model = jaxmodels.build(config)
    ids, labels = file["in/input_ids"], file["in/labels"]
    logits, taps = jax.jit(lambda p: model.apply(p, ids, taps=("mixer_out", "channel_out")))(params)
    assert max_abs(logits, file["out/logits"]) < 2e-5
    for layer in range(2):
        assert max_abs(taps["mixer_out"][layer], file[f"out/attn{layer}"]) < 2e-5
        assert max_abs(taps["channel_out"][layer], file[f"out/mlp{layer}"]) < 2e-5

    def loss(p):
        nll, _ = losses.cross_entropy(model.apply(p, ids)[:, :-1], labels[:, 1:])
        return jnp.mean(nll), nll

    (_, nll), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    # A float32 sum of many losses would itself be off by 1e-6.
    assert abs(np.mean(np.asarray(nll, np.float64)) - float(file["out/loss"])) < 2e-6
    grads = transformer.to_official(config, grads)
    wanted = arrays(file, "out/grad/")
    assert grads.keys() == wanted.keys()
    for name in wanted:
        assert max_rel(grads[name], wanted[name]) < 2e-5, name
    for name, value in transformer.to_official(config, params).items():
        np.testing.assert_array_equal(value, weights[name])


def llama_names(flax):
    out = {}
    for name, value in flax.items():
        if name == "model.wte.embedding":
            out["model.embed_tokens.weight"] = value
        elif name == "model.ln_f.kernel":
            out["model.norm.weight"] = value
        else:
            _, _, layer, rest = name.split(".", 3)
            value = value.T if value.ndim == 2 else value
            out[f"model.layers.{layer}.{FLAX_NAMES[rest]}"] = value
    return out


def test_matches_transformer_of_the_ttt_authors(golden):
    file = golden("ttt/jax_attention")
    config, params = transformer.from_official(
        json.loads(str(file["config"])), llama_names(arrays(file, "param/"))
    )
    mixer = dataclasses.replace(config.mixer, rope_layout="interleaved")
    config = dataclasses.replace(config, mixer=mixer)
    model = jaxmodels.build(config)
    tokens, targets, mask = (
        file[f"in/{k}"] for k in ("input_tokens", "target_tokens", "loss_masks")
    )

    def loss(p):
        logits = model.apply(p, tokens)
        nll, _ = losses.cross_entropy(logits, targets)
        rows = jnp.sum(nll * mask, 1) / jnp.maximum(jnp.sum(mask, 1), 1e-10)
        return jnp.mean(rows), (logits, nll)

    (_, (logits, nll)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert max_abs(logits, file["out/logits"]) < 2e-5
    nll = np.asarray(nll, np.float64)
    value = np.mean(np.sum(nll * mask, 1) / np.maximum(np.sum(mask, 1), 1e-10))
    assert abs(value - float(file["out/loss"])) < 2e-6
    wanted = llama_names(arrays(file, "out/grad/"))
    grads = transformer.to_official(config, grads)
    assert grads.keys() == wanted.keys()
    for name in wanted:
        assert max_rel(grads[name], wanted[name]) < 2e-5, name


def test_unsupported_llama_options_are_refused(golden):
    file = golden("patchlm/fwd_k1")
    config = json.loads(str(file["config"])) | {"attention_bias": True}
    with pytest.raises(ValueError, match="attention_bias=True"):
        transformer.from_official(config, {})
