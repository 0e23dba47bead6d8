"""Masks and scores of the user's own, `apply(masks=..., scores=...)`: they are kept, whatever becomes of the weights, and nothing else is ranked by."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from unit.given_masks import best, diagonal, mask_of, masked, net, scores

import fxmask
from fxmask.errors import ConfigError, StateError, UnsupportedError
from fxmask.kernels.grid import expand_mask

SCHEDULE = fxmask.Schedule("linear", steps=4)


def test_forward_and_gradients_are_those_of_a_dense_copy_with_zeros():
    x, model, dense = torch.randn(6, 64), masked(), net()
    kept = expand_mask(diagonal(), (64, 64), (16, 16))
    with torch.no_grad():
        dense[0].weight.mul_(kept)
    for m in (model, dense):
        m(x).square().sum().backward()
    assert torch.equal(model(x), dense(x))
    assert torch.equal(model[0].weight.grad, dense[0].weight.grad * kept)
    assert torch.equal(fxmask.restore(model)[0].weight, net()[0].weight)


def test_named_layers_alone_are_masked_and_with_include_the_others_by_the_ratio():
    assert list(fxmask.masks(masked())) == ["0.weight"]
    both = masked(include=["0", "2"], ratio=0.75)
    assert torch.equal(mask_of(both), diagonal())
    assert torch.equal(mask_of(both, "2.weight"), mask_of(fxmask.apply(net(), ratio=0.75), "2.weight"))
    assert [row["ranks_by"] for row in fxmask.explain(both).rows[:2]] == ["given", None]


def test_scores_take_a_layer_s_own_ratio():
    model = masked(masks=None, scores={"0": scores(), "2": scores()}, overrides={"2": dict(ratio=0.75)})
    assert torch.equal(mask_of(model), best(scores(), 8)) and torch.equal(mask_of(model, "2.weight"), best(scores(), 4))


def test_a_mask_that_a_schedule_comes_to_is_built_every_so_many_steps():
    model = masked(schedule=SCHEDULE, refresh=3)
    fxmask.step(model, 0)
    kept = []
    for _ in range(6):
        kept.append(int(mask_of(model).sum()))
        fxmask.step(model)
    assert kept[0] == kept[2] == 16 > kept[3] and torch.equal(mask_of(model), diagonal())


@pytest.mark.parametrize("kept", range(1, 17))
def test_every_number_of_blocks_is_kept_to_the_block(kept):
    mask = best(scores(), kept)
    model = masked(masks={"0": mask})
    assert torch.equal(mask_of(model), mask)
    assert fxmask.explain(model).rows[0]["target_ratio"] == pytest.approx(1 - kept / 16)


def test_masks_of_one_model_are_those_of_another():
    first = fxmask.apply(net(), ratio=0.6, criterion="random")
    again = fxmask.apply(net(), masks=fxmask.masks(first))
    assert all(torch.equal(m, fxmask.masks(again)[name]) for name, m in fxmask.masks(first).items())


def _loaded(model):
    model.load_state_dict({name: torch.randn_like(t) for name, t in model.state_dict().items()})
    return model


def _stepped(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    fxmask.guard(optimizer, model)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()
    return model


def _refreshed(model):
    with torch.no_grad():
        model[0].weight.normal_()
    fxmask.refresh(model)
    return model


def _through_meta(model):
    return _loaded(model.to("meta").to_empty(device="cpu"))


def _resumed(model):
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "masks": fxmask.state_dict(model)}, saved)
    state, other = torch.load(io.BytesIO(saved.getvalue()), weights_only=True), masked(masks={"0": diagonal().flip(0)})
    other.load_state_dict(state["model"])
    fxmask.load_state_dict(other, state["masks"])
    return _through_meta(_loaded(other))


def _under_dense(model):
    with fxmask.dense(model):
        assert mask_of(model).all()
        _loaded(model)
    return model


ROUTES = {
    "loaded": _loaded,
    "stepped": _stepped,
    "refreshed": _refreshed,
    "copied": lambda m: _loaded(copy.deepcopy(m)),
    "pickled": lambda m: _loaded(pickle.loads(pickle.dumps(m))),
    "cast": lambda m: _loaded(m.bfloat16()),
    "through meta": _through_meta,
    "resumed": _resumed,
    "inside dense": _under_dense,
}


@pytest.mark.parametrize("route", ROUTES)
def test_a_mask_stays(route):
    model = ROUTES[route](masked())
    assert torch.equal(mask_of(model), diagonal())
    x = torch.randn(3, 64, dtype=model[0].weight.dtype)
    w = model[0].weight * expand_mask(diagonal(), (64, 64), (16, 16))
    assert torch.equal(model[0](x), torch.nn.functional.linear(x, w, model[0].bias))


def test_under_a_guard_masked_weights_rest_and_no_step_is_asked_for():
    model = masked()
    model(torch.randn(2, 64))  # in train mode, and nobody counts
    before, kept = model[0].weight.detach().clone(), expand_mask(diagonal(), (64, 64), (16, 16))
    _stepped(model)
    assert torch.equal(model[0].weight[~kept], before[~kept])
    assert (model[0].weight[kept] != before[kept]).all()


def test_the_tensor_that_was_given_may_change_afterwards():
    mask, s = diagonal(), scores()
    model = masked(masks={"0": mask}, scores={"2": s}, ratio=0.5)
    mask.fill_(True)
    s.neg_()
    _through_meta(model)  # where it is read again
    assert torch.equal(mask_of(model), diagonal())
    assert torch.equal(mask_of(model, "2.weight"), best(scores(), 8))


def test_scores_rank_blocks_over_a_ramp():
    model = fxmask.apply(net(), scores={"0": scores()}, ratio=0.75, schedule=SCHEDULE)
    optimizer, kept = torch.optim.SGD(model.parameters(), 0.1), []
    fxmask.guard(optimizer, model)
    for _ in range(5):
        kept.append(int(mask_of(model).sum()))
        assert torch.equal(mask_of(model), best(scores(), kept[-1]))
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()
    assert kept == [16, 13, 10, 7, 4]


def test_a_ramp_ends_at_the_mask_that_was_given():
    model = masked(schedule=SCHEDULE)
    fxmask.step(model, 0)
    before = mask_of(model)
    for _ in range(5):
        fxmask.step(model)
        assert not (mask_of(model) & ~before).any()
        assert not (diagonal() & ~mask_of(model)).any()
        before = mask_of(model)
    assert torch.equal(before, diagonal())


def test_ties_of_scores_go_by_the_norm_and_infinities_are_numbers():
    model = fxmask.apply(net(), scores={"0": torch.zeros(4, 4, dtype=torch.int64)}, ratio=0.5)
    assert torch.equal(mask_of(model), mask_of(fxmask.apply(net(), ratio=0.5)))
    s = torch.zeros(4, 4).index_put((torch.tensor([0, 3]), torch.tensor([1, 2])), torch.tensor([torch.inf, -torch.inf]))
    model = fxmask.apply(net(), scores={"0": s}, ratio=0.9)
    assert mask_of(model)[0, 1]
    assert not mask_of(fxmask.apply(net(), scores={"0": s}, ratio=1 / 16))[3, 2]


def test_gain_keeps_the_norm_and_cover_goes_over_scores():
    model, before = masked(gain=True), net()[0].weight.double().square().sum()
    kept = expand_mask(diagonal(), (64, 64), (16, 16))
    assert model[0].weight[kept].double().square().sum().item() == pytest.approx(before.item(), rel=1e-5)
    rows = torch.arange(4.0).repeat_interleave(4).view(4, 4)  # all of the best in one row
    assert mask_of(fxmask.apply(net(), scores={"0": rows}, ratio=0.75, cover=True)).any(1).all()


def test_in_a_traced_graph():
    gm = fxmask.apply(torch.fx.symbolic_trace(net()), masks={"0.weight": diagonal()}, scores={"2": scores()}, ratio=0.5)
    x, model = torch.randn(3, 64), masked(scores={"2": scores()}, ratio=0.5)
    assert torch.equal(gm(x), model(x))
    _loaded(gm)
    assert torch.equal(mask_of(gm), diagonal())
    assert torch.equal(mask_of(gm, "2.weight"), best(scores(), 8))


@pytest.mark.parametrize("given", [dict(masks={"0": diagonal()}), dict(scores={"0": scores()}, ratio=0.6875)], ids=["mask", "scores"])
@pytest.mark.parametrize("measure", ["loss", "flip_rate", "bytes"])
def test_a_feedback_drives_the_ratio(measure, given):
    goal = {"loss": {}, "flip_rate": {"goal": 0.5}, "bytes": {"goal": 9 * 16 * 16 * 4}}[measure]
    model = fxmask.apply(net(), **given, schedule=fxmask.Feedback(measure, every=1, change=0.25, **goal))
    optimizer, kept = torch.optim.SGD(model.parameters(), 0.01), []
    fxmask.guard(optimizer, model)
    for i in range(8):
        if measure == "loss":
            fxmask.feedback(model, 1 - 0.1 * i)
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(int(mask_of(model).sum()))
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] == (9 if measure == "bytes" else 5)
    if "scores" in given:
        assert torch.equal(mask_of(model), best(scores(), kept[-1]))


def test_other_layers_keep_their_refresh():
    model = masked(include=["0", "2"], criterion="given", overrides={"2": dict(criterion="l1")})
    _loaded(model)
    with torch.no_grad():
        model[2].weight.normal_()
    assert torch.equal(mask_of(model, "2.weight"), mask_of(fxmask.apply(copy.deepcopy(fxmask.restore(copy.deepcopy(model))), criterion="l1"), "2.weight"))
    assert torch.equal(mask_of(model), diagonal())


def test_a_constant_schedule_needs_no_steps():
    model = masked(schedule=fxmask.Schedule("constant"))
    model(torch.randn(2, 64))
    assert torch.equal(mask_of(model), diagonal())


def test_an_average_of_the_weights_has_the_mask_and_no_warning(recwarn):
    model = masked(schedule=SCHEDULE)
    fxmask.step(model, 0)
    fxmask.step(model, 5)
    average = torch.optim.swa_utils.AveragedModel(model).eval()
    _loaded(model)
    average.update_parameters(model)
    average.update_parameters(model)
    with torch.no_grad():
        average(torch.randn(2, 64))
    assert torch.equal(mask_of(average.module), diagonal())
    assert [str(w.message) for w in recwarn] == []


def test_models_of_an_ensemble_share_it():
    models = [_loaded(masked()) for _ in range(3)]
    params, buffers = torch.func.stack_module_state(models)
    x = torch.randn(5, 64)
    found = torch.func.vmap(lambda p, b: torch.func.functional_call(models[0], (p, b), (x,)))(params, buffers)
    torch.testing.assert_close(found, torch.stack([m(x) for m in models]))


def test_models_of_an_ensemble_share_none_that_is_on_its_way():
    """There blocks that tie go by each one's weights."""
    models = [masked(schedule=SCHEDULE) for _ in range(3)]
    for m in models:
        fxmask.step(m, 1)
    params, buffers = torch.func.stack_module_state(models)
    x = torch.randn(5, 64)
    mapped = torch.func.vmap(lambda p, b: torch.func.functional_call(models[0], (p, b), (x,)))
    with pytest.raises(UnsupportedError, match="vmap over the weights of a layer with a cached mask"):
        mapped(params, buffers)


def test_a_pickled_model_that_lost_it_says_so():
    saved = io.BytesIO()
    torch.save(masked(), saved)
    model = torch.load(io.BytesIO(saved.getvalue()), map_location="meta", weights_only=False).to_empty(device="cpu")
    with pytest.raises(StateError, match="were lost on the meta device"):
        _loaded(model)
    state = fxmask.state_dict(masked())
    fxmask.load_state_dict(model, state)
    assert torch.equal(mask_of(_loaded(model)), diagonal())


def test_what_is_left_out_by_include_says_so():
    model = fxmask.apply(net(), masks={"0": diagonal()}, include="0")
    assert [row["reason"] for row in fxmask.explain(model).rows][1] == "not in include"


def test_one_name_of_a_tied_weight_is_refused_or_the_other_stays_dense():
    model = net()
    model[2].weight = model[0].weight
    fxmask.apply(model, masks={"0": diagonal()})
    assert list(fxmask.masks(model)) == ["0.weight"]
    assert [row["reason"] for row in fxmask.explain(model).rows][1] == "no mask or scores are given for it"


def test_what_cannot_be_cached_is_refused_and_says_how():
    with pytest.raises(UnsupportedError, match=r"fix: materialise the model first\.$"):
        fxmask.apply(net().to("meta"), masks={"0": diagonal()})
    normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
    exported = torch.export.export(nn.Sequential(normed, nn.Linear(64, 64)), (torch.randn(2, 64),)).module()
    with pytest.raises(UnsupportedError, match=r"give the mask or scores to the nn\.Module, before it is traced"):
        fxmask.apply(exported, masks={"0": diagonal()})


def test_no_false_word_of_weights_outside_linears(recwarn):
    model = net()
    model.table = nn.Parameter(torch.zeros(5, 40, 40))  # more than layer 0 has, fewer than the linears
    fxmask.apply(model, masks={"0": diagonal()})
    assert [str(w.message) for w in recwarn] == []


def test_convolutions_and_owners_that_read_a_weight():
    conv = nn.Conv2d(16, 32, 3)
    mask = torch.zeros(2, 9, dtype=torch.bool).index_fill(1, torch.tensor([0, 5]), True)
    model = fxmask.apply(nn.Sequential(conv), layers=nn.Conv2d, masks={"0": mask})
    assert torch.equal(mask_of(_loaded(model)), mask)
    attention = fxmask.apply(nn.MultiheadAttention(64, 4), masks={"out_proj": diagonal()})
    attention.load_state_dict(nn.MultiheadAttention(64, 4).state_dict())
    assert torch.equal(mask_of(attention, "out_proj.weight"), diagonal())


def test_a_weight_of_two_layers_takes_one_mask():
    def tied():
        model = net()
        model[2].weight = model[0].weight
        return model

    model = fxmask.apply(tied(), masks={"0": diagonal(), "2": diagonal()})
    assert torch.equal(mask_of(model), mask_of(model, "2.weight"))
    with pytest.raises(ConfigError, match="of one weight"):
        fxmask.apply(tied(), masks={"0": diagonal(), "2": diagonal().flip(0)})


def test_it_compiles_once():
    model = masked()
    x, graphs = torch.randn(3, 64), []
    expected = model(x)
    compiled = torch.compile(model, backend=lambda gm, args: graphs.append(gm) or gm.forward, fullgraph=True)
    assert torch.equal(compiled(x), expected)
    _loaded(model)
    assert torch.equal(compiled(x), model(x))
    assert len(graphs) == 1


def test_a_still_mask_is_no_news(recwarn):
    model = masked()
    log = fxmask.HealthLog(model, still=1)
    for _ in range(3):
        _loaded(model)
        log.update()
    ramp = masked(schedule=SCHEDULE)
    log = fxmask.HealthLog(ramp, still=1)
    fxmask.step(ramp, 0)
    for _ in range(9):
        fxmask.step(ramp)
        log.update()
    assert [str(w.message) for w in recwarn] == []
    assert not any("take in scores" in note for note in fxmask.analyze(ramp, (torch.randn(2, 64),)).notes)
    assert not any("take in scores" in note for note in fxmask.analyze(model, (torch.randn(2, 64),)).notes)
