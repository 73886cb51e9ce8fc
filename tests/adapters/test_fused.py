"""Unit test: the fused LoRA layer multiplies with a base only when the base is exactly what it takes it for."""

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from karui.adapters.fused import custom_modules


class Doubled(nn.Linear):
    """A linear that computes something else than x W^T, as low-precision layers do."""

    def forward(self, x):
        return 2 * super().forward(x)


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind(8, 8, bias=False)

    def forward(self, x):
        return self.layer(x)


def test_a_subclass_of_linear_keeps_its_own_forward():
    torch.manual_seed(0)
    x = torch.randn(3, 8)
    for kind, factor in ((nn.Linear, 1), (Doubled, 2)):
        model = Model(kind)
        expected = factor * (x @ model.layer.weight.T).detach()
        config = LoraConfig(r=2, target_modules=["layer"])
        config._register_custom_module({**custom_modules(), Doubled: custom_modules()[nn.Linear]})
        adapted = get_peft_model(model, config)
        assert torch.allclose(adapted(x), expected, atol=1e-6)
