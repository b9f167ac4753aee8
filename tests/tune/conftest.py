"""The mark of what runs with every commit."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ci: short enough for every commit")
