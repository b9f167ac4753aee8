"""Proof that dashboards, rules and alerts work: on a real engine, under real load, against real faults."""
