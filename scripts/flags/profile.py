"""From findings to a profile in vLLM's own config format, and the lines of an env file. Pure."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from scripts.flags.finding import SECRET, Finding
from scripts.flags.parts import Paste
from scripts.flags.truth import Say
from scripts.flags.values import is_variable

NO_START = Say(
    en="No profile: no engine is started in it (no `vllm serve MODEL --flag …`), and flags that only sentences name "
    "don't go into one. Paste the command itself, or start from a profile of configs/engine.",
    zh="没有生成配置：文中没有启动引擎的命令（如 `vllm serve MODEL --flag …`），只在正文里提到的参数不会写进配置。"
    "请直接粘贴启动命令，或从 configs/engine 里现成的配置开始。",
)
NOTHING_LEFT = Say(
    en="No profile: the command names no model, and none of its flags is one to keep.",
    zh="没有生成配置：命令里没有模型名，也没有值得保留的参数。",
)


@dataclass(frozen=True)
class Profile:
    """`settings` in the order of the paste; `env` holds no secret: such variables are named with no value.

    `why_none` says why there is no setting, where there were flags; `unproven` are flags left out for want of a figure.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    model: str | None = None
    why_none: Say | None = None
    unproven: tuple[str, ...] = ()

    def yaml(self, version: str, source: str) -> str:
        """The file's text; a line for the model is a comment where the paste named none."""
        lines = [f"# Made from {source}; every key is a flag of vLLM {version}.", ""]
        if self.model is None:
            lines.append("# model: the paste names none; put it here, or after `vllm serve`")
        for key, value in self.settings.items():
            lines += yaml.safe_dump({key: value}, sort_keys=False, allow_unicode=True, width=10_000).splitlines()
        lines += [f"# left out, as nothing measured speaks for it: {flag}" for flag in self.unproven]
        return "\n".join(lines) + "\n"

    def env_lines(self) -> str:
        """The text of the env file's lines, empty where none are wanted."""
        note = "# fill in: the secret itself was not copied\n"
        return "".join(f"{'' if value else note}{name}={value}\n" for name, value in self.env.items())


def build(paste: Paste, findings: list[Finding]) -> Profile:
    """The profile of the last engine start in the paste; flags that only its prose names don't go in."""
    starts = [start for start in paste.starts if start.launcher != "awq.entry" and (start.given or start.model)]
    lines = {given.line for start in starts[-1:] for given in start.given} | {start.line for start in starts[-1:]}
    model = starts[-1].model if starts else None
    settings: dict[str, Any] = {}
    env: dict[str, str] = {}
    unproven = []
    for finding in findings:
        if finding.kind == "flag" and finding.line in lines:
            for key, value in finding.settings.items():
                both_nest = isinstance(settings.get(key), dict) and isinstance(value, dict)
                settings[key] = _merged(settings[key], value) if both_nest else value
            if finding.verdict == "unverifiable" and not finding.settings:
                unproven.append(finding.subject.en)
        if finding.kind == "variable" or finding.line in lines:
            env |= {name: _safe(name, value) for name, value in finding.environment.items()}
    named = settings.pop("model", None)
    model = model or (named if isinstance(named, str) else None)
    if model and not is_variable(model):
        settings = {"model": model, **settings}
    else:
        model = None
    why_none = None
    if not settings and any(finding.kind == "flag" for finding in findings):
        why_none = NOTHING_LEFT if starts else NO_START
    return Profile(settings, env, model, why_none, tuple(unproven))


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {
        **one,
        **{
            k: _merged(one[k], v) if isinstance(v, dict) and isinstance(one.get(k), dict) else v
            for k, v in other.items()
        },
    }


def _safe(name: str, value: str) -> str:
    """A value fit for a file that may be shown: a secret's place stays empty."""
    if SECRET.search(name):
        return ""
    return value if re.fullmatch(r"[\w./:,@%+=-]*", value) else json.dumps(value, ensure_ascii=False)
