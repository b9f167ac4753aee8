"""Alerts on the engines."""

from __future__ import annotations

from scripts.rules import Alert

ALERTS: tuple[Alert, ...] = ()
