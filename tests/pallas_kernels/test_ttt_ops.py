# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Both TTT operations against the official inner loop and against their own reference."""

import functools
import json
import logging
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P
from measure import max_abs, max_rel, rms_rel
from ttt_ops import OPS, arrays, cut, run, start

from pallas_kernels.ttt_common import choice

both_ops = pytest.mark.parametrize("op", ["linear", "mlp"])


def leaves(tree):
    """Arrays by name."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): x for path, x in flat}


def assert_close(got, want, distance, limit):
    got, want = leaves(got), leaves(want)
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert got[name].dtype == x.dtype, name
        assert distance(got[name], x) < limit, name


# Official numbers.

WEIGHTS = {"linear": ("W1", "b1"), "mlp": ("W1", "b1", "W2", "b2")}


def tokens(x):
    """(B, H, n, b, ...) -> (B, H, T, ...)."""
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def weights(file, op, pattern):
    """Biases lose their axis of size 1."""
    found = (file[pattern.format(name)] for name in WEIGHTS[op])
    return tuple(jnp.asarray(x[:, :, 0] if x.shape[2] == 1 else x) for x in found)


@pytest.fixture(scope="module", params=["linear-d16", "linear-d64", "mlp-d16", "mlp-d64"])
def official(golden, request):
    op, width = request.param.split("-")
    file = golden(f"ttt/pt_core_{op}_{width}_b16")
    inputs = {
        "q": tokens(file["in/XQ"]),
        "k": tokens(file["in/XK"]),
        "v": tokens(file["in/XV"]),
        "lr": tokens(file["in/ttt_lr_eta"]),
        "pos_scale": file["in/token_eta"],
        "weights": weights(file, op, "in/{}"),
        "ln_scale": file["param/ttt_norm_weight"],
        "ln_bias": file["param/ttt_norm_bias"],
    }
    return op, file, jax.tree.map(jnp.asarray, inputs)


def heads_merged(x):
    return jnp.moveaxis(x, 1, 2).reshape(x.shape[0], x.shape[2], -1)


def heads_split(x, heads):
    return jnp.moveaxis(x.reshape(*x.shape[:2], heads, -1), 2, 1)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_official_value_and_every_gradient(official, implementation):
    op, file, inputs = official
    # Four mini-batches: a whole group and a rest.
    options = dict(implementation=implementation, checkpoint_every=3)
    call = jax.jit(functools.partial(run, op, **options))
    (out, state), vjp = jax.vjp(call, inputs)
    last = state[: len(state) // 2]
    assert max_abs(heads_merged(out), file["out/XQW"]) < 5e-6
    for got, want in zip(last, weights(file, op, "out/{}_last")):
        assert max_abs(got, want) < 2e-6
    d_state = start(op, weights(file, op, "in/d{}_last"))
    (got,) = vjp((heads_split(file["in/dXQW"], out.shape[1]), d_state))

    # The golden holds the gradient of the full matrix E[i, j] = t_i l_j.
    d_eta = np.asarray(file["out/grad/eta"], np.float64)
    want = {
        "q": tokens(file["out/grad/XQ"]),
        "k": tokens(file["out/grad/XK"]),
        "v": tokens(file["out/grad/XV"]),
        "lr": tokens(np.einsum("...ij,i->...j", d_eta, file["in/token_eta"])),
        "pos_scale": np.einsum("bhnij,bhnj->i", d_eta, file["in/ttt_lr_eta"]),
        "weights": weights(file, op, "out/grad/{}"),
        "ln_scale": file["out/grad/ttt_norm_weight"],
        "ln_bias": file["out/grad/ttt_norm_bias"],
    }
    for name, x in leaves(got).items():
        # The sum over all tokens is rounded here in another order than there.
        assert max_rel(x, leaves(want)[name]) < (4e-6 if "pos_scale" in name else 2e-6), name


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_official_partial_mini_batch_and_its_continuation(official, implementation):
    op, file, inputs = official
    length = json.loads(str(file["config"]))["partial_len"]
    m = len(WEIGHTS[op])
    call = jax.jit(functools.partial(run, op, implementation=implementation))
    out, state = call(cut(inputs, 0, length))
    assert max_abs(heads_merged(out), file["out/partial/XQW"]) < 5e-6
    for got, want in zip(state[m:], weights(file, op, "out/partial/{}_grad")):
        assert max_abs(got, want) < 1e-5
    outputs = []
    for t in range(length, 16):
        phase = jnp.full(out.shape[:1], t, jnp.int32)
        step = cut(inputs, t, t + 1) | {"weights": state[:m]}
        out, state = call(step, state[m:], phase=phase)
        outputs.append(out)
        if t == length:
            for got, want in zip(state[m:], weights(file, op, "out/partial_plus1/{}_grad")):
                assert max_abs(got, want) < 1e-5
    got = heads_merged(jnp.concatenate(outputs, 2))
    assert max_abs(got, file["out/partial/continued_XQW"]) < 5e-6
    for got, want in zip(state, weights(file, op, "out/partial/continued_{}_states")):
        assert max_abs(got, want) < 2e-6


# Against the reference.


def value_and_gradients(op, inputs, **options):
    """Outputs, final state, and the gradients of fixed cotangents on both."""

    @jax.jit
    def both(inputs):
        result, vjp = jax.vjp(lambda inputs: run(op, inputs, **options), inputs)
        draw = np.random.default_rng(1).standard_normal
        d_result = jax.tree.map(lambda x: jnp.asarray(draw(x.shape), x.dtype), result)
        return result, *vjp(d_result)

    return both(inputs)


CASES = [  # B, H, T, K, F, mini-batch, checkpoint_every, dtype
    (1, 2, 3, 8, 16, 16, 4, "float32"),
    (2, 2, 39, 8, 24, 8, 2, "float32"),
    (2, 2, 39, 8, 24, 8, 2, "bfloat16"),
    (1, 2, 7, 8, 16, 1, 1, "float32"),
    (1, 2, 70, 64, 128, 16, 3, "float32"),
    (1, 1, 70, 96, 96, 64, 16, "float32"),
]


@pytest.mark.parametrize("B, H, T, K, F, size, every, dtype", CASES)
@both_ops
def test_value_and_every_gradient_against_the_reference(op, B, H, T, K, F, size, every, dtype):
    inputs = arrays(op, B, H, T, K, size, F=F, dtype=dtype)
    got = value_and_gradients(op, inputs, implementation="xla", checkpoint_every=every)
    want = value_and_gradients(op, inputs, implementation="reference")
    # Both compute in float32; bfloat16 rounds inputs alike, outputs and gradients of q, k, v once.
    assert_close(got, want, rms_rel, 5e-6 if dtype == "float32" else 4e-3)


@both_ops
def test_bfloat16_tokens_are_close_to_float32(op):
    """Of the same values: what is rounded is the output and the gradients, once."""
    inputs = arrays(op, 2, 2, 40, 16, 8, dtype="bfloat16")
    got = value_and_gradients(op, inputs)
    wide = {name: x.astype(jnp.float32) for name, x in inputs.items() if name in "qkv"}
    want = value_and_gradients(op, inputs | wide)
    got, want = (leaves(jax.tree.map(lambda x: x.astype(jnp.float32), x)) for x in (got, want))
    for name, x in want.items():
        assert rms_rel(got[name], x) < 1e-2, name


@both_ops
def test_reset_equals_separate_sequences(op):
    """Documents of 16, 24 and 5 tokens, and of 8, 8, 24 and 5, in one row each."""
    inputs = arrays(op, 2, 2, 45, 8, 8)
    reset = jnp.array([[0, 0, 1, 0, 0, 1], [1, 1, 1, 0, 0, 1]], bool)
    out, state = run(op, inputs, reset=reset)
    for row, begins in enumerate([(0, 16, 40), (0, 8, 16, 40)]):
        one = {name: inputs[name][row : row + 1] for name in ("q", "k", "v", "lr")}
        one |= {"weights": tuple(x[row : row + 1] for x in inputs["weights"])}
        for a, b in zip(begins, (*begins[1:], 45)):
            alone, last = run(op, cut(inputs | one, a, b))
            assert max_abs(out[row : row + 1, :, a:b], alone) < 2e-6
        for x, y in zip(state, last):
            assert max_abs(x[row : row + 1], y) < 2e-6


@pytest.mark.parametrize("T, every", [(45, 2), (48, 4)])
@both_ops
def test_gradients_through_resets_equal_the_reference(op, T, every):
    inputs = arrays(op, 2, 2, T, 8, 8)
    reset = jnp.array([[0, 0, 1, 0, 0, 1], [1, 0, 0, 1, 0, 0]], bool)
    got = value_and_gradients(op, inputs, reset=reset, checkpoint_every=every, implementation="xla")
    want = value_and_gradients(op, inputs, reset=reset, implementation="reference")
    assert_close(got, want, rms_rel, 5e-6)


SIZES = dict(B=3, H=2, T=37, K=8, size=8)
whole = {op: jax.jit(functools.partial(run, op)) for op in OPS}


@both_ops
@settings(max_examples=6, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_chunkings_at_random_places_equal_one_pass(op, seed):
    """Valid tokens lie anywhere in a chunk; what lies between them may be anything."""
    random = np.random.default_rng(seed)
    B, T, size = SIZES["B"], SIZES["T"], SIZES["size"]
    inputs = arrays(op, *SIZES.values())
    want, end = whole[op](inputs)
    state = start(op, inputs["weights"])
    m = len(state) // 2
    at = np.zeros(B, int)
    got = np.zeros(want.shape, np.float32)
    while (at < T).any():
        width = int(random.choice([1, 5, 13]))
        valid = random.random((B, width)) < 0.7
        index = at[:, None] + np.cumsum(valid, 1) - 1
        valid &= index < T
        pieces = {}
        for name in ("q", "k", "v", "lr"):
            x = np.moveaxis(np.asarray(inputs[name]), 2, 1)
            piece = x[np.arange(B)[:, None], np.clip(index, 0, T - 1)].copy()
            piece[~valid] = np.nan
            pieces[name] = jnp.moveaxis(piece, 1, 2)
        out, state = whole[op](
            inputs | pieces | {"weights": state[:m]},
            state[m:],
            phase=jnp.asarray(at % size, jnp.int32),
            valid=jnp.asarray(valid),
        )
        assert np.isfinite(out).all()
        for row in range(B):
            got[row][:, index[row][valid[row]]] = np.asarray(out[row])[:, valid[row]]
        at += valid.sum(1)
    assert max_abs(got, want) < 1e-5
    for x, y in zip(state, end):
        assert max_abs(x, y) < 1e-5


VALID = {1: [[1], [0], [1]], 21: [[1] * 21, [0] * 21, [0, 1, 1] * 7]}


@pytest.mark.parametrize("T", [1, 21])
@both_ops
def test_continued_path_equals_the_reference_with_gradients(op, T):
    inputs = arrays(op, 3, 2, T, 8, 8)
    sums = tuple(0.1 * x for x in arrays(op, 3, 2, T, 8, 8, seed=5)["weights"])
    options = dict(phase=jnp.array([7, 3, 0]), valid=jnp.array(VALID[T], bool), checkpoint_every=2)

    def grads(implementation):
        def score(inputs, sums):
            result = run(op, inputs, sums, **options, implementation=implementation)
            parts = jax.tree.leaves(result)
            return sum(jnp.sum(jnp.sin(x + i)) for i, x in enumerate(parts)), result

        call = jax.jit(jax.value_and_grad(score, argnums=(0, 1), has_aux=True))
        return call(inputs, sums)

    for x, y in zip(jax.tree.leaves(grads("xla")), jax.tree.leaves(grads("reference"))):
        assert max_abs(x, y) < 2e-5 * (1 + float(jnp.max(jnp.abs(y))))


@pytest.mark.parametrize("T, implementation", [(1, "xla"), (21, "xla"), (21, "reference")])
@both_ops
def test_garbage_in_invalid_tokens_reaches_nothing(op, T, implementation):
    inputs = arrays(op, 3, 1, T, 4, 8)
    valid = jnp.array(VALID[T], bool)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def score(inputs):
        options = dict(phase=jnp.array([5, 7, 0]), valid=valid, implementation=implementation)
        result = run(op, inputs, **options)
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(result)), result

    def poison(x):
        return jnp.where(valid.reshape(3, 1, T, *(1,) * (x.ndim - 3)), x, jnp.nan)

    poisoned = inputs | {name: poison(inputs[name]) for name in ("q", "k", "v", "lr")}
    assert_close(score(poisoned), score(inputs), max_abs, 1e-6)


@both_ops
def test_inner_losses(op):
    """Against the definition: f reads by q = k under learning rates of zero."""
    inputs = arrays(op, 2, 3, 27, 8, 8)
    without = {name: inputs[name] for name in ("k", "v", "lr", "pos_scale")}
    norm = inputs["ln_scale"], inputs["ln_bias"]
    got = jax.jit(OPS[op].losses)(*without.values(), start(op, inputs["weights"]), *norm)

    def loss(weights, t):
        last = cut(inputs, t, t + 1) | {"weights": weights}
        f, _ = run(op, last | {"q": last["k"], "lr": jnp.zeros_like(last["lr"])})
        return jnp.mean((f - last["v"]) ** 2, -1)[..., 0]

    m, want = len(inputs["weights"]), {"initial": [], "before": [], "after": []}
    before = inputs["weights"]
    for i in range(3):
        _, state = run(op, cut(inputs, 0, 8 * (i + 1)))
        for name, weights in zip(want, (inputs["weights"], before, state[:m])):
            want[name].append(loss(weights, 8 * i + 7))
        before = state[:m]
    want = {name: jnp.stack(x, -1) for name, x in want.items()}
    assert_close(got, want, max_rel, 1e-5)


# Transformations and resources.


@both_ops
def test_composes_with_vmap_scan_and_checkpoint(op):
    inputs = arrays(op, 2, 2, 20, 4, 8)
    doubled = jax.tree.map(lambda x: jnp.stack([x, 1.1 * x]), inputs)
    call = jax.checkpoint(lambda a: jnp.sum(jnp.sin(run(op, a)[0])))
    scanned = lambda a: jax.lax.scan(lambda total, x: (total + call(x), None), 0.0, a)[0]
    vmapped = lambda a: jnp.sum(jax.vmap(call)(a))
    one = jax.jit(jax.value_and_grad(call))
    each = [one(jax.tree.map(lambda x, i=i: x[i], doubled)) for i in range(2)]
    want = jax.tree.map(lambda *x: jnp.stack(x), *(grads for _, grads in each))
    for form in (scanned, vmapped):
        value, grads = jax.jit(jax.value_and_grad(form))(doubled)
        assert abs(float(value - sum(value for value, _ in each))) < 1e-3
        assert_close(grads, want, max_rel, 5e-6)


SPLIT, HEADS = P("data", "tensor"), P("tensor")
SPECS = dict.fromkeys(("q", "k", "v", "lr"), SPLIT) | {
    "pos_scale": P(),
    "weights": SPLIT,
    "ln_scale": HEADS,
    "ln_bias": HEADS,
}


def mesh_of(kind):
    types = (jax.sharding.AxisType[kind],) * 2
    return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=types)


@pytest.mark.parametrize(
    "op, path",
    [
        ("linear", "aligned"),
        ("mlp", "aligned"),
        ("linear", "reset"),
        ("mlp", "chunk"),
        ("linear", "token"),
    ],
)
def test_inside_shard_map_from_a_shared_start(op, path):
    T = {"chunk": 11, "token": 1}.get(path, 20)
    inputs = arrays(op, 4, 2, T, 8, 8)
    inputs["weights"] = tuple(x[0] for x in inputs["weights"])  # replicated over data
    places = {}
    if path == "reset":
        places = {"reset": jnp.array([[0, 1, 0], [0, 0, 1], [1, 0, 0], [0, 0, 0]], bool)}
    elif path != "aligned":
        valid = jnp.arange(T) < jnp.array([T, 3, 0, 7])[:, None]
        places = {"phase": jnp.array([0, 3, 7, 2], jnp.int32), "valid": valid}

    def local(inputs, places):
        rows = inputs["q"].shape[0]
        weights = (jnp.broadcast_to(x, (rows, *x.shape)) for x in inputs["weights"])
        return run(op, inputs | {"weights": tuple(weights)}, **places)

    def grads(call):
        score = lambda *a: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(call(*a)))
        return jax.jit(jax.grad(score))(inputs, places)

    specs = SPECS | {"weights": HEADS}, dict.fromkeys(places, P("data"))
    sharded = jax.shard_map(local, mesh=mesh_of("Auto"), in_specs=specs, out_specs=SPLIT)
    assert_close(grads(sharded), grads(local), max_rel, 3e-6)


@pytest.mark.parametrize("op, kind", [("linear", "Auto"), ("linear", "Explicit"), ("mlp", "Auto")])
def test_on_a_mesh_no_array_is_gathered(op, kind):
    inputs = arrays(op, 4, 2, 20, 8, 8)
    step = lambda: jax.jit(jax.grad(lambda a: jnp.sum(jnp.sin(run(op, a)[0]))))
    want = step()(inputs)
    mesh = mesh_of(kind)
    shardings = {name: jax.sharding.NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(x, shardings[name]) for name, x in inputs.items()}
        compiled = step().lower(placed).compile()
        got = compiled(placed)
    assert "all-gather" not in compiled.as_text()
    for name, sharding in shardings.items():
        for x in jax.tree.leaves(got[name]):
            assert x.sharding.is_equivalent_to(sharding, x.ndim), name
    assert_close(got, want, max_rel, 3e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("every", [1, 3, 16, 99])
@both_ops
def test_what_is_saved_for_the_backward_pass(op, every, dtype):
    """The inputs in their own dtype, and one state per `checkpoint_every` mini-batches."""
    B, H, n, K, size = 1, 2, 40, 16, 4
    inputs = arrays(op, B, H, n * size, K, size, dtype=dtype)
    call = functools.partial(run, op, checkpoint_every=every)
    saved = jax.eval_shape(lambda a: jax.vjp(call, a)[1], inputs)
    nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(saved))
    kept = sum(x.nbytes for name, x in inputs.items() if name != "weights")
    state = sum(x.nbytes for x in inputs["weights"])
    assert nbytes == kept + -(-n // every) * state


def temporary(op, T, every, **places):
    """Bytes of temporaries of a backward pass, from the compiler, and of all states."""
    inputs = jax.eval_shape(lambda: arrays(op, 1, 2, T, 32, 16, F=32))
    places = {name: jax.ShapeDtypeStruct(shape, bool) for name, shape in places.items()}

    def step(inputs, places):
        call = lambda a: jnp.sum(run(op, a, checkpoint_every=every, **places)[0] ** 2)
        return jax.grad(call)(inputs)

    compiled = jax.jit(step).lower(inputs, places).compile()
    states = T // 16 * sum(4 * x.size for x in jax.tree.leaves(inputs["weights"]))
    return compiled.memory_analysis().temp_size_in_bytes, states


@both_ops
def test_backward_memory_follows_the_stored_states(op):
    """15 of 16 states are not stored."""
    (every_state, states), (some, _) = temporary(op, 4096, 1), temporary(op, 4096, 16)
    assert every_state - some > 0.7 * states


def test_backward_memory_of_the_continued_path_is_bounded():
    """What JAX keeps of a mini-batch, several times its state, is kept for one group at a time."""
    T = 4096
    (all_kept, states), (some, _) = (
        temporary("linear", T, every, valid=(1, T)) for every in (T // 16, 16)
    )
    assert all_kept - some > 2 * states


@both_ops
def test_state_cost_does_not_depend_on_length(op):
    short, long = (
        jax.eval_shape(functools.partial(run, op), arrays(op, 1, 2, T, 8, 8))[1] for T in (3, 300)
    )
    assert jax.tree.map(lambda x: x.shape, short) == jax.tree.map(lambda x: x.shape, long)


# The choice of an implementation.


def tpu_mesh(size=1):
    return jax.sharding.AbstractMesh(
        (size,),
        ("data",),
        axis_types=(jax.sharding.AxisType.Auto,),
        abstract_device=jax.sharding.AbstractDevice("TPU v5 lite", 1, "tpu"),
    )


@both_ops
def test_kernels_are_traced_only_for_the_platform_in_sight(op):
    inputs = arrays(op, 1, 2, 32, 64, 16, F=256)
    step = lambda a: jax.grad(lambda a: jnp.sum(run(op, a)[0]))(a)
    assert "pallas_call" not in str(jax.make_jaxpr(step)(inputs))
    want = jax.jit(step)(inputs)
    with jax.sharding.use_abstract_mesh(tpu_mesh()):
        jaxpr = jax.make_jaxpr(step)(inputs)
    assert str(jaxpr).count("pallas_call") >= 2
    # The same program still runs here.
    got = jax.jit(jaxpr_as_fun(jaxpr))(*jax.tree.leaves(inputs))
    for x, y in zip(got, jax.tree.leaves(want)):
        assert max_rel(x, y) < 2e-6


@both_ops
def test_a_kernel_that_cannot_run_here_is_said_once(op, caplog):
    choice._say_once.cache_clear()
    inputs = arrays(op, 1, 1, 8, 8, 8, dtype="float16")
    for _ in range(2):
        with jax.sharding.use_abstract_mesh(tpu_mesh()), caplog.at_level(logging.WARNING):
            assert "pallas_call" not in str(jax.make_jaxpr(functools.partial(run, op))(inputs))
    (record,) = caplog.records
    assert f"ttt_{op} on tpu runs as 'xla', not as 'pallas_tpu'" in record.getMessage()


def test_a_kernel_is_only_traced_where_its_arrays_are_whole(caplog):
    choice._say_once.cache_clear()
    inputs = arrays("linear", 2, 2, 16, 64, 16)
    call = functools.partial(run, "linear")
    inside = jax.shard_map(call, in_specs=P(), out_specs=P(), check_vma=False)
    with jax.sharding.use_abstract_mesh(tpu_mesh(2)), caplog.at_level(logging.WARNING):
        assert "pallas_call" not in str(jax.make_jaxpr(call)(inputs))
        assert "pallas_call" in str(jax.make_jaxpr(inside)(inputs))
    (record,) = caplog.records
    assert "inside shard_map" in record.getMessage()


@pytest.mark.parametrize("implementation", ["pallas_tpu", "triton_gpu"])
@both_ops
def test_a_named_kernel_that_cannot_do_it_says_why(op, implementation):
    call = functools.partial(run, op, implementation=implementation)
    inputs = arrays(op, 1, 2, 32, 16, 16)
    with pytest.raises(ValueError, match="cannot run this: reset"):
        call(inputs, reset=jnp.zeros((1, 2), bool))
    with pytest.raises(ValueError, match="one token at a time"):
        call(inputs, phase=jnp.zeros((1,), jnp.int32))
    with pytest.raises(ValueError, match="take float32 or bfloat16, not float16"):
        call(arrays(op, 1, 1, 16, 8, 16, dtype="float16"))


@pytest.mark.skipif(find_spec("jax_triton") is not None, reason="jax_triton is installed")
def test_without_jax_triton_the_gpu_kernel_says_what_to_install():
    with pytest.raises(ValueError, match=r"pip install 'jaxmodels\[triton"):
        run("linear", arrays("linear", 1, 2, 32, 64, 16), implementation="triton_gpu")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"k": jnp.zeros((2, 2, 6, 8))}, r"k has shape \(2, 2, 6, 8\), expected \(2, 2, 5, 8\)"),
        ({"lr": jnp.zeros((2, 5, 2))}, "lr has shape"),
        ({"weights": (jnp.zeros((2, 2, 8, 4)), jnp.zeros((2, 2, 8)))}, "state.w has shape"),
        ({"ln_scale": jnp.zeros((8,))}, "ln_scale has shape"),
        ({"pos_scale": jnp.zeros((4, 4))}, "pos_scale has shape"),
        ({"q": jnp.zeros((2, 2, 5, 8), int)}, "q has dtype int32"),
        ({"ln_bias": jnp.zeros((2, 8), int)}, "ln_bias has dtype int32"),
        ({"q": jnp.zeros((2, 5, 8))}, "q has shape"),
    ],
)
def test_misfits_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        run("linear", arrays("linear", 2, 2, 5, 8, 8) | changes)


def test_misfits_of_the_second_layer_are_named():
    inputs = arrays("mlp", 2, 2, 5, 8, 8, F=16)
    w1, b1, w2, b2 = inputs["weights"]
    for changed, name in [((w1, b1, w1, b2), "state.w2"), ((w1, b2, w2, b2), "state.b1")]:
        with pytest.raises(ValueError, match=f"{name} has shape"):
            run("mlp", inputs | {"weights": changed})
    with pytest.raises(ValueError, match=r"state.w2 has dtype int32"):
        run("mlp", inputs | {"weights": (w1, b1, w2.astype(int), b2)})


@pytest.mark.parametrize(
    "options, message",
    [
        ({"implementation": "cuda"}, "one of .*'xla', 'pallas_tpu', 'triton_gpu', 'reference'"),
        ({"checkpoint_every": 0}, "checkpoint_every=0"),
        ({"phase": jnp.zeros((3,), jnp.int32)}, "phase has shape"),
        ({"phase": jnp.zeros((2,))}, "phase has dtype float32"),
        ({"valid": jnp.ones((2, 5))}, "valid has dtype float32"),
        ({"reset": jnp.ones((2, 5), bool)}, r"reset has shape \(2, 5\), expected \(2, 1\)"),
        ({"reset": jnp.ones((2, 1))}, "reset has dtype float32"),
        (
            {"reset": jnp.ones((2, 1), bool), "phase": jnp.zeros((2,), jnp.int32)},
            "not with phase or valid",
        ),
    ],
)
@both_ops
def test_wrong_options_are_named(op, options, message):
    with pytest.raises(ValueError, match=message):
        run(op, arrays(op, 2, 2, 5, 8, 8), **options)
