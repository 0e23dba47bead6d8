"""DESIGN.md's layout names every module, once a folder, and none that there is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kernels", "kernels/triton", "kernels/cpu", "passes", "fxmask", "fxmask/analysis")
FUNCTIONS = "analyze apply restore allocate finalize freeze guard step refresh dense feedback state_dict graphed masks explain stability run_passes"
NAMED = set(FUNCTIONS.split())  # beside the modules that they live in


def sections(text: str) -> dict[str, str]:
    """What stands of each folder: from its name in bold, or from its table's head, to the next one."""
    layout = text.partition("## Layout")[2].partition("\n## ")[0]
    parts = re.split(r"(?m)^(?:\*\*`([\w/]+)/`\*\*: |\| `(analysis)/` \|)", layout)
    names = [bold or f"fxmask/{head}" for bold, head in zip(parts[1::3], parts[2::3], strict=True)]
    return dict(zip(names, parts[3::3], strict=True))


def places(text: str) -> list[tuple[str, str]]:
    """(room, module) for each name in a section: the room is that in the first cell of the name's row, "" for the folder itself."""
    found = []
    for line in [text.partition("\n")[0], *(line for line in text.splitlines() if line.startswith("|"))]:
        room = re.match(r"\| `([a-z_]+)/`", line)
        found += [(room.group(1) if room else "", word) for word in re.findall(r"`([a-z_]+)`", line)]
    return found


def rooms(folder: Path, text: str) -> set[str]:
    """The folder itself, and the folders of it that its section names."""
    return {"", *(room for room, _ in places(text))} | ({p.parent.name for p in folder.glob("*/*.py")} if folder.name == "passes" else set())


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_module_has_its_place(folder):
    text = sections((ROOT / "DESIGN.md").read_text(encoding="utf-8"))[folder]
    named = [place for place in places(text) if place[1] not in NAMED or (ROOT / folder / place[0] / f"{place[1]}.py").exists()]
    modules = {(room, p.stem) for room in rooms(ROOT / folder, text) for p in (ROOT / folder / room).glob("*.py")}
    modules = {(room, name) for room, name in modules if name not in ("__init__", "__main__")}
    missing = sorted(m for m in modules if named.count(m) != 1 and m[1] not in NAMED)
    assert not missing, f"{folder}: expected each module once, in the row of its folder, got these never or twice: {missing}"
    assert not modules - set(named)
    gone = sorted(set(named) - modules)
    assert not gone, f"{folder}: there is no such module: {gone}"


@pytest.mark.parametrize("folder", ["fxmask/advice", "fxmask/bench"])
def test_a_package_says_itself_what_is_where(folder):
    """As DESIGN.md says of these two: the table in `__init__` names every module, once, and none that there is not."""
    rows = re.findall(r"(?m)^\| ([a-z_, ]+) \|", (ROOT / folder / "__init__.py").read_text(encoding="utf-8"))
    named = [name for row in rows if row != "module" for name in row.split(", ")]
    assert sorted(named) == sorted(p.stem for p in (ROOT / folder).glob("*.py") if p.stem != "__init__")


def test_a_row_names_its_folder():
    assert places("text of `a`.\n\n| `state/`: what is held | `b` (`c`) |\n| the rest | `d` |\n") == [("", "a"), ("state", "b"), ("state", "c"), ("", "d")]


def test_the_reader_of_this_table_sees_what_is_missing():
    text = "## Layout\n\n**`kernels/`**: x.\n\n| a | `grid` |\n\n**`passes/`**: y.\n\n| b | `find` |\n\n## Next\n"
    assert sections(text) == {"kernels": "x.\n\n| a | `grid` |\n\n", "passes": "y.\n\n| b | `find` |\n"}
