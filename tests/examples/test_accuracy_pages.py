"""The pages of the comparisons: each table is the csv's, each run has its place, and each price of a mask pairs runs alike."""

from __future__ import annotations

import plots
import pytest
from thesis import accuracy_page, accuracy_table, gaps, recipes


@pytest.mark.parametrize("run", sorted({run.partition("@")[0] for _, *pair in gaps.EQUAL + gaps.OTHER for run in pair}))
def test_prices_are_of_runs_that_there_are(run):
    assert run in recipes.FINAL


def test_a_price_pairs_runs_of_one_seed_and_length():
    def row(run, seed, epochs, test, held):
        numbers = {"test_top1": test, "held_top1": held, "train_tflop": "20" if run == "mask" else "40"}
        return {"phase": "final", "run": run, "seed": seed, "epochs": epochs, **numbers}

    rows = [
        row("mask", "0", "20", "70.5", "71"), row("mask", "1", "20", "69", "70"), row("mask", "1", "34", "72", "72"), row("dense", "1", "20", "71.25", "70"),
        row("dense", "2", "20", "75", "75"),
    ]  # fmt: skip
    equal, longer, none = gaps.differences(rows, (("a", "mask", "dense"), ("b", "mask@34", "dense"), ("c", "mask@34", "dense@34")))
    assert equal == {"terms": "a", "seeds": "1", "test": "-2.25", "held-out": "+0.00", "FLOP, of dense": "0.50"}
    assert (longer["seeds"], longer["test"]) == ("1", "+0.75")
    assert none == {"terms": "c", "seeds": "missing", "test": "", "held-out": "", "FLOP, of dense": ""}


@pytest.mark.parametrize("page", accuracy_page.PAGES, ids=lambda page: page.name)
def test_tables_of_the_pages_are_the_rows_of_the_csv(page):
    known = accuracy_page.tables(plots.read_csv(accuracy_table.RESULTS), plots.read_csv(accuracy_page.isoflop.TIMES))
    text = page.read_text()
    assert accuracy_page.filled(text, known) == text, "python examples/thesis/accuracy_page.py writes them"
    assert text.count("<!-- table: ") == text.count("<!-- end -->") >= 2


def test_what_stands_by_a_name_is_said_of_a_run_that_there_is():
    assert set(accuracy_page.NOTES) <= {*recipes.SEARCH, *recipes.FINAL, *recipes.ISOFLOP}
    runs = {row["run"] for row in plots.read_csv(accuracy_table.RESULTS)}
    pages = "".join(page.read_text() for page in accuracy_page.PAGES)
    assert all(f"`{run}`" in pages for run in runs)  # the losing ones, too


def test_a_price_is_of_one_data_set():
    def row(run, data, test):
        return {"phase": "final", "run": run, "seed": "0", "epochs": "20", "data": data, "test_top1": test, "held_top1": test, "train_tflop": "20"}

    rows = [row("mask", "CIFAR-10", "75"), row("dense", "CIFAR-10", "76"), row("dense", "digits", "99")]
    pairs = (("a", "mask", "dense"), ("b", "mask", "other"))
    assert [(r["data"], r["seeds"], r["test"]) for r in gaps.differences(rows, pairs)] == [("CIFAR-10", "0", "-1.00"), ("", "missing", "")]
    both = gaps.differences([*rows, row("mask", "digits", "98.5")], pairs[:1])
    assert [(r["data"], r["test"]) for r in both] == [("CIFAR-10", "-1.00"), ("digits", "-0.50")]


def test_prices_of_no_runs_are_an_error(tmp_path, capsys):
    (tmp_path / "other.csv").write_text("phase,run\nisoflop,dense-d64\n")
    assert gaps.main(["--csv", str(tmp_path / "none.csv")]) == 2 == gaps.main(["--csv", str(tmp_path / "other.csv")])
    assert "expected rows of phase final" in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "", "a,b\n1,2\n", "phase,run,seed,epochs\nfinal,dense-muon,0,20\n"], ids=["missing", "empty", "another's", "cut short"])
def test_a_csv_without_the_runs_leaves_the_pages_as_they_are(tmp_path, capsys, text):
    pages, table = [tmp_path / page.name for page in accuracy_page.PAGES], tmp_path / "runs.csv"
    for page, own in zip(pages, accuracy_page.PAGES, strict=True):
        page.write_text(own.read_text())
    if text is not None:
        table.write_text(text)
    assert accuracy_page.main([*map(str, pages), "--csv", str(table)]) == 2
    assert "the pages are as they were" in capsys.readouterr().err
    assert [page.read_text() for page in pages] == [page.read_text() for page in accuracy_page.PAGES]
