# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""TTT language models on one CPU thread: train step, growth with the length, decoding.

    python benchmarks/ttt_model.py train     # 4 layers of 125m width: ours over autodiff of a scan
    python benchmarks/ttt_model.py floor     # 2 layers, Mamba backbone: ours over its bare products
    python benchmarks/ttt_model.py growth    # time per token and memory from T = 2k to 32k
    python benchmarks/ttt_model.py decode    # milliseconds per token, early and late in a sequence

Programs that are compared take turns in one process, so that their ratios survive a busy machine.
`floor` divides the FLOPs of all matrix products (each step's recomputation left out) by the rates
that this core reaches on products of their sizes, and shows the times of the official codes, which
were measured on a core that multiplies [2048,768] x [768,2048] at 106 GFLOP/s, scaled to this one.
"""

import argparse
import dataclasses
import functools
import os
import time

OFFICIAL_RATE = 106e9
OFFICIAL = {  # seconds: forward, train step; per decoded token. The better of the two codes.
    "linear": {"forward": 0.95, "train": 3.82, "token": 7.5e-3},
    "mlp": {"forward": 1.41, "train": 5.42, "token": 11.6e-3},
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("what", choices=["train", "floor", "growth", "decode", "all"], nargs="?", default="all")
    add("--inner", nargs="+", default=["linear", "mlp"], choices=["linear", "mlp"])
    add("--length", type=int, default=2048)
    add("--lengths", type=int, nargs="+", default=[2048, 8192, 32768], help="of growth")
    add("--threads", type=int, default=1, help="restrict the process to so many cores; 0: all")
    add("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.threads:  # before JAX makes its thread pool
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    import jax

    cores = len(os.sched_getaffinity(0))
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {cores} cores, float32, B = 1")
    for name in ("train", "floor", "growth", "decode"):
        if args.what in (name, "all"):
            globals()[name](args)


def train(args):
    """Ours over the same model whose inner loop is left to autodiff."""
    print(f"\ntrain step, 125m width, 4 layers, Transformer backbone, T = {args.length}")
    print(f"{'inner':>7} {'ours s':>8} {'autodiff s':>11} {'ratio':>6} {'MiB':>7} {'autodiff':>13}")
    for inner in args.inner:
        config = model_config(inner, num_layers=4)
        plain = dataclasses.replace(config, mixer=with_plain_loop(config.mixer))
        steps = [train_step(c, args.length) for c in (config, plain)]
        (ours, theirs) = take_turns([call for call, _ in steps], args.repeats)
        memory = [compiled.memory_analysis().temp_size_in_bytes / 2**20 for _, compiled in steps]
        print(
            f"{inner:>7} {ours:8.2f} {theirs:11.2f} {theirs / ours:6.2f} {memory[0]:7.0f} "
            f"{memory[1]:13.0f}",
            flush=True,
        )


def floor(args):
    """Ours over the time of the matrix products alone, and over the official codes."""
    big, small = product_rates()
    print(f"\nproducts: [2048,768]x[768,2048] {big / 1e9:.0f} GFLOP/s, ", end="")
    print(f"12 x [16,64]x[64,64] {small / 1e9:.0f} GFLOP/s")
    print(f"2 layers of 125m width, Mamba backbone, vocabulary 1024, T = {args.length}")
    print(f"{'inner':>7} {'pass':>8} {'ours s':>8} {'floor s':>8} {'/floor':>7} {'/official':>10}")
    for inner in args.inner:
        config = model_config(inner, num_layers=2, backbone="mamba")
        config = dataclasses.replace(config, scan_layers=False)
        programs = {
            "forward": forward(config, args.length)[0],
            "train": train_step(config, args.length)[0],
        }
        seconds = take_turns(list(programs.values()), args.repeats)
        mixer = config.mixer
        K = mixer.head_dim(config.d_model)
        inner_flops = 2 * mixer.num_heads * mixer.inner_flops(K)
        outer_flops = config.flops_per_token(args.length) - inner_flops
        once = args.length * (outer_flops / big + inner_flops / small)
        for (name, _), took in zip(programs.items(), seconds):
            least = once * (1 if name == "forward" else 3)
            official = OFFICIAL[inner][name] * OFFICIAL_RATE / big
            print(
                f"{inner:>7} {name:>8} {took:8.2f} {least:8.2f} {took / least:7.2f} "
                f"{took / official:10.2f}",
                flush=True,
            )


def growth(args):
    """Time and memory per token over the length; full rematerialisation, so that memory is that of
    one layer."""
    print("\ntrain step over the length, 2 layers of 125m width, full rematerialisation")
    print(f"{'inner':>7} {'T':>6} {'s':>8} {'us/token':>9} {'over first':>10} {'bytes/token':>12}")
    for inner in args.inner:
        config = dataclasses.replace(model_config(inner, num_layers=2), remat="full")
        first = None
        for length in args.lengths:
            call, compiled = train_step(config, length)
            (took,) = take_turns([call], 1)
            per_token = took / length
            first = first or per_token
            temporary = compiled.memory_analysis().temp_size_in_bytes / length
            print(
                f"{inner:>7} {length:6d} {took:8.2f} {1e6 * per_token:9.1f} "
                f"{per_token / first:10.2f} {temporary:12.0f}",
                flush=True,
            )


def decode(args):
    """One-token steps in a loop as that of `jaxmodels.generate`, early and far in a sequence."""
    import jax
    import numpy as np

    import jaxmodels

    big, _ = product_rates()
    print("\ndecoding, 2 layers of 125m width, Mamba backbone, vocabulary 1024, one sequence")
    print(f"{'inner':>7} {'at':>7} {'ms/token':>9} {'/official':>10}")
    for inner in args.inner:
        model = jaxmodels.build(model_config(inner, num_layers=2, backbone="mamba"))
        params = model.init(jax.random.key(0))
        layers = model.apart(params)

        def steps(params, layers, token, state, count):
            def step(carry, _):
                token, state = carry
                logits, state = model.apply(params, token, state=state, layers=layers)  # noqa: B023
                return (jax.numpy.argmax(logits, -1).astype(np.int32), state), None

            return jax.lax.scan(step, (token, state), None, count)[0]

        run = jax.jit(steps, static_argnums=4, donate_argnums=3)
        token, state, at = (
            np.zeros((1, 1), np.int32),
            model.apart(model.init_state(params, 1, 0)),
            0,
        )
        for start in (64, 16384):
            while at < start:
                token, state = run(params, layers, token, state, 64)
                at += 64
            best = float("inf")
            for _ in range(5):
                begin = time.perf_counter()
                token, state = run(params, layers, token, state, 64)
                jax.block_until_ready(token)
                at += 64
                best = min(best, (time.perf_counter() - begin) / 64)
            official = OFFICIAL[inner]["token"] * OFFICIAL_RATE / big
            print(f"{inner:>7} {start:7d} {1e3 * best:9.2f} {best / official:10.2f}", flush=True)


def model_config(inner, *, num_layers, backbone="transformer"):
    from jaxmodels import ttt

    make = {"linear": ttt.ttt_linear, "mlp": ttt.ttt_mlp}[inner]
    return make(
        d_model=768,
        num_layers=num_layers,
        num_heads=12,
        d_ff=2048,
        vocab_size=1024,
        backbone=backbone,
        dtype="float32",
    )


def with_plain_loop(mixer):
    """The mixer with its inner loop as one scan over mini-batches that JAX differentiates."""
    from ttt_op import PLAIN

    from jaxmodels import TTTMLP

    plain = PLAIN["mlp" if isinstance(mixer, TTTMLP) else "linear"]

    def run(q, k, v, lr, pos_scale, state, ln_scale, ln_bias, **options):
        weights = state[: len(state) // 2]
        return plain(q, k, v, lr, pos_scale, ln_scale, ln_bias, *weights), state

    class Plain(type(mixer)):
        @property
        def operations(self):
            return super().operations._replace(run=run)

    fields = {f.name: getattr(mixer, f.name) for f in dataclasses.fields(mixer)}
    return Plain(**fields)


def example(config, length):
    import jax

    import jaxmodels

    model = jaxmodels.build(config)
    params = model.init(jax.random.key(0))
    return model, params, jax.random.randint(jax.random.key(1), (1, length + 1), 0, 1024)


def forward(config, length):
    """(a compiled forward pass to call without arguments, the compiled program)."""
    import jax

    model, params, tokens = example(config, length)
    compiled = jax.jit(model.apply).lower(params, tokens[:, :-1]).compile()
    return functools.partial(compiled, params, tokens[:, :-1]), compiled


def train_step(config, length):
    """(a compiled train step with AdamW to call without arguments, the compiled program)."""
    import jax
    import jax.numpy as jnp
    import optax

    import jaxmodels

    model, params, tokens = example(config, length)
    optimizer = optax.adamw(1e-4, weight_decay=0.1)

    def loss(params, tokens):
        hidden = model.apply(params, tokens[:, :-1], output="hidden")
        w = model.unembedding(params)
        return jnp.mean(jaxmodels.losses.chunked_cross_entropy(hidden, w, tokens[:, 1:])[0])

    def step(params, moments, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, value

    moments = optimizer.init(params)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, moments, tokens).compile()
    carry = [params, moments]

    def call():
        *carry[:], value = compiled(*carry, tokens)
        return value

    return call, compiled


def take_turns(calls, repeats):
    """Best seconds of each."""
    import jax

    best = [float("inf")] * len(calls)
    for _ in range(repeats + 1):  # the first round warms up
        for i, call in enumerate(calls):
            start = time.perf_counter()
            jax.block_until_ready(call())
            best[i] = min(best[i], time.perf_counter() - start)
    return best


@functools.cache
def product_rates():
    """FLOP/s of a large product and of a batch of small ones, inside a loop as in the model."""
    import jax
    import jax.numpy as jnp

    def rate(shape_a, shape_b, repeats):
        a, b = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate((shape_a, shape_b)))

        @jax.jit
        def run(a, b):
            body = lambda i, total: total + jnp.matmul(a + total[..., :1, :1] * 0, b)
            return jax.lax.fori_loop(0, repeats, body, jnp.zeros((*shape_a[:-1], shape_b[-1])))

        (took,) = take_turns([functools.partial(run, a, b)], 5)
        batch = 1
        for size in shape_a[:-2]:
            batch *= size
        return 2 * batch * shape_a[-2] * shape_a[-1] * shape_b[-1] * repeats / took

    return rate((2048, 768), (768, 2048), 5), rate((12, 16, 64), (12, 64, 64), 2000)


if __name__ == "__main__":
    main()
