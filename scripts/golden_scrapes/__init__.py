"""Engines' /metrics pages, release by release, for the tests of rules and dashboards: tests/fixtures/scrapes."""
