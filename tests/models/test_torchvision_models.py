"""torchvision's image models at their published width: masked, they compute what a dense copy with W∘M written in computes, bit for bit."""

import pytest
import torch
from models.dense_copy import check, images, stirred


@pytest.mark.slow
def test_vit_b_16(torchvision):
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(224, 16, num_layers=2, num_heads=12, hidden_dim=768, mlp_dim=3072, dropout=0.1)
    published = torchvision.models.vit_b_16()
    assert model.encoder.layers[0].mlp[0].weight.shape == published.encoder.layers[0].mlp[0].weight.shape
    check(stirred(model), images(2, 3, 224, 224), read=["*.out_proj.weight"])


# its attention gives qkv.weight and proj.weight to a function
def test_swin_t(torchvision):
    torch.manual_seed(0)
    model = torchvision.models.SwinTransformer([4, 4], 96, [2, 2, 1, 1], [3, 6, 12, 24], [7, 7], stochastic_depth_prob=0.2)
    check(stirred(model), images(2, 3, 112, 112), read=["*.attn.qkv.weight", "*.attn.proj.weight"])
