# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Weights in the LLaMA layout of Hugging Face."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxmodels.decoder import DecoderConfig
from jaxmodels.layers.attention import Attention
from jaxmodels.layers.channel import SwiGLU
from jaxmodels.layers.embeddings import LMHead, TokenInputs
from jaxmodels.layers.norms import RMSNorm
from jaxmodels.model import Params, build
from jaxmodels.weights import Row, expect, export_weights, from_config, import_weights, per_layer


def from_official(
    config: Mapping[str, Any], weights: Mapping[str, Any], *, dtype: str = "float32"
) -> tuple[DecoderConfig, Params]:
    """A LLaMA config (its JSON as a dict) and tensors by official name -> our config and
    parameters.

    Raises:
      ValueError: for an option that is not supported, or weights that do not fit: every missing,
        surplus and misshaped name is listed.
    """
    fixed = {
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": None,
        "hidden_act": "silu",
    }
    for name, value in fixed.items():
        if config.get(name, value) != value:
            raise ValueError(f"{name}={config[name]!r} is not supported; this model has {value!r}")
    ours = DecoderConfig(
        d_model=from_config(config, "hidden_size"),
        num_layers=from_config(config, "num_hidden_layers"),
        inputs=TokenInputs(vocab_size=from_config(config, "vocab_size")),
        mixer=Attention(
            num_heads=from_config(config, "num_attention_heads"),
            num_kv_heads=from_config(config, "num_key_value_heads", None),
            head_dim=from_config(config, "head_dim", None),
            rope_theta=from_config(config, "rope_theta", 10000.0),
        ),
        channel=SwiGLU(d_ff=from_config(config, "intermediate_size")),
        norm=RMSNorm(eps=from_config(config, "rms_norm_eps", 1e-6)),
        head=LMHead(tied=from_config(config, "tie_word_embeddings", False)),
        dtype=dtype,
    )
    return ours, import_weights(build(ours), weight_table(ours), weights)


def to_official(config: DecoderConfig, params: Params) -> dict[str, np.ndarray]:
    """Our parameters -> tensors by official name; the exact inverse of `from_official`."""
    return export_weights(weight_table(config), params)


def weight_table(config: DecoderConfig) -> list[Row]:
    """Every official tensor of this config."""
    layout = "the LLaMA layout"
    mixer = expect(config.mixer, Attention, layout)
    D, V, F = config.d_model, config.vocab_size, expect(config.channel, SwiGLU, layout).d_ff
    H = mixer.num_heads
    G, K = mixer.num_kv_heads or H, mixer.head_dim or D // H

    def block(i):
        def row(official, ours, shape, transpose=False):
            path = ("blocks", *ours.split("/"))
            return Row(f"model.layers.{i}.{official}.weight", path, i, shape, transpose)

        return [
            row("input_layernorm", "mixer_norm/scale", (D,)),
            row("post_attention_layernorm", "channel_norm/scale", (D,)),
            row("self_attn.q_proj", "mixer/wq", (H * K, D), True),
            row("self_attn.k_proj", "mixer/wk", (G * K, D), True),
            row("self_attn.v_proj", "mixer/wv", (G * K, D), True),
            row("self_attn.o_proj", "mixer/wo", (D, H * K), True),
            row("mlp.gate_proj", "channel/w_gate", (F, D), True),
            row("mlp.up_proj", "channel/w_up", (F, D), True),
            row("mlp.down_proj", "channel/w_down", (D, F), True),
        ]

    rows = [
        Row("model.embed_tokens.weight", ("inputs", "embedding"), None, (V, D)),
        Row("model.norm.weight", ("final_norm", "scale"), None, (D,)),
        *per_layer(config.num_layers, block),
    ]
    if not expect(config.head, LMHead, layout).tied:
        rows.append(Row("lm_head.weight", ("head", "w"), None, (V, D), True))
    return rows
