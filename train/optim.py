# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""`OptimizerConfig` -> an optax transformation, its schedule, its decay mask, and the shardings of
its state.

    update = -rate(count) * (direction(clip(gradient)) + weight_decay * mask * parameter)

The direction comes from optax (adam, muon, lion, adafactor, momentum). Decoupled weight decay and
the schedule are the same for all of them, so one learning rate has one meaning.
"""

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train.errors import UserError
from train.experiment import OptimizerConfig
from train.mesh import path_name, replicated


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate of update `count` = 0, 1, ... out of `steps`, warm-up included.

    `cosine` is exactly `optax.warmup_cosine_decay_schedule`. With warm-up the first update has rate
    0.
    """
    peak, final, warmup = config.learning_rate, config.final_learning_rate, config.warmup_steps
    if not 0 <= warmup < steps:
        raise UserError(
            f"optimizer.warmup_steps={warmup} must be at least 0 and below steps={steps} (it is "
            f"counted inside them). Use e.g. --optimizer.warmup-steps {steps // 10}."
        )
    if not peak > 0:
        raise UserError(f"optimizer.learning_rate={peak} must be above 0.")
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, final)
    pieces, boundaries = [], []
    if warmup:
        pieces, boundaries = [optax.linear_schedule(0.0, peak, warmup)], [warmup]
    if config.schedule == "constant":
        pieces.append(optax.constant_schedule(peak))
    elif config.schedule == "linear":
        pieces.append(optax.linear_schedule(peak, final, steps - warmup))
    elif config.schedule == "wsd":
        if not 0 < config.wsd_decay_fraction <= 1:
            raise UserError(
                f"optimizer.wsd_decay_fraction={config.wsd_decay_fraction} must lie in (0, 1]: it "
                "is the share of all steps spent decaying."
            )
        decay = min(max(round(config.wsd_decay_fraction * steps), 1), steps - warmup)
        if steps - decay > warmup:
            pieces.append(optax.constant_schedule(peak))
            boundaries.append(steps - decay)
        pieces.append(optax.linear_schedule(peak, final, decay))
    else:
        raise UserError(
            f"optimizer.schedule={config.schedule!r}: one of cosine, linear, wsd, constant."
        )
    return optax.join_schedules(pieces, boundaries)


def is_matrix(name: str, axes: tuple[str | None, ...]) -> bool:
    """Whether a parameter is a matrix rather than a scale, bias or per-position factor.

    Judged without the axes that only count copies (`layers`, `expert`): a stacked (L, D) norm scale
    is a vector, and so is the (H, K) bias of a per-head map.
    """
    axes = tuple(axis for axis in axes if axis not in ("layers", "expert"))
    last = name.rsplit("/", 1)[-1]
    if "scale" in last or "bias" in last:
        return False
    return len(axes) >= 2 and axes not in (("heads", "head_dim"), ("heads", "inner"))


def decay_mask(config: OptimizerConfig, param_axes):
    """Tree of bools like the parameters: what weight decay shrinks."""
    if config.decay_mask not in ("matrices", "all"):
        raise UserError(f"optimizer.decay_mask={config.decay_mask!r}: one of matrices, all.")
    return jax.tree_util.tree_map_with_path(
        lambda path, axes: config.decay_mask == "all" or is_matrix(path_name(path), axes),
        param_axes,
        is_leaf=_is_axes,
    )


def muon_dimensions(param_axes):
    """Tree of `MuonDimensionNumbers`, or None where Muon leaves a parameter to Adam.

    A weight is a linear map from its reduction axes to its output axes; `layers` and `expert` axes,
    and `heads` of a per-head map (H, K, K), count copies that are orthogonalised one by one. (D, H,
    K) maps D to H x K. The embedding and the output matrix go to Adam, as usual with Muon, and so
    does whatever has an unnamed axis (convolutions).
    """

    def dimensions(path, axes):
        if not is_matrix(path_name(path), axes) or "vocab" in axes or None in axes:
            return None
        used = [i for i, axis in enumerate(axes) if axis not in ("layers", "expert")]
        names = [axes[i] for i in used]
        if names == ["heads", "inner", "inner"]:
            used, names = used[1:], names[1:]
        sides = []
        for i, axis in zip(used, names):
            if axis == "head_dim" and sides and axes[sides[-1][-1]] == "heads":
                sides[-1].append(i)
            else:
                sides.append([i])
        if len(sides) != 2:
            return None
        return optax.contrib.MuonDimensionNumbers(tuple(sides[0]), tuple(sides[1]))

    return jax.tree_util.tree_map_with_path(dimensions, param_axes, is_leaf=_is_axes)


def _is_axes(x) -> bool:
    return isinstance(x, tuple)


def build_optimizer(
    config: OptimizerConfig, *, steps: int, param_axes
) -> optax.GradientTransformation:
    """The whole update rule: clip by global norm, direction, decoupled weight decay, learning rate.

    `adamw` is exactly `optax.adamw` with this schedule and mask. `muon` scales its updates to the
    size of AdamW's (consistent RMS 0.2) and gives what is not a matrix to Adam. `adafactor` has
    factored second moments, update clipping, no momentum, and no scaling by the parameter, so that
    the rate means what it means elsewhere. `sgd` has momentum `b1`.
    """
    if config.clip_norm is not None and not config.clip_norm > 0:
        raise UserError(
            f"optimizer.clip_norm={config.clip_norm} must be above 0; None turns clipping off."
        )
    if config.name == "adamw":
        direction = optax.scale_by_adam(config.b1, config.b2, config.eps)
    elif config.name == "lion":
        direction = optax.scale_by_lion(config.b1, config.b2)
    elif config.name == "sgd":
        direction = optax.trace(config.b1)
    elif config.name == "adafactor":
        direction = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    elif config.name == "muon":
        dimensions = muon_dimensions(param_axes)
        muon = optax.contrib.muon(
            1.0,
            beta=config.b1,
            eps=config.eps,
            adam_b1=config.b1,
            adam_b2=config.b2,
            muon_weight_dimension_numbers=lambda _: dimensions,
            consistent_rms=0.2,
        )
        # optax's muon already subtracts; turn it back into a direction, for the decay and schedule
        # that all share.
        direction = optax.chain(muon, optax.scale(-1.0))
    else:
        raise UserError(
            f"optimizer.name={config.name!r}: one of adamw, muon, lion, adafactor, sgd."
        )
    # `identity` keeps the tree of the state the same, so that a run can go on with clipping turned
    # off.
    clip = optax.identity()
    if config.clip_norm is not None:
        clip = optax.clip_by_global_norm(config.clip_norm)
    return optax.chain(
        clip,
        direction,
        optax.add_decayed_weights(config.weight_decay, decay_mask(config, param_axes)),
        optax.scale_by_learning_rate(learning_rate_schedule(config, steps)),
    )


def updates_done(opt_state) -> jax.Array:
    """How many updates the optimizer has applied: the argument of its schedule. Skipped updates do
    not count."""
    return optax.tree_utils.tree_get_all_with_path(opt_state, "count")[0][1]


def opt_state_shardings(opt_state, param_shapes, param_shardings, mesh: Mesh):
    """Shardings of an optimizer state (a tree of shapes), following the parameters.

    A copy of the parameters inside the state (a moment, an average) is recognised by the path of
    each leaf, which ends in the parameter's own. A factored moment of adafactor lacks one axis of
    its parameter and keeps the sharding of the others. Counters and tables that belong to no
    parameter are replicated.
    """
    shapes = jax.tree_util.tree_flatten_with_path(param_shapes)[0]
    shardings = jax.tree.leaves(param_shardings)
    parameters = {path: (leaf, sharding) for (path, leaf), sharding in zip(shapes, shardings)}

    def place(path, leaf):
        for start in range(len(path)):
            if path[start:] in parameters:
                parameter, sharding = parameters[path[start:]]
                field = getattr(path[start - 1], "name", "") if start else ""
                return _follow(path, field, leaf.shape, parameter.shape, sharding, mesh)
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(place, opt_state)


def _follow(path, field, shape, parameter_shape, sharding, mesh) -> NamedSharding:
    """The sharding of a state leaf of `shape` that belongs to a parameter."""
    if shape == parameter_shape:
        return sharding
    if shape in ((), (1,)):  # adafactor's place holders
        return replicated(mesh)
    if field in ("v_row", "v_col"):
        # As in optax: v_row averages over the largest axis, v_col over the second largest.
        axis = int(np.argsort(parameter_shape)[-1 if field == "v_row" else -2])
        if shape == (*parameter_shape[:axis], *parameter_shape[axis + 1 :]):
            spec = (*sharding.spec, *(None,) * (len(parameter_shape) - len(sharding.spec)))
            return NamedSharding(mesh, PartitionSpec(*spec[:axis], *spec[axis + 1 :]))
    raise UserError(
        f"Optimizer state {path_name(path)} has shape {shape}, its parameter {parameter_shape}: "
        "no rule says how to shard it. Add one to train.optim.opt_state_shardings."
    )
