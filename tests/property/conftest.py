"""Fewer examples of each property where slow tests are left out."""

import pytest
from property import often


def pytest_configure(config: pytest.Config) -> None:
    often.share = 0.4 if "not slow" in config.option.markexpr else 1.0
