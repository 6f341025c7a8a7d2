# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The command `convert`: official TTT checkpoints to ours and back.

    checkpoint    checkpoints/0/           ours, for `evaluate` and `generate`
    safetensors   model.safetensors        our parameters, for `jaxmodels.checkpoints`
    pytorch       model.safetensors        the official PyTorch model
    flax-stream   streaming_train_state    the official JAX code, as its checkpoints were released

All but the first with the config beside them, in config.json.
What the input is, is seen from its contents. Parameters are float32 inside: bfloat16 inputs are
widened exactly, and `--dtype bfloat16` gives them back exactly.
"""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

import jaxmodels
from jaxmodels import DecoderConfig
from jaxmodels.checkpoints import flatten, load_params, save_params
from jaxmodels.ttt import official, stream
from train.checkpoint import FOLDER, Checkpoints, find_checkpoint, load, make_meta, model_identity
from train.errors import UserError
from train.experiment import CheckpointConfig, Experiment
from train.serialize import from_json, to_json

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
STREAMS = ("streaming_train_state", "streaming_params")
WRITTEN = {CONFIG, WEIGHTS, STREAMS[0], FOLDER}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertCommand:
    """Converts official TTT checkpoints to ours and back."""

    input: tyro.conf.Positional[str]
    """What to convert: a run or checkpoint folder of ours, a folder with config.json and
    model.safetensors, a .safetensors file, or a `streaming_train_state` (or its folder)."""
    output: str
    """Folder to write."""
    format: Literal["checkpoint", "safetensors", "pytorch", "flax-stream"]
    """`checkpoint`: ours, for `jaxmodels evaluate` and `generate`. `safetensors`: our parameters as
    one file. `pytorch`: the official PyTorch model. `flax-stream`: the released files of the
    official JAX code (parameters, without optimizer state)."""
    config: str | None = None
    """The model: the name of a preset, or a JSON file (official PyTorch or JAX config, or ours).
    None: the config.json beside the weights. The metadata.pkl of a released checkpoint is never
    read, because reading a pickle runs the code in it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the official files written. float32 keeps every value; bfloat16 those that came from
    bfloat16, and rounds others."""
    tokenizer: str | None = None
    """For `checkpoint`: `bytes`, or the path of a `tokenizers` JSON file. None: that of the input,
    where it is a checkpoint of ours."""
    check: bool = False
    """Read the output again, compare it bit for bit, and run both models on random tokens."""
    reference: str | None = None
    """An .npz with `tokens` (B, T) and `logits` (B, T, V) of the official code, to compare the
    converted model with."""
    tolerance: float = 1e-3
    """Largest difference of a logit from the reference."""
    overwrite: bool = False
    """Replace an output of an earlier conversion."""


class Source(NamedTuple):
    """A model read from files."""

    kind: str
    config: DecoderConfig
    params: Any
    experiment: Experiment | None = None


def run_convert(command: ConvertCommand) -> Iterator[str]:
    """Converts; yields the lines to print."""
    output = Path(command.output).absolute()
    _check_options(command, output)
    source = read_source(command.input, command.config)
    if source.experiment is None and command.tokenizer is None and command.format == "checkpoint":
        raise UserError(
            "a checkpoint names its tokenizer: give --tokenizer FILE (a `tokenizers` JSON file) "
            "or --tokenizer bytes."
        )
    count = sum(x.size for x in jax.tree.leaves(source.params))
    yield f"{command.input}: {source.kind}, {count:,} parameters"

    part, old = (output.with_name(output.name + end) for end in (".part", ".old"))
    for left in (part, old):
        shutil.rmtree(left, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        rounded = _told(lambda: write(command, source, part))
        if output.exists():
            output.rename(old)
        part.rename(output)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    yield f"{command.output}: {command.format}" + (
        f", {rounded:,} values rounded to bfloat16" if rounded else ", every value kept"
    )
    if command.check:
        yield from _check(command, source, output, rounded)
    if command.reference is not None:
        yield _compare(command, source)


def _check_options(command: ConvertCommand, output: Path) -> None:
    if command.dtype != "float32" and command.format in ("checkpoint", "safetensors"):
        raise UserError(f"--dtype {command.dtype}: parameters of ours are float32; drop --dtype.")
    if command.tokenizer is not None and command.format != "checkpoint":
        raise UserError("--tokenizer only says something for --format checkpoint.")
    if not Path(command.input).exists():
        raise UserError(f"there is no file or folder {command.input}.")
    if not output.exists():
        return
    if not command.overwrite:
        raise UserError(f"{output} exists: choose another --output, or give --overwrite.")
    inside = {item.name for item in output.iterdir()} if output.is_dir() else None
    if inside is None or not inside <= WRITTEN:
        raise UserError(
            f"{output} is not the output of an earlier conversion; --overwrite replaces only those."
        )
    if Path(command.input).resolve().is_relative_to(output.resolve()):
        raise UserError(f"the input {command.input} lies in {output}, which would be replaced.")


def _told(what):
    """`what()`, with the ValueErrors of the library, all about what the user gave, as UserError."""
    try:
        return what()
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from None


# Reading.


def read_source(path: str | Path, config: str | None = None) -> Source:
    """The model in a file or folder of any kind that `convert` knows.

    Raises UserError naming what is missing, damaged or not known.
    """
    path = Path(path)
    if path.is_dir():
        if path.name == FOLDER or (path / "meta").is_dir() or (path / FOLDER).is_dir():
            if config is not None:
                raise UserError("--config: a checkpoint of ours knows its config; drop the option.")
            loaded = load(find_checkpoint(path))
            params = jax.device_get(loaded.params)
            return Source("checkpoint", loaded.experiment.model, params, loaded.experiment)
        names = (WEIGHTS, INDEX, *STREAMS)
        found = [path / name for name in names if (path / name).is_file()]
        if len(found) != 1:
            what = "none" if not found else " and ".join(item.name for item in found)
            raise UserError(f"{path}: expected one of {', '.join(names)} in it, found {what}.")
        path = found[0]
    return _told(lambda: _read_file(path, config))


def _read_file(path: Path, config_name: str | None) -> Source:
    with path.open("rb") as file:
        head = file.read(9)
    if path.name == INDEX:
        weights = _read_shards(path)
    elif head[:1] == b"\x92":  # msgpack: a list of two
        weights = stream.read_params(path)
    elif head[8:] == b"{":
        weights = _read_safetensors(path)
    elif head[:2] == b"PK" or head[:1] == b"\x80":
        raise UserError(
            f"{path} is a pickle, and reading one runs the code in it. Save the model as "
            "safetensors first: model.save_pretrained(FOLDER) in PyTorch."
        )
    else:
        raise UserError(f"{path} is neither a safetensors file nor a stream of msgpack records.")
    config = read_config(path, config_name)
    if any(name.startswith("blocks/") for name in weights):
        if not isinstance(config, DecoderConfig):
            config = official.config_from_official(config)
        return Source("safetensors", config, load_params(path, jaxmodels.build(config)))
    ours, params = official.from_official(config, weights)
    is_stream = head[:1] == b"\x92"
    kind = "flax-stream" if is_stream else official.layout_of(weights)
    return Source(kind, ours, params)


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(path)
    except (SafetensorError, KeyError) as error:
        raise UserError(f"{path} is not a complete safetensors file: {error}.") from None


def _read_shards(index: Path) -> dict[str, np.ndarray]:
    """The tensors of a model that is spread over several files."""
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{index} is not an index of safetensors files.") from None
    weights: dict[str, np.ndarray] = {}
    for name in names:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise UserError(f"{index} names {name!r}, which is not a file beside it.")
        weights |= _read_safetensors(index.parent / name)
    return weights


def read_config(weights: Path, name: str | None) -> DecoderConfig | dict[str, Any]:
    """The config named by --config, or beside the weights: ours, or the fields of an official
    one."""
    if name in jaxmodels.PRESETS:
        return dataclasses.replace(jaxmodels.PRESETS[name], dtype="float32")
    path = weights.parent / CONFIG if name is None else Path(name)
    if not path.is_file():
        pickled = (weights.parent / "metadata.pkl").exists()
        raise UserError(
            (f"there is no {path}. " if name is None else f"--config {name}: no such file. ")
            + ("metadata.pkl is not read (a pickle runs code). " if pickled else "")
            + "Give --config the JSON file of the config, or the name of a preset: "
            f"{', '.join(jaxmodels.PRESETS)}."
        )
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}.") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} holds a {type(data).__name__}, not the fields of a config.")
    if "type" not in data:
        return data
    config = from_json(data, str(path))
    if not isinstance(config, DecoderConfig):
        raise UserError(f"{path} is the config of a {type(config).__name__}, not of a model.")
    return config


# Writing.


def write(command: ConvertCommand, source: Source, folder: Path) -> int:
    """Writes a model into an empty folder; returns how many values had to be rounded."""
    if command.format == "checkpoint":
        _write_checkpoint(command, source, folder)
        return 0
    if command.format == "safetensors":
        _write_json(folder / CONFIG, to_json(source.config))
        save_params(folder / WEIGHTS, source.params)
        return 0
    layout: official.Layout = "pytorch" if command.format == "pytorch" else "flax"
    exact = official.to_official(source.config, source.params, layout)
    dtype = jnp.dtype(command.dtype)
    weights = {name: np.ascontiguousarray(x.astype(dtype)) for name, x in exact.items()}
    fields = official.config_to_official(source.config, layout)
    if layout == "pytorch":
        fields["torch_dtype"] = command.dtype
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    else:
        stream.write_params(folder / STREAMS[0], weights)
    _write_json(folder / CONFIG, fields)
    return sum(int(np.sum(weights[k].astype(x.dtype) != x)) for k, x in exact.items())


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")


def _write_checkpoint(command: ConvertCommand, source: Source, folder: Path) -> None:
    experiment = source.experiment
    if experiment is None:
        experiment = Experiment(name="converted", model=source.config, sequence_length=2048)
    if command.tokenizer is not None:
        data = dataclasses.replace(experiment.data, tokenizer=command.tokenizer)
        experiment = dataclasses.replace(experiment, data=data)
    experiment = dataclasses.replace(experiment, model=source.config, ema_decay=None)
    meta = make_meta(experiment, 0, "converted", None)
    checkpoints = Checkpoints(folder, CheckpointConfig())
    state = {"params": source.params, "opt_state": {}, "step": np.int32(0)}
    checkpoints.save(0, state, meta)
    checkpoints.close()


# Checking.


def _logits(source: Source, tokens: np.ndarray) -> np.ndarray:
    """(B, T, V) float64, computed in float32."""
    model = jaxmodels.build(dataclasses.replace(source.config, dtype="float32"))
    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(model.apply)(source.params, tokens), np.float64)


def _difference(got: np.ndarray, want: np.ndarray) -> tuple[float, float]:
    """Largest difference of a logit, and the mean of KL(want || got) in nats per token."""
    p, q = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in (want, got))
    kl = np.sum(np.exp(p) * (p - q), -1)
    return float(np.max(np.abs(got - want))), float(np.mean(kl))


def _check(command: ConvertCommand, source: Source, output: Path, rounded: int) -> Iterator[str]:
    again = read_source(output)
    if model_identity(to_json(again.config)) != model_identity(to_json(source.config)):
        raise UserError(f"check: {output} came back as another model than was written.")
    wanted, found = flatten(source.params), flatten(again.params)
    dtype = jnp.dtype(command.dtype)
    broken = [
        name
        for name, x in wanted.items()
        if not np.array_equal(_bits(x.astype(dtype).astype(x.dtype)), _bits(found[name]))
    ]
    if broken:
        raise UserError(f"check: {output} came back with other values: {', '.join(broken)}.")
    kept = "the rounded values" if rounded else "the input"
    yield f"check: read again, {len(wanted)} arrays equal to {kept} bit for bit"
    length = 2 * getattr(source.config.mixer, "mini_batch_size", 16) + 5
    tokens = np.random.default_rng(0).integers(0, source.config.vocab_size, (2, length))
    apart, kl = _difference(_logits(again, tokens), _logits(source, tokens))
    yield (
        f"check: logits of input and output on {tokens.size} random tokens: "
        f"largest difference {apart:.2e}, KL {kl:.2e} nats per token"
    )


def _bits(x: np.ndarray) -> np.ndarray:
    return np.frombuffer(np.ascontiguousarray(x).tobytes(), np.uint8)


def _compare(command: ConvertCommand, source: Source) -> str:
    path = Path(str(command.reference))
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
            tokens, logits = (arrays[name] for name in ("tokens", "logits"))
    except FileNotFoundError:
        raise UserError(f"--reference {path}: no such file.") from None
    except KeyError as error:
        raise UserError(f"{path} has no {error}; it holds {', '.join(arrays)}.") from None
    except Exception as error:
        raise UserError(f"{path} is not an .npz of arrays: {error}.") from None
    V = source.config.vocab_size
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu" or logits.shape != (*tokens.shape, V):
        raise UserError(
            f"{path}: tokens {tokens.shape} {tokens.dtype} and logits {logits.shape} must be "
            f"(B, T) integers and (B, T, {V})."
        )
    apart, kl = _difference(_logits(source, tokens), logits.astype(np.float64))
    line = (
        f"reference: logits on {tokens.size} tokens of {path}: largest difference {apart:.2e}, "
        f"KL {kl:.2e} nats per token"
    )
    if not apart <= command.tolerance:
        raise UserError(f"{line}; more than --tolerance {command.tolerance:g}.")
    return line
