# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The decoder: slots, both doors, layouts of execution, taps, precision, sizes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from measure import max_abs, rms_rel
from small_models import MIXERS, tiny, tokens

import jaxmodels
from jaxmodels import Attention, DecoderConfig, GeluMLP, LMHead, SwiGLU, TokenInputs, TTTLinear

mixers = pytest.mark.parametrize("mixer", MIXERS)


@mixers
def test_both_doors_give_the_same(mixer):
    model, params = tiny(mixer)
    x = tokens(2, 13)
    module = model.module(params)
    want = jax.jit(model.apply)(params, x)
    np.testing.assert_array_equal(jax.jit(lambda m, x: m(x))(module, x), want)
    assert max_abs(module(x), want) < 1e-5
    back = model.params(module)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    grads = jax.jit(jax.grad(lambda m: jnp.mean(m(x) ** 2)))(module)
    plain = jax.jit(jax.grad(lambda p: jnp.mean(model.apply(p, x) ** 2)))(params)
    for ours, theirs in zip(jax.tree.leaves(model.params(grads)), jax.tree.leaves(plain)):
        assert max_abs(ours, theirs) < 1e-5 * (1 + float(jnp.max(jnp.abs(theirs))))
    fresh = jaxmodels.Decoder(model.config, rngs=nnx.Rngs(params=jax.random.key(3)))
    for a, b in zip(
        jax.tree.leaves(model.params(fresh)), jax.tree.leaves(model.init(jax.random.key(3)))
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "mixer",
    ["attention", "ttt_linear", pytest.param("ttt_mlp_mamba", marks=pytest.mark.slow)],
)
def test_rematerialisation_and_unrolling_change_nothing(mixer):
    model, params = tiny(mixer)
    x = tokens(2, 13)

    def value_and_grad(config):
        model = jaxmodels.build(config)
        return jax.jit(jax.value_and_grad(lambda p: jnp.mean(model.apply(p, x) ** 2)))(params)

    want = value_and_grad(model.config)
    unrolled = {"remat": "branches", "scan_layers": False}
    for changes in ({"remat": "full"}, {"remat": "dots"}, {"remat": "branches"}, unrolled):
        got = value_and_grad(dataclasses.replace(model.config, **changes))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
            assert max_abs(a, b) < 2e-5 * (1 + float(jnp.max(jnp.abs(b)))), changes


@mixers
def test_taps(mixer):
    model, params = tiny(mixer)
    x = tokens(2, 13)
    names = model.config.taps
    out, taps = model.apply(params, x, taps=names)
    assert max_abs(out, model.apply(params, x)) < 1e-6
    assert set(taps) == set(names)
    for name, value in taps.items():
        lead = (3, 2, 13) if name in model.config.block_taps else (2, 13)
        if name in jaxmodels.ttt.VIEWS:
            lead = (3, 2, 4, 13)
        if name in jaxmodels.ttt.STATISTICS:
            lead = (3, 2, 4, 1)  # one whole mini-batch of 8
        assert value.shape[: len(lead)] == lead, name
    assert max_abs(model.logits(params, taps["hidden"]), out) < 1e-6
    norm = lambda v: v / np.sqrt(np.mean(np.square(v), -1, keepdims=True) + 1e-6)
    scale = np.asarray(params["blocks"]["mixer_norm"]["scale"])
    before = np.asarray(taps["block_out"][0])
    if "pre_conv_out" in taps:
        before = before + np.asarray(taps["pre_conv_out"][1])
    assert max_abs(taps["mixer_in"][1], norm(before) * scale[1]) < 1e-5
    _, _, taps = model.apply(params, x, state=model.init_state(params, 2, 13), taps=("block_out",))
    assert taps["block_out"].shape == (3, 2, 13, 32)
    with pytest.raises(ValueError, match="did you mean 'block_out'"):
        model.apply(params, x, taps=("blok_out",))


@mixers
def test_bfloat16_stays_near_float32(mixer):
    model, params = tiny(mixer)
    x = tokens(2, 40)
    half = jaxmodels.build(dataclasses.replace(model.config, dtype="bfloat16"))
    out = half.apply(params, x)
    assert out.dtype == jnp.float32
    # bfloat16 keeps 8 bits (relative step 0.4 %); three layers of rounded activations add up to a
    # few percent.
    assert rms_rel(out, model.apply(params, x)) < 0.06


@mixers
def test_is_causal(mixer):
    model, params = tiny(mixer)
    x = tokens(2, 20)
    y = x.at[:, 11:].set((x[:, 11:] + 1) % 50)
    a, b = model.apply(params, x), model.apply(params, y)
    assert max_abs(a[:, :11], b[:, :11]) < 1e-6
    assert max_abs(a[:, 11:], b[:, 11:]) > 1e-2


def packed_documents():
    """Rows of documents of 11, 2, 16, 7 and of 1, 30 tokens with padding, and where they are."""
    segments = np.zeros((2, 40), np.int32)
    pieces = [(0, 0, 11), (0, 11, 13), (0, 13, 29), (0, 33, 40), (1, 2, 3), (1, 3, 33)]
    for i, (row, start, stop) in enumerate(pieces, 1):
        segments[row, start:stop] = i
    return segments, pieces


@mixers
def test_packed_documents_do_not_see_each_other(mixer):
    part = MIXERS[mixer]
    if mixer != "attention":
        part = dataclasses.replace(part, max_documents=4)
    model, params = tiny(mixer, mixer=part)
    x, (segments, pieces) = tokens(2, 40), packed_documents()
    options = {"segment_ids": segments}
    if mixer == "attention":
        positions = np.zeros_like(segments)
        for row, start, stop in pieces:
            positions[row, start:stop] = np.arange(stop - start)
        options["positions"] = positions

    def total(params, x, real, options):
        out = model.apply(params, x, **options)
        return jnp.sum(jnp.where(real, jnp.square(out).mean(-1), 0.0)), out

    alone = np.zeros((len(pieces), 30), np.int32)  # each document in a row of its own
    for i, (row, start, stop) in enumerate(pieces):
        alone[i, : stop - start] = x[row, start:stop]
    sizes = np.array([[stop - start] for _, start, stop in pieces])
    grad = jax.jit(jax.grad(total, has_aux=True))
    grads, packed = grad(params, x, segments > 0, options)
    want_grads, want = grad(params, alone, np.arange(30) < sizes, {})
    for (row, start, stop), out in zip(pieces, want):
        assert max_abs(packed[row, start:stop], out[: stop - start]) < 2e-5
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads)):
        assert max_abs(a, b) < 2e-5 * (1 + float(jnp.max(jnp.abs(b))))


def test_a_document_too_many_is_nan_not_a_short_memory():
    model, params = tiny(mixer=dataclasses.replace(MIXERS["ttt_linear"], max_documents=1))
    segments = np.repeat(np.arange(1, 9), 2)[None]  # room for one document of 16 tokens
    out = model.apply(params, tokens(1, 16), segment_ids=segments)
    assert np.isfinite(out[:, :4]).all() and np.isnan(out[:, -2:]).all()


def test_ttt_refuses_what_it_cannot_honour():
    model, params = tiny("ttt_linear")
    x = tokens(1, 16)
    with pytest.raises(ValueError, match=r"segment_ids.*max_documents"):
        model.apply(params, x, segment_ids=jnp.ones_like(x))
    with pytest.raises(ValueError, match="positions"):
        model.apply(params, x, positions=jnp.ones_like(x))
    state = model.init_state(params, 1, 16)
    with pytest.raises(ValueError, match="plain sequences"):
        model.apply(params, x, state=state, taps=("ttt_loss_before",))
    model, params = tiny("attention")
    with pytest.raises(ValueError, match="no inner learning rates"):
        model.apply(params, x, inner_lr_scale=0.5)


@pytest.mark.parametrize("mixer", ["ttt_linear", "ttt_mlp_mamba"])
def test_inner_learning_rates_scale(mixer):
    model, params = tiny(mixer)
    x = tokens(2, 20)
    half = dataclasses.replace(MIXERS[mixer], base_lr=MIXERS[mixer].base_lr / 2)
    other, _ = tiny(mixer, mixer=half)
    want = other.apply(params, x)
    assert max_abs(model.apply(params, x, inner_lr_scale=0.5), want) < 1e-5
    assert max_abs(model.apply(params, x), want) > 1e-2


@pytest.mark.parametrize("placement", ["post", "sandwich"])
def test_norm_placement(placement):
    model, params = tiny("attention", norm_placement=placement, norm=jaxmodels.LayerNorm())
    out, taps = model.apply(params, tokens(2, 5), taps=("mixer_in", "mixer_out", "block_out"))
    assert np.isfinite(out).all()
    block = {k: np.asarray(v[0]) for k, v in taps.items()}
    norms = model.module(params).blocks
    name = "channel_norm" if placement == "post" else "mixer_out_norm"
    scale, bias = (np.asarray(getattr(norms, name).__dict__[k][...])[0] for k in ("scale", "bias"))
    normed = block["block_out"] if placement == "post" else block["mixer_out"]
    standard = (normed - bias) / scale
    assert np.abs(standard.mean(-1)).max() < 1e-4
    assert np.abs(standard.var(-1) - 1).max() < 1e-2


def test_gelu_mlp_and_untied_head():
    model, params = tiny("attention", channel=GeluMLP(d_ff=48), head=LMHead(tied=False))
    x = tokens(2, 5)
    out, taps = model.apply(params, x, taps=("channel_in", "channel_out", "hidden"))
    p = jax.tree.map(lambda a: np.asarray(a[0], np.float64), params["blocks"]["channel"])
    h = np.asarray(taps["channel_in"][0], np.float64) @ p["w_up"] + p["b_up"]
    gelu = np.asarray(jax.nn.gelu(h, approximate=False))
    assert max_abs(taps["channel_out"][0], gelu @ p["w_down"] + p["b_down"]) < 1e-5
    assert max_abs(out, np.asarray(taps["hidden"]) @ np.asarray(params["head"]["w"])) < 1e-5


def test_token_ids_outside_the_vocabulary_give_nan():
    model, params = tiny("attention")
    assert np.isnan(model.apply(params, jnp.array([[1, 50]]))[0, 1]).all()


GOOD = dict(
    d_model=32,
    num_layers=1,
    inputs=TokenInputs(vocab_size=8),
    mixer=Attention(num_heads=4),
    channel=SwiGLU(d_ff=8),
)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mixer": SwiGLU(d_ff=8)}, "part for the slot 'channel'; mixer takes one of: .*TTTLinear"),
        ({"channel": "swiglu"}, "channel=str; channel takes one of"),
        ({"mixer": Attention(num_heads=5)}, "d_model=32 is not a multiple of num_heads=5"),
        ({"mixer": TTTLinear(num_heads=5)}, "d_model=32 is not a multiple of num_heads=5"),
        ({"mixer": TTTLinear(num_heads=32)}, "must be even"),
        ({"remat": "dot"}, "did you mean 'dots'"),
        ({"norm_placement": "both"}, "norm_placement='both'"),
        ({"dtype": "float8"}, "dtype='float8'"),
        ({"num_layers": 0}, "num_layers=0"),
    ],
)
def test_misfits_are_explained(changes, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**(GOOD | changes))


def test_heads_must_divide():
    with pytest.raises(ValueError, match="num_heads=4 is not a multiple of num_kv_heads=3"):
        Attention(num_heads=4, num_kv_heads=3)


# Spec section 7: computed for the vocabulary of 32000 with a tied head.
PUBLISHED = {
    "ttt-linear-125m": 110.42,
    "ttt-linear-350m": 337.68,
    "ttt-linear-760m": 733.61,
    "ttt-linear-1.3b": 1285.64,
    "ttt-mlp-125m": 114.59,
    "ttt-mlp-350m": 348.79,
    "ttt-mlp-760m": 758.53,
    "ttt-mlp-1.3b": 1307.86,
    "ttt-linear-125m-transformer": 110.28,
    "ttt-linear-350m-transformer": 337.29,
    "ttt-linear-760m-transformer": 733.02,
    "ttt-linear-1.3b-transformer": 1284.85,
    "ttt-mlp-125m-transformer": 114.44,
    "ttt-mlp-350m-transformer": 348.40,
    "ttt-mlp-760m-transformer": 757.94,
    "ttt-mlp-1.3b-transformer": 1307.07,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(name):
    model = jaxmodels.build(jaxmodels.PRESETS[name])
    assert round(model.num_params / 1e6, 2) == PUBLISHED[name]


def test_parameter_axes_name_every_dimension():
    for mixer in MIXERS:
        model, _ = tiny(mixer)
        is_axes = lambda leaf: isinstance(leaf, tuple)
        axes = jax.tree.leaves(model.param_axes, is_leaf=is_axes)
        shapes = jax.tree.leaves(model.param_shapes)
        assert [len(a) for a in axes] == [len(s.shape) for s in shapes]


def test_flops_are_those_of_the_compiled_products():
    """Against XLA's own count of a forward pass whose layers are unrolled (scans are counted
    once)."""
    model, params = tiny("attention", scan_layers=False, d_model=128, channel=SwiGLU(d_ff=512))
    x = tokens(1, 64)
    cost = jax.jit(model.apply).lower(params, x).compile().cost_analysis()
    # XLA counts every key for every query; we count the causal half. Norms and softmax are in its
    # count only.
    causal = 2 * 3 * 4 * 32 * (64 - 1)
    ours = (model.flops_per_token(64) + causal) * 64
    assert 0.9 < ours / cost["flops"] < 1.02


def test_saved_parameters_come_back(tmp_path):
    model, params = tiny("ttt_linear")
    path = tmp_path / "model.safetensors"
    jaxmodels.checkpoints.save_params(path, params)
    back = jaxmodels.checkpoints.load_params(path, model)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(params)):
        np.testing.assert_array_equal(a, b)
    other, _ = tiny("attention")
    with pytest.raises(ValueError, match=r"surplus blocks/mixer/inner_w"):
        jaxmodels.checkpoints.load_params(path, other)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        jaxmodels.checkpoints.load_params(path, model)
    with pytest.raises(FileNotFoundError, match="no file"):
        jaxmodels.checkpoints.load_params(tmp_path / "none", model)
