"""What a training says of its masks before its images are there."""

from __future__ import annotations

import pytest
from thesis import masked_model, train

from fxmask import FxMaskError


def test_a_length_that_is_too_short_for_few_steps_and_one_that_is_too_long_for_many():
    """What is right for the steps of some images is not refused before these are known."""
    lengths = ["--schedule", "cyclic:100,cycles=2,warmup=1ep", "--regrow", "gradient:0.3:0.4ep", "--backward", "rigl", "--refresh", "5", "--dense-every", "5"]
    masked_model.check(train.arguments(["--data", "digits", *lengths]))


def test_lengths_that_fit_no_images():
    with pytest.raises(FxMaskError, match="expected warmup"):
        masked_model.check(train.arguments(["--data", "digits", "--schedule", "cyclic:5ep,cycles=2,warmup=9ep"]))
