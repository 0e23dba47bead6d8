"""Copies of the checkout, builds, and fresh environments: nothing here builds or installs in the checkout itself."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it there

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command without this process' paths, return what it printed, and fail the test with that where it fails."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environ["PYTHONNOUSERSITE"] = "1"
    done = subprocess.run(command, cwd=cwd, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        pytest.fail(f"{' '.join(map(str, command))}\nended with {done.returncode}:\n{done.stdout}")
    return done.stdout


@dataclass(frozen=True)
class Environment:
    """A virtual environment that sees the packages of this one, but nothing of fxmask until it is installed into `site`."""

    python: Path
    site: Path

    def run(self, *args: str | Path, cwd: Path) -> str:
        return run(self.python, *args, cwd=cwd)

    def install(self, *args: str | Path) -> None:
        self.run("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", *args, cwd=self.site)

    def installed(self) -> set[str]:
        return {path.name for path in self.site.iterdir()} - {"borrowed.pth", "__pycache__"}


@dataclass(frozen=True)
class Builds:
    sdist: Path
    wheel_of_sdist: Path
    wheel_of_checkout: Path


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def project_files() -> list[str]:
    """Every file of the project and every symlink, relative to the root: what git has or would add; outside git, all but dot-folders."""
    if (ROOT / ".git").exists():
        listing = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
        return sorted(name for name in listing.split("\0") if name and os.path.lexists(ROOT / name))
    found = []
    for folder, subfolders, names in os.walk(ROOT):
        links = [name for name in subfolders if (Path(folder) / name).is_symlink()]
        subfolders[:] = [name for name in subfolders if name not in {"__pycache__", "build", "dist"} and (name == ".ci" or name[0] != ".")]
        found += [os.path.relpath(Path(folder) / name, ROOT) for name in names + links]
    return sorted(found)


@pytest.fixture(scope="session")
def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def copy_checkout(project_files: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Make another copy of the checkout, symlinks kept as symlinks."""

    def copy() -> Path:
        target = tmp_path_factory.mktemp("checkout")
        for name in project_files:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
        return target

    return copy


@pytest.fixture(scope="session")
def fresh_environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Environment]:
    """Make an environment; `without` names packages of this one that it shall not see."""

    def make(without: tuple[str, ...] = ()) -> Environment:
        home = tmp_path_factory.mktemp("env")
        venv.create(home / "venv", symlinks=os.name != "nt", with_pip=False)
        scripts, libraries = ("Scripts", "Lib") if os.name == "nt" else ("bin", f"lib/python{sys.version_info[0]}.{sys.version_info[1]}")
        environment = Environment(home / "venv" / scripts / "python", home / "venv" / libraries / "site-packages")
        # links, entry by entry, because this environment may have fxmask installed: then its path would bring fxmask and its metadata along
        borrowed = home / "borrowed"
        borrowed.mkdir()
        for entry in (entry for folder in site.getsitepackages() if os.path.isdir(folder) for entry in Path(folder).iterdir()):
            hidden = "fxmask" in entry.name or entry.suffix == ".pth" or entry.name.split("-")[0] in without
            if not hidden and not (borrowed / entry.name).exists():
                (borrowed / entry.name).symlink_to(entry)
        (environment.site / "borrowed.pth").write_text(f"{borrowed}\n")
        return environment

    return make


@pytest.fixture(scope="session")
def builds(copy_checkout: Callable[[], Path], tmp_path_factory: pytest.TempPathFactory) -> Builds:
    """The distributions, built offline: the sdist and the wheel of it, and the wheel straight from a checkout."""
    out, direct = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("dist_of_checkout")
    build = (sys.executable, "-m", "build", "--no-isolation")
    run(*build, "--outdir", out, copy_checkout(), cwd=out)
    run(*build, "--wheel", "--outdir", direct, copy_checkout(), cwd=direct)
    return Builds(next(out.glob("*.tar.gz")), next(out.glob("*.whl")), next(direct.glob("*.whl")))


@pytest.fixture(scope="session")
def files_in() -> Callable[[Path], list[str]]:
    """List the files of a wheel or an sdist, an sdist's without its top folder."""

    def listing(archive: Path) -> list[str]:
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                return sorted(wheel.namelist())
        with tarfile.open(archive) as sdist:
            return sorted(member.name.partition("/")[2] for member in sdist.getmembers() if not member.isdir())

    return listing
