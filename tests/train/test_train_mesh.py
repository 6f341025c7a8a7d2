# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The mesh and the table of logical names: what fits, and one clear error for whatever does not."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tiny import tiny_model

import jaxmodels
from train.errors import UserError
from train.experiment import MeshConfig
from train.mesh import (
    AXES,
    batch_sharding,
    local_part,
    local_rows,
    make_mesh,
    param_shardings,
    partition_spec,
    to_global,
)

CUBE = MeshConfig(data=2, fsdp=2, tensor=2)


def test_every_axis_is_always_present_and_one_takes_what_is_left():
    mesh = make_mesh(MeshConfig(fsdp=4))
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == {"data": 2, "fsdp": 4, "tensor": 1, "sequence": 1, "expert": 1}
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert make_mesh(MeshConfig(data=1, sequence=-1)).shape["sequence"] == 8
    assert make_mesh(MeshConfig(), jax.devices()[:1]).size == 1


@pytest.mark.parametrize(
    "config, named",
    [
        (MeshConfig(data=3), "needs 3 devices, but 8 are here"),
        (MeshConfig(data=4, fsdp=4), "needs 16 devices, but 8 are here"),
        (MeshConfig(tensor=3), "needs a multiple of 3 devices, but 8 are here"),
        (MeshConfig(data=1, fsdp=2, tensor=6), "needs 12 devices"),
    ],
)
def test_a_mesh_that_misses_the_device_count_is_told_one_that_fits(config, named):
    with pytest.raises(UserError, match=named) as caught:
        make_mesh(config)
    options = re.findall(r"--mesh\.(\w+) (-?\d+)", str(caught.value).split("This fits: ")[1])
    proposed = MeshConfig(**{"data": 1} | {name: int(size) for name, size in options})
    assert make_mesh(proposed).size == 8


@pytest.mark.parametrize(
    "config, named",
    [
        (MeshConfig(fsdp=-1), "mesh.data and mesh.fsdp are both -1"),
        (MeshConfig(tensor=0), "mesh.tensor=0"),
        (MeshConfig(expert=-2), "mesh.expert=-2"),
    ],
)
def test_impossible_sizes(config, named):
    with pytest.raises(UserError, match=re.escape(named)):
        make_mesh(config)


@pytest.mark.parametrize(
    "axes, shape, named",
    [
        (("embed", "wings"), (32, 4), ["block/w", "dimension 1", "'wings'", "RULES"]),
        (("mlp", "heads"), (64, 2), ["block/w", "'mlp'", "'heads'", "'tensor'"]),
        (("batch", "embed"), (8, 32), ["block/w", "'batch'", "'embed'", "'fsdp'"]),
        (("embed", "mlp"), (32, 65), ["block/w", "dimension 1", "'mlp'", "65", "tensor", "2"]),
        (("embed", "mlp"), (31, 64), ["block/w", "dimension 0", "'embed'", "31", "fsdp", "2"]),
        (("embed",), (32, 64), ["block/w", "(32, 64)", "1 axis names"]),
    ],
)
def test_what_the_table_cannot_place_is_an_error(axes, shape, named):
    with pytest.raises(UserError) as caught:
        partition_spec(axes, shape, make_mesh(CUBE), "block/w")
    for part in named:
        assert part in str(caught.value)


def test_conflicting_names_are_an_error_even_where_the_axis_has_size_1():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with pytest.raises(UserError, match="both map to the mesh axis 'tensor'"):
        partition_spec(("mlp", "vocab"), (64, 256), mesh, "w")


def test_parameters_follow_the_table():
    model = tiny_model("attention")
    mesh = make_mesh(CUBE)
    shardings = param_shardings(model, mesh)
    assert jax.tree.structure(shardings) == jax.tree.structure(model.param_shapes)
    expected = {
        ("inputs", "embedding"): P("tensor", "fsdp"),
        ("blocks", "mixer", "wq"): P(None, "fsdp", "tensor", None),
        ("blocks", "mixer", "wo"): P(None, "tensor", None, "fsdp"),
        ("blocks", "channel", "w_down"): P(None, "tensor", "fsdp"),
        ("final_norm", "scale"): P(None),
    }
    for path, spec in expected.items():
        leaf = shardings
        for key in path:
            leaf = leaf[key]
        assert leaf == NamedSharding(mesh, spec), path


def test_a_model_that_does_not_divide_names_the_parameter():
    with pytest.raises(UserError) as caught:
        param_shardings(tiny_model("attention", vocab_size=255), make_mesh(CUBE))
    for part in ("inputs/embedding", "dimension 0", "'vocab'", "255", "tensor", "multiple of 2"):
        assert part in str(caught.value)
    one_head = jaxmodels.Attention(num_heads=1)
    with pytest.raises(UserError, match=r"blocks/mixer/w[kvqo].*'heads'"):
        param_shardings(tiny_model(one_head), make_mesh(CUBE))


def test_a_batch_that_does_not_divide_is_an_error():
    mesh = make_mesh(CUBE)
    with pytest.raises(UserError, match=r"batch_size=6 gives 6 rows.*size 4.*e.g. 8"):
        batch_sharding(mesh, 6, 64, "batch_size=6")
    with pytest.raises(UserError, match="sequence_length=63"):
        batch_sharding(make_mesh(MeshConfig(sequence=2)), 8, 63, "batch_size=8")


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "config", [CUBE, MeshConfig(), MeshConfig(data=2, sequence=4), MeshConfig(data=1, tensor=8)]
)
def test_every_process_reads_only_its_rows_and_together_they_are_the_batch(config, processes):
    """Devices dealt to pretended processes: each builds its shards from its own rows alone."""
    rows, length = 8, 16
    mesh = make_mesh(config)
    sharding = batch_sharding(mesh, rows, length, "batch_size=8")
    batch = np.arange(rows * length, dtype=np.int32).reshape(rows, length)
    devices = list(mesh.devices.flat)
    share = len(devices) // processes
    index_map = sharding.devices_indices_map(batch.shape)
    seen = np.zeros_like(batch)
    for process in range(processes):
        mine = devices[process * share : (process + 1) * share]
        start, stop = local_rows(sharding, batch.shape, mine)
        local = batch[start:stop]  # what data.iterate(first, start, stop) would give
        for device in mine:
            index = index_map[device]
            part = local_part(local, index, rows, start)
            np.testing.assert_array_equal(part, batch[index])
            seen[index] += 1
        needed = {r for device in mine for r in range(*index_map[device][0].indices(rows))}
        assert needed == set(range(start, stop)), "reads rows that no device of it holds"
    assert (seen > 0).all()


def test_to_global_puts_the_rows_where_they_belong():
    mesh = make_mesh(CUBE)
    sharding = batch_sharding(mesh, 8, 16, "batch_size=8")
    batch = np.random.default_rng(0).integers(0, 9, (8, 16))
    array = to_global({"tokens": batch}, sharding, 8)["tokens"]
    assert array.sharding == sharding
    np.testing.assert_array_equal(np.asarray(array), batch)
