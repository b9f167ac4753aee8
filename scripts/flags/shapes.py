"""Engine settings in other shapes than a command line: argument lists, config files, Python calls."""

import ast
import json
import re
import shlex
from collections.abc import Iterator

import yaml

from scripts.flags.parts import Lookup, Start
from scripts.flags.shell import Given
from scripts.flags.text import CJK, Line

LLM_CALL = re.compile(r"\b(?:LLM|EngineArgs|AsyncEngineArgs)\(")


def argument_lists(lines: list[Line]) -> tuple[list[Line], list[Line]]:
    """YAML and JSON argument lists (compose, Kubernetes), each as one command line; and the lines that are none."""
    lists: list[Line] = []
    rest: list[Line] = []
    items: list[str] = []
    number = 0

    def close() -> None:
        scripts = [item for item in items if re.search(r"\bvllm\b.*\s--", item)]  # the text given to `sh -c`
        if scripts:
            lists.extend(Line(number, script) for script in scripts)
        elif any(item.startswith("--") for item in items):
            lists.append(Line(number, shlex.join(items)))
        items.clear()

    for line in _joined(lines):
        inline = re.match(r"(?:command|args|entrypoint):\s*(\[.*\])\s*$", line.text)
        item = re.match(r"-\s+(.*)$", line.text)
        if inline:
            close()
            number, found = line.number, _yaml(inline[1])
            items += [str(part) for part in found] if isinstance(found, list) else []
            close()
        elif item and not CJK.search(item[1]) and len(words := _item(item[1])) <= 2:
            number = number if items else line.number
            items += words
        else:
            close()
            rest.append(line)
    close()
    return lists, rest


def _joined(lines: list[Line]) -> Iterator[Line]:
    """Lines with a list in brackets that goes over several of them as one."""
    pending: Line | None = None
    for line in lines:
        if pending:
            pending = Line(pending.number, f"{pending.text} {line.text}")
        elif re.match(r"(?:command|args|entrypoint):\s*\[[^\]]*$", line.text):
            pending = line
            continue
        else:
            yield line
            continue
        if "]" in line.text:
            yield pending
            pending = None
    if pending:
        yield pending


def _item(text: str) -> list[str]:
    """The words of a list item: one scalar, or a flag with its value."""
    scalar = _yaml(text)
    if isinstance(scalar, str | int | float) and not str(scalar).startswith("--"):
        return [str(scalar)] if " " not in str(scalar) or text[0] in "\"'" else str(scalar).split()
    return str(scalar).split(" ", 1) if isinstance(scalar, str) else text.split()


def _yaml(text: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return None


def compose_options(text: str) -> Iterator[Start]:
    """What a compose file says of the engine's container: its image, shared memory and ipc."""
    for image in re.finditer(r"^( *)image:\s*[\"']?(\S*vllm[^\s\"']*)", text, re.MULTILINE):
        line = text.count("\n", 0, image.start()) + 1
        service = re.split(rf"\n(?! {{{len(image[1])}}}|\s*\n)", text[image.start() :])[0]
        options = re.findall(r"^ *(ipc|shm_size):\s*[\"']?(\w+)", service, re.MULTILINE)
        given = [Given("--" + key.replace("_", "-"), (value,), line, joined=True) for key, value in options]
        yield Start("docker", line, [], docker=given, image=image[2])


def config_file(text: str, lookup: Lookup) -> Start | None:
    """A paste that is one of vLLM's own config files: `key: value` lines, most keys being flags."""
    if len(re.findall(r"^[a-z][\w-]*:\s", text, re.MULTILINE)) < 2:
        return None
    content = _yaml(text)
    if not isinstance(content, dict):
        return None
    known = [key for key in content if isinstance(key, str) and lookup(f"--{key}") is not None]
    if len(known) < 2 or len(known) * 2 < len(content):
        return None
    start = Start("config file", 1, [])
    for key, value in content.items():
        found = re.search(rf"^{re.escape(str(key))}\s*:", text, re.MULTILINE)
        number = text.count("\n", 0, found.start()) + 1 if found else 1
        if key == "model":
            start.model = str(value)
        else:
            start.given.append(_from_python(str(key), value, number))
    return start


def python_calls(text: str) -> Iterator[Start]:
    """`LLM(model=..., enforce_eager=True)`: the same settings, given in Python."""
    for match in LLM_CALL.finditer(text):
        inner = text[match.end() :]
        for end in (index for index, char in enumerate(inner) if char == ")"):
            try:
                call = ast.parse(f"f({inner[:end]})", mode="eval").body
            except SyntaxError:
                continue
            if isinstance(call, ast.Call):
                yield _from_call(call, text.count("\n", 0, match.start()) + 1)
            break


def _from_call(call: ast.Call, line: int) -> Start:
    start = Start("LLM(...)", line, [])
    if call.args and isinstance(call.args[0], ast.Constant):
        start.model = str(call.args[0].value)
    for keyword in call.keywords:
        try:
            value = ast.literal_eval(keyword.value)
        except ValueError:
            continue
        if keyword.arg == "model":
            start.model = str(value)
        elif keyword.arg:
            start.given.append(_from_python(keyword.arg, value, line))
    return start


def _from_python(key: str, value: object, line: int) -> Given:
    """A Python or YAML setting as the flag it stands for."""
    name = "--" + key.replace("_", "-")
    if value is True:
        return Given(name, (), line)
    if value is False:
        return Given(name, ("false",), line)
    if isinstance(value, list):
        return Given(name, tuple(str(part) for part in value), line)
    if isinstance(value, dict):
        return Given(name, (json.dumps(value),), line)
    return Given(name, (str(value),), line)
