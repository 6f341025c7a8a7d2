# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Checkpoints: what is saved comes back, on any mesh; what is damaged or foreign is one clear
error."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from tiny import random_batch, tiny_experiment

import jaxmodels
from train.checkpoint import (
    MANIFEST,
    Checkpoints,
    check_resumable,
    check_same_data,
    find_checkpoint,
    load,
    make_meta,
    read_meta,
)
from train.errors import UserError
from train.experiment import CheckpointConfig, MeshConfig, OptimizerConfig
from train.mesh import make_mesh, to_global
from train.serialize import differences, from_json, to_json
from train.step import make_trainer


@functools.cache
def trainer(cube=False, optimizer="adamw", ema=0.9):
    config = MeshConfig(data=2, fsdp=2, tensor=2) if cube else MeshConfig()
    experiment = tiny_experiment(
        mesh=config, ema_decay=ema, optimizer=OptimizerConfig(name=optimizer, warmup_steps=2)
    )
    mesh = make_mesh(config, None if cube else jax.devices()[:1])
    return experiment, make_trainer(experiment, jaxmodels.build(experiment.model), mesh)


def save(folder, state, experiment, losses, config=None):
    """Saves the state once for every {step: validation loss or None}."""
    checkpoints = Checkpoints(folder, config or CheckpointConfig())
    for step, loss in losses.items():
        validation = None if loss is None else {"loss": loss}
        assert checkpoints.save(step, state, make_meta(experiment, step, "data", validation))
    checkpoints.close()


def equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), got, want
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, experiment, state) of a checkpoint written on the 8-device mesh; read only."""
    folder = tmp_path_factory.mktemp("saved")
    experiment, built = trainer(cube=True)
    state = built.init(jax.random.key(0))
    save(folder, state, experiment, {10: 2.0, 20: 1.0, 30: None}, CheckpointConfig(keep_last=3))
    return folder, experiment, state


@pytest.fixture
def copied(saved, tmp_path):
    """A copy of `saved` that a test may damage."""
    import shutil

    shutil.copytree(saved[0], tmp_path / "run")
    return tmp_path / "run", saved[1], saved[2]


@pytest.mark.parametrize("cube", [True, False])
def test_a_state_comes_back_bit_for_bit_in_our_shardings(saved, cube):
    folder, _, state = saved
    _, built = trainer(cube=cube)
    checkpoints = Checkpoints(folder, CheckpointConfig())
    restored = checkpoints.restore(20, built.shapes)
    checkpoints.close()
    equal(restored, state)
    jax.tree.map(
        lambda leaf, want: leaf.sharding.is_equivalent_to(want, leaf.ndim) or pytest.fail("moved"),
        restored,
        built.shardings,
    )


@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_states_with_empty_and_factored_parts_come_back(tmp_path, optimizer):
    experiment, built = trainer(optimizer=optimizer, ema=None)
    state = built.init(jax.random.key(0))
    save(tmp_path, state, experiment, {3: None})
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    equal(checkpoints.restore(3, built.shapes), state)
    checkpoints.close()


def test_saving_in_the_background_keeps_the_values_of_its_step(tmp_path):
    """The state is donated to the next step while its copy is still being written."""
    experiment, built = trainer()
    state = built.init(jax.random.key(0))
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=10))
    wanted = {}
    for step in range(4):
        wanted[step] = jax.tree.map(np.array, state)
        checkpoints.save(step, state, make_meta(experiment, step, "data", None))
        state, _ = built.step(state, to_global(random_batch(step), built.batch_sharding, 8))
    checkpoints.wait()
    for step in range(4):
        equal(checkpoints.restore(step, built.shapes), wanted[step])
    assert not checkpoints.save(3, state, make_meta(experiment, 3, "data", None)), "overwrote"
    checkpoints.close()


@pytest.mark.parametrize(
    "keep_last, keep_best, kept",
    [(1, 0, [60]), (2, 0, [50, 60]), (1, 1, [20, 60]), (2, 2, [20, 40, 50, 60])],
)
def test_the_last_and_the_best_are_kept(tmp_path, keep_last, keep_best, kept):
    experiment, built = trainer(ema=None)
    state = built.init(jax.random.key(0))
    config = CheckpointConfig(keep_last=keep_last, keep_best=keep_best)
    save(tmp_path, state, experiment, {10: 2.0, 20: 1.0, 30: None}, config)
    # A second program goes on: it must know the losses of the first.
    save(tmp_path, state, experiment, {40: 1.5, 50: 3.0, 60: None}, config)
    checkpoints = Checkpoints(tmp_path, config)
    assert checkpoints.steps() == kept
    checkpoints.close()


def test_loading_for_use_needs_neither_mesh_nor_optimizer(saved):
    folder, experiment, state = saved
    loaded = load(folder)
    assert loaded.step == 30 and loaded.experiment == experiment
    equal(loaded.params, state["ema"])
    devices = {leaf.sharding for leaf in jax.tree.leaves(loaded.params)}
    assert all(len(sharding.device_set) == 1 for sharding in devices)
    assert load(folder, step="best").step == 20
    assert load(folder / "checkpoints" / "10").step == 10
    spread = load(folder, step=10, mesh=make_mesh(MeshConfig(fsdp=8)))
    assert len(jax.tree.leaves(spread.params)[0].sharding.device_set) == 8


def test_a_checkpoint_says_what_it_is(saved):
    folder, experiment, _ = saved
    meta = read_meta(folder / "checkpoints" / "10")
    assert meta["step"] == 10 and meta["seed"] == 0 and meta["data_fingerprint"] == "data"
    assert meta["validation"] == {"loss": 2.0}
    assert from_json(meta["experiment"]) == experiment
    assert meta["versions"]["jax"] == jax.__version__
    assert len(meta["model_fingerprint"]) == 64


def largest(folder):
    return max((f for f in folder.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)


def test_a_truncated_file_is_named_and_so_is_the_way_out(copied):
    folder, _, _ = copied
    _, built = trainer(cube=True)
    file = largest(folder / "checkpoints" / "30" / "training")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    checkpoints = Checkpoints(folder, CheckpointConfig())
    with pytest.raises(UserError) as caught:
        checkpoints.restore(30, built.shapes)
    for part in (
        str(folder / "checkpoints" / "30"),
        file.name,
        "go on from step 20",
        "--directory",
    ):
        assert part in str(caught.value)
    checkpoints.restore(20, built.shapes)
    checkpoints.close()


def test_a_missing_file_is_named(copied):
    folder, _, _ = copied
    file = folder / "checkpoints" / "30" / "ema" / "_METADATA"
    file.unlink()
    with pytest.raises(UserError, match="ema/_METADATA is missing"):
        load(folder)


def test_damage_that_keeps_the_sizes_is_an_error_too(copied, capfd):
    folder, _, _ = copied
    file = largest(folder / "checkpoints" / "30" / "ema")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match=f"the contents of .*{file.name} changed"):
        load(folder)
    assert capfd.readouterr().err == ""


def test_a_checkpoint_without_its_list_of_files_is_still_read(copied):
    """As when the program was killed between the last file and the list."""
    folder, _, state = copied
    (folder / "checkpoints" / "30" / MANIFEST).unlink()
    equal(load(folder).params, state["ema"])
    (folder / "checkpoints" / "20" / MANIFEST).write_text("3")
    with pytest.raises(UserError, match=f"{MANIFEST} cannot be read"):
        load(folder, step=20)


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 99}'])
def test_meta_data_that_cannot_be_read(copied, text):
    folder, _, _ = copied
    checkpoint = folder / "checkpoints" / "30"
    (checkpoint / MANIFEST).unlink()
    (checkpoint / "meta" / "metadata").write_text(text)
    with pytest.raises(UserError, match=r"30 (is truncated or damaged|has format 99)"):
        load(folder)


def test_finding_what_is_not_there(saved, tmp_path):
    with pytest.raises(UserError, match="There is no folder"):
        find_checkpoint(tmp_path / "nothing")
    with pytest.raises(UserError, match="There is no checkpoint in"):
        find_checkpoint(tmp_path)
    with pytest.raises(UserError, match=r"no checkpoint of step 7; it has \[10, 20, 30\]"):
        find_checkpoint(saved[0], 7)


def test_a_run_may_go_on_with_another_rate_but_not_with_another_model():
    experiment = tiny_experiment()
    meta = make_meta(experiment, 5, "data", None)
    change = lambda **changes: check_resumable(meta, tiny_experiment(**changes), "CK")
    assert change() == {}
    assert change(optimizer={"learning_rate": 1.0}) == {"optimizer.learning_rate": (3e-3, 1.0)}
    assert change(steps=50, mesh={"tensor": 2}) == {"steps": (20, 50), "mesh.tensor": (1, 2)}
    assert change(model={"remat": "full", "dtype": "bfloat16"}).keys() == {
        "model.remat",
        "model.dtype",
    }
    for changes, named in [
        (dict(model={"num_layers": 3}), "another model: model.num_layers was 2, now 3"),
        (dict(mixer="ttt"), "another model: model.mixer.type was"),
        (dict(seed=1), "seed was 0, now 1"),
        (dict(batch_size=4), "batch_size was 8, now 4"),
        (dict(optimizer={"name": "lion"}), "optimizer.name was 'adamw', now 'lion'"),
        (dict(ema_decay=0.9), "ema_decay was None, now 0.9"),
    ]:
        with pytest.raises(UserError, match=named) as caught:
            change(**changes)
        assert "CK" in str(caught.value) and "--directory" in str(caught.value)
    with pytest.raises(UserError, match="trained on other data"):
        check_same_data(meta, "other", "CK")


def test_configs_survive_json():
    for mixer in ("attention", "ttt"):
        experiment = tiny_experiment(mixer, data={"train_weights": (0.5, 0.25)})
        assert from_json(json.loads(json.dumps(to_json(experiment)))) == experiment


@pytest.mark.parametrize(
    "edit, named",
    [
        ({"type": "os.system"}, "'os.system' is not in jaxmodels"),
        ({"type": "train.serialize.to_json"}, "not a config dataclass"),
        ({"type": "train.experiment.Nothing"}, "does not exist in this version"),
        ({"type": None}, "None is not in"),
        ({"stepz": 3}, "no field 'stepz'; did you mean 'steps'"),
        ({"steps": 0}, "steps=0 must be at least 1"),
    ],
)
def test_a_config_file_can_only_make_our_configs(edit, named):
    data = to_json(tiny_experiment()) | edit
    with pytest.raises(UserError, match=named):
        from_json(data)


def test_a_config_value_that_would_not_come_back_is_refused():
    @dataclasses.dataclass
    class Odd:
        value: object

    with pytest.raises(UserError, match="type list"):
        to_json(Odd([1]))


def test_differences_name_nested_fields():
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3, "d": 4}}) == {
        "a.c": (2, 3),
        "a.d": (None, 4),
    }
