"""What must be true of this machine before the stack is started: the doctor's checks that stop a start."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from scripts.checks import Check, docker, gpu, host, model, settings, stack
from scripts.checks.probes import Probes
from scripts.checks.subject import Subject, decide


def look(profile: str, environ: Mapping[str, str], running: Collection[str]) -> tuple[Subject, list[Check]]:
    """All of them, worst to be judged by the caller. `environ` wins over .env, as compose has it.

    `running`: services of this stack that hold their ports already.
    """
    probes = Probes(environ=os.environ | dict(environ))
    subject = decide(probes, "stack", profile, None)
    wanted = stack.wanted_ports(probes, subject)
    found = [
        settings.env_file(probes, subject),
        settings.profile(subject),
        settings.fit(subject),
        *docker.checks(probes, subject),
        *gpu.checks(probes, subject),
        *model.checks(subject),
        host.memory(probes, subject),
        host.disk(probes, subject),
        host.wsl(probes),
        *(stack.port(probes, name, port) for name, port in wanted.items() if stack.service_of(name) not in running),
    ]
    return subject, found


def for_image(profile: str, environ: Mapping[str, str]) -> list[Check]:
    """What must hold before the running engine is replaced by one of another image; it keeps card, ports and model."""
    probes = Probes(environ=os.environ | dict(environ))
    subject = decide(probes, "stack", profile, None)
    return [settings.env_file(probes, subject), settings.profile(subject), *docker.checks(probes, subject)]
