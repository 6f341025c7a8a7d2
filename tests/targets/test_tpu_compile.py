# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The TPU kernels compiled ahead of time by the real compiler (`pip install libtpu` suffices).

The interpreter accepts much that Mosaic refuses, and knows no limit of VMEM.
"""

import contextlib
import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxmodels
from jaxmodels.sharding import use_rules
from pallas_kernels.ttt_linear import TTTLinearState, ttt_linear
from pallas_kernels.ttt_mlp import TTTMLPState, ttt_mlp

pytest.importorskip("libtpu", reason="the TPU compiler is not installed (pip install libtpu)")

OPS = {"linear": (ttt_linear, TTTLinearState), "mlp": (ttt_mlp, TTTMLPState)}
CHIPS = {"v5e": "v5e:4x4", "v5p": "v5p:2x2x1", "v6e": "v6e:4x4"}


@functools.cache
def topology(name):
    return topologies.get_topology_desc(name, "tpu")


def on(sharding, tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def shapes(op, B, H, T, K, b, dtype):
    """q, k, v, lr, pos_scale, weights, ln_scale, ln_bias."""
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    weights = [(K, K), (K,)] if op == "linear" else [(K, 4 * K), (4 * K,), (4 * K, K), (K,)]
    return (
        *[jax.ShapeDtypeStruct((B, H, T, K), dtype)] * 3,
        array(B, H, T),
        array(b),
        tuple(array(B, H, *shape) for shape in weights),
        array(H, K),
        array(H, K),
    )


def loss(op, q, k, v, lr, pos_scale, weights, *norm, implementation="pallas_tpu"):
    """Depends on the outputs and on the last weights."""
    function, State = OPS[op]
    state = State(*weights, *(jnp.zeros_like(x) for x in weights))
    out, state = function(q, k, v, lr, pos_scale, state, *norm, implementation=implementation)
    return jnp.sum(out.astype(jnp.float32) ** 2) + sum(jnp.sum(x**2) for x in state)


def gradients(op, **options):
    return jax.grad(functools.partial(loss, op, **options), range(8))


def compiled(function, *args, **options):
    return jax.jit(function, **options).lower(*args).compile()


def kernels(executable):
    return executable.as_text().count('custom_call_target="tpu_custom_call"')


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("K, b", [(64, 16), (64, 64), (96, 16), (96, 64)])
@pytest.mark.parametrize("op", OPS)
def test_value_and_every_gradient(op, K, b, dtype):
    """Three heads, groups of 16 that do not divide the mini-batches, and a partial last one."""
    device = topology(CHIPS["v5e"]).devices[0]
    args = on(SingleDeviceSharding(device), shapes(op, 2, 3, 21 * b + 5, K, b, dtype))
    assert kernels(compiled(gradients(op), *args)) == 2


@pytest.mark.parametrize("chip, K, b", [("v5p", 64, 16), ("v6e", 64, 16), ("v6e", 96, 64)])
@pytest.mark.parametrize("op", OPS)
def test_other_chips(op, chip, K, b):
    device = topology(CHIPS[chip]).devices[0]
    args = on(SingleDeviceSharding(device), shapes(op, 1, 12, 32 * b, K, b, "bfloat16"))
    assert kernels(compiled(gradients(op), *args)) == 2


@pytest.mark.parametrize("K", [64, 96])
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("op", OPS)
def test_decode_step(op, chip, K):
    """The state given away is updated in place."""
    function, State = OPS[op]
    B, H = 4, 3
    q, k, v, lr, pos_scale, weights, *norm = shapes(op, B, H, 1, K, 16, "float32")
    args = (q, k, v, lr, pos_scale, State(*weights, *weights), *norm)
    phase = jax.ShapeDtypeStruct((B,), jnp.int32)

    def step(q, k, v, lr, pos_scale, state, ln_scale, ln_bias, phase):
        arrays = (q, k, v, lr, pos_scale, state, ln_scale, ln_bias)
        return function(*arrays, phase=phase, implementation="pallas_tpu")

    where = SingleDeviceSharding(topology(CHIPS[chip]).devices[0])
    executable = compiled(step, *on(where, (*args, phase)), donate_argnums=5)
    assert kernels(executable) == 1
    state = sum(x.size * 4 for x in (*weights, *weights))
    assert executable.memory_analysis().alias_size_in_bytes >= state


@pytest.mark.parametrize("op", OPS)
def test_takes_less_room_than_the_xla_form(op):
    device = topology(CHIPS["v5e"]).devices[0]
    args = on(SingleDeviceSharding(device), shapes(op, 4, 12, 2048, 64, 16, "bfloat16"))
    room = {
        name: compiled(gradients(op, implementation=name), *args).memory_analysis()
        for name in ("pallas_tpu", "xla")
    }
    ratio = room["pallas_tpu"].temp_size_in_bytes / room["xla"].temp_size_in_bytes
    assert ratio < 0.75, ratio


def auto_mesh(devices, shape, names):
    kinds = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.sharding.Mesh(np.array(devices).reshape(shape), names, axis_types=kinds)


@pytest.mark.parametrize("op", OPS)
def test_sharded_over_a_pod(op):
    """Without naming it: the mesh's devices choose the kernel."""
    mesh = auto_mesh(topology("v5e:16x16").devices, (16, 16), ("data", "tensor"))
    row, head = P("data", "tensor"), P("tensor")
    args = shapes(op, 32, 32, 2048, 64, 16, "bfloat16")
    specs = (row, row, row, row, P(), (row,) * len(args[5]), head, head)
    args = tuple(on(NamedSharding(mesh, spec), x) for spec, x in zip(map(first, specs), args))

    def device_loss(*args):
        value = loss(op, *args, implementation=None)
        return jax.lax.psum(value, ("data", "tensor"))

    call = jax.shard_map(device_loss, mesh=mesh, in_specs=specs, out_specs=P())
    with jax.set_mesh(mesh):
        assert kernels(compiled(jax.grad(call, range(8)), *args)) == 2


def first(spec):
    return spec[0] if isinstance(spec, tuple) and not isinstance(spec, P) else spec


@pytest.mark.parametrize("size", ["125m", "1_3b"])
@pytest.mark.parametrize("op", OPS)
def test_train_step_on_a_pod(op, size):
    """The published recipe, 256 rows of 2048 tokens, on 256 chips of 16 GiB."""
    make_mesh = importlib.import_module("train.mesh").make_mesh
    step = importlib.import_module("train.step")
    experiment = importlib.import_module(f"configs.ttt_{op}_{size}").experiment()
    heads = experiment.model.mixer.num_heads
    tensor = 4 if heads % 4 == 0 and size == "1_3b" else 1
    layout = dataclasses.replace(experiment.mesh, tensor=tensor)
    experiment = dataclasses.replace(experiment, mesh=layout)
    mesh = make_mesh(experiment.mesh, topology("v5e:16x16").devices)
    trainer = step.make_trainer(experiment, jaxmodels.build(experiment.model), mesh)
    tokens = (experiment.batch_size, experiment.sequence_length)
    batch = {
        name: jax.ShapeDtypeStruct(tokens, dtype, sharding=trainer.batch_sharding)
        for name, dtype in (("tokens", jnp.int32), ("targets", jnp.int32), ("weights", jnp.float32))
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        stack.enter_context(use_rules(importlib.import_module("train.mesh").RULES))
        executable = trainer.jitted_step.lower(trainer.shapes, batch).compile()
    assert kernels(executable) == 3  # forward, and again in the backward pass of the layer
    memory = executable.memory_analysis()
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < 15 * 2**30
