# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The train state, the train step and the evaluation step, as jitted functions with pinned
shardings.

    loss = sum(w * nll) / sum(w)  +  z_loss * sum(w * log(Z)^2) / sum(w)        sums over the global
    batch; with reduction "rows" the weights of each row are first divided by their sum

The state is a plain dict: `params`, `opt_state`, `step` (updates attempted so far), and `ema` if
asked for.
Letters: B rows of the global batch, T tokens per row.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmodels.losses import chunked_cross_entropy
from jaxmodels.sharding import use_rules
from train.errors import UserError
from train.experiment import Experiment, InnerLRConfig, LossConfig
from train.mesh import RULES, batch_sharding, check_axes_used, param_shardings, replicated
from train.optim import (
    build_optimizer,
    learning_rate_schedule,
    opt_state_shardings,
    updates_done,
)

State = dict[str, Any]
Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Everything compiled for one model on one mesh."""

    mesh: Mesh
    shapes: State
    """The state as jax.ShapeDtypeStruct, shardings included: the abstract target of a restore."""
    shardings: State
    batch_sharding: NamedSharding
    """Of every (B, T) array of a batch."""
    init: Callable[[jax.Array], State]
    """key -> state. The values do not depend on the mesh."""
    step: Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]
    """(state, batch) -> (state, metrics); the state given is donated."""
    jitted_step: Any
    """The jax.jit function inside `step`, for ahead-of-time lowering under `jax.set_mesh(mesh)`."""


def token_weights(config: LossConfig, batch: Batch) -> jax.Array:
    """(B, T) float32: the weights of a batch, 0 where the target is `ignore_token`."""
    if config.ignore_token is None:
        return batch["weights"]
    return jnp.where(batch["targets"] == config.ignore_token, 0.0, batch["weights"])


def inner_lr_scale(config: InnerLRConfig, step: jax.Array) -> jax.Array:
    """() float32, the factor on inner learning rates at `step`, counted from 0."""
    share = jnp.minimum(1.0, step.astype(jnp.float32) / config.warmup_steps)
    factor = config.start + share * (1.0 - config.start)
    return factor.astype(jnp.bfloat16).astype(jnp.float32)


def loss_sums(
    model, config: LossConfig, params, batch: Batch, inner_lr: jax.Array | None = None
) -> tuple[jax.Array, dict]:
    """Weighted sums over one (micro-)batch, not yet divided: (objective, {nll, log_z_squared}),
    float32. `inner_lr` multiplies the inner learning rates of TTT layers."""
    mixer = model.config.mixer
    options = {} if inner_lr is None else {"inner_lr_scale": inner_lr}
    if "segment_ids" in batch:
        options["segment_ids"] = batch["segment_ids"]
        if mixer.takes_positions:
            options["positions"] = batch["positions"]
    hidden = model.apply(params, batch["tokens"], output="hidden", **options)
    nll, log_z = chunked_cross_entropy(
        hidden, model.unembedding(params), batch["targets"], chunk=config.chunk
    )
    weights = batch["weights"]
    nll = jnp.sum(nll * weights)
    log_z_squared = jnp.sum(jnp.square(log_z) * weights)
    return nll + config.z_loss * log_z_squared, {"nll": nll, "log_z_squared": log_z_squared}


def gradients(
    model,
    config: LossConfig,
    params,
    batch: Batch,
    *,
    inner_lr: jax.Array | None = None,
    accumulation_steps=1,
    mesh=None,
):
    """Gradient of the loss of the whole batch, and the metrics loss, z_loss and weight.

    With accumulation, micro-batch i holds rows i, i + k, ... (so that each stays spread over the
    same devices); gradients are summed over them and divided once by the total weight. On a mesh
    the gradients have the shardings of the parameters.
    """
    counted = token_weights(config, batch)
    if config.reduction == "rows":
        of_row = jnp.sum(counted, 1, keepdims=True)
        weights = jnp.where(of_row > 0, counted / jnp.maximum(of_row, 1e-9), 0.0)
        weight = jnp.sum(of_row > 0, dtype=jnp.float32)  # without the rounding of their sum
    else:
        weights, weight = counted, jnp.sum(counted)
    batch = batch | {"weights": weights}
    value_and_grad = jax.value_and_grad(
        lambda params, batch: loss_sums(model, config, params, batch, inner_lr), has_aux=True
    )

    def pin(grads):
        if mesh is None:
            return grads
        return jax.lax.with_sharding_constraint(grads, param_shardings(model, mesh))

    if accumulation_steps == 1:
        (_, sums), grads = value_and_grad(params, batch)
    else:

        def split(x):
            x = x.reshape(-1, accumulation_steps, *x.shape[1:]).swapaxes(0, 1)
            if mesh is None:
                return x
            spec = PartitionSpec(None, RULES["batch"], RULES["sequence"])
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

        def add(total, micro):
            (_, sums), grads = value_and_grad(params, micro)
            total = jax.tree.map(jnp.add, total, (grads, sums))
            return (pin(total[0]), total[1]), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        start = (pin(zeros), {"nll": jnp.float32(0), "log_z_squared": jnp.float32(0)})
        (grads, sums), _ = jax.lax.scan(add, start, jax.tree.map(split, batch))

    # A batch without any weight has no loss and no gradient, rather than 0/0.
    scale = jnp.where(weight > 0, 1.0 / jnp.maximum(weight, 1e-9), 0.0)
    grads = pin(jax.tree.map(lambda g: g * scale.astype(g.dtype), grads))
    return grads, {
        "loss": sums["nll"] * scale,
        "z_loss": config.z_loss * sums["log_z_squared"] * scale,
        "weight": jnp.sum(counted),
    }


def ema_rate(decay: float, step: jax.Array) -> jax.Array:
    """The decay of the moving average at `step`: small at first, so that the random start is
    forgotten."""
    step = step.astype(jnp.float32)
    return jnp.minimum(decay, (1.0 + step) / (10.0 + step))


def state_shapes_and_shardings(model, optimizer, mesh: Mesh, *, ema: bool) -> tuple[State, State]:
    """Shapes (with shardings) and shardings of the train state; allocates nothing."""
    params = model.param_shapes
    of_params = param_shardings(model, mesh)
    opt_state = jax.eval_shape(optimizer.init, params)
    shapes = {"params": params, "opt_state": opt_state, "step": jax.ShapeDtypeStruct((), jnp.int32)}
    shardings = {
        "params": of_params,
        "opt_state": opt_state_shardings(opt_state, params, of_params, mesh),
        "step": replicated(mesh),
    }
    if ema:
        shapes["ema"], shardings["ema"] = params, of_params
    shapes = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )
    return shapes, shardings


def make_trainer(experiment: Experiment, model, mesh: Mesh) -> Trainer:
    """Builds the jitted functions of an experiment; compiles nothing yet.

    Raises UserError where the model or the batch does not fit the mesh.
    """
    optimizer = build_optimizer(
        experiment.optimizer, steps=experiment.steps, param_axes=model.param_axes
    )
    schedule = learning_rate_schedule(experiment.optimizer, experiment.steps)
    decay = experiment.ema_decay
    shapes, shardings = state_shapes_and_shardings(model, optimizer, mesh, ema=decay is not None)
    check_axes_used(model, mesh)
    rows, k = experiment.batch_size, experiment.accumulation_steps
    if k > 1:
        what = f"batch_size={rows} with accumulation_steps={k}"
        batch_sharding(mesh, rows // k, experiment.sequence_length, what)
    of_batch = batch_sharding(mesh, rows, experiment.sequence_length, f"batch_size={rows}")

    def init(key):
        params = model.init(key)
        state = {
            "params": params,
            "opt_state": optimizer.init(params),
            "step": jnp.zeros((), jnp.int32),
        }
        if decay is not None:
            state["ema"] = jax.tree.map(jnp.copy, params)
        return state

    def step(state, batch):
        params, opt_state = state["params"], state["opt_state"]
        warm = experiment.inner_lr
        inner_lr = inner_lr_scale(warm, updates_done(opt_state)) if warm.active else None
        grads, metrics = gradients(
            model,
            experiment.loss,
            params,
            batch,
            inner_lr=inner_lr,
            accumulation_steps=k,
            mesh=mesh,
        )
        if inner_lr is not None:
            metrics["inner_lr_scale"] = inner_lr
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(metrics["loss"] + metrics["z_loss"]) & jnp.isfinite(grad_norm)
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        new = {"params": optax.apply_updates(params, updates), "opt_state": new_opt_state}
        old = {"params": params, "opt_state": opt_state}
        if decay is not None:
            rate = ema_rate(decay, updates_done(opt_state))
            old["ema"] = state["ema"]
            new["ema"] = jax.tree.map(
                lambda average, p: (rate * average + (1.0 - rate) * p).astype(average.dtype),
                state["ema"],
                new["params"],
            )
        # A gradient that is not finite must not touch the state, whether the run then stops or goes
        # on.
        state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old) | {
            "step": state["step"] + 1
        }
        metrics |= {
            "grad_norm": grad_norm,
            "learning_rate": schedule(updates_done(opt_state)),
            "non_finite": ~finite,
        }
        return state, metrics

    jitted_init = jax.jit(init, out_shardings=shardings)
    jitted_step = jax.jit(
        step,
        in_shardings=(shardings, of_batch),
        out_shardings=(shardings, replicated(mesh)),
        donate_argnums=0,
    )
    return Trainer(
        mesh=mesh,
        shapes=shapes,
        shardings=shardings,
        batch_sharding=of_batch,
        init=_in_mesh(jitted_init, mesh),
        step=_in_mesh(jitted_step, mesh),
        jitted_step=jitted_step,
    )


def make_eval_step(model, config: LossConfig, mesh: Mesh, rows: int, sequence_length: int):
    """((params, batch) -> float32 scalars, sharding of the batch).

    The scalars: sum of weighted nll, sum of the weights that count, sum of all weights.
    """
    of_batch = batch_sharding(
        mesh, rows, sequence_length, f"An evaluation batch of batch_size={rows}"
    )

    def step(params, batch):
        counted = token_weights(config, batch)
        _, sums = loss_sums(model, config, params, batch | {"weights": counted})
        return sums["nll"], jnp.sum(counted), jnp.sum(batch["weights"])

    jitted = jax.jit(
        step,
        in_shardings=(param_shardings(model, mesh), of_batch),
        out_shardings=replicated(mesh),
    )
    return _in_mesh(jitted, mesh), of_batch


def _in_mesh(jitted, mesh: Mesh):
    """Calls (and so traces) `jitted` with the mesh and the table of logical names in place."""

    def call(*args):
        with jax.set_mesh(mesh), use_rules(RULES):
            return jitted(*args)

    return call


def check_traceable(experiment: Experiment, model, mesh: Mesh) -> None:
    """UserError if the model refuses the batches of an experiment. Traces the loss; compiles
    nothing.

    Raised with the model's own words, e.g. for an implementation that this device cannot run.
    """
    shape = experiment.batch_size // experiment.accumulation_steps, experiment.sequence_length
    integers = jax.ShapeDtypeStruct(shape, jnp.int32)
    names = ["tokens", "targets"]
    if experiment.data.packing == "documents":
        names += ["segment_ids", "positions"]
    batch = {name: integers for name in names}
    batch["weights"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    try:
        with jax.set_mesh(mesh), use_rules(RULES):
            jax.eval_shape(
                lambda params, batch: loss_sums(model, experiment.loss, params, batch),
                model.param_shapes,
                batch,
            )
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"The model cannot read such batches: {error}") from error
