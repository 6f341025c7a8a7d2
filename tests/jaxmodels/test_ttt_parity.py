# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""TTT-Linear against the numbers of the official PyTorch model (tolerances of the goldens'
README)."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from measure import max_abs, max_rel

import jaxmodels
from jaxmodels import losses, ttt


def load(file):
    config = json.loads(str(file["config"]))
    weights = {k.removeprefix("param/"): v for k, v in file.items() if k.startswith("param/")}
    return config, weights


@pytest.fixture(scope="module")
def official(golden):
    file = golden("ttt/pt_model_linear_tf")
    config, params = ttt.from_official(*load(file))
    return file, config, params, jaxmodels.build(config)


def next_token_losses(model, params, ids):
    hidden = model.apply(params, ids, output="hidden")
    w = model.unembedding(params)
    return losses.chunked_cross_entropy(hidden[:, :-1], w, ids[:, 1:], chunk=16)[0]


def inner_state(model, params, ids):
    state = model.init_state(params, *ids.shape)
    return model.apply(params, ids, state=state)[1].inner


@pytest.mark.parametrize("case", ["", "odd/"])
def test_forward_matches_official(official, case):
    file, _, params, model = official
    ids = file["in/input_ids_odd" if case else "in/input_ids"]
    taps = ("block_out", "hidden", "ttt_inner", "mixer_out")
    logits, tapped = jax.jit(lambda p, x: model.apply(p, x, taps=taps))(params, ids)
    assert max_abs(logits, file[f"out/{case}logits"]) < 2e-5
    nll = jax.jit(next_token_losses, static_argnums=0)(model, params, ids)
    # A float32 sum of a hundred losses would itself be off by 1e-6.
    loss = np.mean(np.asarray(nll, np.float64))
    assert abs(loss - float(file[f"out/{case}loss"])) < 2e-6
    for layer in range(2):
        for ours, theirs in (("ttt_inner", "ttt_inner"), ("mixer_out", "seq_block_out")):
            want = file[f"out/{case}layer{layer}/{theirs}"]
            assert max_abs(tapped[ours][layer], want) < 2e-5, (ours, layer)
        if not case:
            assert max_abs(tapped["block_out"][layer], file[f"out/hidden/{layer}"]) < 2e-5
    if not case:
        assert max_abs(tapped["hidden"], file["out/hidden/2"]) < 2e-5


def test_inner_state_matches_official(official):
    file, _, params, model = official
    inner = jax.jit(inner_state, static_argnums=0)(model, params, file["in/input_ids"])
    for layer in range(2):
        assert max_abs(inner.w[layer], file[f"out/layer{layer}/W1_states"]) < 2e-6
        assert max_abs(inner.b[layer][:, :, None], file[f"out/layer{layer}/b1_states"]) < 2e-6


@pytest.mark.parametrize("case", ["", "odd/"])
def test_every_gradient_matches_official(official, case):
    file, config, params, model = official
    ids = file["in/input_ids_odd" if case else "in/input_ids"]
    grads = jax.jit(jax.grad(lambda p: jnp.mean(next_token_losses(model, p, ids))))(params)
    grads = ttt.to_official(config, grads)
    prefix = f"out/{case}grad/"
    wanted = [key for key in file if key.startswith(prefix)]
    assert len(wanted) == (len(grads) if not case else 7)
    for key in wanted:
        assert max_rel(grads[key.removeprefix(prefix)], file[key]) < 2e-5, key


def test_decoding_matches_official(golden):
    file = golden("ttt/pt_decode_linear_tf")
    config, params = ttt.from_official(*load(file))
    model = jaxmodels.build(config)
    ids = file["in/input_ids"]
    B, T = ids.shape
    apply = jax.jit(lambda p, x, s: model.apply(p, x, state=s))
    full = jax.jit(model.apply)(params, ids)
    assert max_abs(full, file["out/full_logits"]) < 2e-5

    def check_state(state, name):
        for layer in range(2):
            inner = jax.tree.map(lambda x: x[layer], state.inner)  # noqa: B023
            want = {
                key: file[f"out/{name}/layer{layer}/{key}"]
                for key in ("W1_states", "b1_states", "W1_grad", "b1_grad")
            }
            assert max_abs(inner.w, want["W1_states"]) < 2e-6
            assert max_abs(inner.b[:, :, None], want["b1_states"]) < 2e-6
            assert max_abs(inner.w_sum, want["W1_grad"]) < 1e-5
            assert max_abs(inner.b_sum[:, :, None], want["b1_grad"]) < 1e-5

    for P in file["in/prefill_lengths"]:
        _, state = apply(params, ids[:, :P], model.init_state(params, B, T))
        check_state(state, f"P{P}/prefill_state")
        steps = []
        for t in range(P, T):
            logits, state = apply(params, ids[:, t : t + 1], state)
            steps.append(logits)
        assert max_abs(np.concatenate(steps, 1), file[f"out/P{P}/decode_logits"]) < 2e-5
        check_state(state, f"P{P}/final_state")
        generated = jaxmodels.generate(model, params, ids[:, :P], max_new_tokens=20)
        np.testing.assert_array_equal(generated, file[f"out/P{P}/generated"][:, P:])


def test_official_names_round_trip_exactly(official):
    file, config, params, _ = official
    _, weights = load(file)
    back = ttt.to_official(config, params)
    assert back.keys() == weights.keys()
    for name, value in weights.items():
        np.testing.assert_array_equal(back[name], value, err_msg=name)


def test_wrong_weights_are_listed_together(official):
    file = official[0]
    config, weights = load(file)
    weights = dict(weights)
    del weights["model.norm.weight"]
    weights["model.extra"] = np.zeros(3)
    weights["model.layers.1.seq_modeling_block.W1"] = np.zeros((3, 16, 8))
    with pytest.raises(ValueError) as error:
        ttt.from_official(config, weights)
    message = str(error.value)
    assert "missing model.norm.weight" in message
    assert "surplus model.extra" in message
    assert "misshaped model.layers.1.seq_modeling_block.W1: (3, 16, 8), not (3, 16, 16)" in message


@pytest.mark.parametrize("field, value", [("use_gate", True), ("ttt_layer_type", "mlp")])
def test_unsupported_official_options_are_refused(official, field, value):
    config, weights = load(official[0])
    with pytest.raises(ValueError, match=field):
        ttt.from_official({**config, field: value}, weights)


def test_official_layout_refuses_another_model():
    config = jaxmodels.transformer.transformer(d_model=8, num_layers=1, num_heads=2, d_ff=8)
    with pytest.raises(ValueError, match="holds TTTLinear"):
        ttt.to_official(config, {})
