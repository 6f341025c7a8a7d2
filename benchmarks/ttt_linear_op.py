# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Our TTT-Linear operation beside JAX's own derivative of the same mini-batch scan.

    python benchmarks/ttt_linear_op.py --lengths 2048 8192 --threads 1

Three programs take turns in one process, so that their ratios survive a busy machine: `op` (what
`ttt_linear` runs), `plain` (one scan over mini-batches, differentiated by JAX, which stores what
every mini-batch computed) and `products` (the bare matrix products of the recurrence, in the same
order and with the recomputation: a floor for this way of running them). Printed are the best
milliseconds of each, and the temporary memory that the compiler reserves.
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
    add("--lengths", type=int, nargs="+", default=[2048, 8192], help="tokens per sequence")
    add("--batch", type=int, default=1)
    add("--heads", type=int, default=12)
    add("--width", type=int, default=64, help="width of a head")
    add("--mini-batch", type=int, default=16, help="tokens per inner step")
    add("--checkpoint-every", type=int, nargs="+", default=[16], help="mini-batches, one or more")
    add("--dtype", default="float32", choices=["float32", "bfloat16"], help="of q, k and v")
    add("--repeats", type=int, default=10)
    add("--threads", type=int, default=0, help="restrict the process to so many cores; 0: all")
    return parser.parse_args()


def main():
    args = parse()
    if args.threads:  # before JAX makes its thread pool
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    import jax

    print(
        f"jax {jax.__version__}, {jax.devices()[0].device_kind}, "
        f"{len(os.sched_getaffinity(0))} cores"
    )
    print(
        f"B={args.batch} H={args.heads} K={args.width} b={args.mini_batch} {args.dtype}\n"
        f"{'T':>6} {'pass':>8} {'program':>12} {'ms':>9} {'us/token':>9} {'vs plain':>9} {'MiB':>8}"
    )
    for length in args.lengths:
        one_length(args, length)


def one_length(args, length):
    import jax

    inputs = example(args, length)
    programs = {"plain": plain, "products": products}
    for every in args.checkpoint_every:
        programs[f"op ({every})"] = functools.partial(op, checkpoint_every=every)
    for name, wrap in {"forward": lambda f: f, "both": with_gradients}.items():
        compiled = {
            label: jax.jit(wrap(program)).lower(*inputs).compile()
            for label, program in programs.items()
            if not (name == "forward" and label == "products")
        }
        best = dict.fromkeys(compiled, float("inf"))
        for _ in range(args.repeats):
            for label, call in compiled.items():
                start = time.perf_counter()
                jax.block_until_ready(call(*inputs))
                best[label] = min(best[label], time.perf_counter() - start)
        for label, seconds in best.items():
            memory = compiled[label].memory_analysis().temp_size_in_bytes / 2**20
            print(
                f"{length:6d} {name:>8} {label:>12} {1e3 * seconds:9.1f} "
                f"{1e6 * seconds / length / args.batch:9.2f} "
                f"{best['plain'] / seconds:8.2f}x {memory:8.1f}"
            )


def example(args, T):
    """Arguments of the programs below, of a plausible size."""
    import jax
    import jax.numpy as jnp

    B, H, K, b = args.batch, args.heads, args.width, args.mini_batch
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v = (jax.random.normal(key, (B, H, T, K)).astype(args.dtype) for key in keys[:3])
    lr = jax.nn.sigmoid(jax.random.normal(keys[3], (B, H, T))) / K
    w = 0.02 * jax.random.normal(keys[4], (B, H, K, K))
    norm = jnp.ones((H, K)), jnp.zeros((H, K))
    return q, k, v, lr, 1 / jnp.arange(1.0, b + 1), w, jnp.zeros((B, H, K)), *norm


def with_gradients(program):
    """Value and every gradient, with a cotangent that is not constant."""
    import jax
    import jax.numpy as jnp

    def both(*inputs):
        def loss(*inputs):
            out = program(*inputs).astype(jnp.float32)
            return jnp.sum(out * inputs[2].astype(jnp.float32))

        return jax.value_and_grad(loss, argnums=tuple(range(9)))(*inputs)

    return both


def op(q, k, v, lr, pos_scale, w, b, ln_scale, ln_bias, *, checkpoint_every):
    import jax.numpy as jnp

    from pallas_kernels.ttt_linear import TTTLinearState, ttt_linear

    state = TTTLinearState(w=w, b=b, w_sum=jnp.zeros_like(w), b_sum=jnp.zeros_like(b))
    return ttt_linear(
        q, k, v, lr, pos_scale, state, ln_scale, ln_bias, checkpoint_every=checkpoint_every
    )[0]


def plain(q, k, v, lr, pos_scale, w, b, ln_scale, ln_bias):
    """The same dual form, one mini-batch after another, left to JAX to differentiate."""
    import jax
    import jax.numpy as jnp

    B, H, T, _ = q.shape
    size = pos_scale.shape[0]
    gamma, beta = ln_scale[:, None], ln_bias[:, None]

    def normalise(z):
        centred = z - jnp.mean(z, -1, keepdims=True)
        sigma = jnp.sqrt(jnp.mean(centred * centred, -1, keepdims=True) + 1e-6)
        return centred / sigma, sigma

    def mini_batch(carry, xs):
        w, b = carry
        q, k, v, lr = (x.astype(jnp.float32) for x in xs)
        x_hat, sigma = normalise(k @ w + b)
        r = gamma * (gamma * x_hat + beta - v + k)
        mean = lambda x: jnp.mean(x, -1, keepdims=True)
        g = (r - mean(r) - x_hat * mean(r * x_hat)) / sigma
        eta = pos_scale[:, None] * lr[..., None, :]
        z = q @ w + b - jnp.tril(eta * (1 + q @ k.mT)) @ g
        step = (pos_scale[-1] * lr)[..., None] * g
        out = q + gamma * normalise(z)[0] + beta
        return (w - k.mT @ step, b - jnp.sum(step, -2, keepdims=True)), out.astype(xs[0].dtype)

    split = lambda x: jnp.moveaxis(x.reshape(B, H, T // size, size, *x.shape[3:]), 2, 0)
    _, out = jax.lax.scan(mini_batch, (w, b[:, :, None]), tuple(map(split, (q, k, v, lr))))
    return jnp.moveaxis(out, 0, 2).reshape(q.shape)


def products(q, k, v, lr, pos_scale, w, b, ln_scale, ln_bias):
    """Not a model: the (b, K) x (K, K), (K, b) x (b, K) and (b, b) x (b, K) products alone.

    Its derivative makes the products of the backward pass; `jax.checkpoint` those of the rerun.
    """
    import jax
    import jax.numpy as jnp

    B, H, T, K = q.shape
    size = pos_scale.shape[0]

    @jax.checkpoint
    def mini_batch(w, xs):
        q, k, v = (x.astype(jnp.float32) for x in xs)
        g = k @ w + v
        return w - 1e-4 * (k.mT @ g), (q @ w + (q @ k.mT) @ g).astype(xs[0].dtype)

    split = lambda x: jnp.moveaxis(x.reshape(B, H, T // size, size, K), 2, 0)
    return jnp.moveaxis(jax.lax.scan(mini_batch, w, tuple(map(split, (q, k, v))))[1], 0, 2).reshape(
        q.shape
    )


if __name__ == "__main__":
    main()
