"""The page of the zoo, made from its csv: what is covered, failures by cause, losing rows."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from zoo.results import BEYOND, MISSED

Row = Mapping[str, Any]
EQUAL = ("bits", "rounding", "float64")
STOCK = "stock PyTorch: "
MARK = "<!-- zoo: written by examples/zoo/run.py -->"  # in the README, before and behind the table


def number(row: Row, column: str) -> float:
    try:
        return float(row.get(column, ""))
    except (TypeError, ValueError):
        return float("nan")


def asked(row: Row, check: str) -> bool:
    return str(row.get(check, "")) not in ("", "-")


def masked(row: Row) -> bool:
    """Every eligible Linear and no other is masked, with the dense copy's numbers."""
    named = any(words in row["apply_why"] for words in (MISSED, BEYOND))
    return number(row, "apply") == number(row, "eligible") and not named and row["train"] in EQUAL and row["eval"] in EQUAL


def nothing(row: Row) -> bool:
    """Whether the model has nothing to mask, so that it shows nothing of `apply`."""
    return number(row, "eligible") == 0 == number(row, "apply")


def same_sites(row: Row, check: str) -> bool:
    """Those of `apply`, but for layers that no input reaches in eval mode and so no capture of that shows; in training it may reach them (GoogLeNet)."""
    all_of_them = number(row, "apply")
    return number(row, check) in (all_of_them, all_of_them - number(row, "unreached")) and "not by apply" not in row[f"{check}_why"]


def rewritten(name: str) -> Callable[[Row], bool]:
    return lambda r: same_sites(r, name) and r[f"{name}_equal"] in EQUAL


# what is asked: (words, the check that it is of, rows that pass, what the project wants). What stock PyTorch does not take is counted apart
Question = tuple[str, str, Callable[[Row], bool], str]
QUESTIONS: tuple[Question, ...] = (
    ("`apply`: every eligible Linear; outputs and gradients in train and eval of a dense copy with W∘M", "apply", masked, "99 %"),
    ("its masks: exactly the larger half of the blocks, by norms computed without fxmask", "masks", lambda r: r["masks"] == "yes", ""),
    ("a guarded step: masked weights keep their bits, the others move", "guard", lambda r: r["guard"] == "yes", ""),
    ("backend, `aot_eager`: outputs and gradients of stock Dynamo on the dense copy", "backend", lambda r: r["backend_equal"] in EQUAL, "95 %"),
    ("the same: the sites of `apply`", "backend", lambda r: same_sites(r, "backend"), "or named"),
    ("backend, Inductor: outputs and gradients of the dense copy in eager mode", "inductor", lambda r: r["inductor"] in EQUAL, ""),
    ("stock Inductor on the dense copy, beside it", "inductor_stock", lambda r: r["inductor_stock"] in EQUAL, ""),
    ("`fx.symbolic_trace`, then the FX pass: sites and outputs of `apply`", "trace", rewritten("trace"), ""),
    ("`torch.export`, then the FX pass: sites and outputs of `apply`", "graph", rewritten("graph"), ""),
    ("`torch.export` of the masked model: its outputs", "export", lambda r: r["export"] == "yes", ""),
    ("`analyze` runs", "analyze", lambda r: r["analyze"] == "yes", "95 %"),
    ("`analyze` covers at least 98 % of the FLOP", "analyze", lambda r: number(r, "coverage") >= 98, "95 %"),
    ("its FLOP are FlopCounterMode's, where that counts all (of grouped convolutions: the forward)", "flop_equal", lambda r: r["flop_equal"] != "no", "all"),
)
CHECKS = tuple(dict.fromkeys(check for _, check, _, _ in QUESTIONS if check != "flop_equal"))


def stock_fails(row: Row, check: str) -> bool:
    return str(row.get(f"{check}_why", "")).startswith(STOCK)


def asked_of(rows: Sequence[Row], check: str) -> list[Row]:
    """Rows where a check has been made, and means something."""
    return [r for r in rows if (asked(r, check) or stock_fails(r, check)) and not (check == "apply" and nothing(r))]


def line(row: Row) -> str:
    """A row in one line, for whoever waits."""
    said = [f"{check} {'.' if row.get(check, '') == '' else row[check]}" for check in CHECKS]
    same = "/".join(str(row.get(c, "")) or "." for c in ("train", "eval", "backend_equal"))
    return f"{row['source']}:{row['name']}  {', '.join(said)}, equal {same}, {row.get('seconds')} s, {row.get('peak_mb')} MB, {row['status']}"


def into(text: str, rows: Sequence[Row]) -> str:
    """The README with the table of the rows between its two marks; a user's own models count only on the page of their csv."""
    rows = [r for r in rows if r["source"] != "own"]
    before, _, rest = text.partition(MARK)
    _, _, after = rest.partition(MARK)
    models = ", ".join(f"{n} of {source}" for source, n in Counter(r["source"] for r in rows).most_common())
    said = f"{len(rows)} models so far: {models}; {len({(r['source'], r['family']) for r in rows})} families, each source's counted by itself."
    return f"{before}{MARK}\n{said}\n\n{table(made_of(rows))}\n{MARK}{after}"


def made_of(rows: Sequence[Row]) -> list[Row]:
    """Those that a process could make."""
    return [r for r in rows if r["status"] == "ok"]


def table(rows: Sequence[Row]) -> str:
    """What is asked, of how many, how many of them stock PyTorch takes, how many of those pass."""
    found = []
    for words, check, passes, wanted in QUESTIONS:
        inside = asked_of(rows, check)
        taken = [r for r in inside if not stock_fails(r, check)]
        good = sum(passes(r) for r in taken)
        found.append([words, len(inside), len(taken), good, f"{100 * good / len(taken):.1f} %" if taken else "-", wanted])
    return tabulate(found, headers=["", "models", "stock takes", "right", "share", "wanted"], tablefmt="github", disable_numparse=True)


def cause(reason: str) -> str:
    """A reason without the names, numbers and sizes of one model, so that equal causes are counted together."""
    text = re.sub(r"(not masked|masked, and not by apply|masked beyond nn.Linear's rule): .*", r"\1: names", reason)
    text = re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`", "'…'", text)
    text = re.sub(r"\b[\w]+(\.[\w]+){2,}\b", "…", text)
    return re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "N", text)[:140].replace("|", "/")


def reason_of(row: Row, check: str) -> str:
    """Why a row misses in a check: what the check says, or the comparison."""
    equal = {"apply": ("train", "eval"), "backend": ("backend_equal",), "trace": ("trace_equal",), "graph": ("graph_equal",)}.get(check, ())
    said = [f"{c}: {row[c]}" for c in equal if str(row[c]).startswith("no")]
    why = row.get(f"{check}_why", "")
    if not (why or said):
        why = f"`apply` has no result to compare with: {row['apply_why']}" if row["apply"] == "no" else str(row[check])
    return "; ".join([*said, why]).strip("; ")


def misses(rows: Sequence[Row]) -> dict[str, list[tuple[Row, str]]]:
    """Of each check the rows that miss, with the reason; those that stock PyTorch does not take, too."""
    found: dict[str, list[tuple[Row, str]]] = defaultdict(list)
    for _, of, passes, _ in QUESTIONS:
        check = "analyze" if of == "flop_equal" else of
        for r in asked_of(rows, of):
            if (stock_fails(r, check) or not passes(r)) and all(r is not known for known, _ in found[check]):
                found[check].append((r, reason_of(r, check)))
    return found


def families(rows: Sequence[Row]) -> str:
    found = []
    for source in dict.fromkeys(r["source"] for r in rows):
        inside = [r for r in rows if r["source"] == source]
        made = [r for r in inside if asked(r, "apply")]
        sites = sum(int(number(r, "apply")) for r in made if r["apply"] != "no")
        linears = sum(int(number(r, "linears")) for r in made)
        found.append([source, len(inside), len({r["family"] for r in inside}), linears, sites, sum(masked(r) for r in made)])
    return tabulate(found, headers=["source", "models", "families", "nn.Linear", "masked", "models right by `apply`"], tablefmt="github")


def page(rows: Sequence[Row]) -> str:
    """The page, in markdown."""
    made = made_of(rows)
    out = [
        "# The zoo",
        "",
        f"{len(rows)} models, {len(made)} of them made; 16x16 blocks at 50 %. Written by `make zoo` from `zoo.csv`; never edited by hand.",
        "",
        families(rows),
        "",
        table(made),
        "",
        "Equal is: to the bit in most, else to rounding (1e-4 of a tensor's norm in float32); where float32 rounds more than that, the comparison is made",
        "again in float64 (1e-9), and in float32 the masked model may be at most ten times as far from that as the dense one. Images are smaller than",
        "published where the column `note` says so.",
    ]
    compared = Counter(r[mode] if r[mode] in EQUAL else "no" for r in made for mode in ("train", "eval") if asked(r, mode))
    out += ["", "Compared by `apply`, train and eval apart: " + ", ".join(f"{n} {how}" for how, n in compared.most_common()) + "."]
    not_made = [r for r in rows if r["status"] != "ok"]
    if not_made:
        cells = [[r["source"], r["name"], r["status"].replace("|", "/")] for r in not_made]
        out += ["", "## Not made", "", tabulate(cells, headers=["source", "model", "why"], tablefmt="github")]
    losing = []
    for check, missed in misses(made).items():
        if missed:
            names = defaultdict[str, list[str]](list)  # by cause
            for r, why in missed:
                names[cause(why)].append(r["name"])
                if not why.startswith(STOCK):
                    losing.append([check, f"{r['source']}:{r['name']}", why[:200].replace("|", "/")])
            cells = [[len(of), c, of[0]] for c, of in sorted(names.items(), key=lambda item: -len(item[1]))]
            out += ["", f"## `{check}`: {len(missed)} misses by cause", "", tabulate(cells, headers=["models", "cause", "one of them"], tablefmt="github")]
    if losing:
        out += ["", "## Losing rows, but for those that stock PyTorch does not take either", ""]
        out.append(tabulate(losing, headers=["check", "model", "why"], tablefmt="github"))
    versions = Counter(", ".join(f"{p} {r[p]}" for p in ("torch", "torchvision", "timm", "transformers") if r[p]) for r in rows)
    out += ["", "Versions: " + "; ".join(f"{v} ({n})" for v, n in versions.items()) + "."]
    return "\n".join(out) + "\n"
