"""The rules themselves, a module a component."""

from __future__ import annotations

from scripts.rules import Component
from scripts.rules.components import engine, gateway, gpu, host, meta, slo

ALL: tuple[Component, ...] = (
    engine.COMPONENT,
    gateway.COMPONENT,
    slo.COMPONENT,
    gpu.COMPONENT,
    host.COMPONENT,
    meta.COMPONENT,
)
