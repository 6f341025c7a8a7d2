# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The device mesh and the one table that maps logical axis names to its axes.

Models name the axes of their parameters and activations (`embed`, `heads`, `batch`, ...); `RULES`
says over which mesh axes each of them is split. Whatever the table cannot place evenly is an error:
nothing is replicated silently.
"""

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from train.errors import UserError
from train.experiment import MeshConfig

AXES = ("data", "fsdp", "tensor", "sequence", "expert")

RULES: dict[str, str | tuple[str, ...] | None] = {
    # Activations.
    "batch": ("data", "fsdp"),
    "sequence": "sequence",
    # Parameters and activations.
    "heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "expert": "expert",
    # Parameters.
    "embed": "fsdp",
    "head_dim": None,
    "layers": None,
    "inner": None,
}


def make_mesh(config: MeshConfig, devices=None) -> Mesh:
    """The mesh with the axes `data, fsdp, tensor, sequence, expert` over all devices.

    One size may be -1: it takes what the others leave. Raises UserError when the sizes do not use
    every device exactly, naming both numbers and a mesh that would fit.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = {axis: getattr(config, axis) for axis in AXES}
    for axis, size in sizes.items():
        if size != -1 and size < 1:
            raise UserError(f"mesh.{axis}={size}: a size is at least 1, or -1 for what is left.")
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise UserError(
            f"mesh.{free[0]} and mesh.{free[1]} are both -1: only one axis can take what is left. "
            f"Set one of them, e.g. --mesh.{free[1]} 1."
        )
    fixed = math.prod(size for size in sizes.values() if size != -1)
    count = len(devices)
    if free and count % fixed == 0:
        sizes[free[0]] = count // fixed
    if math.prod(sizes.values()) != count:
        shown = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size != 1) or "1"
        needs = f"a multiple of {fixed}" if free else f"{fixed}"
        raise UserError(
            f"The mesh ({shown}) needs {needs} devices, but {count} "
            f"{'is' if count == 1 else 'are'} here. This fits: {_fitting_mesh(sizes, count)}"
        )
    return jax.make_mesh(
        tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices
    )


def _fitting_mesh(sizes: dict[str, int], count: int) -> str:
    """Options of a mesh close to `sizes` that uses `count` devices exactly."""
    fitting, left = {}, count
    # The model-parallel sizes are the ones that a user chose for memory; data parallelism gives way
    # first.
    for axis in ("tensor", "expert", "sequence", "fsdp"):
        fitting[axis] = math.gcd(max(sizes[axis], 1), left)
        left //= fitting[axis]
    fitting["data"] = left
    return " ".join(
        f"--mesh.{axis} {fitting[axis]}" for axis in AXES if fitting[axis] != 1 or sizes[axis] != 1
    )


def partition_spec(axes, shape, mesh: Mesh, where: str) -> PartitionSpec:
    """The partition of an array of `shape` whose dimensions have the logical names `axes`.

    Raises UserError, naming `where`, for a name that is not in the table, for two names on one mesh
    axis, and for a dimension that its mesh axes do not divide.
    """
    if len(axes) != len(shape):
        raise UserError(f"{where} has shape {tuple(shape)} but {len(axes)} axis names {axes}.")
    used: dict[str, str] = {}
    entries: list[str | tuple[str, ...] | None] = []
    for dimension, (name, size) in enumerate(zip(axes, shape)):
        if name is None:
            entries.append(None)
            continue
        if name not in RULES:
            raise UserError(
                f"{where}, dimension {dimension}: no sharding rule for the axis name {name!r}. "
                f"Known names: {', '.join(sorted(RULES))}; add it to train.mesh.RULES."
            )
        entry = RULES[name]
        mesh_axes = (entry,) if isinstance(entry, str) else (entry or ())
        for axis in mesh_axes:
            if axis in used:
                raise UserError(
                    f"{where}: its axes {used[axis]!r} and {name!r} both map to the mesh axis "
                    f"{axis!r}. One array can use a mesh axis once: rename one of the two in the "
                    "module's axis names."
                )
            used[axis] = name
        parts = math.prod(mesh.shape[axis] for axis in mesh_axes)
        if size % parts:
            raise UserError(
                f"{where}, dimension {dimension} ({name!r}) has size {size}, which the mesh axis "
                f"{' x '.join(mesh_axes)} of size {parts} does not divide. Change that size to a "
                f"multiple of {parts}, or set --mesh.{mesh_axes[-1]} to a divisor of {size}."
            )
        entries.append(entry)
    return PartitionSpec(*entries)


def path_name(path) -> str:
    """`blocks/mixer/w` of a pytree key path."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def param_shardings(model, mesh: Mesh):
    """The sharding of every parameter, as a tree like `model.param_shapes`.

    Raises UserError naming the parameter, its dimension, the mesh axis and the remedy (see
    `partition_spec`).
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf, axes: NamedSharding(
            mesh, partition_spec(axes, leaf.shape, mesh, f"Parameter {path_name(path)}")
        ),
        model.param_shapes,
        model.param_axes,
    )


def check_axes_used(model, mesh: Mesh) -> None:
    """UserError if the mesh splits by something the model does not have, e.g. experts.

    The devices along such an axis would all do the same work.
    """
    names = {n for axes in jax.tree.leaves(model.param_axes, is_leaf=_is_axes) for n in axes}
    used = {RULES[name] for name in names if name is not None}
    for axis in ("tensor", "expert"):
        if mesh.shape[axis] > 1 and axis not in used:
            raise UserError(
                f"mesh.{axis}={mesh.shape[axis]}, but no parameter of this model is split along "
                f"{axis!r}: those devices would repeat each other's work. Use --mesh.{axis} 1."
            )


def _is_axes(x) -> bool:
    return isinstance(x, tuple)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of scalars and tables that every device holds."""
    return NamedSharding(mesh, PartitionSpec())


def batch_parts(mesh: Mesh) -> int:
    """Into how many parts the rows of a batch are split."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def batch_sharding(mesh: Mesh, rows: int, sequence_length: int, what: str) -> NamedSharding:
    """The sharding of a (B, T) array of a batch; UserError where it does not divide.

    `what` names the setting that determines `rows`, e.g. "batch_size=8".
    """
    parts = batch_parts(mesh)
    if rows % parts:
        raise UserError(
            f"{what} gives {rows} rows, which the mesh axes data x fsdp of size {parts} do not "
            f"divide. Use a multiple of {parts} rows (e.g. {-(-rows // parts) * parts}), or a "
            "smaller --mesh.data or --mesh.fsdp."
        )
    if sequence_length % mesh.shape["sequence"]:
        raise UserError(
            f"sequence_length={sequence_length} is not divided by the mesh axis sequence of size "
            f"{mesh.shape['sequence']}. Use a multiple of it, or --mesh.sequence 1."
        )
    return NamedSharding(mesh, PartitionSpec(RULES["batch"], RULES["sequence"]))


def local_rows(sharding: NamedSharding, shape, devices=None) -> tuple[int, int]:
    """Rows [start, stop) of a global (B, T) batch that `devices` hold (default: this process's)."""
    index_map = sharding.devices_indices_map(tuple(shape))
    devices = sharding.addressable_devices if devices is None else devices
    spans = [index_map[device][0].indices(shape[0])[:2] for device in devices]
    return min(start for start, _ in spans), max(stop for _, stop in spans)


def local_part(local: np.ndarray, index, rows: int, first_row: int) -> np.ndarray:
    """The shard `index` of a global array of `rows` rows, cut from `local`, its rows from
    `first_row` on."""
    start, stop, _ = index[0].indices(rows)
    return local[(slice(start - first_row, stop - first_row), *index[1:])]


def to_global(batch: dict, sharding: NamedSharding, rows: int, first_row: int = 0) -> dict:
    """Global arrays of `rows` rows from this process's numpy rows, of which the first is
    `first_row`."""

    def place(local):
        return jax.make_array_from_callback(
            (rows, *local.shape[1:]),
            sharding,
            lambda index: local_part(local, index, rows, first_row),
        )

    return {name: place(value) for name, value in batch.items()}


def describe(mesh: Mesh) -> str:
    """`data 2 x fsdp 4`, the axes larger than 1."""
    return (
        " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "1 device"
    )
