# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Decoding: any chunking, any raggedness, equals the full forward; sampling does what it says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measure import max_abs
from small_models import MIXERS, tiny, tokens

import jaxmodels
from jaxmodels.generate import prefill

LENGTH = 29  # not a multiple of the inner mini-batch of 8


@pytest.fixture(scope="module", params=MIXERS)
def case(request):
    model, params = tiny(request.param)
    x = tokens(3, LENGTH)
    full = np.asarray(jax.jit(model.apply)(params, x))
    step = jax.jit(lambda p, x, s, valid: model.apply(p, x, state=s, valid=valid))
    return model, params, x, full, step


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.data())
def test_any_chunking_equals_the_full_forward(case, data):
    model, params, x, full, step = case
    state, outputs, at = model.init_state(params, 3, LENGTH), [], 0
    while at < LENGTH:
        size = min(data.draw(st.sampled_from([1, 3, 8, 11])), LENGTH - at)
        out, state = step(params, x[:, at : at + size], state, None)
        outputs.append(out)
        at += size
    assert max_abs(np.concatenate(outputs, 1), full) < 2e-5


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 21])
def test_prefill_then_single_steps_equals_the_full_forward(case, length):
    model, params, x, full, step = case
    out, state = step(params, x[:, :length], model.init_state(params, 3, LENGTH), None)
    assert max_abs(out, full[:, :length]) < 2e-5
    for t in range(length, LENGTH):
        out, state = step(params, x[:, t : t + 1], state, None)
        assert max_abs(out[:, 0], full[:, t]) < 2e-5, t


def test_ragged_rows_are_independent_of_their_padding(case):
    model, params, x, full, step = case
    lengths = np.array([5, 8, 19])
    valid = np.arange(LENGTH) < lengths[:, None]
    noise = jnp.where(valid, x, tokens(3, LENGTH, seed=9))
    logits, state = prefill(model, params, noise, lengths, LENGTH)
    for row, length in enumerate(lengths):
        assert max_abs(logits[row], full[row, length - 1]) < 2e-5
    # Each row goes on from its own place; rows that run out of real tokens stand still.
    for i in range(10):
        at = np.minimum(lengths + i, LENGTH - 1)
        valid = (lengths + i < LENGTH)[:, None]
        out, state = step(params, x[np.arange(3), at][:, None], state, valid)
        for row in np.flatnonzero(valid):
            assert max_abs(out[row, 0], full[row, at[row]]) < 2e-5


def test_padding_on_the_left_or_anywhere_is_ignored(case):
    model, params, x, full, step = case
    apply = jax.jit(lambda p, x, valid: model.apply(p, x, valid=valid))
    left = np.arange(LENGTH + 6) >= np.array([[6], [11], [0]])
    scattered = np.random.default_rng(0).random((3, LENGTH + 6)) < 0.7
    for valid in (left, scattered):
        valid = valid & (np.cumsum(valid, 1) <= LENGTH)
        place = np.cumsum(valid, 1) - 1
        padded = np.where(valid, np.take_along_axis(np.asarray(x), np.maximum(place, 0), 1), -1)
        at = 13  # with and without a state, the padding cut in two
        first, state = step(
            params, padded[:, :at], model.init_state(params, 3, LENGTH), valid[:, :at]
        )
        second, _ = step(params, padded[:, at:], state, valid[:, at:])
        for out in (apply(params, padded, valid), np.concatenate([first, second], 1)):
            for row in range(3):
                real = valid[row]
                assert max_abs(out[row][real], full[row, : real.sum()]) < 2e-5


def test_greedy_generation_equals_repeated_full_forwards(case):
    model, params, *_ = case
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [7], [2, 7, 1]]
    got = np.asarray(jaxmodels.generate(model, params, prompts, max_new_tokens=12))
    apply = jax.jit(model.apply)
    for row, prompt in enumerate(prompts):
        text = list(prompt)
        for _ in range(12):
            padded = np.zeros((1, 24), np.int32)  # causal: what follows cannot matter
            padded[0, : len(text)] = text
            text.append(int(jnp.argmax(apply(params, padded)[0, len(text) - 1])))
        np.testing.assert_array_equal(got[row], text[len(prompt) :])


def test_layers_apart_decode_as_stacked_ones(case):
    model, params, x, full, _ = case
    layers = model.apart(params)
    assert len(layers) == 3
    step = jax.jit(lambda x, s: model.apply(params, x, state=s, layers=layers))
    state = model.apart(model.init_state(params, 3, LENGTH))
    first, state = step(x[:, :11], state)
    second, _ = step(x[:, 11:], state)
    assert max_abs(np.concatenate([first, second], 1), full) < 2e-5
    with pytest.raises(ValueError, match="a state that is apart too"):
        model.apply(params, x, layers=layers)


def test_a_full_cache_gives_nan_not_a_wrong_answer():
    model, params = tiny("attention")
    x = tokens(2, 9)
    out, state = model.apply(params, x[:, :8], state=model.init_state(params, 2, 8))
    assert np.isfinite(out).all()
    out, _ = model.apply(params, x[:, 8:], state=state)
    assert np.isnan(out).all()


@pytest.mark.parametrize("mixer", ["ttt_linear", "ttt_mlp_mamba"])
def test_ttt_state_does_not_grow(mixer):
    model, params = tiny(mixer)
    short, long = (model.init_state(params, 2, length) for length in (8, 8000))
    assert jax.tree.map(jnp.shape, short) == jax.tree.map(jnp.shape, long)


def test_end_of_text_stays_ended():
    model, params = tiny("attention")
    free = np.asarray(jaxmodels.generate(model, params, [[1, 2]], max_new_tokens=8))[0]
    stop = int(free[3])
    first = int(np.flatnonzero(free == stop)[0])
    got = np.asarray(jaxmodels.generate(model, params, [[1, 2]], max_new_tokens=8, eos_token=stop))[
        0
    ]
    np.testing.assert_array_equal(got[: first + 1], free[: first + 1])
    assert (got[first:] == stop).all()


def test_sampling():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    draw = jax.jit(
        lambda key, **options: jax.vmap(lambda k: jaxmodels.sample(logits, k, **options)[0])(
            jax.random.split(key, 4000)
        ),
        static_argnames=("temperature", "top_k", "top_p"),
    )
    share = lambda **options: np.bincount(draw(jax.random.key(0), **options), minlength=4) / 4000
    np.testing.assert_allclose(share(), [0.5, 0.3, 0.15, 0.05], atol=0.03)
    np.testing.assert_allclose(share(top_k=2), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(share(top_p=0.6), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(share(top_p=0.45), [1, 0, 0, 0])
    hot = share(temperature=2.0)
    want = np.sqrt([0.5, 0.3, 0.15, 0.05])
    np.testing.assert_allclose(hot, want / want.sum(), atol=0.03)
    assert jaxmodels.sample(logits, jax.random.key(0), temperature=0)[0] == 0


@pytest.mark.parametrize(
    "prompts, options, message",
    [
        ([], {}, "at least one prompt"),
        ([[1], []], {}, "at least one token"),
        ([[50]], {}, "outside 0..49"),
        ([[1]], {"temperature": 1.0}, "needs key"),
        ([[1]], {"temperature": -1.0}, "temperature"),
        ([[1]], {"top_k": 0}, "top_k"),
        ([[1]], {"top_p": 0.0}, "top_p"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_bad_requests_are_refused(prompts, options, message):
    model, params = tiny("attention", num_layers=1)
    with pytest.raises(ValueError, match=message):
        jaxmodels.generate(model, params, prompts, **({"max_new_tokens": 2} | options))
