"""Requested bytes in sectors and lines, against counting the granules of every run."""

import pytest

from fxmask.kernels.sectors import rounded

SECTOR, LINE = 32, 128


def touched(width, pitch, granule):
    """Bytes of the granules of all tiles that begin at a multiple of their width, in all rows of a period, and how many bytes were asked for."""
    starts = [row * pitch + tile * width for row in range(granule) for tile in range(granule)]
    return sum((at + width - 1) // granule - at // granule + 1 for at in starts) * granule, width * len(starts)


@pytest.mark.parametrize("granule", [SECTOR, LINE])
@pytest.mark.parametrize(("width", "pitch"), [(32, 256), (64, 128), (16, 256), (32, 200), (24, 72), (128, 768), (6, 14), (64, 340), (2, 2), (100, 1000)])
def test_whole_periods(width, pitch, granule):
    expected, asked = touched(width, pitch, granule)
    assert rounded(asked, width, pitch, granule) == expected


def test_by_hand():
    assert rounded(320, 32, 256, SECTOR) == 320 and rounded(320, 32, 256, LINE) == 1280  # 16 elements of 2 bytes: a sector each, a quarter of a line
    assert rounded(0, 32, 256, SECTOR) == rounded(5, 0, 256, SECTOR) == 0
    assert rounded(40, 32, 256, SECTOR) == 64  # what is left behind whole runs is a run, too


@pytest.mark.parametrize("granule", [SECTOR, LINE])
def test_never_less_than_asked(granule):
    for asked in range(1, 200, 7):
        for width in (1, 5, 32, 48):
            assert rounded(asked, width, 96, granule) >= asked
