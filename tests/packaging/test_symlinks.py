"""The symlinks that make a checkout look like the installed package."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def links(root, project_files):
    found = {name: os.readlink(root / name) for name in project_files if (root / name).is_symlink()}
    if not found:
        pytest.skip("no symlinks here: an unpacked sdist, or a system without them")
    return found


def test_folders_of_the_package(links):
    assert {name: links.get(name) for name in ("fxmask/kernels", "fxmask/passes")} == {
        "fxmask/kernels": "../kernels",
        "fxmask/passes": "../passes",
    }


def test_all_are_relative_and_stay_inside(links, root):
    outside = [name for name, target in links.items() if os.path.isabs(target) or not (root / name).resolve().is_relative_to(root)]
    assert outside == []


def test_kernels_is_a_namespace_folder(root):
    # with an __init__.py here it would hide the package of that name from scripts that are started in the root
    assert not (root / "kernels/__init__.py").exists()
