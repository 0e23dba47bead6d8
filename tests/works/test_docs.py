"""What a page recommends runs as it is written there, and does what it says."""

import copy
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sample_models import mlp
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, update_bn

import fxmask
from fxmask.analysis.report import TABLES
from fxmask.kernels import reference
from fxmask.kernels.reference import MODES
from fxmask.kernels.score import CRITERIA
from fxmask.passes.settings.schedule import SCHEDULES
from fxmask.passes.state.saliency import LEARNED
from fxmask.passes.stepping.guarded_weight import POLICIES

ROOT = Path(__file__).parents[2]


def code_of(page, opening=""):
    """The snippets of a page that begin so: one, where something is asked for."""
    found = [code for code in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL) if code.startswith(opening)]
    assert len(found) == 1 or not opening
    return "\n\n".join(found)


def snippet(page, opening, **names):
    """Runs the snippet of a page that begins so, and gives what it has named."""
    names = {"fxmask": fxmask, "torch": torch, "nn": nn, **names}
    exec(code_of(page, opening), names)
    return names


def net():
    """Of 16, 16 and 4 blocks of 64x64."""
    return mlp(sizes=(256, 256, 256, 64))


def ratios(model):
    return {row["name"]: row["target_ratio"] for row in fxmask.explain(model).rows if row["masked"]}


def kept(model):
    return {name: int(mask.sum()) for name, mask in fxmask.masks(model).items()}


def train(model, optimizer, seed=0):
    optimizer.zero_grad()
    model(torch.randn(8, 256, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    optimizer.step()


def test_the_first_lines(capsys):
    model = net()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters())
    names = snippet("README.md", "import fxmask, torch", model=model, optimizer=optimizer)
    said = " ".join(capsys.readouterr().out.split())
    assert "0 True selected 256x256 16 2 True selected 256x256 16 4 True selected 64x256 4 all rows: block 64x64; target_ratio 0.8; " in said
    assert "masked_weights freeze; " in said and "of them in kept blocks: 36864 " in said  # 4, 4 and 1
    assert names["model"]._orig_mod is model and not ratios(model) and all(type(m) is nn.Linear for m in model[::2])
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_a_ramp():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    snippet("README.md", "model = fxmask.apply(model, ratio=0.9", model=model, optimizer=optimizer, data=[(0, 0)] * 3)
    rows = fxmask.explain(model).rows
    assert [(row["step"], row["final_ratio"]) for row in rows] == [(3, 0.9)] * 3
    assert ratios(model) == pytest.approx(dict.fromkeys("024", 0.9 * (1 - (1 - 3e-4) ** 3)))


def test_layers_that_are_chosen():
    def block():
        return nn.ModuleDict({"fc": nn.Linear(64, 64), "attn": nn.Linear(64, 64), "own": nn.MultiheadAttention(64, 2)})

    model = nn.ModuleDict({"blocks": nn.ModuleList([block(), block()]), "head": nn.Linear(64, 64)})
    snippet("README.md", "fxmask.apply(model, ratio=0.8, include=", model=model)
    assert ratios(model) == {"blocks.0.fc": 0.5, "blocks.1.fc": 0.8}


def test_a_budget():
    model, x = net(), torch.randn(8, 256)
    found = snippet("README.md", "found = fxmask.allocate", model=model, x=x)["found"]
    assert kept(model) == {f"{name}.weight": k for name, k in found.kept.items()} and found.spent <= found.budget
    assert abs(sum(kept(model).values()) - 0.2 * 144) <= 1  # of blocks of 32x32, which all cost the same here


@pytest.mark.parametrize("page", ["README.md", "docs/graphs.md"])
def test_a_graph(page):
    gm = snippet(page, "gm = fxmask.apply(torch.fx", model=net())["gm"]
    assert kept(gm) == {"0.weight": 128, "2.weight": 128, "4.weight": 32}
    calls = [node for node in gm.graph.nodes if node.target is torch.ops.fxmask.masked_linear.default]
    assert [str(node.args[3].target) for node in calls] == ["fxmask_sites.0", "fxmask_sites.2", "fxmask_sites.4"]


@pytest.mark.parametrize("page", ["README.md", "docs/graphs.md"])
def test_the_compiler_backend(page):
    model, x = net(), torch.randn(8, 256)
    code = code_of(page, "compiled = torch.compile(model, backend=").replace("{", '{"inner": "aot_eager", ')  # which compiles sooner
    exec(code, names := {"torch": torch, "model": model})
    compiled = names["compiled"](x)
    torch.testing.assert_close(compiled, fxmask.apply(copy.deepcopy(model), ratio=0.8, block=(64, 64))(x))


def test_masks_and_scores_of_ones_own():
    torch.manual_seed(0)
    student, model = (nn.ModuleDict({"fc1": nn.Linear(1024, 1024), "head": nn.Linear(1024, 64)}) for _ in range(2))
    teacher, x = fxmask.apply(copy.deepcopy(model), ratio=0.7, block=(32, 32)), torch.randn(4, 1024)
    same, layout, snip = code_of("docs/masks.md", "fxmask.apply(student").split("\n\n")
    names = {"fxmask": fxmask, "torch": torch, "nn": nn, "student": student, "teacher": teacher, "model": model}
    exec(same, names)
    assert all(torch.equal(mask, fxmask.masks(teacher)[name]) for name, mask in fxmask.masks(student).items())
    exec(layout, names)
    assert ratios(model).keys() == {"fc1"} and fxmask.masks(model)["fc1.weight"].sum(1).tolist() == [6] * 32  # itself, and one for each of 5 bits
    fxmask.restore(model)
    exec(snip, {**names, "loss_of": lambda model: model["head"](model["fc1"](x)).square().mean()})
    fc1 = model["fc1"].weight
    scores = (fc1 * fc1.grad).abs().view(32, 32, 32, 32).sum((1, 3))
    best = scores.flatten().topk(-(-1024 // 5)).values.min()
    assert ratios(model) == {"fc1": 0.8} and torch.equal(fxmask.masks(model)["fc1.weight"], scores >= best)


def test_a_criterion_of_your_own():
    """Between steps: no warning, the blocks of the highest scores, and the optimiser's state goes on."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    scores = {name: torch.arange(m.weight.numel() // 1024).view(-1, 8).float() for name, m in model.named_children() if type(m) is nn.Linear}
    fxmask.apply(model, ratio=0.0, block=(32, 32), scores=scores)
    names = {"model": model, "optimizer": optimizer, "handle": fxmask.guard(optimizer, model)}
    names |= {"scores_of": lambda model: scores, "ratio_at": lambda step: step / 400}
    for step in (0, 100, 200, 201):
        names = snippet("docs/masks.md", "if step % 100 == 0:", **{**names, "step": step})
        train(model, optimizer, seed=step)
    assert all(torch.equal(mask.flatten().nonzero().flatten(), torch.arange(mask.numel() // 2, mask.numel())) for mask in fxmask.masks(model).values())
    assert {int(state["step"]) for state in optimizer.state.values()} == {4} and len(names["handle"].policies) == 3


def test_saving_and_going_on(tmp_path):
    def made():
        model = fxmask.apply(net(), ratio=0.75, block=(64, 64), refresh=4, schedule=fxmask.Schedule("cubic", steps=8))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = made()
    fxmask.guard(optimizer, model)
    for i in range(6):
        train(model, optimizer, i)
    save, load = code_of("docs/training.md", "torch.save").split("\n\n")
    again, its = made()
    names = {"fxmask": fxmask, "torch": torch, "path": tmp_path / "run.pt"}
    exec(save, {**names, "model": model, "optimizer": optimizer})
    exec(load, {**names, "model": again, "optimizer": its})
    for i in range(6, 12):
        train(model, optimizer, i)
        train(again, its, i)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    assert kept(again) == {"0.weight": 4, "2.weight": 4, "4.weight": 1}


def test_a_step_as_one_graph():
    """On a CPU, where every call runs the step as it is: the numbers are those of the same steps without `graphed`."""
    torch.manual_seed(0)
    options = dict(ratio=0.5, block=(32, 32), schedule=fxmask.Schedule("cubic", steps=4), impl="reference")
    model = fxmask.apply(nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 64), nn.GELU(), nn.Linear(64, 64)), **options)
    twin, data = copy.deepcopy(model), [(torch.randn(128, 3, 32, 32), torch.randint(0, 64, (128,))) for _ in range(6)]
    code = code_of("docs/training.md", "optimizer = torch.optim.AdamW(").replace('"cuda"', '"cpu"').replace(", capturable=True", "")
    scheduler = SimpleNamespace(step=lambda: None)
    exec(code, names := {"fxmask": fxmask, "torch": torch, "F": F, "model": model, "data": data, "scheduler": scheduler})
    optimizer = torch.optim.AdamW(twin.parameters(), lr=torch.tensor(1e-3), fused=True)
    fxmask.guard(optimizer, twin)
    for x, y in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(twin(x), y)
        loss.backward()
        optimizer.step()
    assert torch.equal(names["loss"], loss) and kept(model) == {"1.weight": 96, "3.weight": 2}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_checkpoints_of_accelerate():
    saved = []

    class Accelerator:
        register_for_checkpointing = staticmethod(saved.append)

    model = fxmask.apply(net(), ratio=0.75, block=(64, 64), refresh=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    snippet("docs/training.md", "class Masks:", model=model, optimizer=optimizer, accelerator=Accelerator())
    for i in range(3):
        train(model, optimizer, i)
    (masks,) = saved
    state = masks.state_dict()
    train(model, optimizer)
    assert {row["step"] for row in fxmask.explain(model).rows} == {4}
    masks.load_state_dict(state)
    assert {row["step"] for row in fxmask.explain(model).rows} == {3}


@pytest.mark.parametrize(("opening", "column", "said"), [
    ("fxmask.apply(model, fxmask.ActivationPruning(ratio", "activations", ["80 % of 1x64"] * 2),
    ("# or with weight masks", "activations", ["50 % of 1x64"] * 2),
    ("# or with weight masks", "backward", ["ste"] * 2),
    ("# every active Dropout", "dropout", ["p=0.2 in 128x128", None]),
    ("fxmask.apply(model, fxmask.BlockDropout(0.2", "dropout", [None, "p=0.2 in 64x64"]),
])  # fmt: skip
def test_the_other_systems(opening, column, said):
    model = nn.ModuleDict({"mlp": nn.Sequential()})
    model["mlp"].add_module("drop", nn.Dropout(0.2 if "every" in opening else 0.0))
    model["mlp"].add_module("fc1", nn.Linear(256, 256))
    model["mlp"].add_module("act", nn.GELU())
    model["mlp"].add_module("fc2", nn.Linear(256, 256))
    snippet("docs/systems.md", opening, model=model)
    assert [row[column] for row in fxmask.explain(model).rows] == said


def test_masks_of_2_in_4():
    model = net()
    snippet("docs/systems.md", "fxmask.apply(model, fxmask.NMMask(2, 4))", model=model)
    weight, mask = model[0].weight, fxmask.masks(model)["0.weight"]
    groups = weight.abs().view(-1, 4)
    assert torch.equal(mask.view(-1, 4), groups >= groups.topk(2).values[:, 1:])
    x = torch.randn(8, 256)
    torch.testing.assert_close(model[0](x), F.linear(x, weight * mask, model[0].bias))


def test_masks_that_change_no_prediction(capsys):
    model = fxmask.apply(net(), fxmask.NMMask(2, 4))
    snippet("docs/systems.md", "print(fxmask.stability(model, x))", model=model, x=torch.randn(8, 256))
    assert "fxmask.stability" in capsys.readouterr().out


def test_learned_masks_of_2_in_4():
    """Made permanent as the page has it: zeros in the weights, the rest as it was."""
    model = net()
    before = copy.deepcopy(model.state_dict())
    made = snippet("docs/systems.md", "fxmask.apply(model, fxmask.NMMask(2, 4, mode=", model=model)
    assert len(made["logits"]) == 3 and made["optimizer"].param_groups[0]["params"] == made["logits"]
    for name, weight in model.state_dict().items():
        mask = weight != 0
        assert torch.equal(weight[mask], before[name][mask]) and (name.endswith("bias") or mask.view(-1, 4).sum(1).eq(2).all())


def test_convolutions():
    model = nn.Sequential(nn.Conv2d(64, 256, 3), nn.Linear(256, 256))
    snippet("docs/convolutions.md", "fxmask.apply(model", model=model)
    assert ratios(model) == {"0": 0.8, "1": 0.8}


def test_counts_and_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    block = nn.Sequential()
    block.add_module("fc1", nn.Linear(256, 256))
    model = nn.ModuleDict({"blocks": nn.ModuleList([block])})
    model.forward = lambda x: block(x)
    report = snippet("docs/analysis.md", "report = fxmask.analyze", model=model, x=torch.randn(8, 256))["report"]
    assert report.summary["flop"]["total"] == 2 * 2 * 8 * 256 * 256  # forward and dW: nobody asks for dX
    said = capsys.readouterr().out
    assert str(report.summary["flop"]["total"]) in said and report.explain("blocks.0.fc1") in said
    assert {path.suffix for path in (tmp_path / "tables").iterdir()} == {".csv", ".json", ".md"}


def test_a_pass_of_ones_own():
    names: dict = {}
    exec(code_of("passes/README.md"), names)
    x = torch.randn(5)
    torch.testing.assert_close(names["gm"](x), F.relu(x).square() + 1)


def test_the_recipe_for_a_run_from_scratch():
    torch.manual_seed(0)
    steps, model = 20, mlp()
    names = snippet("docs/accuracy.md", "fxmask.apply", model=model, steps=steps)
    x = torch.randn(32, model[0].in_features)
    y = x.argmax(1) % 8
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(x), y)
        losses.append(loss.item())
        for optimiser in (names["muon"], names["adamw"]):
            optimiser.zero_grad()
        loss.backward()
        for optimiser in (names["muon"], names["adamw"]):
            optimiser.step()
    assert losses[-1] < 0.5 * losses[0]
    rows = [row for row in fxmask.explain(model).rows if row["masked"]]
    assert {row["step"] for row in rows} == {steps} and all(row["achieved_ratio"] >= 0.5 for row in rows)
    held = {id(p) for o in (names["muon"], names["adamw"]) for g in o.param_groups for p in g["params"]}
    assert held == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("how", [{"schedule": fxmask.Schedule("cubic", 10)}, {"refresh": 5}, {"schedule": fxmask.Schedule("cubic", 10), "refresh": 5}], ids=str)
def test_an_average_takes_the_runs_masks(how):
    """As the page on training says it: the average is the dense copy with the run's masks, and its batch norms can be updated."""
    torch.manual_seed(0)
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)), ratio=0.5, **how)
    ema, optimiser = AveragedModel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    fxmask.guard(optimiser, model)
    for _ in range(15):
        optimiser.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimiser.step()
        ema.update_parameters(model)
    snippet("docs/training.md", "fxmask.load_state_dict(ema", ema=ema, model=model)
    update_bn([torch.randn(8, 64)], ema)
    assert all(mask.float().mean() == 0.5 for mask in fxmask.masks(ema).values())
    if how.get("refresh"):
        assert all(torch.equal(a, b) for a, b in zip(fxmask.masks(ema.module).values(), fxmask.masks(model).values(), strict=True))


NAMED = {  # names that a user may give, and the pages and docstrings that list them
    "criteria": ((*CRITERIA, *LEARNED), {"docs/masks.md": None, "fxmask.WeightMask": fxmask.WeightMask}),
    "schedules": (SCHEDULES[1:], {"README.md": None, "docs/masks.md": None, "fxmask.Schedule": fxmask.Schedule}),
    "policies": (POLICIES, {"docs/masks.md": None, "fxmask.guard": fxmask.guard}),
    "modes": (MODES, {"README.md": None, "fxmask.kernels.reference": reference}),
    "tables": (TABLES, {"docs/analysis.md": None, "fxmask.analyze": fxmask.analyze}),
}


@pytest.mark.parametrize("kind", NAMED)
def test_each_choice_is_told(kind):
    names, places = NAMED[kind]
    for place, thing in places.items():
        text = (ROOT / place).read_text() if thing is None else thing.__doc__
        missing = [name for name in names if not re.search(rf"\b{name}\b", text)]
        assert not missing, f"{place} lists the {kind}, and does not name {missing}"
