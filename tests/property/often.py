"""How often a property is tried."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

share = 1.0  # conftest.py says what part


def examples(most: int, **more: Any) -> settings:
    """`most` examples where slow tests run, too (make test-all), two of five of them elsewhere."""
    return settings(max_examples=max(5, round(share * most)), deadline=None, **more)
