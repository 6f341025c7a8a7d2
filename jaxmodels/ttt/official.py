# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Weights and configs of the two official TTT codes: the single-file PyTorch model, and the JAX
(Flax) training code, whose files `jaxmodels.ttt.stream` reads.

Letters: D model width, H heads, K head width, F width of the MLP, V vocabulary, b inner mini-batch,
W window of the convolutions.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np

from jaxmodels.checkpoints import flatten
from jaxmodels.decoder import DecoderConfig, Residual
from jaxmodels.layers.channel import SwiGLU
from jaxmodels.layers.convolution import CausalConv
from jaxmodels.layers.embeddings import LMHead, TokenInputs
from jaxmodels.layers.norms import RMSNorm
from jaxmodels.model import Params, build
from jaxmodels.ttt.config import TTT, TTTMLP, TTTLinear
from jaxmodels.weights import Row, expect, export_weights, from_config, import_weights, per_layer

Layout = Literal["pytorch", "flax"]

LAYOUT = "the official TTT layout"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
INNER_EPS = 1e-6
"""Of the norms inside the TTT layer; both official codes have it fixed."""
FLAX_BLOCKS: dict[str, tuple[type[TTT], Literal["transformer", "mamba"]]] = {
    "ttt_linear": (TTTLinear, "mamba"),
    "ttt_mlp": (TTTMLP, "mamba"),
    "ttt_linear_base": (TTTLinear, "transformer"),
    "ttt_mlp_base": (TTTMLP, "transformer"),
}
"""`seq_modeling_block` of the JAX code: our mixer and its backbone."""


def from_official(
    config: Mapping[str, Any] | DecoderConfig,
    weights: Mapping[str, Any],
    *,
    dtype: str = "float32",
) -> tuple[DecoderConfig, Params]:
    """Official config and weights -> our config and parameters.

    Args:
      config: the official config as a dict, of either code (see `config_from_official`), or already
        one of ours.
      weights: tensors by PyTorch name, or by Flax name: dotted (`model.h.0.seq_norm.kernel`) or as
        nested dicts, with or without `params` around them. Which of the two is seen from the names.
        bfloat16 is widened to float32, exactly.
      dtype: compute dtype of the config returned.

    Raises:
      ValueError: for an option that is not supported, or weights that do not fit: every missing,
        surplus and misshaped name is listed.
    """
    if isinstance(config, DecoderConfig):
        ours = config
    else:
        ours = config_from_official(config, dtype=dtype)
    weights = {_without_params(name): x for name, x in flatten(weights, ".").items()}
    layout = layout_of(weights)
    if ours.head == LMHead(tied=True) and {HEAD, EMBEDDING} <= weights.keys():
        # PyTorch may list a tied matrix under both its names.
        if not np.array_equal(weights[HEAD], weights[EMBEDDING]):
            raise ValueError(
                f"the config ties the output matrix to the embedding, but {HEAD} differs from "
                f"{EMBEDDING}: set tie_word_embeddings to false"
            )
        del weights[HEAD]
    return ours, import_weights(build(ours), weight_table(ours, layout), weights)


def to_official(
    config: DecoderConfig, params: Params, layout: Layout = "pytorch"
) -> dict[str, np.ndarray]:
    """Our parameters -> tensors by official (dotted) name; the exact inverse of `from_official`.

    Raises:
      ValueError: for a model that the official codes do not have.
    """
    return export_weights(weight_table(config, layout), params)


def layout_of(names: Iterable[str]) -> Layout:
    """Which official code has named these tensors."""
    flax = ("model.wte.", "model.ln_f.", "model.h.", "lm_head.kernel")
    return "flax" if any(name.startswith(flax) for name in names) else "pytorch"


def _without_params(name: str) -> str:
    while name.startswith("params."):
        name = name.removeprefix("params.")
    return name


def config_from_official(config: Mapping[str, Any], *, dtype: str = "float32") -> DecoderConfig:
    """The fields of an official config as a `DecoderConfig`.

    A config of the JAX code is one with `seq_modeling_block`. What a PyTorch config leaves out has
    the default of `TTTConfig` (among them `ttt_base_lr` 1.0, for TTT-MLP too); what a JAX config
    leaves out, the value of the official TTT presets (`ttt_base_lr` 1.0, `pre_conv` true), and
    `tie_word_embeddings` its class's default, false.

    Raises:
      ValueError: a size is missing, or an option has no counterpart here.
    """
    get = lambda *args: from_config(config, *args)
    if "seq_modeling_block" in config:
        block = config["seq_modeling_block"]
        if block not in FLAX_BLOCKS:
            raise ValueError(f"seq_modeling_block={block!r}: one of {', '.join(FLAX_BLOCKS)}")
        kind, backbone = FLAX_BLOCKS[block]
        pre_conv, width = get("pre_conv", True), get("conv_width", 4)
        tied = get("tie_word_embeddings", False)
    else:
        kinds: dict[str, type[TTT]] = {"linear": TTTLinear, "mlp": TTTMLP}
        layer = get("ttt_layer_type", "linear")
        if layer not in kinds:
            raise ValueError(f"ttt_layer_type={layer!r}: one of {', '.join(kinds)}")
        share_qk, use_gate = get("share_qk", False), get("use_gate", False)
        if share_qk != use_gate:
            raise ValueError(
                f"share_qk={share_qk} with use_gate={use_gate}: both (Mamba backbone) or neither "
                "(Transformer backbone)"
            )
        if (activation := get("hidden_act", "silu")) != "silu":
            raise ValueError(f"hidden_act={activation!r}: the official model is SwiGLU, 'silu'")
        kind, backbone = kinds[layer], "mamba" if share_qk else "transformer"
        pre_conv, width = get("pre_conv", False), get("conv_kernel", 4)
        tied = get("tie_word_embeddings", True)
    return DecoderConfig(
        d_model=get("hidden_size"),
        num_layers=get("num_hidden_layers"),
        inputs=TokenInputs(vocab_size=get("vocab_size")),
        mixer=kind(
            num_heads=get("num_attention_heads"),
            mini_batch_size=get("mini_batch_size", 16),
            base_lr=get("ttt_base_lr", 1.0),
            backbone=backbone,
            conv_width=width,
            rope_theta=get("rope_theta", 10000.0),
            eps=INNER_EPS,
        ),
        channel=SwiGLU(d_ff=get("intermediate_size")),
        pre_conv=CausalConv(width=width) if pre_conv else None,
        norm=RMSNorm(eps=get("rms_norm_eps", 1e-6)),
        head=LMHead(tied=tied),
        dtype=dtype,
    )


def config_to_official(config: DecoderConfig, layout: Layout = "pytorch") -> dict[str, Any]:
    """Our config as the fields of an official one; `config_from_official` reads it back, all but
    what only says how to compute (dtype, rematerialisation, implementation).

    Raises:
      ValueError: for a model that the official codes do not have.
    """
    mixer = expect(config.mixer, TTT, LAYOUT)
    _check_expressible(config, mixer)
    is_mlp, is_mamba = isinstance(mixer, TTTMLP), mixer.backbone == "mamba"
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": expect(config.channel, SwiGLU, LAYOUT).d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": mixer.num_heads,
        "rms_norm_eps": expect(config.norm, RMSNorm, LAYOUT).eps,
        "tie_word_embeddings": expect(config.head, LMHead, LAYOUT).tied,
        "rope_theta": mixer.rope_theta,
        "ttt_base_lr": mixer.base_lr,
        "mini_batch_size": mixer.mini_batch_size,
        "pre_conv": config.pre_conv is not None,
        "initializer_range": 0.02,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    width = mixer.conv_width if config.pre_conv is None else config.pre_conv.width
    if layout == "pytorch":
        return fields | {
            "model_type": "ttt",
            "architectures": ["TTTForCausalLM"],
            "hidden_act": "silu",
            "ttt_layer_type": "mlp" if is_mlp else "linear",
            "share_qk": is_mamba,
            "use_gate": is_mamba,
            "conv_kernel": width,
        }
    names = {value: name for name, value in FLAX_BLOCKS.items()}
    return fields | {
        "seq_modeling_block": names[type(mixer), mixer.backbone],
        "conv_width": width,
        "ttt_base_lr_init": -1.0,
        "ttt_base_lr_warmup": -1,
        "remat_mini_batch_group_size": 4,
        "max_sequence_length": 2048,
    }


def _check_expressible(config: DecoderConfig, mixer: TTT) -> None:
    faults = []
    if config.norm_placement != "pre":
        faults.append(f"norm_placement={config.norm_placement!r}, not 'pre'")
    if not isinstance(config.connections, Residual):
        faults.append(f"connections={type(config.connections).__name__}, not Residual")
    if mixer.eps != INNER_EPS:
        faults.append(f"mixer.eps={mixer.eps}, not {INNER_EPS}")
    widths = {mixer.conv_width} if mixer.backbone == "mamba" else set()
    if config.pre_conv is not None:
        widths.add(config.pre_conv.width)
    if len(widths) > 1:
        faults.append("convolutions of different widths; there is one field for them")
    if faults:
        raise ValueError(f"{LAYOUT} cannot hold this model: {'; '.join(faults)}")


def weight_table(config: DecoderConfig, layout: Layout = "pytorch") -> list[Row]:
    """Every official tensor of this config: the names of both codes side by side."""
    if layout not in ("pytorch", "flax"):
        raise ValueError(f"layout={layout!r}: one of pytorch, flax")
    mixer = expect(config.mixer, TTT, LAYOUT)
    D, V, F = config.d_model, config.vocab_size, expect(config.channel, SwiGLU, LAYOUT).d_ff
    H, K, b = mixer.num_heads, mixer.head_dim(config.d_model), mixer.mini_batch_size
    is_pytorch = layout == "pytorch"

    def make(prefix, layer):
        def row(ours, pytorch, flax, shape):
            official = prefix + (pytorch if is_pytorch else flax)
            path = (*(() if layer is None else ("blocks",)), *ours.split("/"))
            return Row(official, path, layer, shape)

        def matrix(ours, pytorch, flax, shape):
            """`shape` is Flax's; PyTorch has the axes in reverse order."""
            if not is_pytorch:
                return row(ours, pytorch, flax, shape)
            return dataclasses.replace(row(ours, pytorch, flax, shape[::-1]), transpose=True)

        return row, matrix

    def block(i):
        row, matrix = make(f"model.layers.{i}." if is_pytorch else f"model.h.{i}.", i)
        S = "seq_modeling_block"
        rate = row(
            "mixer/lr_kernel",
            f"{S}.learnable_ttt_lr_weight",
            f"{S}.learnable_ttt_lr/kernel",
            (H, 1, D) if is_pytorch else (H, D, 1),
        )
        rows = [
            row("mixer_norm/scale", "seq_norm.weight", "seq_norm.kernel", (D,)),
            row("channel_norm/scale", "ffn_norm.weight", "ffn_norm.kernel", (D,)),
            matrix("channel/w_gate", "mlp.gate_proj.weight", "feed_forward.w1.kernel", (D, F)),
            matrix("channel/w_up", "mlp.up_proj.weight", "feed_forward.w3.kernel", (D, F)),
            matrix("channel/w_down", "mlp.down_proj.weight", "feed_forward.w2.kernel", (F, D)),
            matrix("mixer/wq", f"{S}.q_proj.weight", f"{S}.wq.kernel", (D, D)),
            matrix("mixer/wv", f"{S}.v_proj.weight", f"{S}.wv.kernel", (D, D)),
            matrix("mixer/wo", f"{S}.o_proj.weight", f"{S}.wo.kernel", (D, D)),
            dataclasses.replace(rate, transpose=True),
            row(
                "mixer/lr_bias",
                f"{S}.learnable_ttt_lr_bias",
                f"{S}.learnable_ttt_lr/bias",
                (H, 1),
            ),
            row(
                "mixer/position_offset",
                f"{S}.learnable_token_idx",
                f"{S}.learnable_token_idx",
                (b,),
            ),
            row("mixer/inner_norm_scale", f"{S}.ttt_norm_weight", f"{S}.ttt_norm/scale", (H, K)),
            row("mixer/inner_norm_bias", f"{S}.ttt_norm_bias", f"{S}.ttt_norm/bias", (H, K)),
            row("mixer/out_norm/scale", f"{S}.post_norm.weight", f"{S}.post_norm.scale", (D,)),
            row("mixer/out_norm/bias", f"{S}.post_norm.bias", f"{S}.post_norm.bias", (D,)),
        ]
        if isinstance(mixer, TTTMLP):
            rows += [
                row("mixer/inner_w1", f"{S}.W1", f"{S}.ttt_dense_0", (H, K, 4 * K)),
                row("mixer/inner_b1", f"{S}.b1", f"{S}.ttt_bias_0", (H, 1, 4 * K)),
                row("mixer/inner_w2", f"{S}.W2", f"{S}.ttt_dense_1", (H, 4 * K, K)),
                row("mixer/inner_b2", f"{S}.b2", f"{S}.ttt_bias_1", (H, 1, K)),
            ]
        else:
            rows += [
                row("mixer/inner_w", f"{S}.W1", f"{S}.ttt_dense_0", (H, K, K)),
                row("mixer/inner_b", f"{S}.b1", f"{S}.ttt_bias_0", (H, 1, K)),
            ]
        if mixer.backbone == "mamba":
            W = mixer.conv_width
            for name in ("conv_q", "conv_k"):
                rows += [
                    matrix(
                        f"mixer/{name}/kernel",
                        f"{S}.{name}.weight",
                        f"{S}.{name}.kernel",
                        (W, 1, D),
                    ),
                    row(f"mixer/{name}/bias", f"{S}.{name}.bias", f"{S}.{name}.bias", (D,)),
                ]
            rows.append(matrix("mixer/w_gate", f"{S}.g_proj.weight", f"{S}.wg.kernel", (D, D)))
        else:
            rows.append(matrix("mixer/wk", f"{S}.k_proj.weight", f"{S}.wk.kernel", (D, D)))
        if config.pre_conv is not None:
            W = config.pre_conv.width
            rows += [
                row("pre_conv_norm/scale", "conv.norm.weight", "conv.conv_norm.kernel", (D,)),
                matrix("pre_conv/kernel", "conv.conv.weight", "conv.conv1.kernel", (W, 1, D)),
                row("pre_conv/bias", "conv.conv.bias", "conv.conv1.bias", (D,)),
            ]
        return rows

    row, matrix = make("", None)
    rows = [
        row("inputs/embedding", EMBEDDING, "model.wte.embedding", (V, D)),
        row("final_norm/scale", "model.norm.weight", "model.ln_f.kernel", (D,)),
        *per_layer(config.num_layers, block),
    ]
    if not expect(config.head, LMHead, LAYOUT).tied:
        rows.append(matrix("head/w", HEAD, "lm_head.kernel", (D, V)))
    return rows
