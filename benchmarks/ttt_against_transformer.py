# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Train step of TTT-Linear beside the dense Transformer of equal size, over the sequence length.

    python benchmarks/ttt_against_transformer.py --lengths 512 2048 8192

Gradient of the language-model loss, float32, one row, both models in one process taking turns. Time
per token stays level for TTT-Linear and grows with T for attention. Printed are the best
milliseconds, the microseconds per token over those at the first length, and the ratio of the two.
"""

import argparse
import functools
import time


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    add("--d-model", type=int, default=256)
    add("--layers", type=int, default=2)
    add("--heads", type=int, default=4)
    add("--repeats", type=int, default=3)
    args = parser.parse_args()

    import jax

    from jaxmodels.transformer import transformer
    from jaxmodels.ttt import ttt_linear

    sizes = dict(d_model=args.d_model, num_layers=args.layers, num_heads=args.heads)
    sizes |= dict(d_ff=args.d_model * 11 // 4, vocab_size=256, dtype="float32", remat="full")
    configs = {"TTT-Linear": ttt_linear(**sizes), "Transformer": transformer(**sizes)}
    kind = jax.devices()[0].device_kind
    print(f"jax {jax.__version__}, {kind}, D={args.d_model}, {args.layers} layers")
    print(
        f"{'T':>6} {'TTT ms':>9} {'Tfm ms':>9} {'TTT/Tfm':>8} "
        f"{'TTT us/token, x':>16} {'Tfm us/token, x':>16}"
    )
    first = None
    for length in args.lengths:
        steps = {name: train_step(config, length) for name, config in configs.items()}
        best = dict.fromkeys(steps, float("inf"))
        for _ in range(args.repeats):
            for name, step in steps.items():
                start = time.perf_counter()
                jax.block_until_ready(step())
                best[name] = min(best[name], time.perf_counter() - start)
        per_token = {name: seconds / length for name, seconds in best.items()}
        first = first or per_token
        ttt, tfm = (best[name] for name in configs)
        growth = [per_token[name] / first[name] for name in configs]
        print(
            f"{length:>6} {ttt * 1e3:>9.1f} {tfm * 1e3:>9.1f} {ttt / tfm:>8.2f} "
            f"{growth[0]:>16.2f} {growth[1]:>16.2f}",
            flush=True,
        )


def train_step(config, length):
    """A compiled step of one row, ready to be called without arguments."""
    import jax
    import jax.numpy as jnp

    import jaxmodels

    model = jaxmodels.build(config)
    params = model.init(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (1, length + 1), 0, 256)

    def loss(params, tokens):
        hidden = model.apply(params, tokens[:, :-1], output="hidden")
        w = model.unembedding(params)
        return jnp.mean(jaxmodels.losses.chunked_cross_entropy(hidden, w, tokens[:, 1:])[0])

    step = jax.jit(jax.value_and_grad(loss)).lower(params, tokens).compile()
    jax.block_until_ready(step(params, tokens))
    return functools.partial(step, params, tokens)


if __name__ == "__main__":
    main()
