"""The project's own Prometheus and Alertmanager configuration, pointed at the lab's addresses. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# What finds a target is the address's business, and goes; what relabels or limits is ours, and stays.
_OURS = ("static_configs", "dns_sd_configs", "file_sd_configs", "scrape_interval", "scrape_timeout")
# An Alertmanager waits minutes to tell several things at once; a proof can't.
_WAITS = ("group_wait", "group_interval")


class ConfigError(Exception):
    """The shipped configuration has something that the lab does not know."""


def prometheus(
    shipped: Mapping[str, Any], jobs: Mapping[str, str], *, interval: str, alertmanager: str
) -> dict[str, Any]:
    """Every scrape job as shipped, its target read from targets/<target>.json; jobs: job name -> target.

    A target that no shipped job scrapes gets a plain job of its own, which `unshipped` names. Raises ConfigError.
    """
    scrapes = []
    for job in shipped["scrape_configs"]:
        name = job["job_name"]
        if name not in jobs:
            raise ConfigError(f"prometheus.yml scrapes {name}, and the proof starts nothing of that name")
        kept = {key: value for key, value in job.items() if key not in _OURS}
        kept["file_sd_configs"] = _target(jobs[name])
        scrapes.append(kept)
    scrapes += [{"job_name": job, "file_sd_configs": _target(jobs[job])} for job in unshipped(shipped, jobs)]
    times = dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), interval)
    return {
        **shipped,
        "global": {**shipped["global"], **times},
        "scrape_configs": scrapes,
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
    }


def unshipped(shipped: Mapping[str, Any], jobs: Mapping[str, str]) -> tuple[str, ...]:
    """Jobs whose target the lab has and prometheus.yml does not scrape."""
    scraped = {jobs.get(job["job_name"]) for job in shipped["scrape_configs"]}
    return tuple(job for job, target in jobs.items() if target not in scraped)


def _target(name: str) -> list[dict[str, Any]]:
    return [{"files": [f"targets/{name}.json"], "refresh_interval": "1s"}]


def alertmanager(shipped: Mapping[str, Any], url: Callable[[str], str]) -> dict[str, Any]:
    """Routes, grouping and inhibition as shipped; each receiver a webhook at url(its name), and no waiting."""
    hook = {"send_resolved": True}
    receivers = [
        {"name": one["name"], "webhook_configs": [{**hook, "url": url(one["name"])}]} for one in shipped["receivers"]
    ]
    return {**shipped, "route": _hasty(shipped["route"]), "receivers": receivers}


def _hasty(route: Mapping[str, Any]) -> dict[str, Any]:
    changed = {key: ("1s" if key in _WAITS else value) for key, value in route.items()}
    if "routes" in route:
        changed["routes"] = [_hasty(child) for child in route["routes"]]
    return changed
