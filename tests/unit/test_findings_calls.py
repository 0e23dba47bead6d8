"""Calls of masked models that once went wrong silently: derivatives, modes, compilers, threads, odd inputs."""

import pytest
import torch
from sample_models import mlp
from torch import nn
from unit.formed_models import X, formed

import fxmask


@pytest.mark.parametrize("mode", ["masked", "ste", "unmasked", "rigl"])
def test_second_derivatives_of_both_forms_agree(mode):
    config = fxmask.WeightMask(ratio=0.6, backward=mode, dense_every=1)
    model = fxmask.apply(nn.Sequential(nn.Linear(32, 32)).double(), config)
    fxmask.step(model, 0)
    x = torch.randn(3, 32, dtype=torch.float64, requires_grad=True)
    (gx,) = torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)
    expected = torch.autograd.grad(gx.square().sum(), model[0].weight)[0]

    def penalty(w):
        f = lambda x: torch.func.functional_call(model, {"0.weight": w}, (x,)).sin().sum()  # noqa: E731
        return torch.func.grad(f)(x.detach()).square().sum()

    assert torch.allclose(torch.func.grad(penalty)(model[0].weight.detach()), expected)


@pytest.mark.parametrize("form", ["module", "trace"])
def test_distillation_from_the_dense_self(form):
    for options in (dict(backward="rigl"), dict(refresh=2), {}):
        model = fxmask.apply(formed(form), ratio=0.7, **options)
        fxmask.step(model, 0)
        y = model(X)
        with torch.no_grad(), fxmask.dense(model):
            teacher = model(X)
        (y - teacher).square().sum().backward()


def test_the_argument_keeps_its_name():
    model = fxmask.apply(mlp())
    assert torch.equal(model[0](input=X), model[0](X))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors():
    model = fxmask.apply(mlp(), ratio=0.7)
    nested = torch.nested.nested_tensor([X, X[:1]])
    got = model(nested).unbind()
    assert torch.allclose(got[0], model(X), atol=1e-6) and torch.allclose(got[1], model(X[:1]), atol=1e-6)


def test_the_first_step_recompiles_nothing():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    model = fxmask.apply(mlp(), criterion="random")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(3):
        compiled(X)
        fxmask.step(model)
    assert counter.frame_count == 1


def test_apply_inside_inference_mode():
    model = mlp()
    with torch.inference_mode():
        fxmask.apply(model, refresh=2)
    fxmask.step(model, 4)
    model(X).sum().backward()


@pytest.mark.parametrize("mode", ["masked", "ste", "rigl", "unmasked"])
def test_a_masked_inf_is_nothing_in_the_aten_form_too(mode):
    from fxmask.kernels import ops, reference

    w, mask = torch.randn(32, 32), torch.tensor([[True, False], [True, True]])
    w[0, 20] = float("inf")
    expected = ops.masked_linear(X[:, :32], w, None, mask, 16, 16, mode)
    assert expected.isfinite().all()
    if mode != "unmasked":  # whose dX goes through the whole weight
        assert torch.equal(reference.composite(X[:, :32], w, None, mask, (16, 16), mode), expected)


def test_readers_in_many_threads():
    from concurrent.futures import ThreadPoolExecutor

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model, x = fxmask.apply(nn.TransformerEncoder(layer, 2), ratio=0.75).eval(), torch.randn(2, 5, 32)
    with torch.no_grad():
        expected = model(x)

    def run(_):
        with torch.no_grad():
            return torch.equal(model(x), expected)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(200)))
    assert run(0)
    assert all(isinstance(m.weight, nn.Parameter) for m in model.modules() if isinstance(m, nn.Linear))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("impl", ["auto", "reference", "cpu"])
@pytest.mark.parametrize("mode", ["masked", "ste", "unmasked"])
def test_sparse_inputs(mode, impl):
    """Those that PyTorch's Linear takes: bags of words."""
    x, found = X.relu(), []
    for make in (lambda: x, x.to_sparse, x.to_sparse_csr):
        torch.manual_seed(0)
        model = fxmask.apply(nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 8)), ratio=0.6, backward=mode, impl=impl, exclude="2")
        with torch.no_grad():
            y = model(make())
        model(make()).square().sum().backward()
        found.append([y, model[0].weight.grad, model[0].bias.grad])
    for got in found[1:]:
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, found[0], strict=True))


@pytest.mark.parametrize("wrong", [None, [1.0] * 64, 3])
def test_what_is_no_tensor(wrong):
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 64)), ratio=0.5)
    with pytest.raises(TypeError, match=rf"expected a Tensor, got {type(wrong).__name__}"):
        model(wrong)


@pytest.mark.parametrize("form", ["module", "trace"])
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_gradients_of_functional_calls_in_a_trace_without_values(form, mode):
    """torch.func.grad and functionalisation wrap the tensors of make_fx, which has no values for those that the mask's state holds."""
    from torch.fx.experimental.proxy_tensor import make_fx

    model = fxmask.apply(formed(form), ratio=0.6)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    called = lambda w, x: torch.func.functional_call(model, w, (x,)).square().sum()  # noqa: E731
    f = torch.func.grad(called) if form == "module" else called  # a custom op in a graph has no torch.func.grad
    expected, got = f(weights, X), make_fx(f, tracing_mode=mode)(weights, X)(weights, X)
    same = torch.utils._pytree.tree_map(lambda a, b: torch.allclose(a, b, atol=1e-6), got, expected)
    assert all(torch.utils._pytree.tree_leaves(same))


@pytest.mark.parametrize("form", ["module", "trace"])
def test_ahead_of_time_autograd_of_functorch(form):
    from functorch.compile import nop
    from torch._functorch.aot_autograd import aot_module

    model = fxmask.apply(formed(form), ratio=0.6)
    y = model(X)
    y.square().sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    compiled = aot_module(model, nop)
    assert torch.allclose(compiled(X), y, atol=1e-6)
    compiled(X).square().sum().backward()
    assert all(torch.allclose(p.grad, expected[name], atol=1e-5) for name, p in model.named_parameters())
