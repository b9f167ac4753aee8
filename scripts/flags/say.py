"""Findings that need no reviewed entry: their sentences, in both languages, follow from the captured releases alone."""

from typing import Any

from scripts.engine_args import Flag, release
from scripts.engine_args.history import Life
from scripts.flags.finding import Finding
from scripts.flags.shell import Given
from scripts.flags.truth import Say, Verdict
from scripts.flags.values import is_variable

TRAPS = {
    "blank after backslash": Say(
        en="A blank follows a backslash at a line's end: a shell ends the command there, and the rest is lost. "
        "Read here as one command.",
        zh="行尾反斜杠后面有空格：shell 会在此处结束命令，后面的参数全部失效。这里按一条完整命令读取。",
    ),
    "comment inside a command": Say(
        en="A comment stands inside a continued command: a shell ends the command there. Read here without it.",
        zh="续行命令中间夹有注释：shell 会在此处结束命令。这里已忽略注释。",
    ),
}


def _finding(kind: str, subject: str | Say, verdict: Verdict, why: Say, line: int, **more: Any) -> Finding:
    shown = subject if isinstance(subject, Say) else Say(en=subject, zh=subject)
    return Finding(kind, shown, verdict, why, line=line, **more)


def trap(name: str) -> Finding:
    """What a shell would have choked on."""
    subject = Say(en=name, zh={"blank after backslash": "反斜杠后有空格"}.get(name, "命令中间有注释"))
    fix = Say(en="Remove it from the script.", zh="请在脚本里删掉。")
    return _finding("trap", subject, "wrong value", TRAPS[name], 0, write=fix)


def stray(words: list[str], line: int) -> Finding:
    """Words that belong to no flag: the parser refuses them."""
    more = f" … (+{len(words) - 3})" if len(words) > 3 else ""
    why = Say(
        en="Belongs to no flag, and the model is the only free word: the parser refuses it.",
        zh="不属于任何参数，而模型名之外不允许有多余的词：解析器会拒绝。",
    )
    fix = Say(en="Delete it, or quote the value it is a part of.", zh="删除，或给它所属的取值整体加引号。")
    return _finding("trap", " ".join(words[:3]) + more, "wrong value", why, line, write=fix)


def plain(kind: str, name: str, line: int) -> Finding:
    """A program or metric that exists and needs no comment."""
    return _finding(kind, name, "real", Say(en="Exists under this name.", zh="存在，名称正确。"), line)


def other_program(name: str, line: int) -> Finding:
    """One of vLLM's programs that starts no server."""
    why = Say(en="Exists; its flags are its own and are not judged here.", zh="存在；它的参数自成一套，这里不作判断。")
    return _finding("program", name, "real", why, line)


def missing(
    kind: str, text: str, line: int, version: str, life: Life | None, near: str | None, versions: tuple[str, ...]
) -> Finding:
    """Something that release `version` doesn't have: gone, yet to come, or in no captured release."""
    what = {"flag": "a flag", "variable": "a variable", "metric": "a metric", "program": "a program"}[kind]
    result_en, result_zh = {
        "flag": (" The server exits with code 2.", "服务会以退出码 2 直接退出。"),
        "variable": (" vLLM ignores it with a warning.", "vLLM 只会警告并忽略它。"),
        "metric": (" A query for it reads nothing.", "查询不会返回任何数据。"),
        "program": (" It cannot be started.", "无法启动。"),
    }[kind]
    hint = Say(en=f"Did you mean {near}?", zh=f"是否想写 {near}？") if near else None
    drop = Say(en="Delete it.", zh="直接删除。")
    if life and release(life.first) > release(version):
        why = Say(
            en=f"Not in {version} yet: {life.first} is the first captured release with it.{result_en}",
            zh=f"{version} 还没有：已收录的版本中 {life.first} 才首次出现。{result_zh}",
        )
        return _finding(kind, text, "not yet", why, line, write=hint or drop)
    if life:
        why = Say(
            en=f"{life.first} to {life.last} had it, {life.gone_in} no longer does.{result_en}",
            zh=f"{life.first} 至 {life.last} 有，{life.gone_in} 起不再提供。{result_zh}",
        )
        return _finding(kind, text, "removed", why, line, write=hint or drop, gone_in=life.gone_in)
    why = Say(
        en=f"Not {what} of {version}, nor of any captured release ({versions[0]} to {versions[-1]}).{result_en}",
        zh=f"{version} 没有，已收录的所有版本（{versions[0]} 至 {versions[-1]}）也都没有。{result_zh}",
    )
    return _finding(kind, text, "unknown", why, line, write=hint or drop)


def misfit(subject: Say, problem: Say, line: int, settings: dict[str, Any]) -> Finding:
    """A flag that exists with a value that doesn't fit."""
    return _finding("flag", subject, "wrong value", problem, line, settings=settings)


def false_in_config(flag: Flag, subject: Say, line: int, settings: dict[str, Any]) -> Finding:
    """`enable-x: false` in a config file."""
    key, negative = flag.name.removeprefix("--"), (flag.negative or "").removeprefix("--")
    if flag.default in (None, False) and not negative:
        return default(subject, flag, line)
    why = Say(
        en=f"`vllm serve` drops `{key}: false` from a config file without a word, and the default stays.",
        zh=f"`vllm serve` 会静默丢弃配置文件里的 `{key}: false`，默认值照旧生效。",
    )
    fix = Say(en=f"{negative}: true", zh=f"{negative}: true")
    return _finding(
        "flag", Say(en=f"{key}: false", zh=f"{key}: false"), "wrong value", why, line, write=fix, settings=settings
    )


def default(subject: Say, flag: Flag, line: int) -> Finding:
    """A value that is the default already."""
    why = Say(en="Is the default already: changes nothing.", zh="本来就是默认值：写不写都一样。")
    return _finding("flag", subject, "harmless", why, line)


def multiple(flag: Flag, given: Given, value: Any) -> Say | None:
    """What 16k means, where a value ends in such a letter."""
    if not (str(flag.type).startswith("human_readable") and given.value and given.value[-1].isalpha()):
        return None
    if not isinstance(value, int):
        return None
    return Say(
        en=f"{given.value} is {value:,}: k is 1000, K is 1024.", zh=f"{given.value} 即 {value:,}：k=1000，K=1024。"
    )


def real_flag(subject: Say, flag: Flag, given: Given, value: Any, settings: dict[str, Any]) -> Finding:
    """A flag that exists and whose value fits."""
    en, zh = "Exists.", "存在。"
    if given.value and is_variable(given.value):
        en = "Exists; a shell variable is in the value, so it was not checked and a config file can't hold it."
        zh = "存在；取值含有 shell 变量，未检查，也不能写进配置文件。"
    elif given.name.startswith("--") and given.name.split(".")[0].replace("_", "-") not in (*flag.names, flag.negative):
        en, zh = f"Short for {flag.name}: write it out.", f"是 {flag.name} 的缩写：请写全称。"
    elif found := multiple(flag, given, value):
        return _finding("flag", subject, "real", found, given.line, settings=settings)
    elif flag.deprecated:
        en, zh = (
            "Exists, and is marked as deprecated: a later release drops it.",
            "存在，但已标记弃用：后续版本会移除。",
        )
    return _finding("flag", subject, "real", Say(en=en, zh=zh), given.line, settings=settings)


def variable(text: str, name: str, value: str | None, line: int, *, own: bool) -> Finding:
    """A variable that vLLM reads, or one of another program, which is passed on."""
    why = (
        Say(en="vLLM reads it.", zh="vLLM 会读取。")
        if own
        else Say(en="Not vLLM's own: passed on as it is.", zh="不是 vLLM 自己的变量：原样传递。")
    )
    environment = {name: value} if value is not None else {}
    return _finding("variable", text, "real", why, line, environment=environment)


def without_total(name: str, line: int) -> Finding:
    """A counter named without its suffix."""
    why = Say(
        en="A counter's series ends in _total: without it a query reads nothing.",
        zh="计数器的序列名以 _total 结尾：少了它查询不会返回任何数据。",
    )
    fix = Say(en=f"{name}_total", zh=f"{name}_total")
    return _finding("metric", name, "renamed", why, line, write=fix)
