"""What the wheel and the sdist contain."""

from __future__ import annotations

import zipfile

# folder of the checkout -> folder in the wheel
TREES = {"fxmask": "fxmask", "kernels": "fxmask/kernels", "passes": "fxmask/passes"}


def modules(project_files):
    """Path in the checkout -> path in the wheel, for every module of the library."""
    parts = [(name, name.partition("/")) for name in project_files if name.endswith(".py")]
    return {name: f"{TREES[tree]}/{rest}" for name, (tree, _, rest) in parts if tree in TREES}


def test_packages_list_equals_the_folders(project_files, pyproject):
    folders = {path.rpartition("/")[0].replace("/", ".") for path in modules(project_files).values()}
    assert sorted(pyproject["tool"]["setuptools"]["packages"]) == sorted(folders)


def test_wheel_has_every_module_and_nothing_else(builds, files_in, project_files):
    packaged = [name for name in files_in(builds.wheel_of_checkout) if ".dist-info/" not in name]
    assert packaged == sorted([*modules(project_files).values(), "fxmask/py.typed"])


def test_wheel_of_sdist_equals_wheel_of_checkout(builds, files_in):
    assert files_in(builds.wheel_of_sdist) == files_in(builds.wheel_of_checkout)


def test_wheel_has_one_top_level_name(builds, files_in):
    names = {name.partition("/")[0] for name in files_in(builds.wheel_of_checkout)}
    assert {name for name in names if not name.endswith(".dist-info")} == {"fxmask"}


def test_wheel_metadata(builds):
    with zipfile.ZipFile(builds.wheel_of_checkout) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        fields = wheel.read(name).decode().partition("\n\n")[0].splitlines()
    core = {field.removeprefix("Requires-Dist: ") for field in fields if field.startswith("Requires-Dist: ") and "extra ==" not in field}
    assert {requirement.split(">")[0].split("<")[0] for requirement in core} == {"torch", "triton", "tabulate", "nvidia-ml-py"}
    assert "License-Expression: BSD-3-Clause" in fields
    assert "Requires-Python: >=3.10" in fields


def test_sdist_has_the_whole_project(builds, files_in, project_files, root):
    packed = set(files_in(builds.sdist))
    wanted = {name for name in project_files if name.startswith((*(f"{tree}/" for tree in TREES), "tests/", "examples/", "docs/", ".ci/"))}
    wanted |= {"CHANGELOG.md", "CONTRIBUTING.md", "DESIGN.md", "LICENSE", "Makefile", "README.md", "constraints.txt", "pyproject.toml"}
    links = {name for name in wanted if (root / name).is_symlink()}  # the mapping in pyproject.toml does without them
    assert sorted(wanted - links - packed) == []
    assert not [name for name in packed if name.endswith(".pyc") or name.startswith(("fxmask/kernels", "fxmask/passes", ".venv"))]
