# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Published sizes of TTT-Linear and TTT-MLP (paper appendix C; Llama-2 vocabulary).

`ttt-linear-125m` and so on have the Mamba backbone with its convolution before the mixer, the final
form of the paper and of the released checkpoints; `ttt-linear-125m-transformer` the Transformer
backbone.
"""

from jaxmodels.decoder import DecoderConfig
from jaxmodels.layers.channel import SwiGLU
from jaxmodels.layers.convolution import CausalConv
from jaxmodels.layers.embeddings import TokenInputs
from jaxmodels.ttt.config import TTT, TTTMLP, Backbone, TTTLinear


def ttt_linear(*, num_heads: int, backbone: Backbone = "transformer", **options) -> DecoderConfig:
    """A TTT-Linear language model; `d_model`, `num_layers`, `d_ff` and further fields of
    `DecoderConfig` as keywords. The Mamba backbone brings the convolution before the mixer."""
    return _decoder(TTTLinear(num_heads=num_heads, backbone=backbone), **options)


def ttt_mlp(*, num_heads: int, backbone: Backbone = "transformer", **options) -> DecoderConfig:
    """A TTT-MLP language model, see `ttt_linear`."""
    return _decoder(TTTMLP(num_heads=num_heads, backbone=backbone), **options)


def _decoder(mixer: TTT, *, d_ff: int, vocab_size: int = 32000, **options) -> DecoderConfig:
    return DecoderConfig(
        inputs=TokenInputs(vocab_size=vocab_size),
        mixer=mixer,
        channel=SwiGLU(d_ff=d_ff),
        pre_conv=CausalConv() if mixer.backbone == "mamba" else None,
        **options,
    )


SIZES = {
    "125m": dict(d_model=768, num_layers=12, num_heads=12, d_ff=2048),
    "350m": dict(d_model=1024, num_layers=24, num_heads=16, d_ff=2736),
    "760m": dict(d_model=1536, num_layers=24, num_heads=16, d_ff=4096),
    "1.3b": dict(d_model=2048, num_layers=24, num_heads=32, d_ff=5504),
}

BACKBONES: dict[Backbone, str] = {"mamba": "", "transformer": "-transformer"}

PRESETS = {
    f"{name}-{size}{suffix}": make(backbone=backbone, **sizes)
    for name, make in (("ttt-linear", ttt_linear), ("ttt-mlp", ttt_mlp))
    for backbone, suffix in BACKBONES.items()
    for size, sizes in SIZES.items()
}
