"""Whether the monitoring itself can be trusted."""

from __future__ import annotations

from scripts.rules import Alert, Component

ALERTS: tuple[Alert, ...] = ()

COMPONENT = Component("meta", "Whether the monitoring itself can be trusted.", ALERTS)
