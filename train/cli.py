# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The command line: `jaxmodels train | evaluate | generate | convert | data`.

Every option is a field of a config dataclass, with its default and its docstring as help. A mistake
of the user ends in one message on stderr and exit code 2. Nothing heavy is imported before a
command needs it.
"""

import dataclasses
import difflib
import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from train.errors import UserError

COMMANDS = {
    "train": "train the experiment of a config file; run again, it continues",
    "evaluate": "loss, perplexity and bits per byte of a checkpoint",
    "generate": "continue prompts with a trained model",
    "convert": "official TTT checkpoints to ours and back",
    "data": "turn text into token files",
}

# Import name -> name on the package index, of what the `train` extra adds.
TRAIN_EXTRA = {
    "orbax.checkpoint": "orbax-checkpoint",
    "grain": "grain",
    "tensorboard": "tensorboard",
    "tyro": "tyro",
    "tqdm": "tqdm",
    "matplotlib": "matplotlib",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit code: 0, 2 for a mistake of the user, 130 after Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        # A SIGTERM before the loop listens for it ends the program like a Ctrl-C.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    except ValueError:  # not the main thread
        before = None
    try:
        return _run(argv)
    except UserError as error:
        return _complain(str(error))
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); nobody is left to be told.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno is None:
            raise
        what = f"{error.filename}: " if error.filename else ""
        return _complain(
            f"{what}{error.strerror}. Check the path, its permissions and the free space."
        )
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _complain(message: str) -> int:
    sys.stdout.flush()
    print(f"jaxmodels: error: {message}", file=sys.stderr)
    return 2


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"jaxmodels {importlib.metadata.version('jaxmodels')}")
        return 0
    command, rest = argv[0], argv[1:]
    if command not in COMMANDS:
        raise UserError(
            f"there is no command {command!r}{_did_you_mean(command, COMMANDS)} "
            f"Commands: {', '.join(COMMANDS)}."
        )
    missing = [package for name, package in TRAIN_EXTRA.items() if not _installed(name)]
    if missing:
        raise UserError(
            f"`jaxmodels {command}` needs {', '.join(missing)}, not installed here. "
            "Install with: pip install 'jaxmodels[train]'"
        )
    run = {
        "train": _train,
        "evaluate": _evaluate,
        "generate": _generate,
        "convert": _convert,
        "data": _data,
    }
    return run[command](rest)


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _usage() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return (
        "usage: jaxmodels COMMAND [options]\n\n"
        f"commands:\n{commands}\n\n"
        "`jaxmodels COMMAND --help` lists the options, with their defaults.\n\n"
        "example: jaxmodels train ttt_linear_bytes --optimizer.learning-rate 1e-3"
    )


def _did_you_mean(word: str, known) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else "."


# Configs.


def config_names() -> list[str]:
    """Names of the configs that are installed with the package."""
    # By name: the application does not depend on the configs that users write for it.
    folder = importlib.import_module("configs").__path__
    return sorted(m.name for m in pkgutil.iter_modules(folder) if not m.name.startswith("_"))


def load_experiment(name: str) -> Any:
    """The `Experiment` of a config: the path of a Python file with a function `experiment()`, or a
    bare name.

    Raises UserError naming the file, or the line in it, that is wrong.
    """
    from train.experiment import Experiment

    path = Path(name)
    installed = config_names()
    if path.is_file():
        module = _import_file(path)
    elif path.with_suffix("").name in installed and str(path.parent) in (".", "configs"):
        module = importlib.import_module(f"configs.{path.with_suffix('').name}")
    else:
        here = [str(p) for p in sorted(path.parent.glob("*.py"))] if path.parent.is_dir() else []
        where = "it is a folder" if path.is_dir() else "there is no such file"
        near = difflib.get_close_matches(name, here + installed, n=1)
        near = near or difflib.get_close_matches(path.stem, installed, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"installed: {', '.join(installed)}."
        raise UserError(f"config {name!r}: {where}; {hint}")
    function = getattr(module, "experiment", None)
    if not callable(function):
        raise UserError(
            f"config {name}: it has no function experiment() that returns an Experiment."
        )
    experiment = _call_config(function, name)
    if not isinstance(experiment, Experiment):
        raise UserError(
            f"config {name}: experiment() returned a {type(experiment).__name__}, not an "
            "Experiment."
        )
    return experiment


def _import_file(path: Path) -> Any:
    module_name = f"jaxmodels_config_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"config {path}: not a Python file (its name must end in .py).")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up
    _call_config(lambda: spec.loader.exec_module(module), str(path))
    return module


def _call_config(function, name: str) -> Any:
    """Runs code of a config file; whatever it raises becomes a message with the line."""
    try:
        return function()
    except UserError:
        raise
    except SyntaxError as error:
        raise UserError(f"config {name}, line {error.lineno}: {error.msg}.") from None
    except Exception as error:
        line, trace = None, error.__traceback__
        while trace is not None:
            if Path(trace.tb_frame.f_code.co_filename).name == Path(name).with_suffix(".py").name:
                line = trace.tb_lineno
            trace = trace.tb_next
        where = f", line {line}" if line else ""
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise UserError(f"config {name}{where}: {kind}{error}") from None


def parse(cls_or_default: Any, args: Sequence[str], prog: str) -> Any:
    """Fills a config dataclass from the command line: a class, or an instance that gives the
    defaults.

    `--help` prints every field with its docstring. An unknown option is a UserError with the
    nearest name.
    """
    import tyro

    default = None if isinstance(cls_or_default, type) else cls_or_default
    cls = cls_or_default if default is None else type(default)
    extra = {} if default is None else {"default": default}
    value, unknown = tyro.cli(
        cls,
        args=list(args),
        prog=prog,
        config=(tyro.conf.AvoidSubcommands,),
        return_unknown_args=True,
        **extra,
    )
    if unknown:
        option = next((word for word in unknown if word.startswith("-")), None)
        if option is None:
            raise UserError(f"{prog}: unexpected argument {unknown[0]!r}; options start with `--`.")
        option = option.split("=")[0]
        word = option.lstrip("-").replace("_", "-").removeprefix("no-")
        names = [name.replace("_", "-") for name in _option_names(value)]
        near = difflib.get_close_matches(word, names, n=1)
        if not near:  # the field alone, e.g. `--learning-rate`
            near = [name for name in names if name.split(".")[-1] == word.split(".")[-1]][:1]
        hint = f"did you mean --{near[0]}?" if near else f"see {prog} --help."
        raise UserError(f"{prog}: unknown option {option}; {hint}")
    return value


def _option_names(config: Any, prefix: str = "") -> list[str]:
    names = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            names += _option_names(value, f"{prefix}{field.name}.")
        else:
            names.append(f"{prefix}{field.name}")
    return names


# Commands.


def _train(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(
            "usage: jaxmodels train CONFIG [options]\n\n"
            "CONFIG is a Python file with a function experiment(), or the name of an installed "
            "config:\n"
            f"  {', '.join(config_names())}\n\n"
            "`jaxmodels train CONFIG --help` lists every option with the config's defaults.\n"
            "A run continues from its latest checkpoint; Ctrl-C or SIGTERM saves one and stops."
        )
        return 0 if args else 2
    if args[0].startswith("-"):
        raise UserError(f"name the config first: jaxmodels train CONFIG {args[0]} ...")
    experiment = parse(load_experiment(args[0]), args[1:], f"jaxmodels train {args[0]}")
    from train.loop import train

    train(experiment)
    return 0


def _evaluate(args: list[str]) -> int:
    from train.inference import EvaluateCommand, run_evaluate

    print(run_evaluate(parse(EvaluateCommand, args, "jaxmodels evaluate")))
    return 0


def _generate(args: list[str]) -> int:
    from train.inference import GenerateCommand, run_generate

    for text in run_generate(parse(GenerateCommand, args, "jaxmodels generate")):
        print(text)
    return 0


def _convert(args: list[str]) -> int:
    from train.convert import ConvertCommand, run_convert

    for line in run_convert(parse(ConvertCommand, args, "jaxmodels convert")):
        print(line, flush=True)
    return 0


def _data(args: list[str]) -> int:
    actions = {
        "tokens": "turn text files or JSON lines into a token file",
        "stdlib": "build the corpus of Python's own sources and show what is in it",
        "show": "print a row as the model sees it",
    }
    if not args or args[0] in ("-h", "--help"):
        listed = "\n".join(f"  {name:<6}  {text}" for name, text in actions.items())
        print(f"usage: jaxmodels data ACTION [options]\n\nactions:\n{listed}")
        return 0 if args else 2
    if args[0] not in actions:
        raise UserError(
            f"jaxmodels data: there is no action {args[0]!r}{_did_you_mean(args[0], actions)} "
            f"Actions: {', '.join(actions)}."
        )
    import train.data as data

    commands: dict[str, tuple[type, Callable[[Any], None]]] = {
        "tokens": (data.TokensCommand, data.run_tokens),
        "stdlib": (data.StdlibCommand, data.run_stdlib),
        "show": (data.ShowCommand, data.run_show),
    }
    command, run = commands[args[0]]
    run(parse(command, args[1:], f"jaxmodels data {args[0]}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
