"""Types, choices and defaults of an engine's config fields, read from source: names are followed through imports."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.engine_args.vocabulary import Flag, Form

UNKNOWN = "?"  # a default that only running the code would tell


def constant(node: ast.AST | None) -> Any:
    """The value of a literal, or None."""
    try:
        return ast.literal_eval(node) if node is not None else None
    except (ValueError, TypeError, SyntaxError):
        return None


@dataclass(frozen=True)
class Field:
    """A config field as far as a command line cares."""

    name: str
    form: Form
    type: str | None
    choices: tuple[Any, ...]
    suggested: tuple[str, ...]
    default: Any

    def as_flag(self, names: tuple[str, ...]) -> Flag:
        """The flag that exposes this field under `names`."""
        long = next((name for name in names if name.startswith("--")), names[0])
        negative = "--no-" + long.removeprefix("--") if self.form == "boolean" else None
        return Flag(names, self.form, self.type, self.choices, self.suggested, self.default, negative)


class Modules:
    """The parsed modules of one vllm package; parses each file once."""

    def __init__(self, package: Path) -> None:
        self.package = package
        self._trees: dict[str, ast.Module] = {}
        self._tables: dict[str, tuple[dict[str, ast.AST], dict[str, tuple[str, str]]]] = {}

    def tree(self, relative: str) -> ast.Module:
        """The syntax tree of a file under the package."""
        if relative not in self._trees:
            self._trees[relative] = ast.parse((self.package / relative).read_text())
        return self._trees[relative]

    def find(self, relative: str, name: str, depth: int = 0) -> tuple[str, ast.AST] | None:
        """Where `name`, as seen in file `relative`, is defined: (file, class or assigned value); None if outside."""
        defined, imported = self._symbols(relative)
        if name in defined:
            return relative, defined[name]
        if name in imported and depth < 8:
            file, original = imported[name]
            return self.find(file, original, depth + 1)
        return None

    def _symbols(self, relative: str) -> tuple[dict[str, ast.AST], dict[str, tuple[str, str]]]:
        """A file's names: those it defines at the top, and those it imports from vllm as (file, name there)."""
        if relative in self._tables:
            return self._tables[relative]
        defined: dict[str, ast.AST] = {}
        imported: dict[str, tuple[str, str]] = {}
        for node in self.tree(relative).body:
            if isinstance(node, ast.ClassDef):
                defined[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                defined |= {target.id: node.value for target in targets if isinstance(target, ast.Name)}
        for part in ast.walk(self.tree(relative)):
            if isinstance(part, ast.ImportFrom) and (file := self._file(relative, part)):
                imported |= {alias.asname or alias.name: (file, alias.name) for alias in part.names}
        self._tables[relative] = defined, imported
        return defined, imported

    def _file(self, relative: str, node: ast.ImportFrom) -> str | None:
        """The file that `from X import ...` in file `relative` means, or None when it isn't vllm's own."""
        if node.level:
            base = Path(relative).parents[node.level - 1]
            module = base / (node.module or "").replace(".", "/")
        elif (node.module or "").split(".")[0] == "vllm":
            module = Path(*(node.module or "").split(".")[1:])
        else:
            return None
        candidates = [module / "__init__.py"]
        if module.name:
            candidates.insert(0, module.with_suffix(".py"))
        return next((str(path) for path in candidates if (self.package / path).is_file()), None)

    def fields(self, relative: str, node: ast.ClassDef) -> Iterator[Field]:
        """The annotated fields of a config class, inherited ones first."""
        for file, item in self._annotated(relative, node):
            yield self._field(file, item)

    def _annotated(self, relative: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.AnnAssign]]:
        for base in node.bases:
            found = self.find(relative, base.id) if isinstance(base, ast.Name) else None
            if found and isinstance(found[1], ast.ClassDef):
                yield from self._annotated(found[0], found[1])
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item.annotation):
                yield relative, item

    def field(self, relative: str, config: str, name: str) -> Field | None:
        """The field `name` of the class `config` as seen from file `relative`."""
        found = self.find(relative, config)
        if not found or not isinstance(found[1], ast.ClassDef):
            return None
        matches = [at for at in self._annotated(found[0], found[1]) if ast.unparse(at[1].target) == name]
        return self._field(*matches[-1]) if matches else None

    def _field(self, relative: str, item: ast.AnnAssign) -> Field:
        members = list(self._members(relative, item.annotation))
        plain = {label for label, _ in members}
        options = [option for label, values in members if label in ("Literal", "Enum") for option in values]
        form: Form = "value"
        kind: str | None = "str"
        if "bool" in plain:
            form, kind = ("optional", "str") if "str" in plain else ("boolean", None)
        elif "Literal" in plain:
            kind = type(options[0]).__name__ if options else "str"
        elif plain & {"tuple", "list", "set", "Sequence"}:
            form, kind = "list", "str"
        else:
            kind = next((label for label in ("int", "float", "dict", "Config") if label in plain), "str")
        kind = "json" if kind in ("dict", "Config") else kind
        closed = "Literal" in plain and "str" not in plain and form == "value"
        default = self.value(relative, item.value) if item.value is not None else None
        return Field(
            ast.unparse(item.target),
            form,
            kind,
            choices=tuple(options) if closed else (),
            suggested=() if closed else tuple(str(option) for option in options),
            default=default,
        )

    def _members(self, relative: str, node: ast.expr) -> Iterator[tuple[str, list[Any]]]:
        """The alternatives of an annotation: (label, options), aliases resolved."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        if isinstance(node, ast.BinOp):
            yield from self._members(relative, node.left)
            yield from self._members(relative, node.right)
        elif isinstance(node, ast.Subscript):
            head = ast.unparse(node.value).split(".")[-1]
            inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if head == "Literal":
                yield "Literal", list(self._literals(relative, inner))
            elif head in ("Optional", "Union", "SkipValidation"):
                for part in inner:
                    yield from self._members(relative, part)
            elif head == "Annotated":
                yield from self._members(relative, inner[0])
            else:
                yield head.lower() if head in ("List", "Dict", "Tuple", "Set") else head, []
        elif isinstance(node, ast.Name | ast.Attribute):
            yield from self._named(relative, ast.unparse(node))

    def _literals(self, relative: str, options: list[ast.expr]) -> Iterator[Any]:
        """The options of a Literal, those of the Literals it names included."""
        for option in options:
            if isinstance(option, ast.Constant):
                yield option.value
            else:
                for _, values in self._members(relative, option):
                    yield from values

    def _named(self, relative: str, name: str) -> Iterator[tuple[str, list[Any]]]:
        found = self.find(relative, name) if "." not in name else None
        if found is None:
            yield name, []
        elif not isinstance(found[1], ast.ClassDef):
            assert isinstance(found[1], ast.expr)
            yield from self._members(found[0], found[1])
        elif enum := self.enum(found[1]):
            yield "Enum", enum
        else:
            decorators = " ".join(ast.unparse(d) for d in found[1].decorator_list)
            yield ("Config" if "config" in decorators or "dataclass" in decorators else "str"), []

    @staticmethod
    def enum(node: ast.ClassDef) -> list[str]:
        """The values of an Enum of strings; the member names where they are something else, numbers beside them."""
        if not any("Enum" in ast.unparse(base) for base in node.bases):
            return []
        pairs = [
            (item.targets[0].id, constant(item.value))
            for item in node.body
            if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name)
        ]
        names = [name for name, _ in pairs if name.isupper() and not name.startswith("_")]
        values = [value for name, value in pairs if name in names and isinstance(value, str) and "." not in value]
        numbers = [str(value) for name, value in pairs if name in names and isinstance(value, int)]
        return values if len(values) == len(names) else [*names, *numbers]

    def options(self, relative: str, node: ast.expr) -> Iterator[Any]:
        """The members of a `choices=` expression."""
        if isinstance(node, ast.ListComp):
            node = node.generators[0].iter
        if isinstance(node, ast.Call) and node.args:
            node = node.args[0]  # list(X), get_args(X), X.keys() come down to X
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            for element in node.elts:
                if isinstance(element, ast.Starred):
                    yield from self.options(relative, element.value)
                else:
                    yield constant(element)
        elif isinstance(node, ast.Dict):
            yield from (constant(key) for key in node.keys)
        elif isinstance(node, ast.Name) and (found := self.find(relative, node.id)):
            if isinstance(found[1], ast.ClassDef):
                yield from self.enum(found[1])
            elif isinstance(found[1], ast.Subscript):
                for _, values in self._members(found[0], found[1]):
                    yield from values
            else:
                yield from self.options(found[0], found[1])  # type: ignore[arg-type]

    def value(self, relative: str, node: ast.expr) -> Any:
        """A default's value: literals, `Config.field`, `Field(default=...)`, `get_field(...)`; UNKNOWN otherwise."""
        if isinstance(node, ast.Constant) or constant(node) is not None:
            return constant(node)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if field := self.field(relative, node.value.id, node.attr):
                return field.default
            found = self.find(relative, node.value.id)
            if found and isinstance(found[1], ast.ClassDef) and self.enum(found[1]):
                return node.attr
        if isinstance(node, ast.Call):
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            if "default" in keywords:
                return self.value(relative, keywords["default"])
            if ast.unparse(keywords.get("default_factory", node)) in ("list", "dict", "set"):
                return []
        return UNKNOWN

    @staticmethod
    def type_label(node: ast.expr) -> str:
        """A short name for the `type=` of an argument."""
        text = ast.unparse(node).removeprefix("optional_type(").removesuffix(")")
        labels = {"json.loads": "json", "nullable_str": "str", "nullable_kvs": "key=value", "get_attr": "str"}
        return labels.get(text, text)
