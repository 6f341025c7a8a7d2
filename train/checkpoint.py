# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Checkpoints: saved by orbax in the background, restored into our shardings, checked before use.

A checkpoint is the folder `RUN/checkpoints/STEP` with the items

    params      the parameters             ema         their moving average, if the run keeps one
    training    optimizer state and step   meta        JSON: config, seed, fingerprints, versions

and `files.json`, the sizes and check sums of its files, by which a truncated copy is found out
before it is read.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import platform
import shutil
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, SingleDeviceSharding

import jaxmodels
from train.errors import UserError
from train.experiment import CheckpointConfig, Experiment
from train.mesh import param_shardings
from train.serialize import differences, fingerprint, from_json, to_json

FOLDER = "checkpoints"
MANIFEST = "files.json"
SUM_BYTES = 2**30
FORMAT = 1

# Fields of a model config that say how it is computed, not what: a run may go on with others.
EXECUTION_FIELDS = {"dtype", "remat", "scan_layers", "implementation", "checkpoint_every"}


def model_identity(model_json: Any) -> Any:
    """A model config in JSON form without the fields that only say how to compute it."""
    if isinstance(model_json, dict):
        return {
            key: model_identity(item)
            for key, item in model_json.items()
            if key not in EXECUTION_FIELDS
        }
    return model_json


def versions() -> dict[str, str]:
    """Versions of what wrote a checkpoint."""
    found = {"python": platform.python_version()}
    for name in ("jaxmodels", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def make_meta(
    experiment: Experiment, step: int, data_fingerprint: str, validation: dict | None
) -> dict[str, Any]:
    """What a checkpoint says about itself. `validation`: the evaluation at this very step, if
    any."""
    config = to_json(experiment)
    return {
        "format": FORMAT,
        "step": step,
        "seed": experiment.seed,
        "data_fingerprint": data_fingerprint,
        "model_fingerprint": fingerprint(model_identity(config["model"])),
        "validation": validation,
        "experiment": config,
        "versions": versions(),
    }


class Checkpoints:
    """The checkpoints of one run.

    Saving copies the state to the host and writes it in the background; a checkpoint counts once
    its folder is complete. `close` waits for the last one.
    """

    def __init__(self, run_directory: str | Path, config: CheckpointConfig):
        self.directory = Path(run_directory).absolute() / FOLDER
        self.directory.mkdir(parents=True, exist_ok=True)
        self._policy = _LastAndBest(config)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._policy,
            async_options=ocp.options.AsyncOptions(
                post_finalization_callback=self._write_manifests
            ),
        )
        self._manager = _read(
            lambda: ocp.CheckpointManager(self.directory, options=options), self.directory, None
        )
        for step in self.steps():
            # A damaged one is not this function's business: it counts as not evaluated.
            with contextlib.suppress(UserError):
                self._note(step, self.meta(step)["validation"])

    def _note(self, step: int, validation: dict | None) -> None:
        if validation is not None and math.isfinite(validation["loss"]):
            self._policy.losses[step] = validation["loss"]

    @property
    def best_loss(self) -> float:
        """The lowest validation loss among the checkpoints; infinity before the first."""
        return min(self._policy.losses.values(), default=math.inf)

    def steps(self) -> list[int]:
        """Steps that have a complete checkpoint, in order."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: dict[str, Any], meta: dict[str, Any]) -> bool:
        """Starts saving the state after `step` updates; False if that step is already saved."""
        if step in self.steps():
            return False
        training = {"opt_state": state["opt_state"], "step": state["step"]}
        items = {
            "params": ocp.args.StandardSave(state["params"]),
            "training": ocp.args.StandardSave(training),
            "meta": ocp.args.JsonSave(meta),
        }
        if "ema" in state:
            items["ema"] = ocp.args.StandardSave(state["ema"])
        self._note(step, meta["validation"])
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        return True

    def meta(self, step: int) -> dict[str, Any]:
        """What the checkpoint of `step` says about itself."""
        return read_meta(self.directory / str(step), self._earlier(step))

    def restore(self, step: int, shapes: dict[str, Any]) -> dict[str, Any]:
        """The train state in the shardings of `shapes` (see `Trainer.shapes`), whatever mesh wrote
        it.

        Raises UserError naming the folder if it is truncated or damaged.
        """
        folder = self.directory / str(step)
        training = {"opt_state": shapes["opt_state"], "step": shapes["step"]}
        targets = {"params": shapes["params"], "training": training}
        if "ema" in shapes:
            targets["ema"] = shapes["ema"]
        restored = restore_items(folder, targets, self._earlier(step))
        training = restored.pop("training")
        return restored | training

    def remove_partial(self) -> None:
        """Removes what a program that was killed while saving has left."""
        for folder in self.directory.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _earlier(self, step: int) -> int | None:
        return max((other for other in self.steps() if other < step), default=None)

    def wait(self) -> None:
        """Returns once every checkpoint is complete; raises what went wrong in the background."""
        self._manager.wait_until_finished()
        self._write_manifests()

    def close(self) -> None:
        """Waits, then lets go of the folder."""
        self.wait()
        self._manager.close()

    def _write_manifests(self) -> None:
        if jax.process_index() != 0:
            return
        for folder in self.directory.iterdir():
            manifest = folder / MANIFEST
            if not folder.name.isdigit() or manifest.exists():
                continue
            # An old checkpoint may be removed under our hands.
            with contextlib.suppress(FileNotFoundError):
                files = {
                    file.relative_to(folder).as_posix(): list(_size_and_sum(file))
                    for file in sorted(folder.rglob("*"))
                    if file.is_file()
                }
                partial = folder / (MANIFEST + ".tmp")
                partial.write_text(json.dumps(files))
                partial.rename(manifest)


def _size_and_sum(file: Path, sums: bool = True) -> tuple[int, int | None]:
    """Bytes and CRC-32 of a file; no sum beyond `SUM_BYTES`, where it would cost too much time."""
    size, total = file.stat().st_size, 0
    if size > SUM_BYTES or not sums:
        return size, None
    with file.open("rb") as stream:
        while block := stream.read(2**22):
            total = zlib.crc32(block, total)
    return size, total


def check_complete(folder: Path, items: Iterable[str], earlier: int | None = None) -> None:
    """UserError if a file of these items of a checkpoint is missing or is not what was written.

    Done before orbax reads, because orbax reads in parallel and prints one trace per broken file.
    Many processes do not all read everything only to add it up: they compare sizes.
    """
    manifest = folder / MANIFEST
    if not folder.is_dir():
        raise UserError(f"There is no checkpoint {folder}.")
    if not manifest.exists():  # killed between the last file and the manifest: orbax will judge
        return
    try:
        files = {name: tuple(entry) for name, entry in json.loads(manifest.read_text()).items()}
    except (ValueError, TypeError, AttributeError):
        raise _damaged(folder, earlier, f"{MANIFEST} cannot be read") from None
    sums = jax.process_count() == 1
    for name, written in files.items():
        if name.split("/")[0] not in items:
            continue
        if not (folder / name).exists():
            raise _damaged(folder, earlier, f"{name} is missing")
        found = _size_and_sum(folder / name, sums)
        if found[0] != written[0]:
            how = f"has {found[0]} bytes instead of {written[0]}"
            raise _damaged(folder, earlier, f"{name} {how}")
        if sums and found != written:
            raise _damaged(folder, earlier, f"the contents of {name} changed")


def read_meta(folder: Path, earlier: int | None = None) -> dict[str, Any]:
    """The JSON of a checkpoint folder, without touching its arrays."""
    check_complete(folder, ["meta"], earlier)
    try:
        meta = json.loads((folder / "meta" / "metadata").read_text())
        written = meta["format"]
    except (OSError, ValueError, KeyError, TypeError):
        raise _damaged(folder, earlier, "its meta data cannot be read") from None
    if written != FORMAT:
        raise UserError(
            f"Checkpoint {folder} has format {written}, this version reads format {FORMAT}. "
            f"It was written by jaxmodels {meta.get('versions', {}).get('jaxmodels')}."
        )
    return meta


def restore_items(folder: Path, targets: dict[str, Any], earlier: int | None = None) -> dict:
    """Restores some items of a checkpoint into abstract targets (jax.ShapeDtypeStruct with
    sharding)."""
    check_complete(folder, targets, earlier)
    items = {name: ocp.args.StandardRestore(target) for name, target in targets.items()}
    checkpointer = ocp.Checkpointer(ocp.CompositeCheckpointHandler())
    restored = _read(
        lambda: checkpointer.restore(folder, args=ocp.args.Composite(**items)), folder, earlier
    )
    return {name: restored[name] for name in targets}


def _damaged(folder: Path, earlier: int | None, why: str) -> UserError:
    if earlier is None:
        remedy = "Delete that folder, or choose another run folder with --directory."
    else:
        remedy = (
            f"Delete that folder to go on from step {earlier}, or choose another run folder with "
            "--directory."
        )
    return UserError(
        f"Checkpoint {folder} is truncated or damaged: {why}. Nothing was changed. {remedy}"
    )


def _read(what: Callable[[], Any], folder: Path, earlier: int | None) -> Any:
    """`what()`, with whatever orbax raises on a damaged folder as one UserError."""
    try:
        return what()
    except UserError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    raise _damaged(folder, earlier, reason)


class _LastAndBest:
    """Which checkpoints orbax keeps. The losses come from our own meta data, so that they outlive
    the program."""

    def __init__(self, config: CheckpointConfig):
        self.config = config
        self.losses: dict[int, float] = {}

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        keep = set(steps[-self.config.keep_last :])
        ranked = sorted((s for s in steps if s in self.losses), key=lambda s: self.losses[s])
        keep |= set(ranked[: self.config.keep_best])
        return [step in keep for step in steps]


def check_resumable(meta: dict, experiment: Experiment, folder: Path) -> dict[str, tuple]:
    """UserError unless the run `experiment` can go on from the checkpoint; returns the harmless
    changes.

    The model, the seed, the shape of the batch and the optimizer must be those of the checkpoint.
    Other fields (learning rate, steps, mesh, logging, ...) may change.
    """
    old, new = meta["experiment"], to_json(experiment)
    remedy = (
        "Nothing was changed. Undo that, or start another run with another --name or --directory."
    )
    changed = differences(model_identity(old["model"]), model_identity(new["model"]))
    if changed:
        raise UserError(
            f"Checkpoint {folder} is of another model: {_listed(changed, 'model.')}. {remedy}"
        )
    changed = differences(old, new)
    fixed = ("seed", "batch_size", "sequence_length", "optimizer.name")
    blocking = {name: pair for name, pair in changed.items() if name in fixed}
    if (old["ema_decay"] is None) != (new["ema_decay"] is None):
        blocking["ema_decay"] = (old["ema_decay"], new["ema_decay"])
    if blocking:
        raise UserError(
            f"Checkpoint {folder} cannot go on with other settings: {_listed(blocking)}. {remedy}"
        )
    quiet = ("name", "directory", "compilation_cache")
    return {n: pair for n, pair in changed.items() if n.split(".")[0] not in (*quiet, "log")}


def check_same_data(meta: dict, data_fingerprint: str, folder: Path) -> None:
    """UserError if the training data are not those of the checkpoint."""
    if meta["data_fingerprint"] != data_fingerprint:
        raise UserError(
            f"Checkpoint {folder} was trained on other data (fingerprint "
            f"{meta['data_fingerprint'][:12]}, now {data_fingerprint[:12]}): the sources, the "
            "tokenizer or the packing are different. Nothing was changed. Restore the data, or "
            "start another run with another --name or --directory."
        )


def _listed(changed: dict[str, tuple], prefix: str = "") -> str:
    shown = [f"{prefix}{name} was {a!r}, now {b!r}" for name, (a, b) in list(changed.items())[:5]]
    more = len(changed) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A trained model without its training: what evaluation and generation need."""

    folder: Path
    step: int
    experiment: Experiment
    model: jaxmodels.Model
    params: Any
    meta: dict[str, Any]


def find_checkpoint(path: str | Path, step: int | str = "latest") -> Path:
    """The folder of one checkpoint, given a run folder, its `checkpoints` folder, or the folder
    itself.

    `step` is a number, "latest", or "best" (lowest validation loss).
    """
    path = Path(path).absolute()
    if not path.is_dir():
        raise UserError(
            f"There is no folder {path}. Give the folder of a run, e.g. --checkpoint runs/NAME."
        )
    if (path / "meta").is_dir():
        return path
    root = path / FOLDER if (path / FOLDER).is_dir() else path
    steps = sorted(int(p.name) for p in root.iterdir() if p.name.isdigit() and p.is_dir())
    if not steps:
        raise UserError(
            f"There is no checkpoint in {root}. Give the folder of a run that saved one."
        )
    if step == "latest":
        return root / str(steps[-1])
    if step == "best":
        losses: dict[int, float] = {}
        for candidate in steps:
            validation = read_meta(root / str(candidate))["validation"]
            if validation:
                losses[candidate] = validation["loss"]
        if not losses:
            raise UserError(f"No checkpoint in {root} was evaluated; use --step latest.")
        return root / str(min(losses, key=lambda candidate: losses[candidate]))
    if step not in steps:
        raise UserError(f"{root} has no checkpoint of step {step}; it has {steps}.")
    return root / str(step)


def load(path: str | Path, *, step: int | str = "latest", mesh: Mesh | None = None) -> Loaded:
    """Loads a trained model, without its optimizer state, onto a mesh or onto one device.

    The moving average is loaded where the run kept one, as evaluation during training does.
    """
    folder = find_checkpoint(path, step)
    meta = read_meta(folder)
    experiment = from_json(meta["experiment"], where=f"the config in {folder}")
    model = jaxmodels.build(experiment.model)
    if mesh is None:
        device = SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: device, model.param_shapes)
    else:
        shardings = param_shardings(model, mesh)
    target = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        model.param_shapes,
        shardings,
    )
    item = "params" if experiment.ema_decay is None else "ema"
    params = restore_items(folder, {item: target})[item]
    return Loaded(folder, meta["step"], experiment, model, params, meta)
