# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Names, configs and files of the two official TTT codes: exact both ways, and wrong ones refused
with the place."""

import dataclasses
import json
import pathlib
import pickle
import tracemalloc

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from flax.serialization import msgpack_serialize
from flax.traverse_util import unflatten_dict
from measure import max_abs

import jaxmodels
from jaxmodels import ttt
from jaxmodels.ttt import official, stream

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens" / "ttt"
STREAM = GOLDENS / "jax_streaming_train_state_linear_bf16.msgpack"
PYTORCH = [
    f"pt_model_{kind}_{backbone}" for kind in ("linear", "mlp") for backbone in ("tf", "mamba")
]
FLAX = [
    f"jax_model_{kind}_{backbone}" for kind in ("linear", "mlp") for backbone in ("base", "mamba")
]
BLOCK = "model.layers.1.seq_modeling_block"


def load(file):
    weights = {k.removeprefix("param/"): v for k, v in file.items() if k.startswith("param/")}
    return json.loads(str(file["config"])), weights


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype and got[name].shape == value.shape, name
        assert got[name].tobytes() == value.tobytes(), name


@pytest.mark.parametrize("name", PYTORCH + FLAX)
def test_names_round_trip_bit_for_bit(golden, name):
    official_config, weights = load(golden(f"ttt/{name}"))
    config, params = ttt.from_official(official_config, weights)
    layout, other = ("pytorch", "flax") if name in PYTORCH else ("flax", "pytorch")
    assert_equal(ttt.to_official(config, params, layout), weights)

    again = official.config_to_official(config, other)
    config_again, params_again = ttt.from_official(again, ttt.to_official(config, params, other))
    assert config_again == config
    assert_equal(ttt.to_official(config_again, params_again, layout), weights)


def test_flax_weights_may_be_nested(golden):
    official_config, weights = load(golden("ttt/jax_model_mlp_mamba"))
    nested = unflatten_dict({("params", *name.split(".")): x for name, x in weights.items()})
    config, params = ttt.from_official(official_config, nested)
    assert_equal(ttt.to_official(config, params, "flax"), weights)


@pytest.mark.parametrize("layout", ["pytorch", "flax"])
def test_untied_head(layout):
    config = ttt.ttt_mlp(
        d_model=8,
        num_layers=2,
        num_heads=2,
        d_ff=12,
        vocab_size=11,
        dtype="float32",
        head=jaxmodels.LMHead(tied=False),
    )
    params = jax.device_get(jaxmodels.build(config).init(jax.random.key(0)))
    weights = ttt.to_official(config, params, layout)
    name, shape = {"pytorch": ("lm_head.weight", (11, 8)), "flax": ("lm_head.kernel", (8, 11))}[
        layout
    ]
    assert weights[name].shape == shape
    fields = official.config_to_official(config, layout)
    assert fields["tie_word_embeddings"] is False
    config_again, params_again = ttt.from_official(fields, weights)
    assert config_again == config
    jax.tree.map(np.testing.assert_array_equal, params_again, params)


@pytest.mark.parametrize("name", ["ttt-linear-125m", "ttt-mlp-760m", "ttt-mlp-125m-transformer"])
def test_tables_hold_every_parameter_of_the_presets(name):
    model = jaxmodels.build(jaxmodels.PRESETS[name])
    for layout in ("pytorch", "flax"):
        table = official.weight_table(model.config, layout)
        assert sum(np.prod(row.official_shape) for row in table) == model.num_params
        fields = official.config_to_official(model.config, layout)
        config = official.config_from_official(fields, dtype=model.config.dtype)
        assert config == model.config


def test_bfloat16_is_widened_exactly(golden):
    official_config, weights = load(golden("ttt/pt_model_linear_mamba"))
    half = {name: x.astype(jnp.bfloat16) for name, x in weights.items()}
    config, params = ttt.from_official(official_config, half)
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(params))
    back = {name: x.astype(jnp.bfloat16) for name, x in ttt.to_official(config, params).items()}
    assert_equal(back, half)


def test_a_tied_matrix_may_be_listed_twice(golden):
    official_config, weights = load(golden("ttt/pt_model_linear_tf"))
    twice = weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}
    config, params = ttt.from_official(official_config, twice)
    assert_equal(ttt.to_official(config, params), weights)
    twice["lm_head.weight"] = twice["lm_head.weight"] + 1
    with pytest.raises(ValueError, match="tie_word_embeddings to false"):
        ttt.from_official(official_config, twice)


def test_wrong_weights_are_listed_together(golden):
    official_config, weights = load(golden("ttt/pt_model_linear_tf"))
    del weights["model.norm.weight"]
    weights["model.extra"] = np.zeros(3, np.float32)
    weights[f"{BLOCK}.W1"] = np.zeros((3, 16, 8), np.float32)
    weights[f"{BLOCK}.b1"] = np.zeros((3, 1, 16), np.float64)
    with pytest.raises(ValueError) as error:
        ttt.from_official(official_config, weights)
    lines = str(error.value).splitlines()
    assert "4 faults" in lines[0]
    assert {line.strip() for line in lines[1:]} == {
        "missing model.norm.weight",
        "surplus model.extra",
        f"misshaped {BLOCK}.W1: (3, 16, 8), not (3, 16, 16)",
        f"inexact {BLOCK}.b1: float64 does not fit float32",
    }


def test_missing_flax_names_are_listed_as_flax_names(golden):
    official_config, weights = load(golden("ttt/jax_model_linear_base"))
    del weights["model.wte.embedding"]
    with pytest.raises(ValueError, match=r"1 faults\):\s+missing model.wte.embedding$"):
        ttt.from_official(official_config, weights)


@pytest.mark.parametrize(
    "golden_name, changes, message",
    [
        ("pt_model_linear_tf", {"use_gate": True}, "share_qk=False with use_gate=True"),
        ("pt_model_linear_mamba", {"use_gate": False}, "share_qk=True with use_gate=False"),
        ("pt_model_linear_tf", {"ttt_layer_type": "conv"}, "ttt_layer_type='conv'"),
        ("pt_model_linear_tf", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("pt_model_linear_tf", {"num_attention_heads": 5}, "not a multiple of num_heads=5"),
        ("jax_model_mlp_base", {"seq_modeling_block": "self_attention"}, "'self_attention'"),
    ],
)
def test_options_without_a_counterpart_are_refused(golden, golden_name, changes, message):
    official_config, _ = load(golden(f"ttt/{golden_name}"))
    with pytest.raises(ValueError, match=message):
        official.config_from_official(official_config | changes)


def test_what_a_config_leaves_out():
    sizes = dict(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    pytorch = official.config_from_official(sizes | {"ttt_layer_type": "mlp"})
    assert pytorch.mixer == jaxmodels.TTTMLP(num_heads=2, base_lr=1.0)
    assert pytorch.pre_conv is None and pytorch.head.tied
    flax = official.config_from_official(sizes | {"seq_modeling_block": "ttt_mlp_base"})
    assert flax.mixer == jaxmodels.TTTMLP(num_heads=2, base_lr=1.0)
    assert flax.pre_conv == jaxmodels.CausalConv(width=4) and not flax.head.tied
    with pytest.raises(ValueError, match="lacks 'hidden_size'"):
        official.config_from_official({"vocab_size": 8})


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(norm_placement="post"), "norm_placement='post'"),
        (dict(norm=jaxmodels.LayerNorm()), "no names for LayerNorm"),
        (dict(channel=jaxmodels.GeluMLP(d_ff=8)), "no names for GeluMLP"),
        (dict(mixer=jaxmodels.Attention(num_heads=2)), "no names for Attention"),
        (dict(mixer=jaxmodels.TTTLinear(num_heads=2, eps=1e-5)), "mixer.eps=1e-05"),
        (
            dict(
                mixer=jaxmodels.TTTLinear(num_heads=2, backbone="mamba", conv_width=3),
                pre_conv=jaxmodels.CausalConv(width=4),
            ),
            "different widths",
        ),
    ],
)
def test_models_without_an_official_form_are_refused(changes, message):
    config = ttt.ttt_linear(d_model=8, num_layers=1, num_heads=2, d_ff=8, vocab_size=8)
    with pytest.raises(ValueError, match=message):
        official.config_to_official(dataclasses.replace(config, **changes))


# The released checkpoints.


def test_released_stream_equals_what_the_official_loader_read(golden):
    file = golden("ttt/jax_checkpoint_linear_bf16")
    official_config, wanted = load(file)
    weights = stream.read_params(STREAM)
    assert weights.keys() == wanted.keys()
    for name, value in weights.items():
        assert value.dtype == jnp.bfloat16
        np.testing.assert_array_equal(value.astype(np.float32), wanted[name])
    config, params = ttt.from_official(official_config, weights)
    logits = jax.jit(jaxmodels.build(config).apply)(params, file["in/input_tokens"])
    assert max_abs(logits, file["out/logits"]) < 2e-5


def raw_records(path):
    with open(path, "rb") as file:
        return {tuple(key): value for key, value in msgpack.Unpacker(file, use_list=False)}


def test_exported_records_have_the_official_bytes(golden, tmp_path):
    official_config, _ = load(golden("ttt/jax_checkpoint_linear_bf16"))
    config, params = ttt.from_official(official_config, stream.read_params(STREAM))
    weights = ttt.to_official(config, params, "flax")
    stream.write_params(
        tmp_path / "half", {name: x.astype(jnp.bfloat16) for name, x in weights.items()}
    )
    wanted = {k: v for k, v in raw_records(STREAM).items() if k[0] == "params"}
    assert raw_records(tmp_path / "half") == wanted
    stream.write_params(tmp_path / "single", weights)
    assert_equal(stream.read_params(tmp_path / "single"), weights)
    assert {item.name for item in tmp_path.iterdir()} == {"half", "single"}


def test_optimizer_state_is_read_where_asked_for():
    records = dict(stream.read_records(STREAM, optimizer=True))
    assert len(records) == 159 and records["step",] == 1
    moment = records["opt_state", "1", "0", "mu", "params", "model", "wte", "embedding"]
    assert moment.shape == (32, 16) and moment.dtype == jnp.bfloat16
    assert len(dict(stream.read_records(STREAM))) == 52


def test_streaming_params_have_no_prefix(tmp_path):
    packed = [
        msgpack.packb((key[2:], value))
        for key, value in raw_records(STREAM).items()
        if key[0] == "params"
    ]
    (tmp_path / "streaming_params").write_bytes(b"".join(packed))
    assert_equal(stream.read_params(tmp_path / "streaming_params"), stream.read_params(STREAM))


def test_memory_is_bounded_by_one_record(tmp_path):
    path, value = tmp_path / "large", msgpack_serialize(np.zeros(2**20, np.float32))
    with path.open("wb") as file:
        for i in range(40):
            file.write(msgpack.packb((("opt_state", str(i)), value)))
        file.write(msgpack.packb((("params", "params", "x"), value)))
    tracemalloc.start()
    params = stream.read_params(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert params["x"].nbytes == 2**22
    assert path.stat().st_size > 160e6 and 4e6 < peak < 40e6


class Bomb:
    def __reduce__(self):
        return pathlib.Path("exploded").touch, ()


def damage(how):
    data = STREAM.read_bytes()
    first = data.index(b"\x92\x98\xa6params")
    one = data[first : data.index(b"\x92\x98\xa6params", first + 1)]
    return {
        "truncated": data[:20000],
        "last byte missing": data[:-1],
        "empty": b"",
        "text": b"hello world",
        "pickle": pickle.dumps(Bomb()),
        "not a pair": data[:first] + msgpack.packb([1, 2, 3]),
        "key of numbers": msgpack.packb(([1], b"")),
        "no bytes": msgpack.packb((["params", "params", "x"], [1.0])),
        "not an array": msgpack.packb((["params", "params", "x"], msgpack_serialize({"a": 1}))),
        "a number": msgpack.packb((["params", "params", "x"], msgpack_serialize(1))),
        "unknown dtype": one.replace(b"bfloat16", b"bfloat61"),
        "wrong size": one[:-2].replace(b"\xc41", b"\xc4/"),
        "twice": one + one,
        "endless": b"\x92\x91\xa6params\xc6\xff\xff\xff\xff" + data,
    }[how]


@pytest.mark.parametrize(
    "how, message",
    [
        ("truncated", "record 67, at byte 19858 of 20000: the file ends inside it"),
        ("last byte missing", "record 158, .* the file ends inside it"),
        ("empty", "holds no parameters"),
        ("text", "record 0, at byte 0 of 11: not a checkpoint stream"),
        ("pickle", "record 0, at byte 0 of .*: not a checkpoint stream"),
        ("not a pair", "record 1, at byte 10 of 14: not a pair"),
        ("key of numbers", "its key is not a list of names"),
        ("no bytes", "params/params/x holds a list instead of the bytes"),
        ("not an array", "params/params/x holds a dict instead of an array"),
        ("a number", "params/params/x is a single number"),
        ("unknown dtype", "the array params/params/model/h/0/conv/conv1/bias is damaged"),
        ("wrong size", "the array params/params/model/h/0/conv/conv1/bias is damaged"),
        ("twice", "params/params/model/h/0/conv/conv1/bias comes a second time"),
        ("endless", "record 0, .* the file ends inside it|longer than"),
    ],
)
def test_damaged_streams_are_refused_with_the_place(tmp_path, monkeypatch, how, message):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "damaged"
    path.write_bytes(damage(how))
    with pytest.raises(ValueError, match=message) as error:
        stream.read_params(path)
    assert str(path) in str(error.value)
    assert not pathlib.Path("exploded").exists()
