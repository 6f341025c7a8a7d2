# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Our TTT operations beside JAX's own derivative of the same mini-batch scan.

    python benchmarks/ttt_op.py --lengths 2048 8192 --threads 1

The programs take turns in one process, so that their ratios survive a busy machine: `op` (what
`ttt_linear` or `ttt_mlp` runs) and `plain` (one scan over mini-batches, differentiated by JAX,
which stores what every mini-batch computed). Printed are the best milliseconds of each, the time
over that of the matrix products alone (their FLOPs, without any recomputation, at the rate that
batches of (b, K) x (K, K) reach in the same process), and the temporary memory that the compiler
reserves.
"""

import argparse
import functools
import os
import time


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ops", nargs="+", default=["linear", "mlp"], choices=["linear", "mlp"])
    add("--lengths", type=int, nargs="+", default=[2048, 8192], help="tokens per sequence")
    add("--batch", type=int, default=1)
    add("--heads", type=int, default=12)
    add("--width", type=int, default=64, help="width of a head")
    add("--mini-batch", type=int, default=16, help="tokens per inner step")
    add("--checkpoint-every", type=int, nargs="+", default=[16], help="mini-batches, one or more")
    add("--dtype", default="float32", choices=["float32", "bfloat16"], help="of q, k and v")
    add("--implementation", help="as in the public call")
    add("--repeats", type=int, default=10)
    add("--threads", type=int, default=0, help="restrict the process to so many cores; 0: all")
    return parser.parse_args()


def main():
    args = parse()
    if args.threads:  # before JAX makes its thread pool
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-args.threads :])
    import jax

    print(
        f"jax {jax.__version__}, {jax.devices()[0].device_kind}, "
        f"{len(os.sched_getaffinity(0))} cores\n"
        f"B={args.batch} H={args.heads} K={args.width} b={args.mini_batch} {args.dtype}"
    )
    for op in args.ops:
        print(
            f"{op}\n{'T':>6} {'pass':>8} {'program':>10} {'ms':>9} {'us/token':>9} {'vs plain':>9} "
            f"{'vs matmul':>10} {'MiB':>8}"
        )
        for length in args.lengths:
            one_length(args, op, length)


def one_length(args, op, length):
    import jax

    inputs = example(args, op, length)
    programs = {"plain": PLAIN[op]}
    for every in args.checkpoint_every:
        programs[f"op ({every})"] = functools.partial(
            ours, op, checkpoint_every=every, implementation=args.implementation
        )
    product, product_flops = small_products(args)
    for name, wrap in {"forward": lambda f: f, "both": with_gradients}.items():
        compiled = {
            label: jax.jit(wrap(program)).lower(*inputs).compile()
            for label, program in programs.items()
        }
        best = dict.fromkeys(compiled, float("inf"))
        seconds_per_flop = float("inf")
        for _ in range(args.repeats):
            seconds_per_flop = min(seconds_per_flop, timed(product) / product_flops)
            for label, call in compiled.items():
                best[label] = min(best[label], timed(functools.partial(call, *inputs)))
        floor = seconds_per_flop * flops(args, op, length) * (1 if name == "forward" else 3)
        for label, seconds in best.items():
            memory = compiled[label].memory_analysis().temp_size_in_bytes / 2**20
            print(
                f"{length:6d} {name:>8} {label:>10} {1e3 * seconds:9.1f} "
                f"{1e6 * seconds / length / args.batch:9.2f} "
                f"{best['plain'] / seconds:8.2f}x {seconds / floor:9.2f}x {memory:8.1f}"
            )
        print(f"{'':26} (products alone: {1e3 * floor:.1f} ms, {1e-9 / seconds_per_flop:.0f} GF/s)")


def timed(call):
    import jax

    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def flops(args, op, T):
    """Multiplications and additions of a forward pass; the derivative costs twice as much."""
    K, b = args.width, args.mini_batch
    per_token = 6 * K * K + 4 * b * K if op == "linear" else 56 * K * K + 20 * b * K
    return args.batch * args.heads * T * per_token


def small_products(args):
    """1000 batches of (b, K) x (K, K) in turn, and their FLOPs."""
    import jax
    import jax.numpy as jnp

    n, K = args.batch * args.heads, args.width
    x = jnp.ones((n, args.mini_batch, K))
    w = jnp.broadcast_to(jnp.eye(K), (n, K, K))
    step = jax.jit(lambda x, w: jax.lax.fori_loop(0, 1000, lambda _, x: x @ w, x))
    step(x, w).block_until_ready()
    return functools.partial(step, x, w), 2000 * x.size * K


def example(args, op, T):
    """Arguments of the programs below, of a plausible size; the weights come last."""
    import jax
    import jax.numpy as jnp

    B, H, K, b = args.batch, args.heads, args.width, args.mini_batch
    keys = jax.random.split(jax.random.key(0), 6)
    q, k, v = (jax.random.normal(key, (B, H, T, K)).astype(args.dtype) for key in keys[:3])
    lr = jax.nn.sigmoid(jax.random.normal(keys[3], (B, H, T))) / K
    matrix = lambda key, *shape: 0.02 * jax.random.normal(key, (B, H, *shape))
    vector = lambda n: jnp.zeros((B, H, n))
    if op == "linear":
        weights = matrix(keys[4], K, K), vector(K)
    else:
        weights = matrix(keys[4], K, 4 * K), vector(4 * K), matrix(keys[5], 4 * K, K), vector(K)
    return q, k, v, lr, 1 / jnp.arange(1.0, b + 1), jnp.ones((H, K)), jnp.zeros((H, K)), *weights


def with_gradients(program):
    """Value and every gradient, with a cotangent that is not constant."""
    import jax
    import jax.numpy as jnp

    def both(*inputs):
        def loss(*inputs):
            out = program(*inputs).astype(jnp.float32)
            return jnp.sum(out * inputs[2].astype(jnp.float32))

        return jax.value_and_grad(loss, argnums=tuple(range(len(inputs))))(*inputs)

    return both


def ours(op, q, k, v, lr, pos_scale, ln_scale, ln_bias, *weights, **options):
    import jax.numpy as jnp

    from pallas_kernels import ttt_linear, ttt_mlp

    call, State = {
        "linear": (ttt_linear.ttt_linear, ttt_linear.TTTLinearState),
        "mlp": (ttt_mlp.ttt_mlp, ttt_mlp.TTTMLPState),
    }[op]
    state = State(*weights, *(jnp.zeros_like(x) for x in weights))
    return call(q, k, v, lr, pos_scale, state, ln_scale, ln_bias, **options)[0]


# The same dual form, one mini-batch after another, left to JAX to differentiate.


def plain_linear(q, k, v, lr, pos_scale, ln_scale, ln_bias, w, b):
    import jax.numpy as jnp

    gamma, beta = ln_scale[:, None], ln_bias[:, None]

    def mini_batch(carry, xs):
        w, b = carry
        q, k, v, lr = (x.astype(jnp.float32) for x in xs)
        g = target_gradient(k @ w + b, k, v, gamma, beta)
        eta = pos_scale[:, None] * lr[..., None, :]
        z = q @ w + b - jnp.tril(eta * (1 + q @ k.mT)) @ g
        step = (pos_scale[-1] * lr)[..., None] * g
        out = q + gamma * normalise(z)[0] + beta
        return (w - k.mT @ step, b - jnp.sum(step, -2, keepdims=True)), out.astype(xs[0].dtype)

    return scan(mini_batch, (w, b[:, :, None]), q, k, v, lr, pos_scale.shape[0])


def plain_mlp(q, k, v, lr, pos_scale, ln_scale, ln_bias, w1, b1, w2, b2):
    import jax
    import jax.numpy as jnp

    gamma, beta = ln_scale[:, None], ln_bias[:, None]

    def mini_batch(carry, xs):
        w1, b1, w2, b2 = carry
        q, k, v, lr = (x.astype(jnp.float32) for x in xs)
        hidden, gelu_vjp = jax.vjp(jax.nn.gelu, k @ w1 + b1)
        g2 = target_gradient(hidden @ w2 + b2, k, v, gamma, beta)
        (g1,) = gelu_vjp(g2 @ w2.mT)
        eta = pos_scale[:, None] * lr[..., None, :]
        seen = jax.nn.gelu(q @ w1 + b1 - jnp.tril(eta * (1 + q @ k.mT)) @ g1)
        z = seen @ w2 + b2 - jnp.tril(eta * (1 + seen @ hidden.mT)) @ g2
        out = q + gamma * normalise(z)[0] + beta
        step1, step2 = ((pos_scale[-1] * lr)[..., None] * g for g in (g1, g2))
        total = lambda x: jnp.sum(x, -2, keepdims=True)
        carry = w1 - k.mT @ step1, b1 - total(step1), w2 - hidden.mT @ step2, b2 - total(step2)
        return carry, out.astype(xs[0].dtype)

    carry = w1, b1[:, :, None], w2, b2[:, :, None]
    return scan(mini_batch, carry, q, k, v, lr, pos_scale.shape[0])


PLAIN = {"linear": plain_linear, "mlp": plain_mlp}


def normalise(z):
    import jax.numpy as jnp

    centred = z - jnp.mean(z, -1, keepdims=True)
    sigma = jnp.sqrt(jnp.mean(centred * centred, -1, keepdims=True) + 1e-6)
    return centred / sigma, sigma


def target_gradient(z, k, v, gamma, beta):
    import jax.numpy as jnp

    mean = lambda x: jnp.mean(x, -1, keepdims=True)
    x_hat, sigma = normalise(z)
    h = gamma * (gamma * x_hat + beta - v + k)
    return (h - mean(h) - x_hat * mean(h * x_hat)) / sigma


def scan(mini_batch, carry, q, k, v, lr, size):
    import jax
    import jax.numpy as jnp

    B, H, T, _ = q.shape
    split = lambda x: jnp.moveaxis(x.reshape(B, H, T // size, size, *x.shape[3:]), 2, 0)
    _, out = jax.lax.scan(mini_batch, carry, tuple(map(split, (q, k, v, lr))))
    return jnp.moveaxis(out, 0, 2).reshape(q.shape)


if __name__ == "__main__":
    main()
