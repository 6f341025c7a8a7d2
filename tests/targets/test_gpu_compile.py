# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The Triton kernels compiled for an H100 on a machine without a GPU.

XLA and Triton compile as on the real machine. jaxlib assembles a Triton kernel when it is first
launched, by the ptxas of its own CUDA; that is done here too, with the one of `nvidia-cuda-nvcc`,
and its report of registers and spills is read. Run in an environment of its own (`make
test-targets`); elsewhere skipped.
"""

import functools
import importlib.util
import pathlib
import re
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import ttt_linear as linear
from pallas_kernels import ttt_mlp as mlp
from pallas_kernels.ttt_linear import triton_gpu as linear_gpu
from pallas_kernels.ttt_mlp import triton_gpu as mlp_gpu

HERE = pathlib.Path(__file__).parent
SHARED_MEMORY = 232448  # bytes that one block may have on an H100
STATES = {"ttt_linear": linear.TTTLinearState, "ttt_mlp": mlp.TTTMLPState}
KERNELS = {"ttt_linear": linear_gpu, "ttt_mlp": mlp_gpu}
B, H, EVERY = 2, 4, 4


def nvcc():
    """The folder of the assembler that jaxlib would take."""
    found = importlib.util.find_spec("nvidia.cuda_nvcc") if has("nvidia") else None
    return pathlib.Path(next(iter(found.submodule_search_locations))) if found else None


def has(name):
    return importlib.util.find_spec(name) is not None


pytestmark = [
    pytest.mark.skipif(not has("jax_triton"), reason="jax-triton is not installed"),
    pytest.mark.skipif(not has("jax_cuda12_plugin"), reason="the CUDA plugin is not installed"),
    pytest.mark.skipif(nvcc() is None, reason="nvidia-cuda-nvcc-cu12 is not installed"),
]


@pytest.fixture(scope="module")
def h100s():
    """h100s("1x1x1") -> the devices of such a topology."""
    patch = pytest.MonkeyPatch()
    patch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    config = (HERE / "h100_target_config.txtpb").read_text()
    yield functools.cache(
        lambda shape: (
            topologies.get_topology_desc(
                platform="cuda", topology_name="", topology=shape, target_config=config
            ).devices
        )
    )
    patch.undo()


@pytest.fixture
def reports(monkeypatch, tmp_path):
    """Of every Triton kernel compiled: its name, bytes of shared memory, registers and bytes
    spilled per thread."""
    from jax_triton import triton_lib

    found, compile_kernel = [], triton_lib.compile_ttir_to_ptx_inplace

    def assemble(*args):
        result = compile_kernel(*args)
        source = tmp_path / f"{len(found)}.ptx"
        source.write_text(result.binary)
        command = [nvcc() / "bin/ptxas", "-v", "--gpu-name=sm_90a", source, "-o", "/dev/null"]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        registers = int(re.search(r"Used (\d+) registers", run.stderr)[1])
        spills = int(re.search(r"(\d+) bytes spill stores", run.stderr)[1])
        found.append((result.name, result.shared_mem_bytes, registers, spills))
        return result

    monkeypatch.setattr(triton_lib, "compile_ttir_to_ptx_inplace", assemble)
    monkeypatch.setattr(triton_lib, "_COMPILED_KERNEL_CACHE", {})
    return found


def shapes(op, K, b, T, dtype):
    """The arguments of `forward`, `backward` and `one_token`, as shapes."""
    array = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
    F, groups = 4 * K, -(-(T // b) // EVERY)
    weights = [(K, K), (K,)] if op == "ttt_linear" else [(K, F), (F,), (F, K), (K,)]
    tokens = array(B, H, T, K, dtype=dtype)
    shared = tokens, tokens, tokens, array(B, H, T), array(b)
    norm = array(H, K), array(H, K)
    per_head = tuple(array(B, H, *x) for x in weights)
    starts = tuple(array(groups, B, H, *x) for x in weights)
    token = array(B, H, K)
    state = STATES[op](*per_head, *per_head)
    decode = token, token, token, array(B, H), array(B), array(B, dtype=bool), state, *norm
    return (*shared, per_head, *norm), (*shared, starts, *norm, tokens, per_head), decode


def compile_on(devices, function, arguments):
    sharding = jax.sharding.SingleDeviceSharding(devices[0])
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.jit(function).lower(*jax.tree.map(place, arguments)).compile()


CASES = [
    ("ttt_linear", 64, 16, "float32"),
    ("ttt_linear", 64, 16, "bfloat16"),
    ("ttt_linear", 96, 16, "float32"),
    ("ttt_linear", 96, 16, "bfloat16"),
    ("ttt_linear", 64, 64, "float32"),
    ("ttt_linear", 64, 64, "bfloat16"),
    ("ttt_mlp", 64, 16, "float32"),
    ("ttt_mlp", 64, 16, "bfloat16"),
    ("ttt_mlp", 96, 16, "float32"),
    ("ttt_mlp", 96, 16, "bfloat16"),
    ("ttt_mlp", 64, 64, "float32"),
    ("ttt_mlp", 64, 64, "bfloat16"),
    ("ttt_mlp", 96, 64, "float32"),
    ("ttt_mlp", 96, 64, "bfloat16"),
]


@pytest.mark.parametrize(("op", "K", "b", "dtype"), CASES)
def test_forward_and_backward(op, K, b, dtype, h100s, reports):
    assert KERNELS[op].unsupported(K, b, 4 * K, jnp.dtype(dtype)) is None
    forward, backward, _ = shapes(op, K, b, 7 * b, jnp.dtype(dtype))
    for name, arguments in (("forward", forward), ("backward", backward)):
        function = functools.partial(getattr(KERNELS[op], name), eps=1e-6, every=EVERY)
        compiled = compile_on(h100s("1x1x1"), function, arguments)
        assert "triton_kernel_call" in compiled.as_text()
    print(reports)
    assert [x[0] for x in reports] == ["forward_kernel", "backward_kernel"]
    assert all(shared <= SHARED_MEMORY for _, shared, _, _ in reports)


@pytest.mark.parametrize("K", [64, 96])
@pytest.mark.parametrize("op", STATES)
def test_one_token(op, K, h100s, reports):
    function = functools.partial(KERNELS[op].one_token, eps=1e-6)
    compiled = compile_on(h100s("1x1x1"), function, shapes(op, K, 16, 16, jnp.float32)[2])
    print(reports)
    ((name, shared, _, spills),) = reports
    assert (name, spills) == ("one_token_kernel", 0)
    assert shared <= SHARED_MEMORY
    # The state is written in place: the call's outputs are its operands.
    assert re.search(r"triton_kernel_call.*output_to_operand_aliasing", compiled.as_text())


@pytest.mark.parametrize("op", STATES)
def test_loss_and_gradients_inside_shard_map(op, h100s):
    """The public operation with a partial last mini-batch, batch and heads sharded over 8 GPUs."""
    K, b, T = 64, 16, 40
    mesh = Mesh(np.array(h100s("1x2x4")).reshape(2, 4), ("data", "tensor"))
    arrays = shapes(op, K, b, T // b * b, jnp.bfloat16)[0]
    token = jax.ShapeDtypeStruct((B, H, T, K), jnp.bfloat16)
    arrays = (token, token, token, jax.ShapeDtypeStruct((B, H, T), jnp.float32), *arrays[4:])
    call = {"ttt_linear": linear.ttt_linear, "ttt_mlp": mlp.ttt_mlp}[op]
    per_head, row = PartitionSpec("data", "tensor"), PartitionSpec("tensor")
    specs = (per_head,) * 4 + (PartitionSpec(), (per_head,) * len(arrays[5]), row, row)

    def loss(q, k, v, lr, pos, weights, gamma, beta):
        state = STATES[op](*weights, *(jnp.zeros_like(x) for x in weights))
        out, state = call(q, k, v, lr, pos, state, gamma, beta, implementation="triton_gpu")
        total = jnp.sum(out.astype(jnp.float32) ** 2) + sum(jnp.sum(x) for x in state)
        return jax.lax.psum(total, ("data", "tensor"))

    sharded = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    place = lambda x, spec: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
    )
    arguments = jax.tree.map(place, arrays, specs)
    step = jax.jit(jax.value_and_grad(sharded, tuple(range(8))))
    text = step.lower(*arguments).compile().as_text()
    assert text.count('custom_call_target="triton_kernel_call"') == 2
