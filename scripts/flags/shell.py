"""One logical line as a shell would take it: which program, with what environment, flags and model."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from scripts.flags.text import Line

PROMPT = re.compile(
    r"^\s*(?:\([\w.-]+\)\s*)?(?:PS\s+[A-Za-z]:[^>]*>|[A-Za-z]:\\[^>]*>|[\w.-]+@[\w.-]+:?[^$#%]*[$#%]|[$%>])\s+"
)
ASSIGNMENT = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*)=(.*)$", re.DOTALL)
PLACEHOLDER = re.compile(r"^(…|\.{3}|<[^<>]*>|\[(options|model_tag|args)\])$", re.IGNORECASE)
# Words before a command that change nothing about it.
PREFIXES = {"sudo", "nohup", "exec", "time", "setsid", "stdbuf", "export", "set", "env", "uvx"}
# Options of `docker run` that take no value; every other one does.
DOCKER_SWITCHES = {"-d", "-i", "-t", "-it", "-ti", "-dit", "-itd", "-P", "--detach", "--interactive", "--tty", "--rm"}
DOCKER_SWITCHES |= {"--init", "--privileged", "--publish-all", "--read-only", "--no-healthcheck", "--oom-kill-disable"}
SUBCOMMANDS = {"serve", "chat", "complete", "bench", "run-batch", "collect-env", "launch"}
OPERATORS = {"|", "||", "&&", ";", "&", ";;"}


@dataclass(frozen=True)
class Given:
    """A flag as it was typed: `--block-size 256`. `values` holds what followed it, joined by = or not."""

    name: str
    values: tuple[str, ...] = ()
    line: int = 0
    joined: bool = False  # written --flag=value

    @property
    def value(self) -> str | None:
        """The values as one text, None where there was none."""
        return " ".join(self.values) if self.values else None

    def __str__(self) -> str:
        return " ".join((self.name, *self.values))


@dataclass
class Command:
    """One engine start: `launcher` is "vllm serve", a `python -m` module, another word, or "" for a bare flag list."""

    launcher: str
    line: int
    words: list[str]  # what follows the launcher, flags not yet paired with values
    env: list[tuple[str, str]] = field(default_factory=list)
    docker: list[Given] = field(default_factory=list)
    image: str | None = None


def commands(line: Line) -> Iterator[Command]:
    """The engine starts in a line that reads as a command; none for prose and for other programs."""
    text = PROMPT.sub("", line.text)
    text = re.sub(r"<([\w ./:-]+)>", "…", text)
    text = re.sub(r"\$\([^()]*\)", "$VALUE", text)
    text = re.sub(r"(?<=\s)[\d&]?>>?\s*(&\d|[\w./-]+)", "", text)  # redirections
    pending: list[tuple[str, str]] = []
    for words in _split(text):
        found, pending = _command(words, line.number, pending)
        if found:
            yield found


def _split(text: str) -> Iterator[list[str]]:
    """The words of each simple command of a line; a stray quote makes all quotes plain characters."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        words = list(lexer)
    except ValueError:
        words = text.replace('"', "").replace("'", "").split()
    current: list[str] = []
    for word in words:
        if word in OPERATORS:
            yield current
            current = []
        elif word not in ("<", ">"):
            current.append(word)
    yield current


def _command(
    words: list[str], line: int, pending: list[tuple[str, str]]
) -> tuple[Command | None, list[tuple[str, str]]]:
    """The engine start in one simple command, and the variables that `export` leaves for the next one."""
    env = list(pending)
    while words and (words[0] in PREFIXES or ASSIGNMENT.match(words[0]) or words[0] in ("uv", "run", "poetry")):
        if assigned := ASSIGNMENT.match(words[0]):
            env.append((assigned[1], assigned[2]))
        words = words[1:]
    if not words:
        return None, env
    program = words[0].rsplit("/", 1)[-1]
    if program in ("docker", "podman", "nerdctl") and len(words) > 2:
        return _docker(words, line, env), []
    if program == "vllm" and len(words) > 1:
        if words[1] not in SUBCOMMANDS and not any(word.startswith("--") for word in words[2:]):
            return None, []  # a sentence that begins with the name
        if words[1].startswith("-"):
            return Command("vllm", line, words[1:], env), []
        return Command(f"vllm {words[1]}", line, words[2:], env), []
    if re.fullmatch(r"python[\d.]*", program) and "-m" in words[:3]:
        at = words.index("-m") + 1
        module = words[at] if at < len(words) else ""
        if module.split(".")[0] in ("vllm", "awq"):
            return Command(module, line, words[at + 1 :], env), []
    if re.fullmatch(r"vllm[-_][a-z-_]+", program):
        return Command(program, line, words[1:], env), []
    if re.fullmatch(r"python[\d.]*", program) and len(words) > 1 and words[1].endswith("api_server.py"):
        module = "vllm.entrypoints.openai.api_server" if "openai" in words[1] else "vllm.entrypoints.api_server"
        return Command(module, line, words[2:], env), []
    if re.match(r"--?[A-Za-z]", words[0]):
        return Command("", line, words, env), []
    return None, env if words == [] else []


def _docker(words: list[str], line: int, env: list[tuple[str, str]]) -> Command | None:
    """`docker run ... IMAGE args`: what follows the image goes to the engine."""
    words = words[2:] if words[1] != "compose" else words[3:]
    given: list[Given] = []
    entrypoint = ""
    while words and words[0].startswith("-"):
        name, _, value = words[0].partition("=")
        words = words[1:]
        values: tuple[str, ...] = (value,) if value else ()
        if not value and name not in DOCKER_SWITCHES and words:
            values, words = (words[0],), words[1:]
        given.append(Given(name, values, line, joined=bool(value)))
        if name in ("-e", "--env") and values and (assigned := ASSIGNMENT.match(values[0])):
            env.append((assigned[1], assigned[2]))
        if name == "--entrypoint" and values:
            entrypoint = values[0]
    if not words:
        return None
    image, words = words[0], words[1:]
    if "vllm" not in image and "vllm" not in " ".join(words):
        return None
    inner, _ = _command([entrypoint, *words] if entrypoint else words, line, [])
    if inner is None or not inner.launcher:
        inner = Command("vllm serve", line, words)
    return Command(inner.launcher, line, inner.words, env + inner.env, given, image)
