"""A LoRA layer in one step computes the same as PEFT's own layer."""

import copy
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear
from torch import nn

from qat_lora.lora.adapter import Dropout
from qat_lora.lora.layer import OneStep, in_one_step


class Two(nn.Module):
    """Two linear layers in sequence, the first with a bias."""

    config = SimpleNamespace(model_type="two", to_dict=dict)

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def pair(dropout: float = 0.0, **config) -> list[nn.Module]:
    """PEFT's own layers, and the same in one step."""
    torch.manual_seed(0)
    own = get_peft_model(Two(), LoraConfig(r=3, lora_alpha=6, target_modules=["first", "second"], **config))
    for name, p in own.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
    ours = copy.deepcopy(own)
    for model in (own, ours):
        for layer in [module for module in model.modules() if isinstance(module, Linear)]:
            if dropout:
                layer.lora_dropout["default"] = Dropout(dropout)
            if model is ours:
                in_one_step(layer)
    return [own.train(), ours.train()]


def results(model: nn.Module, bf16: bool = False, ahead: bool = True) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(2, 5, 12).requires_grad_(ahead)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        y = model(x)
    y.float().square().sum().backward()
    return [y.detach().float(), *([x.grad] if ahead else []), *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_values_and_gradients_equal_pefts(dropout, ahead):
    own, ours = pair(dropout)
    assert sum(isinstance(module, OneStep) for module in ours.modules()) == 2
    torch.testing.assert_close(results(ours, ahead=ahead), results(own, ahead=ahead))


def test_its_bf16_error_is_no_larger_than_pefts():
    own, ours = pair()
    exact = results(copy.deepcopy(own))
    theirs, mine = (
        [(a - b).norm() / b.norm() for a, b in zip(results(model, bf16=True), exact)] for model in (own, ours)
    )
    assert max(mine) < 1.5 * max(theirs) < 0.05


def test_only_the_adapter_gets_a_gradient_and_the_state_equals_pefts():
    own, ours = pair()
    results(ours)
    assert all(("lora_" in name) == (p.grad is not None) for name, p in ours.named_parameters())
    assert ours.state_dict().keys() == own.state_dict().keys()


def test_disabled_merged_and_unloaded_it_equals_pefts():
    own, ours = pair()
    x = torch.randn(3, 12)
    with own.disable_adapter(), ours.disable_adapter():
        torch.testing.assert_close(ours(x), own(x), rtol=0, atol=0)
    for model in (own, ours):
        model.merge_adapter()
    torch.testing.assert_close(ours(x), own(x), rtol=0, atol=0)
    torch.testing.assert_close(ours.merge_and_unload()(x), own.merge_and_unload()(x), rtol=0, atol=0)


def test_a_layer_that_is_not_a_plain_product_is_unchanged():
    _, ours = pair(use_dora=True)
    assert not any(isinstance(module, OneStep) for module in ours.modules())
