"""Grafana's model classes, imported quietly.

The package prefers its schema v2 and warns about the one that Grafana's file provisioning reads.
"""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models import (
        bargauge,
        common,
        dashboard,
        prometheus,
        stat,
        table,
        text,
        timeseries,
    )

__all__ = [
    "JSONEncoder",
    "bargauge",
    "common",
    "dashboard",
    "prometheus",
    "register_default_plugins",
    "stat",
    "table",
    "text",
    "timeseries",
]
