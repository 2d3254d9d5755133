"""The anchor's gradients. tests/scripts covers the rows that a resumed run takes."""

import pytest
import torch

from qat_lora.data.batches import chosen_rows
from qat_lora.kd.anchor import Anchor
from qat_lora.models.loading import load_model
from qat_lora.train.loop import Plan, plain_stage


@pytest.fixture
def gradients(tiny_model_dir, make_session, data, backend):
    """gradients(accumulation): those of the first update of a model by the anchor alone."""

    def found(accumulation):
        model, anchor = load_model(str(tiny_model_dir)), Anchor(data[0], 3.0)
        plan = Plan(1, 4 // accumulation, accumulation, 1e-3, 0, 0.0, seed=5)
        session = make_session(f"run{accumulation}", backend)
        update = next(iter(plain_stage("train", model, data[1], plan, session, lambda step: {})))
        anchor.add_to(update, model)
        return {name: p.grad for name, p in model.named_parameters()}

    return found


def dense_kl(model, items) -> torch.Tensor:
    """KL from the sparse targets, in plain torch, averaged over positions that have one."""
    rows = {key: torch.stack([item[key] for item in items]) for key in items[0]}
    logp = model(rows["tokens"]).logits.log_softmax(-1).gather(2, rows["index"])
    kl = -(rows["prob"] * logp).sum(2) - rows["entropy"]
    return (kl * rows["mask"]).sum() / rows["mask"].sum()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_its_gradients_are_those_of_plain_torch(gradients, tiny_model_dir, data, accumulation):
    plain, rows = load_model(str(tiny_model_dir)), next(chosen_rows(5, len(data[0]), 4))
    (3.0 * dense_kl(plain, [data[0][i] for i in rows])).backward()
    for name, gradient in gradients(accumulation).items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, rtol=1e-3, atol=1e-6, msg=name)
