"""Print what an installed engine's own parser knows, as JSON: run by that engine's python, `python live.py`.

Stands alone (imports nothing of this project), for it runs in the engine's environment, whose release may be any.
"""

import argparse
import enum
import importlib
import inspect
import json
import os
import pathlib
import re
import sys
import typing
from collections.abc import Callable
from typing import Any

PARSERS = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
PARSER_CLASSES = ("vllm.utils.argparse_utils", "vllm.utils")
LABELS = {"loads": "json", "parse_dataclass": "json", "union_dict_and_str": "json or str"}


def parser() -> argparse.ArgumentParser:
    """The `vllm serve` parser of the engine installed in this interpreter."""
    module = _first(PARSERS, "make_arg_parser")
    made = module.make_arg_parser(_first(PARSER_CLASSES, "FlexibleArgumentParser").FlexibleArgumentParser())
    if "--config" not in made._option_string_actions:  # up to 0.10 the subcommand added it
        made.add_argument("--config", type=str, default="")
    return typing.cast(argparse.ArgumentParser, made)


def _first(names: tuple[str, ...], attribute: str) -> Any:
    for name in names:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        if hasattr(module, attribute):
            return module
    raise ModuleNotFoundError(f"no {attribute} in {', '.join(names)}")


def describe(action: argparse.Action, annotation: object) -> dict[str, Any]:
    """One flag in the form of scripts.engine_args.vocabulary.Flag."""
    form = "value"
    if isinstance(action, argparse.BooleanOptionalAction):
        form = "boolean"
    elif action.nargs == 0:
        form = "switch"
    elif action.nargs == "?":
        form = "optional"
    elif action.nargs is not None:
        form = "list"
    names = list(action.option_strings)
    negative = None
    if form == "boolean":
        negative = next((name for name in names if name.startswith("--no-")), None)
        names = [name for name in names if name != negative]
    options = [option for option in action.choices or [] if option is not None]
    suggested = _enum_names(annotation)
    if not suggested and isinstance(action.metavar, list):
        suggested = action.metavar
    elif not suggested and (braces := re.match(r"\{([^}]+)\}", str(action.metavar))):
        suggested = braces[1].split(",")
    return {
        "names": names,
        "form": form,
        "type": None if form in ("switch", "boolean") else _label(action.type),
        "choices": options,
        "suggested": [str(option) for option in suggested if option is not None],
        "default": _plain(action.default),
        "negative": negative,
        "deprecated": bool(getattr(action, "deprecated", False)) or "Deprecated" in type(action).__name__,
    }


def _label(kind: Any) -> str:
    """A short name for an argument's type; wrappers that only add `None` are looked through."""
    if kind is None:
        return "str"
    for wrapped in inspect.getclosurevars(kind).nonlocals.values() if inspect.isfunction(kind) else ():
        if isinstance(wrapped, Callable) and getattr(kind, "__name__", "") != "parse_dataclass":  # type: ignore[arg-type]
            return _label(wrapped)
    name = getattr(kind, "__name__", str(kind))
    return LABELS.get(name, name)


def _enum_names(annotation: object) -> list[str]:
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        members = {name: member.value for name, member in annotation.__members__.items() if not name.startswith("_")}
        return [*members, *(str(value) for value in members.values() if isinstance(value, int))]
    return next((found for part in typing.get_args(annotation) if (found := _enum_names(part))), [])


def _plain(default: object) -> Any:
    """A default as JSON can hold it; an object that JSON can't hold counts as unset, for it is the config's own."""
    if default is argparse.SUPPRESS:
        return None
    if isinstance(default, enum.Enum):
        return default.name
    try:
        return json.loads(json.dumps(default))
    except TypeError:
        return None


def main() -> int:
    """Print the capture of the installed release on stdout."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    vllm = importlib.import_module("vllm")
    arguments = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs
    annotations = {name: field.type for name, field in arguments.__dataclass_fields__.items()}
    flags = [
        describe(action, annotations.get(action.dest))
        for action in parser()._actions
        if action.option_strings and not isinstance(action, argparse._HelpAction)
    ]
    methods = list(importlib.import_module("vllm.model_executor.layers.quantization").QUANTIZATION_METHODS)
    for flag in flags:
        if "--quantization" in flag["names"]:
            flag["suggested"] = sorted(methods)
    environment = sorted(importlib.import_module("vllm.envs").environment_variables)
    package = str(pathlib.Path(str(vllm.__file__)).parent)
    version = vllm.__version__.split("+")[0]
    json.dump({"version": version, "package": package, "flags": flags, "env": environment}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
