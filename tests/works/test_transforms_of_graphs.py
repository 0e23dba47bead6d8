"""torch.func and forward-mode AD over graphs with the ops in them: right, or an error, and never a zero tangent."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from sample_models import mlp
from torch import fx
from torch.func import grad, jvp, vmap
from works.twin import RATIO, near, pair, some

import fxmask
from fxmask.errors import UnsupportedError


def traced():
    return fxmask.apply(fx.symbolic_trace(mlp()), ratio=RATIO)


def traced_by_export():
    return fxmask.apply(torch.export.export(mlp(), (some(6, 64),)).module(), ratio=RATIO)


def exported():
    return torch.export.export(fxmask.apply(mlp(), ratio=RATIO), (some(6, 64),)).module()


FORMS = [traced, traced_by_export, exported]
ZERO = "would silently see a zero tangent"


@pytest.fixture(params=FORMS, ids=lambda f: f.__name__)
def graph(request):
    return request.param()


def test_vmap_is_right(graph):
    x = some(6, 3, 64)
    near(vmap(graph, in_dims=1, out_dims=1)(x).detach(), pair(mlp())[1](x).detach())


def test_forward_mode_raises(graph):
    x = some(6, 64)
    with pytest.raises(UnsupportedError, match=ZERO), forward_ad.dual_level():
        graph(forward_ad.make_dual(x, x))
    with pytest.raises(UnsupportedError, match=ZERO):
        jvp(graph, (x,), (x,))


def test_reverse_mode_transforms_raise(graph):
    with pytest.raises(RuntimeError, match="setup_context"):
        grad(lambda x: graph(x).sum())(some(6, 64))


def test_a_level_around_the_backward_alone_raises():
    """The forward ran outside, and its backward is made of ops that see no tangent either."""
    model = fxmask.apply(mlp(), ratio=RATIO)
    x = some(6, 64).requires_grad_()
    y = model(x)
    with pytest.raises(UnsupportedError, match=ZERO), forward_ad.dual_level():
        torch.autograd.grad(y, x, forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y)))


@pytest.mark.parametrize("op", ["masked_linear", "masked_linear_dx", "masked_linear_dw", "masked_linear_backward"])
def test_the_ops_themselves(op):
    x, w, gy, mask = some(6, 32), some(48, 32), some(6, 48), torch.ones(3, 2, dtype=torch.bool)
    args = {
        "masked_linear": (x, w, None, mask),
        "masked_linear_dx": (gy, w, mask),
        "masked_linear_dw": (gy, x, mask),
        "masked_linear_backward": (gy, x, w, mask),
    }[op]
    call = getattr(torch.ops.fxmask, op)
    call(*args, 16, 16, "masked")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(args[0], torch.ones_like(args[0]))
        with pytest.raises(UnsupportedError, match=ZERO):
            call(dual, *args[1:], 16, 16, "masked")


def test_a_compiled_forward_derivative(graph):
    """The compiler traces one by fakes, which raise as well; and runs none without."""
    x = some(6, 64)
    with pytest.raises(Exception, match=ZERO):
        torch.compile(lambda x, t: jvp(graph, (x,), (t,))[1], backend="aot_eager")(x, x)
