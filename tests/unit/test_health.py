"""HealthLog: its figures against hand counts, its warnings, its files."""

import csv
import warnings

import pytest
import torch
from torch import nn

import fxmask
from fxmask.errors import ConfigError, FxMaskWarning, StateError, UnsupportedError
from fxmask.health.health_file import COLUMNS

BLOCK = (4, 4)


def model(ratio=0.5, **options):
    torch.manual_seed(0)
    return fxmask.apply(nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 10)), ratio=ratio, block=BLOCK, exclude=(), **options)


def put(m, mask, scale=1.0):
    """Weights whose best blocks are those of `mask`."""
    full = mask.repeat_interleave(4, 0).repeat_interleave(4, 1)[: m.weight.shape[0], : m.weight.shape[1]]
    with torch.no_grad():
        m.weight.copy_(torch.where(full, 2.0, 0.5) * scale)


def grid(*kept):
    mask = torch.zeros(3, 4, dtype=torch.bool)
    for i, j in kept:
        mask[i, j] = True
    return mask


A = grid((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2))
B = grid((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 3))


def test_figures_by_hand():
    m = model()
    log = fxmask.HealthLog(m)
    put(m[0], A)
    first = log.update().rows[0]
    assert first["name"] == "0.weight" and (first["blocks"], first["kept"], first["ratio"]) == (12, 6, 0.5)
    assert (first["flips"], first["flips_total"], first["age_max"], first["never_kept"]) == (0, 0, 0, 0.5)
    assert first["kept_norm_fraction"] == pytest.approx(6 * 4 / (6 * 4 + 6 * 0.25))
    assert (first["dead_rows"], first["dead_cols"]) == (pytest.approx(1 / 3), pytest.approx(1 / 4))
    put(m[0], B)
    second = log.update().rows[0]
    assert (second["flips"], second["flip_rate"], second["flips_total"]) == (2, 2 / 12, 2)
    assert (second["age_mean"], second["age_max"], second["never_kept"]) == (pytest.approx(10 / 12), 1, 5 / 12)
    assert (second["dead_rows"], second["dead_cols"]) == (0, 0)
    put(m[0], A)
    third = log.update().rows[0]
    assert (third["flips"], third["flips_total"], third["age_max"]) == (2, 4, 2)
    assert torch.equal(log.activity["0.weight"], 2 * A + B.long())
    assert torch.equal(fxmask.masks(m)["0.weight"], A)


def test_ragged_edges_count_features_and_not_blocks():
    m = model()
    put(m[2], grid((0, 0), (0, 1), (0, 2), (1, 0), (1, 1))[:, :3])  # 10 outputs in blocks of 4, 4, 2; 5 of 9 blocks
    row = fxmask.HealthLog(m).update().rows[1]
    assert row["name"] == "2.weight" and row["kept"] == 5
    assert (row["dead_rows"], row["dead_cols"]) == (pytest.approx(2 / 10), 0)


def test_a_mask_that_stands_still_is_warned_of_once():
    m = model()
    log = fxmask.HealthLog(m, still=3)
    for _ in range(3):
        log.update()
    with pytest.warns(FxMaskWarning, match="stopped moving") as said:
        log.update()
    assert [str(w.message).split()[3] for w in said] == ["0.weight", "2.weight"]
    log.update()  # any warning is an error here


@pytest.mark.parametrize("options", [dict(refresh=0), dict(ratio=0.0)], ids=["built once", "dense"])
def test_no_warning_where_nothing_should_move(options):
    m = model(**options)
    log = fxmask.HealthLog(m, still=1)
    for _ in range(3):
        log.update()
        fxmask.step(m)
        fxmask.refresh(m)


def test_no_warning_of_a_weight_that_rests():
    log = fxmask.HealthLog(model().requires_grad_(False), still=1)
    for _ in range(3):
        log.update()


def test_a_cached_mask_stands_still_where_it_was_built_anew():
    m = model(refresh=3)
    log = fxmask.HealthLog(m, still=2)
    fxmask.step(m, 0)
    for _ in range(6):  # any warning is an error here
        log.update()
        fxmask.step(m)
    with pytest.warns(FxMaskWarning, match="no block changed place in 2 updates"):
        log.update()


def test_no_warning_while_the_ratio_moves():
    m = model(schedule=fxmask.Schedule("linear", steps=6))
    fxmask.step(m, 0)
    log = fxmask.HealthLog(m, still=2)
    for _ in range(6):
        log.update()
        fxmask.step(m)
    assert log.update().rows[0]["kept"] == 6


@pytest.mark.parametrize("scale", [0.0])
def test_a_dead_layer_is_warned_of(scale):
    m = model()
    put(m[0], A, scale)
    log = fxmask.HealthLog(m)
    with pytest.warns(FxMaskWarning, match=r"layer of 0.weight has died"):
        row = log.update().rows[0]
    assert row["kept_norm_fraction"] == 0
    log.update()


def test_csv_grows_and_a_resumed_log_goes_on(tmp_path):
    path = tmp_path / "health.csv"
    m = model()
    whole, part = fxmask.HealthLog(m, path), fxmask.HealthLog(m)
    for mask in (A, B):
        put(m[0], mask)
        whole.update(), part.update()
    file = tmp_path / "log.pt"
    torch.save(part.state_dict(), file)
    resumed = fxmask.HealthLog(m)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    put(m[0], A)
    assert whole.update().rows == resumed.update().rows
    assert all(torch.equal(whole.activity[n], resumed.activity[n]) for n in whole.activity)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert len(rows) == 6 and [r["update"] for r in rows] == list("112233") and int(rows[4]["flips"]) == 2


def test_a_file_goes_on_where_the_loaded_log_stopped(tmp_path):
    path, m = tmp_path / "health.csv", model()
    path.touch()  # as tempfile makes one
    log = fxmask.HealthLog(m, path)
    for i, mask in enumerate((A, B, A)):
        put(m[0], mask)
        log.update()
        if i == 1:
            saved, lines = log.state_dict(), path.read_text().splitlines()
    none = [",".join(COLUMNS), f"2,0,0.wei{lines[-1]}", "2,0,0.weight,12"]  # a head again; rows that a full disk, and a kill, have cut short
    path.write_text("\n".join([*path.read_text().splitlines(), *none]))
    resumed = fxmask.HealthLog(m, path)
    resumed.load_state_dict(saved)
    assert path.read_text().splitlines() == lines and len(lines) == 5
    assert resumed.update().rows == log.report().rows
    assert [r["update"] for r in csv.DictReader(path.read_text().splitlines())] == list("112233")


def test_a_head_of_another_size_begins_anew():
    m = model()
    log = fxmask.HealthLog(m)
    log.update()
    m[2] = nn.Linear(12, 20)
    fxmask.apply(m, ratio=0.5, block=BLOCK, include="2")
    assert [(r["blocks"], r["flips"], r["age_max"]) for r in log.update().rows] == [(12, 0, 1), (15, 0, 0)]


def test_a_log_of_an_earlier_version_goes_on():
    m = model()
    log = fxmask.HealthLog(m)
    for mask in (A, B):
        put(m[0], mask)
        log.update()
    saved, again = log.state_dict(), fxmask.HealthLog(m)
    for entry in saved["last"].values():  # which knew of no change of blocks, nor when a mask was built
        del entry["block"], entry["since"], entry["built"]
    again.load_state_dict(saved)
    put(m[0], A)
    assert again.update().rows == log.update().rows


def test_a_log_that_goes_back_drops_what_came_later():
    m = model()
    log = fxmask.HealthLog(m)
    put(m[0], A)
    log.update()
    saved = log.state_dict()
    for _ in range(2):
        put(m[0], B)
        log.update()
    log.load_state_dict(saved)
    assert [r["update"] for r in log.rows] == [1, 1] and log.report().summary["flips"] == 0
    report = log.update()
    assert [r["update"] for r in log.rows] == [1, 1, 2, 2] and [r["flips"] for r in report.rows] == [2, 0]
    assert report.summary["blocks"] == 12 + 9 and report.summary["flips"] == 2


def test_nothing_moves_in_the_model():
    m = model(refresh=2)
    fxmask.step(m, 0)
    before, masks = {k: v.clone() for k, v in m.state_dict().items()}, fxmask.masks(m)
    log = fxmask.HealthLog(m)
    log.update()
    assert all(torch.equal(v, before[k]) for k, v in m.state_dict().items()) and all(torch.equal(v, masks[k]) for k, v in fxmask.masks(m).items())
    assert log.report().rows[0]["step"] == 0


def test_flips_of_masks_that_are_rewritten_in_place():
    m = model(refresh=2)
    m[0]._fxmask_in_place = True  # as fxmask.graphed has it
    log, flips = fxmask.HealthLog(m), []
    for mask in (A, B):
        put(m[0], mask)
        fxmask.refresh(m)
        flips.append(log.update().rows[0]["flips"])
    assert flips == [0, 2]


def test_a_state_is_a_copy():
    log = fxmask.HealthLog(model())
    log.update()
    saved = log.state_dict()
    log.update()
    assert saved["activity"]["0.weight"].max() == 1 and log.activity["0.weight"].max() == 2


def test_a_heatmap_begins_anew_with_other_blocks(monkeypatch):
    m = model(phases={2: dict(block=(2, 4))})
    monkeypatch.setattr("fxmask.health.health_log.heatmaps", lambda shares, path: shares)
    log = fxmask.HealthLog(m)
    for _ in range(3):
        fxmask.step(m)
        log.update()
    assert all(share.max() == 1 for share in log.heatmap("x.png").values())


def test_pictures(tmp_path):
    m = model()
    log = fxmask.HealthLog(m)
    log.update()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # matplotlib's own
        assert log.plot(tmp_path / "curves.png").stat().st_size > 1000
        assert log.heatmap(tmp_path / "blocks.png", ["0.weight"]).stat().st_size > 1000
    with pytest.raises(ConfigError, match=r"expected names among 0.weight, 2.weight, got \['1'\]"):
        log.heatmap(tmp_path / "x.png", ["1"])
    for draw in (log.plot, log.heatmap):
        with pytest.raises(ConfigError, match=r"expected a suffix that matplotlib knows, such as \.png, got '\.csv'"):
            draw(tmp_path / "x.csv")
        with pytest.raises(ConfigError, match="the output folder cannot be written: No such file or directory"):
            draw(tmp_path / "nowhere" / "x.png")


def test_wrong_use():
    m = model()
    with pytest.raises(ConfigError, match="still counts updates: expected an int of at least 1, got 0"):
        fxmask.HealthLog(m, still=0)
    with pytest.raises(StateError, match="nothing is masked"):
        fxmask.HealthLog(nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="a log without updates"):
        fxmask.HealthLog(m).heatmap("x.png")
    with pytest.raises(StateError, match="expected what state_dict returned"):
        fxmask.HealthLog(m).load_state_dict({"updates": 1})
    with torch.device("meta"):
        empty = fxmask.apply(nn.Linear(32, 32), ratio=0.5)
    with pytest.raises(UnsupportedError, match="needs the weight's values"):
        fxmask.HealthLog(empty).update()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: s.update(updates="x"),
        lambda s: s.update(updates=-1),
        lambda s: s["last"]["0.weight"].update(block=7),
        lambda s: s["last"]["0.weight"].update(since="x"),
        lambda s: s["last"]["0.weight"].update(mask=s["last"]["0.weight"]["mask"].to_sparse()),
        lambda s: s.update(activity={}),
        lambda s: s.update(last=[]),
        lambda s: s["last"].update({"0.weight": 3}),
        lambda s: s["last"]["0.weight"].update(mask=s["last"]["0.weight"]["mask"].to("meta")),
        lambda s: s["activity"].update({"0.weight": s["activity"]["0.weight"].to("meta")}),
        lambda s: s["last"]["0.weight"].update(mask=None),
        lambda s: s["last"]["0.weight"].update(flips=None),
        lambda s: s["last"]["0.weight"].update(age=torch.zeros(3, 4)),
        lambda s: s["activity"].update({"0.weight": torch.zeros(2, 2, dtype=torch.int64)}),
    ],
)
def test_a_state_that_is_none_changes_nothing(spoil):
    log = fxmask.HealthLog(model())
    log.update()
    saved, before = log.state_dict(), log.update().rows
    spoil(saved)
    with pytest.raises(StateError, match="expected what state_dict returned"):
        log.load_state_dict(saved)
    assert (log.updates, log.report().rows) == (2, before)
    assert log.update().rows[0]["age_max"] == 2


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "my notes, and no csv", "\nnotes\n", "update,step,name\n1,0,x\n"], ids=["csv", "notes", "blank", "columns"])
def test_a_file_that_no_log_has_written_is_left_alone(tmp_path, text):
    saved, path, m = fxmask.HealthLog(model()), tmp_path / "health.csv", model()
    saved.update()
    path.write_text(text)
    log = fxmask.HealthLog(m, path)
    with pytest.raises(StateError, match=r"is no csv of a log: expected a first line update,step,\.\.\., got(.|\n)*fix: name another path"):
        log.load_state_dict(saved.state_dict())
    assert path.read_text() == text and (log.updates, log.activity) == (0, {})
    for of_a_log in ("", "update,step,na", "\ufeff" + ",".join(f'"{c}"' for c in COLUMNS) + "\n"):  # empty, cut short by a kill, as spreadsheets write it
        path.write_text(of_a_log)
        log.load_state_dict(saved.state_dict())
        log.update()
        assert log.updates == 2 and len(path.read_text().splitlines()) == 3


def test_a_file_that_is_no_text_is_left_alone(tmp_path):
    """As a checkpoint is, whose first line may be longer than csv reads."""
    saved, path = fxmask.HealthLog(model()), tmp_path / "model.pt"
    saved.update()
    path.write_bytes(b"PK\xff\xfe" + bytes(200_000))
    with pytest.raises(StateError, match=r"is no csv of a log(.|\n)*fix: name another path"):
        fxmask.HealthLog(model(), path).load_state_dict(saved.state_dict())
    assert path.stat().st_size == 200_004


def test_a_folder_that_takes_no_files_is_told_when_a_file_is_taken_up(tmp_path):
    path, m = tmp_path / "health.csv", model()
    log = fxmask.HealthLog(m, path)
    log.update()
    path.with_name("health.csv.new").mkdir()
    before = path.read_text()
    with pytest.raises(ConfigError, match="the output folder cannot be written: Is a directory"):
        log.load_state_dict(log.state_dict())
    assert path.read_text() == before


def test_inside_dense_there_is_no_mask_to_look_at():
    m = model(refresh=0)
    log = fxmask.HealthLog(m)
    before = log.update().rows
    with fxmask.dense(m), pytest.raises(StateError, match="leave the with block"):
        log.update()
    assert log.updates == 1 and log.report().rows == before and log.update().summary["flips"] == 0


def test_a_warning_that_is_an_error_leaves_a_whole_update(tmp_path):
    m, path = model(), tmp_path / "health.csv"
    log = fxmask.HealthLog(m, path)
    with torch.no_grad():
        m[0].weight.zero_()
    with pytest.raises(FxMaskWarning, match="has died"):
        log.update()
    assert log.updates == 1 and [r["name"] for r in log.report().rows] == ["0.weight", "2.weight"] and len(path.read_text().splitlines()) == 3
    log.update()
    assert len(path.read_text().splitlines()) == 5


def test_a_log_of_another_model_is_refused():
    with pytest.raises(ConfigError, match=r"expected a fxmask\.HealthLog of this model, got one of another Sequential"):
        fxmask.explain(model(), health=fxmask.HealthLog(model()))
    m = model()
    assert fxmask.explain(m[0], health=fxmask.HealthLog(m)).rows


@pytest.mark.parametrize("path", [3, b"x", ["x"]], ids=repr)
def test_a_path_that_is_none(path):
    with pytest.raises(ConfigError, match="expected a path or None, got"):
        fxmask.HealthLog(model(), path)


def test_an_update_that_is_refused_counts_nothing(tmp_path):
    m, folder = model(), tmp_path / "there"
    folder.mkdir()
    log = fxmask.HealthLog(m, folder / "health.csv")
    log.update()
    before = log.state_dict()
    folder.rename(tmp_path / "away")
    with pytest.raises(ConfigError, match="cannot be written"):
        log.update()
    (tmp_path / "away").rename(folder)
    fxmask.restore(m)
    with pytest.raises(StateError, match="nothing is masked"):
        log.update()
    fxmask.apply(m, ratio=0.5, block=BLOCK, exclude=())
    assert log.updates == before["updates"] == 1 and len(log.rows) == 2
    log.update()
    rows = list(csv.DictReader((folder / "health.csv").read_text().splitlines()))
    assert [r["update"] for r in rows] == ["1", "1", "2", "2"] and int(log.activity["0.weight"].max()) == 2
