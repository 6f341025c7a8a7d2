# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""`jaxmodels convert` from end to end: every kind in and out, and one message per mistake."""

import json
import pathlib
import pickle
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import tiny_model, write_text

import jaxmodels
import train.convert
from jaxmodels import ttt
from jaxmodels.ttt import official, stream
from train.checkpoint import load
from train.cli import main
from train.convert import read_source

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens" / "ttt"
STREAM = GOLDENS / "jax_streaming_train_state_linear_bf16.msgpack"


def convert(capsys, *args, code=0):
    """Runs the command; what it printed (on stderr, where it must fail)."""
    assert main(["convert", *map(str, args)]) == code
    streams = capsys.readouterr()
    assert "Traceback" not in streams.err
    return streams.err if code else streams.out


@pytest.fixture
def released(golden, tmp_path):
    """A folder like a released checkpoint, and its config in JSON."""
    folder = tmp_path / "released"
    folder.mkdir()
    shutil.copy(STREAM, folder / "streaming_train_state")
    (folder / "metadata.pkl").write_bytes(pickle.dumps({"step": 1}))
    config = tmp_path / "official.json"
    config.write_text(str(golden("ttt/jax_checkpoint_linear_bf16")["config"]))
    return folder, config


@pytest.fixture
def pytorch(golden, tmp_path):
    """An official PyTorch model: float32, on disk as transformers saves it."""
    file = golden("ttt/pt_model_mlp_mamba")
    folder = tmp_path / "official"
    folder.mkdir()
    weights = {k.removeprefix("param/"): v for k, v in file.items() if k.startswith("param/")}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(str(file["config"]))
    np.savez(tmp_path / "reference.npz", tokens=file["in/input_ids"], logits=file["out/logits"])
    return folder


def test_every_kind_in_and_out_and_back_to_the_released_bytes(released, golden, tmp_path, capsys):
    file = golden("ttt/jax_checkpoint_linear_bf16")
    reference = tmp_path / "reference.npz"
    np.savez(reference, tokens=file["in/input_tokens"], logits=file["out/logits"])
    folder, config = released
    out = convert(
        capsys, folder, "--config", config, "--output", tmp_path / "a", "--format", "pytorch",
        "--check", "--reference", reference,
    )  # fmt: skip
    assert "flax-stream, 5,972 parameters" in out and "every value kept" in out
    assert "equal to the input bit for bit" in out
    assert "largest difference 0.00e+00, KL 0.00e+00" in out
    apart = re.search(r"reference: .* largest difference (\S+), KL (\S+) nats", out)
    assert float(apart[1]) < 2e-5 and abs(float(apart[2])) < 1e-7
    weights = load_file(tmp_path / "a" / "model.safetensors")
    assert weights["model.layers.0.conv.conv.weight"].shape == (16, 1, 4)

    for source, target, kind in (
        ("a", "b", "safetensors"),
        ("b", "c", "checkpoint"),
        ("c", "d", "flax-stream"),
    ):
        options = ["--tokenizer", "bytes"] if kind == "checkpoint" else []
        options += ["--dtype", "bfloat16"] if kind == "flax-stream" else []
        out = convert(
            capsys, tmp_path / source, "--output", tmp_path / target, "--format", kind, *options
        )
        assert f"{kind}, every value kept" in out
    official_config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert official_config["seq_modeling_block"] == "ttt_linear"
    written = list(stream.read_records(tmp_path / "d" / "streaming_train_state"))
    wanted = list(stream.read_records(STREAM))
    assert [key for key, _ in written] == [key for key, _ in wanted]
    for (key, got), (_, want) in zip(written, wanted, strict=True):
        assert got.dtype == want.dtype and got.tobytes() == want.tobytes(), key
    assert {item.name for item in tmp_path.iterdir() if item.is_dir()} == {*"abcd", "released"}


def test_rounding_is_said_and_measured(pytorch, tmp_path, capsys):
    out = convert(
        capsys, pytorch, "--output", tmp_path / "half", "--format", "pytorch",
        "--dtype", "bfloat16", "--check", "--reference", tmp_path / "reference.npz",
    )  # fmt: skip
    rounded = re.search(r"([\d,]+) values rounded to bfloat16", out)
    assert int(rounded[1].replace(",", "")) > 1000
    assert "equal to the rounded values bit for bit" in out
    found = re.search(r"check: logits .* largest difference (\S+), KL (\S+) nats", out)
    assert 1e-4 < float(found[1]) < 1 and 0 < float(found[2]) < 0.1
    assert float(re.search(r"reference: .* largest difference (\S+),", out)[1]) < 2e-5
    for name, value in load_file(tmp_path / "half" / "model.safetensors").items():
        want = load_file(pytorch / "model.safetensors")[name].astype(jnp.bfloat16)
        assert value.dtype == jnp.bfloat16 and value.tobytes() == want.tobytes()


def test_a_model_spread_over_several_files(pytorch, tmp_path, capsys):
    weights = load_file(pytorch / "model.safetensors")
    (pytorch / "model.safetensors").unlink()
    names = sorted(weights)
    places = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for part in set(places.values()):
        save_file({n: weights[n] for n in names if places[n] == part}, pytorch / part)
    index = pytorch / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    convert(capsys, pytorch, "--output", tmp_path / "one", "--format", "pytorch")
    one = load_file(tmp_path / "one" / "model.safetensors")
    assert one.keys() == weights.keys()
    assert all(one[name].tobytes() == weights[name].tobytes() for name in names)

    index.write_text(json.dumps({"weight_map": places | {"x": "../reference.npz"}}))
    args = (pytorch, "--output", tmp_path / "two", "--format", "pytorch")
    assert "'../reference.npz', which is not a file beside" in convert(capsys, *args, code=2)


def test_a_converted_checkpoint_generates_and_evaluates(tmp_path, capsys):
    model = tiny_model(jaxmodels.TTTMLP(num_heads=2, backbone="mamba"))
    params = jax.device_get(model.init(jax.random.key(0)))
    folder = tmp_path / "official"
    folder.mkdir()
    stream.write_params(
        folder / "streaming_params", ttt.to_official(model.config, params, layout="flax")
    )
    fields = official.config_to_official(model.config, "flax")
    (folder / "config.json").write_text(json.dumps(fields))
    args = (folder, "--output", tmp_path / "run", "--format", "checkpoint")
    assert "--tokenizer" in convert(capsys, *args, code=2)
    convert(capsys, *args, "--tokenizer", "bytes", "--check")
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "run").params, params)
    for place in ("run/checkpoints", "run/checkpoints/0"):
        jax.tree.map(np.testing.assert_array_equal, read_source(tmp_path / place).params, params)

    checkpoint = ["--checkpoint", str(tmp_path / "run")]
    prompt = ["--prompt", "def f(x):", "--max-new-tokens", "6", "--temperature", "0"]
    assert main(["generate", *checkpoint, *prompt]) == 0
    want = jaxmodels.generate(model, params, [list(b"def f(x):")], max_new_tokens=6)[0].tolist()
    text = "def f(x):" + bytes(want).decode("utf-8", "replace")
    assert capsys.readouterr().out == text + "\n"
    data = write_text(tmp_path)
    args = ["--validation", data.validation[0], "--sequence-length", "64"]
    assert main(["evaluate", *checkpoint, *args, "--json"]) == 0
    assert 7.5 < json.loads(capsys.readouterr().out)["bits_per_byte"] < 8.5


def test_check_finds_what_came_back_otherwise(pytorch, tmp_path, capsys, monkeypatch):
    write = train.convert.write

    def write_and_damage(command, source, folder):
        rounded = write(command, source, folder)
        path = folder / "model.safetensors"
        weights = load_file(path)
        weights["model.norm.weight"][3] *= 1 + 1e-6
        save_file(weights, path)
        return rounded

    monkeypatch.setattr(train.convert, "write", write_and_damage)
    args = (pytorch, "--output", tmp_path / "out", "--format", "pytorch", "--check")
    assert "came back with other values: final_norm/scale." in convert(capsys, *args, code=2)


def test_another_model_differs_from_the_reference(pytorch, tmp_path, capsys):
    config = json.loads((pytorch / "config.json").read_text())
    (pytorch / "config.json").write_text(json.dumps(config | {"ttt_base_lr": 0.1}))
    args = ("--output", tmp_path / "out", "--format", "safetensors")
    reference = tmp_path / "reference.npz"
    err = convert(capsys, pytorch, *args, "--reference", reference, code=2)
    assert "more than --tolerance 0.001" in err and "KL" in err
    again = ("--overwrite", "--reference", reference, "--tolerance", "100")
    assert "reference: logits on 128 tokens" in convert(capsys, pytorch, *args, *again)


def test_nothing_is_overwritten_unasked(pytorch, tmp_path, capsys):
    output = tmp_path / "out"
    args = (pytorch, "--output", output, "--format", "safetensors")
    convert(capsys, *args)
    before = (output / "model.safetensors").stat().st_ino
    assert "exists: choose another --output, or give --overwrite" in convert(capsys, *args, code=2)
    assert (output / "model.safetensors").stat().st_ino == before
    convert(capsys, *args, "--overwrite")
    assert (output / "model.safetensors").stat().st_ino != before

    (output / "thesis.tex").write_text("years of work")
    err = convert(capsys, *args, "--overwrite", code=2)
    assert "not the output of an earlier conversion" in err
    assert (output / "thesis.tex").exists()
    args = (pytorch, "--output", pytorch, "--format", "pytorch", "--overwrite")
    assert "would be replaced" in convert(capsys, *args, code=2)
    assert {item.name for item in pytorch.iterdir()} == {"config.json", "model.safetensors"}


def test_a_failed_conversion_leaves_nothing(released, tmp_path, capsys):
    folder, config = released
    data = (folder / "streaming_train_state").read_bytes()
    (folder / "streaming_train_state").write_bytes(data[:12345])
    args = (folder, "--config", config, "--output", tmp_path / "out", "--format", "pytorch")
    err = convert(capsys, *args, code=2)
    assert "of 12345: the file ends inside it" in err
    assert {item.name for item in tmp_path.iterdir()} == {"released", "official.json"}


def test_inputs_that_are_none_are_named(released, pytorch, tmp_path, capsys):
    folder, config = released
    to = ("--output", tmp_path / "out", "--format", "pytorch")

    def err(*args):
        return convert(capsys, *args, *to, code=2)

    missing = err(folder)
    assert "no " in missing and "metadata.pkl is not read" in missing
    assert "--config the JSON file of the config" in missing and "ttt-mlp-1.3b" in missing
    assert "no such file" in err(folder, "--config", "ttt-linear-12m")
    wrong = err(folder, "--config", "ttt-linear-125m")
    assert "misshaped model.wte.embedding: (32, 16), not (32000, 768)" in wrong
    assert "missing model.h.11." in wrong
    assert "is not JSON" in err(folder, "--config", folder / "metadata.pkl")
    assert "there is no file or folder" in err(tmp_path / "nowhere")
    assert "is a pickle" in err(folder / "metadata.pkl", "--config", config)
    (tmp_path / "notes.txt").write_text("a note of some length")
    assert "neither a safetensors file nor" in err(tmp_path / "notes.txt", "--config", config)
    assert "expected one of model.safetensors" in err(tmp_path)
    path = pytorch / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "is not a complete safetensors file" in err(pytorch)
    shutil.copy(STREAM, pytorch / "streaming_params")
    assert "found model.safetensors and streaming_params" in err(pytorch)


def test_options_that_say_nothing_are_refused(pytorch, tmp_path, capsys):
    to = ("--output", tmp_path / "out", "--format")
    err = convert(capsys, pytorch, *to, "safetensors", "--dtype", "bfloat16", code=2)
    assert "--dtype bfloat16" in err
    err = convert(capsys, pytorch, *to, "pytorch", "--tokenizer", "bytes", code=2)
    assert "--tokenizer only" in err


def test_models_without_an_official_form(tmp_path, capsys):
    model = tiny_model("attention")
    folder = tmp_path / "ours"
    folder.mkdir()
    jaxmodels.checkpoints.save_params(
        folder / "model.safetensors", jax.device_get(model.init(jax.random.key(0)))
    )
    (folder / "config.json").write_text(json.dumps(train.serialize.to_json(model.config)))
    args = (folder, "--output", tmp_path / "out", "--format")
    assert "no names for Attention" in convert(capsys, *args, "pytorch", code=2)
    assert not (tmp_path / "out").exists()
    convert(capsys, *args, "checkpoint", "--tokenizer", "bytes")
    again = (tmp_path / "out", "--config", "ttt-linear-125m", "--output", tmp_path / "x")
    assert "knows its config" in convert(capsys, *again, "--format", "safetensors", code=2)


@pytest.mark.parametrize(
    "arrays, message",
    [
        (dict(tokens=np.zeros((1, 4), np.int32)), "has no 'logits'; it holds tokens"),
        (
            dict(tokens=np.zeros((1, 4), np.int32), logits=np.zeros((1, 4, 7))),
            "must be (B, T) integers and (B, T, 61)",
        ),
        (None, "is not an .npz of arrays"),
    ],
)
def test_wrong_references(pytorch, tmp_path, capsys, arrays, message):
    path = tmp_path / "other.npz"
    path.write_text("text") if arrays is None else np.savez(path, **arrays)
    args = ("--output", tmp_path / "out", "--format", "pytorch", "--reference", path)
    assert message in convert(capsys, pytorch, *args, code=2)


def test_help_says_what_is_read_and_written(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["convert", "--help"])
    assert stop.value.code == 0
    out = re.sub(r"[│\s]+", " ", capsys.readouterr().out)
    for text in (
        "--format {checkpoint,safetensors,pytorch,flax-stream}",
        "Read the output again, compare it bit for bit",
        "metadata.pkl of a released checkpoint is never read",
    ):
        assert text in out
