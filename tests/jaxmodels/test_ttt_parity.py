# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""TTT-Linear and TTT-MLP with both backbones against the numbers of the official PyTorch and JAX
codes: models, gradients, statistics and decoding (tolerances of the goldens' README)."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from measure import max_abs, max_rel

import jaxmodels
from jaxmodels import losses, ttt

INNER_NAMES = {
    "linear": {"w": "W1", "b": "b1"},
    "mlp": {"w1": "W1", "b1": "b1", "w2": "W2", "b2": "b2"},
}
TAPS = ("embedding", "block_out", "hidden", "ttt_inner", "mixer_out", *ttt.VIEWS)
STATISTICS = {
    "ttt_loss_initial": "ttt_loss_init",
    "ttt_loss_before": "ttt_loss_step_0",
    "ttt_loss_after": "ttt_loss_step_1",
    "ttt_target_spread": "ssl_tgt_mse",
}


def load(file):
    """Official config and weights of a golden -> our model and parameters."""
    config = json.loads(str(file["config"]))
    weights = {k.removeprefix("param/"): v for k, v in file.items() if k.startswith("param/")}
    config, params = ttt.from_official(config, weights)
    return jaxmodels.build(config), params


@pytest.mark.parametrize("case", ["", "odd/"])
@pytest.mark.parametrize("name", ["linear_tf", "linear_mamba", "mlp_tf", "mlp_mamba"])
def test_pytorch_model(golden, name, case):
    file = golden(f"ttt/pt_model_{name}")
    model, params = load(file)
    ids = file["in/input_ids_odd" if case else "in/input_ids"]

    @jax.jit
    def run(params, ids):
        def loss(params):
            logits, taps = model.apply(params, ids, taps=TAPS)
            nll, _ = losses.cross_entropy(logits[:, :-1], ids[:, 1:])
            return jnp.mean(nll), (nll, logits, taps)

        return jax.grad(loss, has_aux=True)(params)

    grads, (nll, logits, taps) = jax.device_get(run(params, ids))
    assert max_abs(logits, file[f"out/{case}logits"]) < 2e-5
    # A float32 sum of a hundred losses would itself be off by 1e-6.
    loss = np.mean(np.asarray(nll, np.float64))
    assert abs(loss - float(file[f"out/{case}loss"])) < 2e-6
    for layer in range(2):
        for ours, theirs in (("ttt_inner", "ttt_inner"), ("mixer_out", "seq_block_out")):
            want = file[f"out/{case}layer{layer}/{theirs}"]
            assert max_abs(taps[ours][layer], want) < 2e-5, (ours, layer)
        if not case:
            assert max_abs(taps["block_out"][layer], file[f"out/hidden/{layer}"]) < 2e-5
    grads = ttt.to_official(model.config, grads)
    wanted = [key for key in file if key.startswith(f"out/{case}grad/")]
    assert len(wanted) == (7 + 2 * name.startswith("mlp") if case else len(grads))
    for key in wanted:
        assert max_rel(grads[key.split("grad/")[1]], file[key]) < 2e-5, key
    if case:
        return
    assert max_abs(taps["hidden"], file["out/hidden/2"]) < 2e-5
    for ours, theirs in zip(ttt.VIEWS, ("XQ", "XK", "XV", "ttt_lr_eta")):
        want = file[f"out/layer0/{theirs}"]
        assert max_abs(taps[ours][0].reshape(want.shape), want) < 2e-5, ours
    offset = params["blocks"]["mixer"]["position_offset"][0]
    factors = np.maximum(0.0, 1 / np.arange(1, 17) + offset)
    assert max_abs(factors, file["out/layer0/token_eta"]) < 1e-7

    @jax.jit
    def read(params, ids):
        return model.apply(params, ids, state=model.init_state(params, *ids.shape))[1]

    state = jax.device_get(read(params, ids))
    for ours, theirs in INNER_NAMES[name.split("_")[0]].items():
        for layer in range(2):
            want = file[f"out/layer{layer}/{theirs}_states"]
            got = getattr(state.mixer.inner, ours)[layer].reshape(want.shape)
            assert max_abs(got, want) < 2e-6, (ours, layer)


@pytest.mark.parametrize("name", ["linear_base", "linear_mamba", "mlp_base", "mlp_mamba"])
def test_jax_model(golden, name):
    file = golden(f"ttt/jax_model_{name}")
    model, params = load(file)
    tokens, targets, mask = (
        file[f"in/{key}"] for key in ("input_tokens", "target_tokens", "loss_masks")
    )
    means = lambda x: np.sum(x * mask, 1) / np.maximum(np.sum(mask, 1), 1e-10)

    @jax.jit
    def run(params, scale):
        def loss(params):
            options = dict(taps=TAPS + ttt.STATISTICS, inner_lr_scale=scale)
            logits, taps = model.apply(params, tokens, **options)
            nll, _ = losses.cross_entropy(logits, targets)
            rows = jnp.sum(nll * mask, 1) / jnp.sum(mask, 1)
            return jnp.mean(rows), (nll, logits, taps)

        return jax.grad(loss, has_aux=True)(params)

    grads, (nll, logits, taps) = jax.device_get(run(params, np.float32(1)))
    assert max_abs(logits, file["out/logits"]) < 2e-5
    assert abs(np.mean(means(np.asarray(nll, np.float64))) - float(file["out/loss"])) < 2e-6
    accuracy = np.mean(means(np.argmax(logits, -1) == targets))
    assert accuracy == pytest.approx(float(file["out/accuracy"]), abs=1e-7)
    for got, key in ((taps["embedding"], 0), (taps["block_out"][0], 1), (taps["hidden"], 2)):
        assert max_abs(got, file[f"out/hidden/{key}"]) < 2e-5
    for ours, theirs in STATISTICS.items():
        for layer in range(2):
            got = np.mean(np.asarray(taps[ours][layer], np.float64), (0, 1))
            want = file[f"out/ttt_stats/layer{layer}/{theirs}"]
            assert np.max(np.abs(got / want - 1)) < 1e-5, (ours, layer)
    norm = float(file["out/grad_global_norm"])
    assert abs(optax.tree.norm(grads) / norm - 1) < 2e-5
    grads = ttt.to_official(model.config, grads, layout="flax")
    wanted = [key for key in file if key.startswith("out/grad/")]
    assert len(wanted) == len(grads)
    for key in wanted:
        assert max_rel(grads[key.removeprefix("out/grad/")], file[key]) < 2e-5, key

    _, (_, logits, _) = run(params, file["in/ttt_lr_mult"][0])
    assert max_abs(logits, file["out/logits_lr_mult"]) < 2e-5
    assert max_abs(logits, file["out/logits"]) > 1e-3

    half = jaxmodels.build(dataclasses.replace(model.config, dtype="bfloat16"))

    @jax.jit
    def run_half(params):
        logits = half.apply(params, tokens)
        return logits, losses.cross_entropy(logits, targets)[0]

    logits, nll = run_half(params)
    apart = np.abs(np.asarray(logits) - file["out/bf16/logits"])
    assert np.max(apart) < 0.2 and np.mean(apart) < 0.02
    assert abs(np.mean(means(np.asarray(nll))) - float(file["out/bf16/loss"])) < 2e-2


def check_state(state, file, place, kind):
    state = jax.device_get(state)
    for layer in range(2):
        want = lambda key: file[f"out/{place}/layer{layer}/{key}"]  # noqa: B023
        for ours, theirs in INNER_NAMES[kind].items():
            for name, key, bound in (
                (ours, f"{theirs}_states", 2e-6),
                (f"{ours}_sum", f"{theirs}_grad", 1e-5),
            ):
                got = getattr(state.mixer.inner, name)[layer].reshape(want(key).shape)
                assert max_abs(got, want(key)) < bound, (place, layer, key)
        # The official cache keeps the last four inputs, of which the oldest is never used again.
        if state.pre_conv is not None:
            tail = want("conv_pre_conv")[:, :, 1:]
            assert max_abs(np.swapaxes(state.pre_conv[layer], 1, 2), tail) < 1e-5
        if state.mixer.conv is not None:
            for key in ("conv_ttt_conv_q", "conv_ttt_conv_k"):
                tail = want(key)[:, :, 1:]
                assert max_abs(np.swapaxes(state.mixer.conv[layer], 1, 2), tail) < 1e-5


@pytest.mark.parametrize("name", ["linear_tf", "linear_mamba", "mlp_tf", "mlp_mamba"])
def test_pytorch_decoding(golden, name):
    file = golden(f"ttt/pt_decode_{name}")
    model, params = load(file)
    kind, has_conv = name.split("_")[0], name.endswith("mamba")
    ids = file["in/input_ids"]
    B, T = ids.shape
    assert max_abs(jax.jit(model.apply)(params, ids), file["out/full_logits"]) < 2e-5
    apply = jax.jit(lambda p, x, state, valid: model.apply(p, x, state=state, valid=valid))
    start = jax.jit(lambda p: model.init_state(p, B, T))(params)

    def read(tokens, state, valid=None):
        logits, state = apply(params, tokens, state, valid)
        assert (state.pre_conv is not None) == (state.mixer.conv is not None) == has_conv
        return logits, state

    prefills = [int(P) for P in file["in/prefill_lengths"]]
    for P in prefills:
        # Padded to one length, so that there is one program to compile for all.
        valid = np.broadcast_to(np.arange(max(prefills)) < P, (B, max(prefills)))
        padded = ids[:, : max(prefills)]
        _, state = read(padded, start, valid)
        check_state(state, file, f"P{P}/prefill_state", kind)
        steps = []
        for t in range(P, T):
            logits, state = read(ids[:, t : t + 1], state)
            steps.append(logits)
        assert max_abs(np.concatenate(steps, 1), file[f"out/P{P}/decode_logits"]) < 2e-5
        check_state(state, file, f"P{P}/final_state", kind)

    prompts = [row[:P].tolist() for P in prefills for row in ids]
    generated = jaxmodels.generate(model, params, prompts, max_new_tokens=20)
    wanted = [file[f"out/P{P}/generated"][:, P:] for P in prefills]
    np.testing.assert_array_equal(generated, np.concatenate(wanted))
