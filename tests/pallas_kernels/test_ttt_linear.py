# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The TTT-Linear operation against the official inner loop and against its own reference."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from measure import max_abs, max_rel, rms_rel

from pallas_kernels.ttt_linear import TTTLinearState, init_state, ttt_linear

NAMES = ("q", "k", "v", "lr", "pos_scale", "w", "b", "ln_scale", "ln_bias")


def run(q, k, v, lr, pos_scale, w, b, ln_scale, ln_bias, **options):
    """The operation from a state without running sums."""
    state = start({"w": w, "b": b})
    return ttt_linear(q, k, v, lr, pos_scale, state, ln_scale, ln_bias, **options)


def start(inputs):
    """The inputs' own w and b per sequence, and no running sums."""
    w, b = inputs["w"], inputs["b"]
    return TTTLinearState(w=w, b=b, w_sum=jnp.zeros_like(w), b_sum=jnp.zeros_like(b))


def arrays(B, H, T, K, size, dtype="float32", seed=0):
    # numpy's generator, because each shape of jax.random would be compiled.
    draw = np.random.default_rng(seed).standard_normal
    normal = lambda *shape: draw(shape, np.float32)
    inputs = {
        "q": normal(B, H, T, K).astype(jnp.dtype(dtype)),
        "k": normal(B, H, T, K).astype(jnp.dtype(dtype)),
        "v": normal(B, H, T, K).astype(jnp.dtype(dtype)),
        "lr": np.float32(1) / (1 + np.exp(normal(B, H, T))) / np.float32(K),
        "pos_scale": np.float32(1) / np.arange(1, size + 1, dtype=np.float32) + 0.05 * normal(size),
        "w": 0.1 * normal(B, H, K, K),
        "b": 0.1 * normal(B, H, K),
        "ln_scale": 1 + 0.2 * normal(H, K),
        "ln_bias": 0.2 * normal(H, K),
    }
    return {name: jnp.asarray(x) for name, x in inputs.items()}


# Official numbers.


@pytest.fixture(scope="module", params=["d16", "d64"])
def official(golden, request):
    file = golden(f"ttt/pt_core_linear_{request.param}_b16")
    tokens = lambda x: x.reshape(*x.shape[:2], -1, *x.shape[4:])  # (B, H, n, b, ...) -> tokens
    inputs = {
        "q": tokens(file["in/XQ"]),
        "k": tokens(file["in/XK"]),
        "v": tokens(file["in/XV"]),
        "lr": tokens(file["in/ttt_lr_eta"]),
        "pos_scale": file["in/token_eta"],
        "w": file["in/W1"],
        "b": file["in/b1"][:, :, 0],
        "ln_scale": file["param/ttt_norm_weight"],
        "ln_bias": file["param/ttt_norm_bias"],
    }
    return file, {name: jnp.asarray(inputs[name]) for name in NAMES}, tokens


def heads_merged(x):
    return jnp.moveaxis(x, 1, 2).reshape(x.shape[0], x.shape[2], -1)


def heads_split(x, heads):
    return jnp.moveaxis(x.reshape(*x.shape[:2], heads, -1), 2, 1)


@pytest.mark.parametrize(
    "implementation, checkpoint_every", [("xla", 1), ("xla", 3), ("xla", 16), ("reference", 1)]
)
def test_official_value_and_every_gradient(official, implementation, checkpoint_every):
    file, inputs, tokens = official
    options = dict(implementation=implementation, checkpoint_every=checkpoint_every)
    (out, state), vjp = jax.vjp(jax.jit(functools.partial(run, **options)), *inputs.values())
    assert max_abs(heads_merged(out), file["out/XQW"]) < 5e-6
    assert max_abs(state.w, file["out/W1_last"]) < 2e-6
    assert max_abs(state.b, file["out/b1_last"][:, :, 0]) < 2e-6
    zeros = jax.tree.map(jnp.zeros_like, state)
    d_state = zeros._replace(w=file["in/dW1_last"], b=file["in/db1_last"][:, :, 0])
    d_out = heads_split(file["in/dXQW"], out.shape[1])
    got = dict(zip(NAMES, vjp((d_out, d_state))))

    # The golden holds the gradient of the full matrix E[i, j] = t_i l_j.
    d_eta = np.asarray(file["out/grad/eta"], np.float64)
    want = {
        "q": tokens(file["out/grad/XQ"]),
        "k": tokens(file["out/grad/XK"]),
        "v": tokens(file["out/grad/XV"]),
        "lr": tokens(np.einsum("...ij,i->...j", d_eta, file["in/token_eta"])),
        "pos_scale": np.einsum("bhnij,bhnj->i", d_eta, file["in/ttt_lr_eta"]),
        "w": file["out/grad/W1"],
        "b": file["out/grad/b1"][:, :, 0],
        "ln_scale": file["out/grad/ttt_norm_weight"],
        "ln_bias": file["out/grad/ttt_norm_bias"],
    }
    for name in NAMES:
        assert max_rel(got[name], want[name]) < 2e-6, name


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_official_partial_mini_batch_and_its_continuation(official, implementation):
    file, inputs, _ = official
    length = json.loads(str(file["config"]))["partial_len"]
    take = lambda a, b: [inputs[n][:, :, a:b] for n in ("q", "k", "v", "lr")]
    norm = (inputs["ln_scale"], inputs["ln_bias"])
    op = jax.jit(functools.partial(ttt_linear, implementation=implementation))
    state = start(inputs)
    out, state = op(*take(0, length), inputs["pos_scale"], state, *norm)
    assert max_abs(heads_merged(out), file["out/partial/XQW"]) < 5e-6
    assert max_abs(state.w_sum, file["out/partial/W1_grad"]) < 1e-5
    assert max_abs(state.b_sum, file["out/partial/b1_grad"][:, :, 0]) < 1e-5
    outputs = []
    for t in range(length, 16):
        phase = jnp.full(out.shape[:1], t, jnp.int32)
        out, state = op(*take(t, t + 1), inputs["pos_scale"], state, *norm, phase=phase)
        outputs.append(out)
        if t == length:
            assert max_abs(state.w_sum, file["out/partial_plus1/W1_grad"]) < 1e-5
            assert max_abs(state.b_sum, file["out/partial_plus1/b1_grad"][:, :, 0]) < 1e-5
    got = heads_merged(jnp.concatenate(outputs, 2))
    assert max_abs(got, file["out/partial/continued_XQW"]) < 5e-6
    assert max_abs(state.w, file["out/partial/continued_W1_states"]) < 2e-6
    assert max_abs(state.b, file["out/partial/continued_b1_states"][:, :, 0]) < 2e-6


# Against the reference.

CASES = [  # B, H, T, K, mini-batch, checkpoint_every, dtype
    (1, 1, 1, 8, 16, 4, "float32"),
    (2, 3, 5, 8, 8, 1, "float32"),
    (2, 2, 39, 8, 8, 2, "float32"),
    (2, 2, 39, 8, 8, 2, "bfloat16"),
    (1, 2, 130, 64, 16, 3, "float32"),
    (1, 2, 130, 64, 16, 3, "bfloat16"),
    (1, 1, 70, 96, 64, 16, "float32"),
]


@pytest.mark.parametrize("B, H, T, K, size, every, dtype", CASES)
def test_value_and_every_gradient_against_the_reference(B, H, T, K, size, every, dtype):
    inputs = arrays(B, H, T, K, size, dtype)
    random = np.random.default_rng(1)
    cotangent = jax.tree.map(
        lambda x: random.standard_normal(x.shape, np.float32).astype(x.dtype),
        jax.eval_shape(run, *inputs.values()),
    )

    @functools.partial(jax.jit, static_argnums=0)
    def value_and_vjp(implementation, inputs, cotangent):
        options = dict(implementation=implementation, checkpoint_every=every)
        out, vjp = jax.vjp(lambda a: run(**a, **options), inputs)
        return out, *vjp(cotangent)

    got, got_grads = value_and_vjp("xla", inputs, cotangent)
    want, want_grads = value_and_vjp("reference", inputs, cotangent)
    # Both compute in float32; bfloat16 rounds inputs alike, outputs and gradients of q, k, v once.
    tolerance = 5e-6 if dtype == "float32" else 4e-3
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert a.dtype == b.dtype
        assert max_abs(a, b) <= tolerance * (1 + float(jnp.max(jnp.abs(b))))
    for name in NAMES:
        assert got_grads[name].dtype == want_grads[name].dtype
        assert rms_rel(got_grads[name], want_grads[name]) < tolerance, name


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1))
def test_random_chunkings_at_random_places_equal_one_pass(seed):
    random = np.random.default_rng(seed)
    B, H, T, K, size = 3, 2, 37, 8, 8
    inputs = arrays(B, H, T, K, size)
    want, end = run_jit(*inputs.values())
    state = start(inputs)
    at = np.zeros(B, int)
    got = np.zeros(want.shape, np.float32)
    while (at < T).any():
        width = int(random.choice([1, 5, 13]))
        counts = [min(int(random.integers(0, width + 1)), T - a) for a in at]
        valid = np.arange(width) < np.array(counts)[:, None]
        index = np.minimum(at[:, None] + np.arange(width), T - 1)
        rows = np.arange(B)[:, None]
        pieces = []
        for name in ("q", "k", "v", "lr"):
            piece = np.moveaxis(np.asarray(inputs[name]), 2, 1)[rows, index].copy()
            piece[~valid] = np.nan  # what is not valid may hold anything
            pieces.append(jnp.moveaxis(piece, 1, 2))
        out, state = continued_jit(
            *pieces,
            inputs["pos_scale"],
            state,
            inputs["ln_scale"],
            inputs["ln_bias"],
            phase=jnp.asarray(at % size, jnp.int32),
            valid=jnp.asarray(valid),
        )
        for row, count in enumerate(counts):
            got[row, :, at[row] : at[row] + count] = out[row, :, :count]
            at[row] += count
    assert max_abs(got, want) < 1e-5
    for a, b in zip(state, end):
        assert max_abs(a, b) < 1e-5


run_jit = jax.jit(run)
continued_jit = jax.jit(ttt_linear)


@pytest.mark.parametrize("T", [1, 11])
def test_continued_path_equals_the_reference_with_gradients(T):
    B, H, K, size = 3, 2, 8, 8
    inputs = arrays(B, H, T, K, size)
    sums = arrays(B, H, T, K, size, seed=5)
    phase = jnp.array([0, 3, 7])
    valid = jnp.arange(T) < jnp.array([T, T // 2, 0])[:, None]

    def grads(implementation):
        def score(inputs, w_sum, b_sum):
            a = dict(inputs)
            state = TTTLinearState(w=a.pop("w"), b=a.pop("b"), w_sum=w_sum, b_sum=b_sum)
            args = [a[n] for n in ("q", "k", "v", "lr", "pos_scale")]
            out, state = ttt_linear(
                *args,
                state,
                a["ln_scale"],
                a["ln_bias"],
                phase=phase,
                valid=valid,
                implementation=implementation,
            )
            out = jnp.where(valid[:, None, :, None], out, 0)
            parts = (out, *state)
            return sum(jnp.sum(jnp.sin(x + i)) for i, x in enumerate(parts)), (out, state)

        call = jax.jit(jax.value_and_grad(score, argnums=(0, 1, 2), has_aux=True))
        return call(inputs, 0.1 * sums["w"], 0.1 * sums["b"])

    for a, b in zip(jax.tree.leaves(grads("xla")), jax.tree.leaves(grads("reference"))):
        assert max_abs(a, b) < 2e-5 * (1 + float(jnp.max(jnp.abs(b))))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("T", [1, 11])
def test_garbage_in_invalid_tokens_reaches_no_state_and_no_gradient(T, implementation):
    inputs = arrays(2, 1, T, 4, 8)
    valid = jnp.arange(T) < jnp.array([T, T // 2])[:, None]

    def score(inputs):
        options = dict(phase=jnp.array([5, 7]), valid=valid, implementation=implementation)
        out, state = run(**inputs, **options)
        out = jnp.where(valid[:, None, :, None], out, 0)
        return sum(jnp.sum(jnp.sin(x)) for x in (out, *state))

    def poison(x):
        return jnp.where(valid.reshape(2, 1, T, *(1,) * (x.ndim - 3)), x, jnp.nan)

    poisoned = inputs | {name: poison(inputs[name]) for name in ("q", "k", "v", "lr")}
    call = jax.jit(jax.value_and_grad(score))
    for a, b in zip(jax.tree.leaves(call(poisoned)), jax.tree.leaves(call(inputs))):
        assert max_abs(a, b) < 1e-6


# Transformations and resources.


def test_composes_with_vmap_scan_and_checkpoint():
    inputs = arrays(2, 2, 20, 4, 8)
    doubled = {name: jnp.stack([x, 1.1 * x]) for name, x in inputs.items()}
    call = jax.checkpoint(lambda a: jnp.sum(jnp.sin(run(**a)[0])))
    scanned = lambda a: jax.lax.scan(lambda total, x: (total + call(x), None), 0.0, a)[0]
    vmapped = lambda a: jnp.sum(jax.vmap(call)(a))
    one = jax.jit(jax.value_and_grad(call))
    each = [one({name: x[i] for name, x in doubled.items()}) for i in range(2)]
    want = sum(value for value, _ in each)
    want_grads = {name: jnp.stack([grads[name] for _, grads in each]) for name in NAMES}
    for form in (scanned, vmapped):
        value, grads = jax.jit(jax.value_and_grad(form))(doubled)
        assert abs(float(value - want)) < 1e-3
        for name in NAMES:
            assert max_rel(grads[name], want_grads[name]) < 5e-6, name


SPLIT, HEADS = P("data", "tensor"), P("tensor")
SPECS = dict.fromkeys(NAMES, SPLIT) | {"pos_scale": P(), "ln_scale": HEADS, "ln_bias": HEADS}


def mesh_of(kind):
    types = (jax.sharding.AxisType[kind],) * 2
    return jax.make_mesh((2, 2), ("data", "tensor"), axis_types=types, devices=jax.devices()[:4])


def test_inside_shard_map_over_batch_and_heads():
    inputs = arrays(4, 4, 20, 8, 8)
    score = lambda *a: jnp.sum(jnp.sin(run(*a)[0]))
    want = jax.jit(jax.grad(score, argnums=tuple(range(9))))(*inputs.values())
    local = jax.shard_map(
        lambda *a: run(*a)[0],
        mesh=mesh_of("Auto"),
        in_specs=tuple(SPECS.values()),
        out_specs=SPLIT,
    )
    got = jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(local(*a))), argnums=tuple(range(9))))(
        *inputs.values()
    )
    for name, a, b in zip(NAMES, got, want):
        assert max_rel(a, b) < 2e-6, name


def test_continued_path_inside_shard_map_from_a_shared_start():
    inputs = arrays(4, 4, 11, 8, 8)
    inputs |= {"w": inputs["w"][0], "b": inputs["b"][0]}  # replicated over data
    phase = jnp.array([0, 3, 7, 2], jnp.int32)
    valid = jnp.arange(11) < jnp.array([11, 3, 0, 7])[:, None]

    def local(q, k, v, lr, pos_scale, w, b, ln_scale, ln_bias, phase, valid):
        state = init_state(w, b, q.shape[0])
        options = dict(phase=phase, valid=valid)
        out, state = ttt_linear(q, k, v, lr, pos_scale, state, ln_scale, ln_bias, **options)
        return jnp.where(valid[:, None, :, None], out, 0), state

    def grads(call):
        score = lambda *a: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(call(*a, phase, valid)))
        return jax.jit(jax.grad(score, argnums=tuple(range(9))))(*inputs.values())

    specs = SPECS | {"w": HEADS, "b": HEADS, "phase": P("data"), "valid": P("data")}
    sharded = jax.shard_map(
        local, mesh=mesh_of("Auto"), in_specs=tuple(specs.values()), out_specs=SPLIT
    )
    for name, a, b in zip(NAMES, grads(sharded), grads(local)):
        assert max_rel(a, b) < 2e-6, name


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_on_a_mesh_no_array_is_gathered(kind):
    inputs = arrays(4, 4, 20, 8, 8)
    step = lambda: jax.jit(
        jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(run(*a)[0])), argnums=tuple(range(9)))
    )
    _, want = step()(*inputs.values())
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(inputs[n], jax.sharding.NamedSharding(mesh, SPECS[n])) for n in NAMES
        ]
        compiled = step().lower(*placed).compile()
        _, got = compiled(*placed)
    assert "all-gather" not in compiled.as_text()
    for name, a, b in zip(NAMES, got, want):
        assert a.sharding.is_equivalent_to(placed[NAMES.index(name)].sharding, a.ndim), name
        assert max_rel(a, b) < 2e-6, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("every", [1, 3, 16, 99])
def test_what_is_saved_for_the_backward_pass(every, dtype):
    """The inputs in their own dtype, and one state per `checkpoint_every` mini-batches."""
    B, H, n, K, size = 1, 2, 40, 16, 4
    inputs = arrays(B, H, n * size, K, size, dtype)
    run_ = functools.partial(run, checkpoint_every=every)
    saved = jax.eval_shape(lambda *a: jax.vjp(run_, *a)[1], *inputs.values())
    nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(saved))
    kept = sum(x.nbytes for name, x in inputs.items() if name not in ("w", "b"))
    state = B * H * (K * K + K) * 4
    assert nbytes == kept + -(-n // every) * state


def test_backward_memory_follows_the_stored_states():
    """Temporaries of a backward pass, from the compiler: 15 of 16 states are not stored."""
    inputs = jax.eval_shape(lambda: arrays(1, 2, 16384, 32, 16))

    def temporary(every):
        def step(d_out, *a):
            _, vjp = jax.vjp(lambda *a: run(*a, checkpoint_every=every)[0], *a)
            return vjp(d_out)

        args = [inputs[name] for name in ("q", *NAMES)]
        return jax.jit(step).lower(*args).compile().memory_analysis().temp_size_in_bytes

    all_states = 16384 // 16 * 2 * 32 * 32 * 4
    every_state, some = temporary(1), temporary(16)
    assert every_state - some > 0.8 * all_states
    assert some < 0.25 * all_states


def test_state_cost_does_not_depend_on_length():
    short, long = (jax.eval_shape(run, *arrays(1, 2, T, 8, 8).values())[1] for T in (3, 300))
    assert jax.tree.map(lambda x: x.shape, short) == jax.tree.map(lambda x: x.shape, long)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"k": jnp.zeros((2, 2, 6, 8))}, r"k has shape \(2, 2, 6, 8\), expected \(2, 2, 5, 8\)"),
        ({"lr": jnp.zeros((2, 5, 2))}, "lr has shape"),
        ({"w": jnp.zeros((2, 2, 8, 4))}, "state.w has shape"),
        ({"ln_scale": jnp.zeros((8,))}, "ln_scale has shape"),
        ({"pos_scale": jnp.zeros((4, 4))}, "pos_scale has shape"),
        ({"q": jnp.zeros((2, 2, 5, 8), int)}, "q has dtype int32"),
        ({"ln_bias": jnp.zeros((2, 8), int)}, "ln_bias has dtype int32"),
        ({"w": jnp.zeros((2, 2, 8, 8), int)}, "state.w has dtype int32"),
        ({"q": jnp.zeros((2, 5, 8))}, "q has shape"),
    ],
)
def test_misfits_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        run(**(arrays(2, 2, 5, 8, 8) | changes))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"implementation": "cuda"}, "one of .*xla.*pallas_tpu.* or None"),
        ({"checkpoint_every": 0}, "checkpoint_every=0"),
        ({"phase": jnp.zeros((3,), jnp.int32)}, "phase has shape"),
        ({"phase": jnp.zeros((2,))}, "phase has dtype float32"),
        ({"valid": jnp.ones((2, 5))}, "valid has dtype float32"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        run(**arrays(2, 2, 5, 8, 8), **options)
