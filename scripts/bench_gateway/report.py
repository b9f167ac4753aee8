"""From a run's rows to figures, aims and the tables of docs/benchmarks.md. Pure."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.bench_gateway.parties import BESIDE, DIRECT, GATEWAY, LITELLM, NO_WINDOW, ROUTER

BUSY = 0.95  # a core this full is the bottleneck
BEGIN, END = "<!-- the gateway beside its peers: begin -->", "<!-- the gateway beside its peers: end -->"


@dataclass(frozen=True)
class Figure:
    """Over the rounds."""

    median: float
    least: float
    most: float

    def told(self, digits: int) -> str:
        return f"{self.median:,.{digits}f} ({self.least:,.{digits}f} – {self.most:,.{digits}f})"


@dataclass(frozen=True)
class Aim:
    """`figure` is None where a party it needs was not measured."""

    what: str
    bound: float
    at_least: bool
    digits: int
    figure: Figure | None

    @property
    def verdict(self) -> str:
        """By the median; rounds that say otherwise are told of."""
        if self.figure is None:
            return "not measured"
        ends = (self._holds(self.figure.least), self._holds(self.figure.most))
        word = "met" if self._holds(self.figure.median) else "missed"
        return word if ends[0] == ends[1] else f"{word}, not in every round"

    def _holds(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value < self.bound


Rows = Mapping[str, Mapping[str, Any]]  # of one round: party, kind


def over(rounds: Sequence[Rows], of: Callable[[Rows], float]) -> Figure | None:
    """None where a round lacks what it is made of."""
    try:
        values = [of(rows) for rows in rounds]
    except KeyError:
        return None
    return Figure(statistics.median(values), min(values), max(values))


def added(rounds: Sequence[Rows], party: str, kind: str, quantile: str) -> Figure | None:
    """Milliseconds over asking the source directly, in the same round."""
    return over(rounds, lambda rows: rows[party][kind][quantile] - rows[DIRECT][kind][quantile])


def per_cpu_s(rounds: Sequence[Rows], party: str, kind: str) -> Figure | None:
    return over(rounds, lambda rows: rows[party][kind]["per_cpu_s"])


def ratio(rounds: Sequence[Rows], party: str, to: str, kind: str) -> Figure | None:
    """Of work per CPU-second, round by round."""
    return over(rounds, lambda rows: rows[party][kind]["per_cpu_s"] / rows[to][kind]["per_cpu_s"])


def aims(result: Mapping[str, Any]) -> list[Aim]:
    """What the gateway shall reach as it is shipped."""
    rounds = result["rounds"]
    plan = result["plan"]
    found = [
        Aim("added p50, one in flight, ms", 0.5, False, 2, added(rounds, GATEWAY, "one_in_flight", "p50_ms")),
        Aim(f"added p50 at {plan['rate']:g}/s, ms", 1, False, 2, added(rounds, GATEWAY, "open_loop", "p50_ms")),
        Aim(f"added p99 at {plan['rate']:g}/s, ms", 5, False, 2, added(rounds, GATEWAY, "open_loop", "p99_ms")),
    ]
    for count in plan["in_flight"]:
        kind, what = f"in_flight_{count}", f"requests per CPU-second, {count} in flight"
        found.append(Aim(f"{what} ÷ vllm-router's", 0.4, True, 2, ratio(rounds, GATEWAY, ROUTER, kind)))
        found.append(Aim(f"{what} ÷ LiteLLM's", 20, True, 1, ratio(rounds, GATEWAY, LITELLM, kind)))
    for per_write in plan["per_write"]:
        what = f"{per_write} a write, every {plan['step_ms']:g} ms"
        bound = 0.5 if per_write == 1 else 1.0
        figure = ratio(rounds, GATEWAY, ROUTER, f"events_{per_write}")
        found.append(Aim(f"events per CPU-second, {what} ÷ vllm-router's", bound, True, 2, figure))
    what = f"events per CPU-second, {plan['flood'][1]} a write, unpaced"
    found.append(Aim(f"{what} ÷ vllm-router's", 1.0, True, 2, ratio(rounds, GATEWAY, ROUTER, "flood")))
    memory = over(rounds, lambda rows: rows[GATEWAY]["held"]["memory_mb"])
    return [*found, Aim(f"MB with {plan['held']} open streams", 150, False, 0, memory)]


def parties_of(result: Mapping[str, Any]) -> list[str]:
    measured = result["rounds"][0]
    return [name for name in (GATEWAY, NO_WINDOW, BESIDE, ROUTER, LITELLM) if name in measured]


def latency_table(result: Mapping[str, Any]) -> list[str]:
    rounds, rate = result["rounds"], result["plan"]["rate"]
    lines = [
        f"| added, ms | p50, one in flight | p99, one in flight | p50 at {rate:g}/s | p99 at {rate:g}/s |",
        "|---|---|---|---|---|",
    ]
    for name in parties_of(result):
        cells = [_told(added(rounds, name, kind, q), 2) for kind in _LATENCY for q in ("p50_ms", "p99_ms")]
        lines.append(f"| {_named(result, name)} | {' | '.join(cells)} |")
    alone = [_told(over(rounds, _plain(kind, q)), 2) for kind in _LATENCY for q in ("p50_ms", "p99_ms")]
    return [*lines, f"| no gateway: the whole time | {' | '.join(alone)} |"]


_LATENCY = ("one_in_flight", "open_loop")


def _plain(kind: str, quantile: str) -> Callable[[Rows], float]:
    return lambda rows: float(rows[DIRECT][kind][quantile])


def work_table(result: Mapping[str, Any]) -> list[str]:
    rounds, plan = result["rounds"], result["plan"]
    kinds = [f"in_flight_{count}" for count in plan["in_flight"]]
    kinds += [*(f"events_{per_write}" for per_write in plan["per_write"]), "flood"]
    heads = [f"requests, {count} in flight" for count in plan["in_flight"]]
    heads += [f"events, {per_write} a write" for per_write in plan["per_write"]]
    heads += [f"events, {plan['flood'][1]} a write, unpaced"]
    heads += ["MB idle", f"MB, {plan['held']} streams"]
    lines = [f"| per CPU-second | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name in parties_of(result):
        cells = [_told(per_cpu_s(rounds, name, kind), 0) + _mark(result, name, kind) for kind in kinds]
        cells.append(f"{result['idle_mb'][name]:.0f}")
        cells.append(_told(over(rounds, _memory(name)), 0))
        lines.append(f"| {_named(result, name)} | {' | '.join(cells)} |")
    return lines


def _memory(name: str) -> Callable[[Rows], float]:
    return lambda rows: float(rows[name]["held"]["memory_mb"])


def _mark(result: Mapping[str, Any], name: str, kind: str) -> str:
    """A dagger where load or source, and not the party, set the pace of a closed loop in some round."""
    together = result["cores"]["load"] == result["cores"]["source"]
    for rows in result["rounds"] if kind.startswith("in_flight") else ():
        row = rows[name][kind]
        if "failed" in row:
            continue
        share = {who: used / row["wall_s"] for who, used in row["cpu_s"].items()}
        if (sum if together else max)((share["load"], share["source"])) > BUSY > share["party"]:
            return " †"
    return ""


def aims_table(result: Mapping[str, Any]) -> list[str]:
    lines = ["| aim, for the gateway as shipped | bound | measured | |", "|---|---|---|---|"]
    for aim in aims(result):
        bound = f"{'≥' if aim.at_least else '<'} {aim.bound:g}"
        lines.append(f"| {aim.what} | {bound} | {_told(aim.figure, aim.digits)} | {aim.verdict} |")
    return lines


def beside_table(result: Mapping[str, Any]) -> list[str]:
    """The gateway's work per CPU-second divided by the other checkout's, round by round; nothing without one."""
    rounds, plan = result["rounds"], result["plan"]
    if BESIDE not in rounds[0]:
        return []
    lines = ["| per CPU-second, the gateway ÷ the other gateway | |", "|---|---|"]
    kinds = {f"in_flight_{count}": f"requests, {count} in flight" for count in plan["in_flight"]}
    kinds |= {f"events_{each}": f"events, {each} a write" for each in plan["per_write"]}
    kinds["flood"] = f"events, {plan['flood'][1]} a write, unpaced"
    return [*lines, *(f"| {what} | {_told(ratio(rounds, GATEWAY, BESIDE, kind), 2)} |" for kind, what in kinds.items())]


def _told(figure: Figure | None, digits: int) -> str:
    return "–" if figure is None else figure.told(digits)


def _named(result: Mapping[str, Any], name: str) -> str:
    version = result["versions"].get(name)
    return {GATEWAY: "**the gateway**", NO_WINDOW: "the gateway, window 0"}.get(name, f"{name} {version}")


def shares(result: Mapping[str, Any]) -> str:
    """How busy the load and the source were at their busiest, as shares of a core."""
    rows = [row for rows in result["rounds"] for party in rows.values() for row in party.values() if "cpu_s" in row]
    most = {who: max(row["cpu_s"][who] / row["wall_s"] for row in rows) for who in ("load", "source")}
    return f"At their busiest the load took {most['load']:.0%} of a core and the source {most['source']:.0%}."


def failures(result: Mapping[str, Any]) -> list[str]:
    """What a peer could not do, once each."""
    told: dict[str, None] = {}
    for rows in result["rounds"]:
        for name, kinds in rows.items():
            for kind, row in kinds.items():
                if "failed" in row:
                    told[f"No figure for {name}, {kind.replace('_', ' ')}: {row['failed']}."] = None
    return list(told)


def section(result: Mapping[str, Any], link: str) -> str:
    """One run as Markdown. `link` leads to its JSON."""
    told, plan = result["machine"], result["plan"]
    where = result["cores"]
    apart = "cores of their own" if where["source"] != where["load"] else "the other core together"
    head = (
        f"**{told['cpus']} cores, {told['processor']}** ([JSON]({link})), Python {told['python']}, commit "
        f"{result['versions']['gateway']}, {plan['rounds']} rounds in {result['took_s']:.0f} s; "
        f"{told['busy_before']:.0%} of the machine was busy with other work before. Each party on one core, load and "
        f"source on {apart}. Medians, least – most over the rounds."
    )
    tables = [latency_table(result), work_table(result), beside_table(result), aims_table(result)]
    parts = [[head], *tables, [*failures(result), shares(result)]]
    return "\n\n".join("\n".join(part) for part in parts if part)


def page(text: str, sections: Sequence[str]) -> str:
    """`text` of docs/benchmarks.md with these sections between its marks. Raises ValueError where it has none."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"no single {BEGIN} … {END}")
    before, rest = text.split(BEGIN)
    note = "<!-- Written by `python -m scripts.bench_gateway --docs` from docs/benchmarks/gateway-peers.*.json. -->"
    return before + "\n\n".join([f"{BEGIN}\n{note}", *sections, END]) + rest.split(END)[1]
