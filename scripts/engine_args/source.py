"""Read an engine's flags from its source, without importing it: for releases that do not install here.

vLLM registers a flag in one of three ways over the years, and each is followed:
1. `parser.add_argument("--x", type=int, ...)`, the only way up to 0.8
2. `group.add_argument("--x", **cache_kwargs["x"])`, where the rest is the annotation and default of a config field
3. one flag for each field of the FrontendArgs classes
"""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from scripts.engine_args.annotations import Modules, constant
from scripts.engine_args.vocabulary import Engine, Flag, Metric

# Where flags are registered beside the file that defines make_arg_parser; a file that isn't there is another release's.
REGISTRATIONS = ("engine/arg_utils.py", "entrypoints/openai/api_server.py", "entrypoints/cli/serve.py", "scripts.py")
KINDS = ("counter", "gauge", "histogram", "info")


class LayoutError(Exception):
    """A source laid out in a way that this module doesn't know, so that it would miss flags."""


def engine(package: Path, version: str) -> Engine:
    """All that the vllm package at `package` tells without running; LayoutError where its flags can't be found."""
    found = flags(package), environment(package), metrics(package), programs(package)
    return Engine(version, "source", *map(tuple, found))  # type: ignore[arg-type]


def flags(package: Path) -> list[Flag]:
    """Every flag of `vllm serve` (or, before it existed, of the OpenAI server) of the vllm package at `package`."""
    modules = Modules(package)
    found: dict[str, Flag] = {}
    for relative in _registrations(package):
        tree = modules.tree(relative)
        for flag in [*_registered(modules, relative, tree), *_frontend(modules, relative, tree)]:
            found.setdefault(flag.name, flag)
    if missing := {"--model", "--port", "--max-model-len"} - found.keys():
        raise LayoutError(f"no {' '.join(sorted(missing))} in it: it registers flags in a place not looked at")
    return sorted(found.values(), key=lambda flag: flag.name)


def _registrations(package: Path) -> list[str]:
    """The files of the package that register the server's flags."""
    fixed = [relative for relative in REGISTRATIONS if (package / relative).is_file()]
    frontends = [
        path.relative_to(package).as_posix()
        for path in sorted((package / "entrypoints").rglob("*.py"))
        if path.name != "run_batch.py" and "def make_arg_parser(" in path.read_text()
    ]
    return [*fixed, *frontends]


def _registered(modules: Modules, relative: str, tree: ast.Module) -> Iterator[Flag]:
    """Ways 1 and 2, in source order."""
    sources = _kwargs_variables(tree)
    for call in ast.walk(tree):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            continue
        if call.func.attr != "add_argument":
            continue
        # scripts.py holds the parsers of every subcommand; the others' flags are not the server's.
        owner = call.func.value
        if relative == "scripts.py" and not (isinstance(owner, ast.Name) and owner.id == "serve_parser"):
            continue
        names = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        names = [name for name in names if name.startswith("-")]
        if not names:
            continue
        flag = Flag(names=tuple(names), form="value", type="str")
        for config, field in _splats(call, sources):
            if described := modules.field(relative, config, field):
                flag = described.as_flag(tuple(names))
        yield _explicit(modules, relative, call, flag)


def _kwargs_variables(tree: ast.Module) -> dict[str, tuple[str, str | None]]:
    """Variables that hold get_kwargs(Config) or get_kwargs(Config)["field"]: name -> (config, field)."""
    found: dict[str, tuple[str, str | None]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value, field = node.value, None
            if isinstance(value, ast.Subscript):
                field, value = constant(value.slice), value.value
            if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("get_kwargs") and value.args:
                found[node.targets[0].id] = (ast.unparse(value.args[0]), field or None)
    return found


def _splats(call: ast.Call, sources: dict[str, tuple[str, str | None]]) -> Iterator[tuple[str, str]]:
    """The (config class, field) pairs that a call's `**x_kwargs["field"]` stands for."""
    for keyword in call.keywords:
        if keyword.arg is not None:
            continue
        for node in ast.walk(keyword.value):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
                config, _ = sources.get(node.value.id, ("", None))
                field = constant(node.slice)
                if config and isinstance(field, str):
                    yield config, field
            elif isinstance(node, ast.Name):
                config, whole = sources.get(node.id, ("", None))
                if config and whole:
                    yield config, whole


def _explicit(modules: Modules, relative: str, call: ast.Call, flag: Flag) -> Flag:
    """`flag` with what the call itself states, which overrides the config field."""
    given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    changes: dict[str, object] = {}
    action = ast.unparse(given["action"]).strip("'\"") if "action" in given else ""
    if action in ("store_true", "store_false", "help", "version"):
        changes |= {"form": "switch", "type": None}
    elif action.endswith("BooleanOptionalAction"):
        negative = "--no-" + flag.name.removeprefix("--")
        changes |= {"form": "boolean", "type": None, "negative": negative}
    elif "nargs" in given:
        nargs = constant(given["nargs"])
        changes |= {"form": "optional" if nargs == "?" else "list"}
    if "type" in given and changes.get("form", flag.form) not in ("switch", "boolean"):
        changes["type"] = modules.type_label(given["type"])
    if "choices" in given:
        changes["choices"] = tuple(modules.options(relative, given["choices"]))
    if "default" in given:
        changes["default"] = modules.value(relative, given["default"])
    if "deprecated" in given:
        changes["deprecated"] = bool(constant(given["deprecated"]))
    return dataclasses.replace(flag, **changes)  # type: ignore[arg-type]


def _frontend(modules: Modules, relative: str, tree: ast.Module) -> Iterator[Flag]:
    """Way 3: the FrontendArgs classes' fields."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("FrontendArgs"):
            singular = _made_singular(node)
            for field in modules.fields(relative, node):
                flag = field.as_flag(("--" + field.name.replace("_", "-"),))
                yield dataclasses.replace(flag, form="value") if field.name in singular else flag


def _made_singular(node: ast.ClassDef) -> set[str]:
    """Fields of list type that the class turns into one-value flags: `del kwargs["x"]["nargs"]`."""
    texts = [ast.unparse(target) for part in ast.walk(node) if isinstance(part, ast.Delete) for target in part.targets]
    return {text.split("['")[1].split("']")[0] for text in texts if text.endswith("['nargs']")}


def programs(package: Path) -> list[str]:
    """What can be started: subcommands of `vllm` and, as `python -m` names, the modules under entrypoints."""
    found: set[str] = set()
    for path in sorted((package / "entrypoints").rglob("*.py")):
        text = path.read_text()
        if 'if __name__ == "__main__"' in text:
            found.add(".".join(("vllm", *path.relative_to(package).with_suffix("").parts)))
        if "cli" in path.parts:
            found |= {f"vllm {name}" for name in _subcommands(ast.parse(text))}
    if (package / "scripts.py").is_file():
        found |= {f"vllm {name}" for name in _subcommands(ast.parse((package / "scripts.py").read_text()))}
    return sorted(found)


def _subcommands(tree: ast.Module) -> Iterator[str]:
    """Names of the CLI's subcommand classes, and those given to add_parser by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and "CLISubcommand" in map(ast.unparse, node.bases):
            for item in node.body:
                if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == "name":
                    yield str(constant(item.value))
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith("subparsers.add_parser")
            and isinstance(name := constant(node.args[0]) if node.args else None, str)
        ):
            yield name


def environment(package: Path) -> list[str]:
    """Names of the environment variables the release reads: its own table, or what it asks os.environ for."""
    table = package / "envs.py"
    paths = [table] if table.is_file() else list(package.rglob("*.py"))
    names: set[str] = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            keys = node.keys if isinstance(node, ast.Dict) and path == table else []
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.getenv", "os.environ.get"):
                keys = list(node.args[:1])
            names |= {k for key in keys if isinstance(k := constant(key), str) and k.isupper()}
    return sorted(names)


def metrics(package: Path) -> list[Metric]:
    """Names of the `vllm:` metrics the release can export, as /metrics shows them, with their kinds."""
    found: dict[str, Metric] = {}
    for path in package.rglob("*.py"):
        text = path.read_text()
        if "vllm:" not in text or "benchmarks" in path.parts:  # the benchmark client reads metrics by prefix
            continue
        for name, kind in _metric_strings(ast.parse(text)):
            if found.get(name, Metric(name, "unknown")).kind == "unknown":
                found[name] = Metric(name, kind)
    # Some code names a counter without its suffix where it reads it.
    known = [metric for metric in found.values() if metric.kind != "unknown" or metric.name + "_total" not in found]
    return sorted(known, key=lambda metric: metric.name)


def _metric_strings(node: ast.AST, kind: str = "unknown") -> Iterator[tuple[str, str]]:
    """(exported name, kind) of each metric name under `node`; the kind is that of the nearest call around it."""
    if isinstance(node, ast.Call):
        callee = ast.unparse(node.func).lower()
        kind = next((k for k in KINDS if k in callee.rsplit(".", 1)[-1]), kind)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        base = node.value.removeprefix("vllm:")
        if base != node.value and base.isidentifier() and not base.endswith("_"):
            suffix = {"counter": "_total", "info": "_info"}.get(kind, "")
            yield "vllm:" + base.removesuffix(suffix) + suffix, kind
        return
    for child in ast.iter_child_nodes(node):
        yield from _metric_strings(child, kind)
