# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The Triton kernels of the TTT operations on a GPU: checked against XLA and the reference, timed.

    python benchmarks/ttt_gpu.py --lengths 2048 8192 32768

First every kernel against the XLA form, and the decode step against the reference: the largest
difference over the largest number of each array, worst array shown. Then forward, backward and
decode step, kernel and XLA in turn: the best milliseconds of each, XLA's time over the kernel's,
and what the kernel's time means in GB/s (arguments read and results written once) and TFLOP/s (the
products of the dual form, recomputation included). Without an NVIDIA GPU it says so and stops.
"""

import argparse
import functools
import importlib
import sys
import time


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ops", nargs="+", default=["ttt_linear", "ttt_mlp"], choices=["ttt_linear", "ttt_mlp"])
    add("--lengths", type=int, nargs="+", default=[2048, 8192, 32768], help="tokens per sequence")
    add("--batch", type=int, default=4)
    add("--heads", type=int, default=32)
    add("--width", type=int, default=64, help="width of a head")
    add("--mini-batch", type=int, default=16, help="tokens per inner step")
    add("--every", type=int, default=16, help="mini-batches between stored states")
    add("--dtypes", nargs="+", default=["bfloat16", "float32"], help="of q, k and v")
    add("--repeats", type=int, default=5)
    add("--calls", type=int, default=5, help="calls per repeat")
    add("--check-only", action="store_true")
    return parser.parse_args()


def main():
    args = parse()
    import jax

    from pallas_kernels.ttt_common import triton_gpu

    try:
        device = jax.devices("cuda")[0]
    except RuntimeError:
        print("ttt_gpu: no NVIDIA GPU here, nothing measured")
        return
    why = triton_gpu.unsupported(args.width, args.dtypes[0])
    if why is not None:
        sys.exit(f"ttt_gpu: {why}")
    jax.config.update("jax_default_matmul_precision", "highest")  # of XLA, for the checks
    print(f"jax {jax.__version__}, {device.device_kind}")
    check(args)
    if args.check_only:
        return
    jax.config.update("jax_default_matmul_precision", None)
    print(f"B={args.batch} H={args.heads} K={args.width} b={args.mini_batch} every={args.every}")
    print(
        f"{'op':>10} {'dtype':>8} {'T':>6} {'pass':>9} {'triton ms':>10} {'xla ms':>9} "
        f"{'speed-up':>8} {'GB/s':>6} {'TFLOP/s':>8}"
    )
    for op in args.ops:
        for dtype in args.dtypes:
            for T in args.lengths:
                measure(args, op, dtype, T)


def module(op, name):
    return importlib.import_module(f"pallas_kernels.{op}.{name}")


def example(op, B, H, K, b, T, dtype):
    """The arguments of `forward`, cotangents of its first two results, and those of `one_token`."""
    import jax
    import jax.numpy as jnp

    keys = iter(jax.random.split(jax.random.key(0), 40))
    array = lambda *shape: jax.random.normal(next(keys), shape)
    F = 4 * K
    shapes = [(K, K), (K,)] if op == "ttt_linear" else [(K, F), (F,), (F, K), (K,)]
    q, k, v, d_out = (array(B, H, T, K).astype(dtype) for _ in range(4))
    lr = jax.nn.sigmoid(array(B, H, T)) / K
    weights = tuple(0.02 * array(B, H, *s) for s in shapes)
    d_weights = tuple(array(B, H, *s) for s in shapes)
    norm = 1 + 0.1 * array(H, K), 0.1 * array(H, K)
    pos = 1 / jnp.arange(1.0, b + 1)
    tokens = tuple(x[:, :, 0].astype(jnp.float32) for x in (q, k, v))
    package = importlib.import_module(f"pallas_kernels.{op}")
    State = package.TTTLinearState if op == "ttt_linear" else package.TTTMLPState
    state = State(*weights, *(0.01 * x for x in weights))
    last = jnp.arange(B) % 2 == 1
    decode = (*tokens, lr[:, :, 0], jnp.full((B,), 0.5), last, state, *norm)
    return (q, k, v, lr, pos, weights, *norm), d_out, d_weights, decode


def programs(op, name, every, arrays, d_out, d_weights, decode):
    """pass -> (compiled program, its arguments)."""
    import jax

    implementation = module(op, name)
    options = {"eps": 1e-6, "every": every}
    starts = jax.jit(functools.partial(module(op, "xla").forward, **options))(*arrays)[2]
    saved = (*arrays[:5], starts, *arrays[6:], d_out, d_weights)
    found = {
        "forward": (functools.partial(implementation.forward, **options), arrays),
        "backward": (functools.partial(implementation.backward, **options), saved),
        "one_token": (functools.partial(implementation.one_token, eps=1e-6), decode),
    }
    return {
        key: (jax.jit(function).lower(*arguments).compile(), arguments)
        for key, (function, arguments) in found.items()
    }


def check(args):
    import jax.numpy as jnp

    print("largest difference from XLA (one_token: from the reference), relative to the largest")
    for op in args.ops:
        for dtype in args.dtypes:
            for K, b in ((64, 16), (96, 16), (64, 64)):
                if module(op, "triton_gpu").unsupported(K, b, 4 * K, jnp.dtype(dtype)):
                    print(f"{op:>10} {dtype:>8} K={K} b={b}: not supported")
                    continue
                inputs = example(op, 2, 3, K, b, 7 * b, dtype)
                ours = programs(op, "triton_gpu", 3, *inputs)
                theirs = programs(op, "xla", 3, *inputs)
                token = functools.partial(module(op, "reference").one_token, eps=1e-6)
                theirs["one_token"] = token, inputs[3]
                line = [f"{op:>10} {dtype:>8} K={K} b={b}:"]
                for name in ours:
                    got, want = (f(*x) for f, x in (ours[name], theirs[name]))
                    line.append(f"{name} {worst(got, want):.1e}")
                print("  ".join(line))


def worst(got, want):
    import jax
    import numpy as np

    differences = []
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        differences.append(np.abs(x - y).max() / np.abs(y).max())
    return float(np.max(differences))  # NaN wins


def measure(args, op, dtype, T):
    import jax

    B, H, K, b = args.batch, args.heads, args.width, args.mini_batch
    inputs = example(op, B, H, K, b, T, dtype)
    calls = {name: programs(op, name, args.every, *inputs) for name in ("triton_gpu", "xla")}
    for name in calls["xla"]:
        best = dict.fromkeys(calls, float("inf"))
        for _ in range(args.repeats):
            for implementation, by_pass in calls.items():
                call, arguments = by_pass[name]
                jax.block_until_ready(call(*arguments))
                start = time.perf_counter()
                for _ in range(args.calls):
                    out = call(*arguments)
                jax.block_until_ready(out)
                seconds = (time.perf_counter() - start) / args.calls
                best[implementation] = min(best[implementation], seconds)
        seconds = best["triton_gpu"]
        moved = sum(x.nbytes for x in jax.tree.leaves((arguments, out)))
        tokens = B * H * (1 if name == "one_token" else T)
        print(
            f"{op:>10} {dtype:>8} {T:6d} {name:>9} {1e3 * seconds:10.3f} {1e3 * best['xla']:9.3f} "
            f"{best['xla'] / seconds:7.1f}x {1e-9 * moved / seconds:6.0f} "
            f"{1e-12 * tokens * flops(op, name, K, b) / seconds:8.2f}",
            flush=True,
        )


def flops(op, name, K, b):
    """Per token and head, as the kernels' docstrings count them."""
    more, b = b > 16, min(b, 16)  # chunks of 16 tokens, with sums of their own
    if op == "ttt_linear":
        return {
            "forward": (6 + 2 * more) * K * K + 4 * b * K,
            "backward": (20 + 6 * more) * K * K + 12 * b * K,
            "one_token": 8 * K * K,
        }[name]
    return {
        "forward": (64 + 16 * more) * K * K + 20 * b * K,
        "backward": (208 + 56 * more) * K * K + 70 * b * K,
        "one_token": 80 * K * K,
    }[name]


if __name__ == "__main__":
    main()
