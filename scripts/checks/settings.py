"""What people write: .env, the gateway's settings, the keys file, the engine profile."""

from __future__ import annotations

import datetime
import difflib
import sys
from pathlib import Path

from gateway.keys import Key, KeysFileError, parse_keys
from gateway.settings import DEFAULT_CONFIG, ENV_PREFIX
from gateway.wording import several
from scripts.checks import Check, envvalues, fail, judged, ok, skip, warn
from scripts.checks import fit as planning
from scripts.checks.docker import compose_services
from scripts.checks.envfile import ENV, EXAMPLE, example_names, misspelt, nearest, place, read_env
from scripts.checks.probes import Probes
from scripts.checks.subject import Subject, profile_path
from scripts.engine_args.vocabulary import PINNED, load
from scripts.planner import PlanError
from scripts.planner.gpus import load_gpus
from scripts.planner.numbers import gib
from scripts.planner.settings import PROFILES

KEYS_FILE = "keys.json"  # in SECRETS_DIR, where `make keys` writes them
_COMPOSE_OWN = ("COMPOSE_", "DOCKER_", "BUILDKIT_")  # docker's own variables are welcome in .env
EXPIRES_SOON = datetime.timedelta(days=14)
# Settings are read in a process of their own: `load` looks at the environment, which here is another one.
_LOAD = (
    "from gateway.settings import load; from gateway.wording import several; s = load(); "
    "print(several(len(s.engines), 'engine') + f', listens on {s.listen}')"
)


def checks(probes: Probes, subject: Subject, now: datetime.datetime | None = None) -> list[Check]:
    moment = now or datetime.datetime.now(datetime.UTC)
    return [
        env_file(probes, subject),
        gateway(probes, subject),
        keys(probes, subject, moment),
        profile(subject, probes),
        fit(subject),
    ]


def env_file(probes: Probes, subject: Subject) -> Check:
    """Every name of .env is one of .env.example, every name that the example sets is set, and to what it can be."""
    name, expected = "settings.env", f"{ENV}: every name of {EXAMPLE} that is not commented out, and no unknown one"
    found = read_env(probes.root)
    if found is None:
        if subject.purpose == "demo":
            return skip(name, expected, f"there is no {ENV}; the demo needs none")
        return fail(name, expected, f"there is no {ENV}", f"cp {EXAMPLE} {ENV}, then edit it")
    text = probes.read(probes.root / EXAMPLE)
    if text is None:
        return skip(name, expected, f"there is no {EXAMPLE} to compare with")
    wanted, known = example_names(text)
    problems = list(found.mistakes)
    meant = set()
    for variable in found.values:
        line = found.lines[variable]
        if variable.upper().startswith(ENV_PREFIX):
            problems.append((line, f"{variable} reaches no container: {DEFAULT_CONFIG} is the place for it"))
        elif variable not in known and not (variable.startswith(_COMPOSE_OWN) and misspelt(variable, known) is None):
            near = nearest(variable, known)
            meant.add(near)
            problems.append((line, f"{variable} is unknown" + (f": did you mean {near}?" if near else "")))
        elif variable == "ENGINE_PROFILE" and not _profile_is_there(found.values[variable], subject):
            problems.append((line, f"ENGINE_PROFILE={found.values[variable]}: there is no such file in configs/engine"))
        elif wrong := envvalues.problem(variable, found.values[variable], probes.root):
            problems.append((line, wrong))
    for variable in wanted:
        if found.values.get(variable) or probes.environ.get(variable) or variable in meant:
            continue
        if variable in found.lines:
            problems.append((found.lines[variable], f"{variable} has no value"))
        else:
            problems.append((0, f"{variable} is not set"))
    fix = f"edit {ENV}; {EXAMPLE} lists and explains the names"
    told = "; ".join(f"{ENV}:{line}: {text}" if line else f"{ENV}: {text}" for line, text in sorted(problems))
    typos = {variable: near for variable in sorted(probes.environ) if (near := misspelt(variable, known))}
    if typos and not problems:  # it may be another program's, so it stops nothing
        told = "; ".join(
            f"{variable} of this shell is unknown: did you mean {near}?" for variable, near in typos.items()
        )
        return warn(name, expected, told, f"unset {' '.join(typos)}, and set what was meant; {EXAMPLE} lists the names")
    return judged(not problems, name, expected, told or several(len(found.values), "name"), fix)


def _profile_is_there(said: str, subject: Subject) -> bool:
    """The profile that is looked at is settings.profile's matter; one that was overruled is only told of here."""
    path = profile_path(said)
    return not said or path.stem == subject.profile_path.stem or path.is_file()


def gateway(probes: Probes, subject: Subject) -> Check:
    """What `python -m gateway` would say at its start."""
    name, expected = "settings.gateway", f"{DEFAULT_CONFIG} and {ENV_PREFIX}* load"
    environ = {key: value for key, value in probes.environ.items() if not key.upper().startswith("GATEWAY_")}
    if subject.purpose == "demo":
        environ[f"{ENV_PREFIX}AUTH__DISABLED"] = "true"  # as the demo itself sets it
    else:
        environ |= _container_environment(probes, subject)
    ran = probes.run([sys.executable, "-c", _LOAD], environ)
    if ran is None:
        return skip(name, expected, f"{sys.executable} can't be started")
    if ran.code == 0:
        return ok(name, expected, ran.out.strip())
    lines = [line for line in ran.err.splitlines() if line.strip()]
    at = next((i for i, line in enumerate(lines) if "SettingsError: " in line), None)
    said = lines if at is None else [lines[at].partition("SettingsError: ")[2], *lines[at + 1 :]]
    return fail(name, expected, "; ".join(said) if at is not None else ran.why, "docs/settings.md explains every key")


def _container_environment(probes: Probes, subject: Subject) -> dict[str, str]:
    """What compose sets for the gateway; where compose can't be asked, the one thing it can't start without."""
    service = compose_services(probes, subject).get("gateway") or {}
    told = {str(key): str(value) for key, value in (service.get("environment") or {}).items() if value is not None}
    return told or {f"{ENV_PREFIX}AUTH__KEYS_FILE": KEYS_FILE}


def keys(probes: Probes, subject: Subject, now: datetime.datetime) -> Check:
    """At least one key that is valid now, and none about to end unnoticed."""
    name, expected = "settings.keys", "a keys file with a valid key, none expiring within 14 days"
    if subject.purpose == "demo":
        return skip(name, expected, "the demo serves loopback only, without keys")
    path = probes.root / Path(subject.environ.get("SECRETS_DIR") or "secrets").expanduser() / KEYS_FILE
    text = probes.read(path)
    if text is None:
        return fail(name, expected, f"{path} can't be read", "make keys NAME=app1")
    try:
        found = parse_keys(text.encode(), str(path)).keys
    except KeysFileError as error:
        return fail(name, expected, str(error), "restore it from a backup, or make a new one: make keys NAME=app1")
    valid = [key for key in found if key.expires is None or key.expires > now]
    if not valid:
        return fail(name, expected, f"{path}: {several(len(found), 'key')}, none valid", "make keys NAME=app1")
    return _expiry(name, expected, found, valid, now)


def _expiry(name: str, expected: str, found: tuple[Key, ...], valid: list[Key], now: datetime.datetime) -> Check:
    ending = {key.name: key.expires for key in valid if key.expires and key.expires - now < EXPIRES_SOON}
    later = {key.name for key in valid if key.expires is None or key.expires - now >= EXPIRES_SOON}
    gone = {key.name for key in found} - {key.name for key in valid}
    # A key that ends while another of its name goes on is a rotation, not a surprise.
    notes = [f"{who} expires {when:%Y-%m-%d}" for who, when in ending.items() if who not in later]
    notes += [f"{who} has expired" for who in sorted(gone)]
    if notes:
        return warn(
            name,
            expected,
            "; ".join(notes),
            "make keys ARGS='rotate NAME', or ARGS='revoke NAME' where it is not needed",
        )
    return ok(name, expected, several(len(valid), "valid key"))


def profile(subject: Subject, probes: Probes | None = None) -> Check:
    """Every key is a flag of the pinned engine, and no line of it is dropped without a word."""
    name, expected = "settings.profile", f"a vLLM config file whose keys are flags of vLLM {PINNED}"
    if subject.problem and not subject.profile_path.is_file():
        return fail(name, expected, *_no_profile(subject, probes or Probes()))
    if subject.problem:
        return fail(name, expected, subject.problem, "set ENGINE_PROFILE to a file of configs/engine, without .yaml")
    engine = load()
    names = {flag.name.removeprefix("--") for flag in engine.flags if flag.name.startswith("--")}
    problems = []
    for key, value in subject.profile.items():
        if engine.flag(f"--{key}") is None:
            near = nearest(key, {known.upper() for known in names})
            meant = f": did you mean {near.lower()}?" if near else ""
            problems.append(f"{key} is no flag of vLLM {PINNED}{meant}")
        elif value is False:
            problems.append(f"`{key}: false` is silently dropped: write no-{key}: true")
    fix = f"edit {subject.profile_path}; `make flags` knows what replaced an old flag"
    return judged(not problems, name, expected, "; ".join(problems) or subject.profile_path.name, fix)


def _no_profile(subject: Subject, probes: Probes) -> tuple[str, str]:
    """What was found, and what to write instead: the nearest names, those for the same card first."""
    said = subject.profile_path.stem
    shipped = sorted(path.stem for path in PROFILES.glob("*.yaml"))
    card = [stem for stem in shipped if subject.card in stem.split(".")[1:]] if subject.card else []
    near = [*difflib.get_close_matches(said, card, 2, 0.4), *difflib.get_close_matches(said, shipped, 3, 0.4)]
    named = ", ".join(dict.fromkeys(near)) or ", ".join(shipped)
    env_file = read_env(probes.root)
    setting = probes.environ.get("ENGINE_PROFILE") or (env_file.values.get("ENGINE_PROFILE") if env_file else None)
    other = setting is None or profile_path(setting).stem != said  # so the command line named this one
    at = "--profile" if other else place("ENGINE_PROFILE", env_file, probes.environ)
    return f"{at}={said}: there is no {subject.profile_path}", f"write one that is there: {named}"


def fit(subject: Subject) -> Check:
    """The profile alone on the card it names; gpu.memory asks the same of the card that is here, as it is now."""
    name, expected = "settings.fit", "the memory plan of this profile on its card fits"
    if subject.card is None:
        return skip(name, expected, f"{subject.profile_path.name} names no known card (<model>.<card>.yaml)")
    try:
        plan = planning.plan(subject, None if subject.on_cpu else load_gpus()[subject.card])
    except PlanError as error:
        return skip(name, expected, f"no plan: {error}")
    held = (
        f"KV cache {gib(plan.pool)} = {plan.capacity().tokens:,} tokens ({'estimate' if plan.is_estimate else 'exact'})"
    )
    fix = f"make plan PROFILE={subject.profile_path.stem}"
    return judged(not plan.problems, name, expected, "; ".join(plan.problems) or held, fix)
