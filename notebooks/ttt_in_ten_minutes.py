# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxmodels/jaxmodels/blob/main/notebooks/ttt_in_ten_minutes.ipynb)

# %%
# SPDX-License-Identifier: Apache-2.0
# Installs the package where it is missing (on Colab), else does nothing.
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("jaxmodels") is None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "jaxmodels[notebooks]"]
    subprocess.check_call(command)

# %% [markdown]
# # TTT in ten minutes
#
# A recurrent layer compresses what it has read into a state of fixed size. In a TTT layer
# (*Learning to (Learn at Test Time)*, ICML 2025, [arXiv 2407.04620](https://arxiv.org/abs/2407.04620))
# that state is the weights of a small model, and reading a token is a step of gradient descent on
# them. This notebook shows
#
# 1. the inner loop alone, on a toy sequence,
# 2. the hidden model of a small language model learning as it reads,
# 3. what that is worth: bits per byte against position,
# 4. the layer on its own, in plain JAX code.
#
# It needs no network and no accelerator, and takes about a minute on two CPU cores.

# %%
import pathlib
import re
import sysconfig

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import jaxmodels
from pallas_kernels import ttt_linear, ttt_mlp

plt.rcParams.update(
    {
        "figure.dpi": 90,
        "figure.constrained_layout.use": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.titlesize": "medium",
        "grid.color": "#e4e7eb",
        "legend.frameon": False,
    }
)
BLUE, RED, GRAY = "#2b6cb0", "#d64545", "#7b8794"

# %% [markdown]
# ## 1. The inner loop
#
# Each head turns a token into three views: a *key* $k$, a *value* $v$ and a *query* $q$. Its
# hidden state is a model $f$ that learns to turn keys into values, and the head's output is what
# $f$ makes of the query:
#
# $$f(k) = k + \mathrm{LN}(k W + b), \qquad \ell(W, b) = \tfrac12 \lVert f(k) - v \rVert^2$$
#
# Tokens come in mini-batches of 16. With $g_j$ the gradient of $\ell$ at token $j$ with respect
# to $k_j W + b$, always taken at the weights with which the mini-batch starts, token $i$ is
# answered by
#
# $$o_i = q_i + \mathrm{LN}(q_i W_i + b_i), \quad W_i = W - t_i \sum_{j \le i} \eta_j k_j^\top g_j$$
#
# and likewise for $b_i$. Here $\eta_j$ is the token's own learning rate, and $t_i = 1/i$ for the
# $i$-th token turns the sum into a mean. The last $W_i$ starts the next mini-batch. TTT-MLP has
# an MLP with one hidden layer in place of $k W + b$.
#
# `ttt_linear` and `ttt_mlp` are this loop as plain functions of arrays. Below, a hidden rule
# produces the values, and changes halfway. The queries are fresh vectors, never seen as keys, so
# a small error means that the state has learned the rule and not just the pairs.

# %%
K, T, B, size = 32, 2048, 8, 16  # head width, tokens, sequences, mini-batch
keys = jax.random.split(jax.random.key(0), 6)
k, q = jax.random.normal(keys[0], (2, B, 1, T, K))  # (batch, heads, tokens, width)
first, second = jax.random.normal(keys[1], (2, K, K)) / K**0.5


def rule(x):
    y = jnp.where(jnp.arange(T)[:, None] < T // 2, x @ first, x @ second)
    return x + jax.nn.standardize(y)


pos_scale = 1 / jnp.arange(1, size + 1)  # t_i
ln = jnp.ones((1, K)), jnp.zeros((1, K))  # scale and bias of LN, per head


def normal(key, *shape):
    return 0.02 * jax.random.normal(key, shape)


linear = ttt_linear.init_state(normal(keys[2], 1, K, K), jnp.zeros((1, K)), B)
w1, w2 = normal(keys[3], 1, K, 4 * K), normal(keys[4], 1, 4 * K, K)
mlp = ttt_mlp.init_state(w1, jnp.zeros((1, 4 * K)), w2, jnp.zeros((1, K)), B)


def error(operation, state, rate):
    """Mean squared error of the answers, one number per mini-batch."""
    lr = jnp.full((B, 1, T), rate / K)
    out, _ = operation(q, k, rule(k), lr, pos_scale, state, *ln)
    return jnp.mean((out - rule(q)) ** 2, axis=(0, 1, 3)).reshape(-1, size).mean(1)


errors = {
    "rate 0: the initial state": (error(ttt_linear.ttt_linear, linear, 0.0), GRAY),
    "TTT-Linear": (error(ttt_linear.ttt_linear, linear, 1.0), BLUE),
    "TTT-MLP": (error(ttt_mlp.ttt_mlp, mlp, 0.1), RED),
}

# %%
figure, axes = plt.subplots(figsize=(7, 3.2))
for label, (values, color) in errors.items():
    axes.plot(jnp.arange(0, T, size), values, color=color, label=label)
axes.axvline(T // 2, color="black", linewidth=0.8, linestyle=":")
axes.text(T // 2 + 20, 2.45, "the rule changes", va="top")
axes.set(xlabel="tokens read", ylabel="error on new queries", ylim=(0, 2.5), xlim=(0, T))
axes.legend(loc="center", bbox_to_anchor=(0.33, 0.6))
plt.show()

# %% [markdown]
# No weight was trained for this: the functions only *read* a sequence. When the rule changes, the
# state unlearns the old one and learns the new one.
#
# ## 2. A language model whose state learns
#
# In a language model the outer training shapes everything that the inner loop uses: the views,
# the rates $\eta$, and the state from which every sequence starts. It differentiates through the
# inner loop. Here is a small byte-level TTT-Linear model.
#
# Its text is made so that memory pays, and a minute of training is enough to see it: the names of
# Python's standard library, where every sequence repeats 12 names of its own in random order. The
# names of the held-out sequences come from other files and never occur in the training text.

# %%
files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
names = [set(re.findall(rb"\b[a-z_]{3,8}\b", file.read_bytes())) for file in files]
known = set().union(*(found for i, found in enumerate(names) if i % 8))
unseen = set().union(*names[::8]) - known
rng = np.random.default_rng(0)


def batch(names, count, length):
    """Inputs and next bytes, (count, length) each."""
    rows = []
    for _ in range(count):
        row = b" ".join(rng.choice(rng.choice(names, 12), length // 3))
        rows.append(np.frombuffer(row[: length + 1], np.uint8).astype(np.int32))
    tokens = np.stack(rows)
    return tokens[:, :-1], tokens[:, 1:]


known, unseen = np.array(sorted(known)), np.array(sorted(unseen))
print(len(known), "names to train on,", len(unseen), "held out. One held-out sequence begins:")
print(bytes(batch(unseen, 1, 210)[0].astype(np.uint8)).decode())

# %%
STEPS = 300
config = jaxmodels.ttt.ttt_linear(
    d_model=128, num_layers=1, num_heads=4, d_ff=256, vocab_size=256, backbone="mamba"
)
model = jaxmodels.build(config)
params = model.init(jax.random.key(0))  # a nested dict of arrays
rate = optax.warmup_cosine_decay_schedule(0.0, 8e-3, STEPS // 10, STEPS)
optimizer = optax.chain(
    optax.clip_by_global_norm(1.0), optax.contrib.muon(rate, consistent_rms=0.2)
)


def bits(params, inputs, targets):
    """Bits that each byte costs, (count, length)."""
    nats, _ = jaxmodels.losses.cross_entropy(model.apply(params, inputs), targets)
    return nats / jnp.log(2)


@jax.jit
def step(params, state, inputs, targets):
    loss, grads = jax.value_and_grad(lambda p: bits(p, inputs, targets).mean())(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


state, losses = jax.jit(optimizer.init)(params), []
for i in range(STEPS):
    params, state, loss = step(params, state, *batch(known, 16, 256))
    losses.append(loss)
    if (i + 1) % 50 == 0:
        print(f"step {i + 1}: {np.mean(losses[-10:]):.2f} bits per byte")

# %% [markdown]
# Now the trained model reads held-out text, eight times as long as it ever saw, and we watch its
# hidden models. *Taps* return what happens inside: here the inner loss of the last token of every
# mini-batch under the weights that every sequence starts from, under those that the mini-batch
# starts with, and under those that it leaves behind.

# %%
inputs, targets = batch(unseen, 32, 2048)
taps = ("ttt_loss_initial", "ttt_loss_before", "ttt_loss_after")
_, seen = jax.jit(lambda params, inputs: model.apply(params, inputs, taps=taps))(params, inputs)

figure, axes = plt.subplots(figsize=(7, 3.2))
labels = ("initial state", "start of the mini-batch", "after its step")
for name, label, color in zip(taps, labels, (GRAY, BLUE, RED)):
    loss = seen[name].mean(axis=(0, 1, 2))  # over layers, sequences and heads
    axes.plot(16 * jnp.arange(len(loss)), loss, color=color, label=label)
axes.set(xlabel="bytes read", ylabel="inner loss", ylim=(0, None), xlim=(0, 2048))
axes.legend(loc="center right", bbox_to_anchor=(1, 0.7))
plt.show()

# %% [markdown]
# From gray to blue is what the state has learned from all the text before; from blue to red is
# what one step on the mini-batch itself adds.
#
# ## 3. Bits per byte against position
#
# What the state has learned makes later text cheaper. Beside it the same model on the same bytes,
# with its state reset every 64 bytes.

# %%
evaluate = jax.jit(bits)
kept = evaluate(params, inputs, targets)
reset = evaluate(params, inputs.reshape(-1, 64), targets.reshape(-1, 64)).reshape(kept.shape)

figure, axes = plt.subplots(figsize=(7, 3.2))
for values, label, color in (
    (reset, "state reset every 64 bytes", GRAY),
    (kept, "state kept", BLUE),
):
    mean = values.reshape(32, -1, 64).mean(axis=(0, 2))
    axes.plot(32 + 64 * jnp.arange(len(mean)), mean, ".-", color=color, label=label)
    print(f"{label}: {mean[0]:.2f} bits per byte in the first 64 bytes, {mean[-1]:.2f} in the last")
axes.set(xlabel="position in bytes", ylabel="bits per byte", ylim=(0, None), xlim=(0, 2048))
axes.legend()
plt.show()

# %% [markdown]
# ## 4. The layer alone
#
# A layer is a pytree: it goes into `jax.jit` and `jax.grad` as it is, next to any other JAX code.
# It returns its state instead of hiding it.

# %%
layer = jaxmodels.TTTLinear(num_heads=4).build(256, rngs=nnx.Rngs(0))
x = jax.random.normal(jax.random.key(1), (2, 300, 256))

read = jax.jit(lambda layer, x, state=None: layer(x, state=state))
y, _ = read(layer, x)

grads = jax.jit(jax.grad(lambda layer, x: jnp.mean(layer(x)[0] ** 2)))(layer, x)
layer = jax.tree.map(lambda weight, grad: weight - 0.1 * grad, layer, grads)  # one step of SGD
y, _ = read(layer, x)
print("output", y.shape, "of", sum(w.size for w in jax.tree.leaves(layer)), "weights")

# %% [markdown]
# Reading in pieces gives what reading at once gives. Pieces may have any length (75 is no
# multiple of the mini-batch), and the state does not grow.

# %%
state = layer.init_state(2)
for start in range(0, 300, 75):
    piece, state = read(layer, x[:, start : start + 75], state)
    difference = jnp.abs(piece - y[:, start : start + 75]).max()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    print(f"after {start + 75} tokens: largest difference {difference:.0e}, state {size} bytes")

# %% [markdown]
# ## Where next
#
# * What it matches, what runs where, traps: the
#   [model card](https://github.com/jaxmodels/jaxmodels/blob/main/jaxmodels/ttt/README.md)
# * The inner loop as an operation, its dual form and its costs:
#   [ttt_linear](https://github.com/jaxmodels/jaxmodels/blob/main/pallas_kernels/ttt_linear/README.md)
# * Published sizes, TTT-Linear and TTT-MLP from 125m to 1.3b:
#   `jaxmodels.build(jaxmodels.PRESETS["ttt-linear-125m"])`
# * Training: `jaxmodels train ttt_linear_bytes` learns Python in five minutes on two cores. The
#   published recipes are in
#   [configs](https://github.com/jaxmodels/jaxmodels/blob/main/configs)
