"""torch.compile(backend="fxmask") on other people's models: the bits of fxmask.apply in eager mode, its numbers through Inductor."""

import fresh_process
import pytest
import torch
from compile_backend.helpers import train
from torch import nn

import fxmask
from fxmask.compiler import backend

pytestmark = pytest.mark.models
OPTIONS = dict(ratio=0.75, block=(16, 16))


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False).logits


def llama():
    import transformers  # it imports torchvision, which beside a CPU build of torch wants its shim first

    torch.manual_seed(0)
    sizes = dict(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    return Logits(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, max_position_embeddings=64, attn_implementation="sdpa")))


def vit():
    import timm

    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=32)


MODELS = {"llama": (llama, lambda: torch.randint(128, (2, 16))), "vit": (vit, lambda: torch.randn(2, 3, 32, 32))}


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_apply(torchvision, name, inner):
    torch._dynamo.reset()
    make, x = MODELS[name]
    ours, applied = make(), fxmask.apply(make(), **OPTIONS)
    call = torch.compile(ours, backend=backend.fxmask_backend, fullgraph=True, options={**OPTIONS, "inner": inner, "require": True})
    found, expected = train(ours, call, x, 4, 1e-3), train(applied, applied, x, 4, 1e-3)
    if inner == "eager":
        assert found == expected
        assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), applied.parameters(), strict=True))
    else:
        assert found == pytest.approx(expected, rel=1e-4)


FRESH = {
    "llama": """
from torchvision_shim import import_torchvision
import_torchvision()
import transformers
class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False).logits
def make():
    sizes = dict(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    return Logits(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, max_position_embeddings=64)))
inputs = lambda: torch.randint(128, (2, 16))
""",
    "vit": """
from torchvision_shim import import_torchvision
import_torchvision()
import timm
make = lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=32)
inputs = lambda: torch.randn(2, 3, 32, 32)
""",
}


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("name", FRESH)
def test_a_process_that_never_imports_fxmask(name, inner):
    fresh_process.check(FRESH[name], inner)
