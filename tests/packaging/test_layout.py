"""DESIGN.md's layout names every module, once a folder, and none that there is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kernels", "kernels/triton", "kernels/cpu", "passes", "fxmask", "fxmask/analysis")
FUNCTIONS = "analyze apply restore allocate finalize guard step refresh dense feedback state_dict graphed masks explain stability run_passes"
NAMED = set(FUNCTIONS.split())  # beside the modules that they live in


def sections(text: str) -> dict[str, str]:
    """What stands of each folder: from its name in bold, or from its table's head, to the next one."""
    layout = text.partition("## Layout")[2].partition("\n## ")[0]
    parts = re.split(r"(?m)^(?:\*\*`([\w/]+)/`\*\*: |\| `(analysis)/` \|)", layout)
    names = [bold or f"fxmask/{head}" for bold, head in zip(parts[1::3], parts[2::3], strict=True)]
    return dict(zip(names, parts[3::3], strict=True))


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_module_has_its_place(folder):
    text = sections((ROOT / "DESIGN.md").read_text(encoding="utf-8"))[folder]
    rows = [line for line in text.splitlines() if line.startswith("|")]
    words = re.findall(r"`([a-z_]+)`", "\n".join(rows) + text.partition("\n")[0])
    modules = {p.stem for p in (ROOT / folder).glob("*.py")} - {"__init__", "__main__"}
    missing = sorted(m for m in modules if words.count(m) != 1 and m not in NAMED)
    assert not missing, f"{folder}: expected each module once, got these never or twice: {missing}"
    assert not modules - set(words)
    gone = sorted(set(words) - modules - NAMED)
    assert not gone, f"{folder}: there is no such module: {gone}"


def test_the_reader_of_this_table_sees_what_is_missing():
    text = "## Layout\n\n**`kernels/`**: x.\n\n| a | `grid` |\n\n**`passes/`**: y.\n\n| b | `find` |\n\n## Next\n"
    assert sections(text) == {"kernels": "x.\n\n| a | `grid` |\n\n", "passes": "y.\n\n| b | `find` |\n"}
