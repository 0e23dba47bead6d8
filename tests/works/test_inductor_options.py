"""Inductor with the options that change how a graph is run: CUDA graphs (on a CPU they change nothing and must not fail), cpp wrapper, freezing."""

import pytest
import torch
from works.twin import MODELS, check, near, pair, results, some

CASES = {
    "reduce-overhead": dict(mode="reduce-overhead"),
    "cudagraphs": dict(options={"triton.cudagraphs": True}),
    "max-autotune": dict(mode="max-autotune"),
    "default": {},
}


pytestmark = pytest.mark.slow  # each compiles C++


@pytest.mark.parametrize("case", CASES)
def test_training(case):
    masked, twin, kept = pair(MODELS["mlp"][0]())
    call = torch.compile(masked, fullgraph=True, **CASES[case])
    for seed in (2, 3, 4):  # a CUDA graph is recorded by the second call and replayed by the third
        x = some(6, 64, seed=seed)
        check(results(call, masked, x), results(twin, twin, x), kept)


@pytest.mark.parametrize("name", ["residual", "encoder"])
@pytest.mark.parametrize("case", ["reduce-overhead", "default"])
def test_other_models(case, name):
    make, shape = MODELS[name]
    masked, twin, kept = pair(make())
    x = some(*shape)
    check(results(torch.compile(masked, **CASES[case]), masked, x), results(twin, twin, x), kept)


def test_inference_frozen():
    """Freezing folds parameters into the graph: masks of the moment, outputs equal."""
    masked, twin, _ = pair(MODELS["mlp"][0]().eval())
    with torch.no_grad():
        near(torch.compile(masked, options={"freezing": True})(some(6, 64)), twin.eval()(some(6, 64)))
