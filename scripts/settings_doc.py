"""docs/settings.md out of the settings' own descriptions.

    python -m scripts.settings_doc            # write it
    python -m scripts.settings_doc --check    # only tell whether it is up to date

Exit codes: 0 written, or up to date; 1 out of date (with --check); 2 wrong usage.
"""

import argparse
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gateway.settings import CONFIG_VARIABLE, DEFAULT_CONFIG, ENV_PREFIX, Settings
from scripts._command import Parser

TARGET = Path("docs/settings.md")
HEAD = f"""\
# Settings of the gateway

<!-- Written by `make settings-doc` from the descriptions in gateway/settings.py; edit those. -->

They come from a YAML file, named by `{CONFIG_VARIABLE}` (default `{DEFAULT_CONFIG}`), and from the environment, which
wins: `batching.window_ms` is `{ENV_PREFIX}BATCHING__WINDOW_MS`. Lists and mappings are JSON there; an empty variable
counts as not set. They are read once: a change needs a restart. Only the keys file (docs/security.md) and lists of
engines (docs/replicas.md) are followed while the gateway runs.

A wrong value, an unknown name or a file that can't be used stops the start with one line a mistake: key, value,
expectation, and for an unknown name the nearest one; exit code 1.
"""


def sections() -> Iterator[tuple[str, dict[str, FieldInfo]]]:
    """Top-level settings first (section ""), then each section in the order of the code."""
    fields = Settings.model_fields
    yield "", {name: field for name, field in fields.items() if not _is_section(field)}
    for name, field in fields.items():
        if _is_section(field):
            assert isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
            yield name, dict(field.annotation.model_fields)


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def render() -> str:
    parts = [HEAD]
    for section, fields in sections():
        prefix = f"{section}." if section else ""
        parts.append(
            f"\n## {section or 'Addresses and engines'}\n\n| setting | default | what it does |\n|---|---|---|\n"
        )
        for name, field in fields.items():
            text = " ".join(part for part in (_sentence(field), _expected(field)) if part)
            parts.append(f"| `{prefix}{name}` | {_default(field)} | {text} |\n")
    return "".join(parts)


def _sentence(field: FieldInfo) -> str:
    return (field.description or "").replace("|", "\\|")


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(value)}]`"
    if isinstance(value, float):
        value = f"{value:g}"
    return f"`{value}`"


def _expected(field: FieldInfo) -> str:
    """Bounds and choices, as far as the type tells them."""
    choices = typing.get_args(field.annotation) if typing.get_origin(field.annotation) is typing.Literal else ()
    if choices:
        return "One of " + ", ".join(f"`{choice}`" for choice in choices) + "."
    bounds = [text for source in (field, *_inner(field.annotation)) for text in _bounds(source.metadata)]
    return f"({', '.join(bounds)})" if bounds else ""


def _inner(annotation: Any) -> list[FieldInfo]:
    """The FieldInfos that Annotated types inside a union carry: `Seconds | None`."""
    if isinstance(annotation, types.UnionType):
        return [found for part in typing.get_args(annotation) for found in _inner(part)]
    return [item for item in getattr(annotation, "__metadata__", ()) if isinstance(item, FieldInfo)]


def _bounds(metadata: Sequence[Any]) -> Iterator[str]:
    words = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most", "min_length": "at least"}
    for item in metadata:
        for name, word in words.items():
            value = getattr(item, name, None)
            if value is not None:
                yield f"{word} {value:.15g}" if name != "min_length" else f"{value} or more"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("settings-doc", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    chosen = parser.parse_args(arguments)
    text = render()
    current = TARGET.read_text(encoding="utf-8") if TARGET.is_file() else ""
    if text == current:
        print(f"{TARGET} is up to date")
        return 0
    if chosen.check:
        print(f"settings-doc: {TARGET} is out of date; run `make settings-doc`", file=sys.stderr)
        return 1
    TARGET.write_text(text, encoding="utf-8")
    print(f"wrote {TARGET}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
