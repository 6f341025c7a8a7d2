# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Weights of the official single-file PyTorch TTT model, TTT-Linear with the Transformer
backbone."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxmodels.decoder import DecoderConfig
from jaxmodels.layers.channel import SwiGLU
from jaxmodels.layers.embeddings import LMHead, TokenInputs
from jaxmodels.layers.norms import RMSNorm
from jaxmodels.model import Params, build
from jaxmodels.ttt.config import TTTLinear
from jaxmodels.weights import Row, expect, export_weights, from_config, import_weights, per_layer


def from_official(
    config: Mapping[str, Any], weights: Mapping[str, Any], *, dtype: str = "float32"
) -> tuple[DecoderConfig, Params]:
    """Official config (its JSON as a dict) and tensors by official name -> our config and
    parameters.

    Raises:
      ValueError: for an option that is not supported, or weights that do not fit: every missing,
        surplus and misshaped name is listed.
    """
    ours = config_from_official(config, dtype=dtype)
    return ours, import_weights(build(ours), weight_table(ours), weights)


def to_official(config: DecoderConfig, params: Params) -> dict[str, np.ndarray]:
    """Our parameters -> tensors by official name; the exact inverse of `from_official`."""
    return export_weights(weight_table(config), params)


def config_from_official(config: Mapping[str, Any], *, dtype: str = "float32") -> DecoderConfig:
    """The official `TTTConfig` fields as a `DecoderConfig`."""
    wanted = {"ttt_layer_type": "linear", "pre_conv": False, "share_qk": False, "use_gate": False}
    if wrong := {
        name: config[name] for name in wanted if name in config and config[name] != wanted[name]
    }:
        raise ValueError(f"only TTT-Linear with the Transformer backbone is supported, got {wrong}")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act={activation!r}: the official model is SwiGLU, 'silu'")
    eps = from_config(config, "rms_norm_eps", 1e-6)
    return DecoderConfig(
        d_model=from_config(config, "hidden_size"),
        num_layers=from_config(config, "num_hidden_layers"),
        inputs=TokenInputs(vocab_size=from_config(config, "vocab_size")),
        mixer=TTTLinear(
            num_heads=from_config(config, "num_attention_heads"),
            mini_batch_size=from_config(config, "mini_batch_size", 16),
            base_lr=from_config(config, "ttt_base_lr", 1.0),
            rope_theta=from_config(config, "rope_theta", 10000.0),
        ),
        channel=SwiGLU(d_ff=from_config(config, "intermediate_size")),
        norm=RMSNorm(eps=eps),
        head=LMHead(tied=from_config(config, "tie_word_embeddings", True)),
        dtype=dtype,
    )


def weight_table(config: DecoderConfig) -> list[Row]:
    """Every official tensor of this config."""
    layout = "the official TTT layout"
    mixer_config = expect(config.mixer, TTTLinear, layout)
    D, V, F = config.d_model, config.vocab_size, expect(config.channel, SwiGLU, layout).d_ff
    H, b = mixer_config.num_heads, mixer_config.mini_batch_size
    K = D // H

    def block(i):
        def row(official, ours, shape, transpose=False):
            path = ("blocks", *ours.split("/"))
            return Row(f"model.layers.{i}.{official}", path, i, shape, transpose)

        mixer = "seq_modeling_block"
        return [
            row("seq_norm.weight", "mixer_norm/scale", (D,)),
            row("ffn_norm.weight", "channel_norm/scale", (D,)),
            row("mlp.gate_proj.weight", "channel/w_gate", (F, D), True),
            row("mlp.up_proj.weight", "channel/w_up", (F, D), True),
            row("mlp.down_proj.weight", "channel/w_down", (D, F), True),
            row(f"{mixer}.q_proj.weight", "mixer/wq", (D, D), True),
            row(f"{mixer}.k_proj.weight", "mixer/wk", (D, D), True),
            row(f"{mixer}.v_proj.weight", "mixer/wv", (D, D), True),
            row(f"{mixer}.o_proj.weight", "mixer/wo", (D, D), True),
            row(f"{mixer}.learnable_ttt_lr_bias", "mixer/lr_bias", (H, 1)),
            row(f"{mixer}.learnable_token_idx", "mixer/position_offset", (b,)),
            row(f"{mixer}.ttt_norm_weight", "mixer/inner_norm_scale", (H, K)),
            row(f"{mixer}.ttt_norm_bias", "mixer/inner_norm_bias", (H, K)),
            row(f"{mixer}.W1", "mixer/inner_w", (H, K, K)),
            row(f"{mixer}.b1", "mixer/inner_b", (H, 1, K)),
            row(f"{mixer}.post_norm.weight", "mixer/out_norm/scale", (D,)),
            row(f"{mixer}.post_norm.bias", "mixer/out_norm/bias", (D,)),
            # [H, 1, D] officially; .T reverses all three axes, so the middle one drops out.
            row(f"{mixer}.learnable_ttt_lr_weight", "mixer/lr_kernel", (H, 1, D), True),
        ]

    rows = [
        Row("model.embed_tokens.weight", ("inputs", "embedding"), None, (V, D)),
        Row("model.norm.weight", ("final_norm", "scale"), None, (D,)),
        *per_layer(config.num_layers, block),
    ]
    if not expect(config.head, LMHead, layout).tied:
        rows.append(Row("lm_head.weight", ("head", "w"), None, (V, D), True))
    return rows
