"""Our GRPO and SFT losses and their gradients equal TRL's own: `make test-peers`."""

from collections import defaultdict
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from qat_lora.rl.objective import REDUCTIONS, Objective, grpo_loss, token_weights

pytestmark = pytest.mark.peer
ROWS, WIDTH = 6, 7


def theirs(logp, old, reference, advantages, mask, objective, micro_batches):
    """The loss as TRL's trainer computes it, from given log-probabilities instead of a model."""
    from trl import GRPOTrainer

    class Trainer(GRPOTrainer):
        def __init__(self):
            self.current_gradient_accumulation_steps = micro_batches

        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            return logp, torch.zeros_like(logp), None

    trainer = Trainer()

    def same(tensor, reduction=None):
        return tensor

    alone = SimpleNamespace(num_processes=1, sync_gradients=True, gather=same, gather_for_metrics=same, reduce=same)
    settings = {
        "aux_loss_enabled": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "use_vllm": False,
        "importance_sampling_level": "token", "_entropy_bonus_enabled": False, "use_adaptive_entropy": False,
        "beta": objective.beta, "loss_type": objective.reduction, "epsilon_low": objective.clip_low,
        "epsilon_high": objective.clip_high, "max_completion_length": WIDTH, "accelerator": alone,
        "args": SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=micro_batches),
        "model": SimpleNamespace(training=True), "_metrics": {"train": defaultdict(list)},
    }  # fmt: skip
    for name, value in settings.items():
        setattr(trainer, name, value)
    ids = torch.zeros(ROWS, WIDTH, dtype=torch.long)
    return trainer._compute_loss(None, {
        "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask, "advantages": advantages,
        "old_per_token_logps": old, "ref_per_token_logps": reference, "num_items_in_batch": mask.sum() * micro_batches,
    })  # fmt: skip


def ours(logp, old, reference, advantages, mask, objective, micro_batches):
    update = ROWS * micro_batches, mask.sum() * micro_batches
    weights = token_weights(mask, objective.reduction, *update, WIDTH, micro_batches)
    return grpo_loss(logp, old, reference if objective.beta else None, advantages, weights, objective)


@pytest.mark.parametrize(
    "reduction, beta, clip, masked, on_policy, micro_batches",
    list(product(REDUCTIONS, (0.0, 0.04), ((0.2, 0.28), (0.1, 0.1)), (False, True), (False, True), (1, 3))),
)
def test_loss_and_gradient_equal(reduction, beta, clip, masked, on_policy, micro_batches):
    """For one micro-batch, in an update of `micro_batches` of them; in fp64."""
    random = torch.Generator().manual_seed(5)
    logp, old, reference = (-2 * torch.rand(ROWS, WIDTH, generator=random, dtype=torch.double) for _ in range(3))
    advantages = torch.randn(ROWS, generator=random, dtype=torch.double)
    lengths = torch.tensor([7, 1, 4, 3, 7, 2])
    mask = (torch.arange(WIDTH) < lengths.unsqueeze(1)).double()
    if masked:
        mask[[1, 4]] = 0
    objective, found = Objective(reduction, *clip, beta), []
    for loss_of in (ours, theirs):
        leaf = logp.clone().requires_grad_()
        start = leaf.detach() if on_policy else old
        loss = loss_of(leaf, start, reference, advantages, mask, objective, micro_batches)
        loss.backward()
        found.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-10)
    assert found[0][1].abs().sum() > 0


# -- SFT -------------------------------------------------------------------------------------------------------------
TURNS = [
    ("What is two and two?", "Four."),
    ("Name a colour, please, and nothing else but that one colour.", "Blue, as the sky is on a day without clouds."),
    ("Why?", "Because."),
]
AS_TEXT = [{"prompt": f"### Q: {asked}\n### A: ", "completion": said} for asked, said in TURNS]
AS_TURNS = [
    {"prompt": [{"role": "user", "content": asked}], "completion": [{"role": "assistant", "content": said}]}
    for asked, said in TURNS
]


@pytest.mark.parametrize("rows", [AS_TEXT, AS_TURNS], ids=["text", "turns"])
@pytest.mark.parametrize("together", [False, True])
def test_sft_labels_loss_and_gradients_equal(rows, together, tiny_model_dir, tiny_tokenizer, tmp_path):
    """The same rows through TRL's trainer: target tokens, loss and gradients. In chats TRL also trains on the line end
    that the template puts after the end of the turn, which a model never generates."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from qat_lora.data.chat import documents
    from qat_lora.data.supervised import PackedExamples, encoded
    from qat_lora.models.loading import load_model
    from qat_lora.train.supervised import packed_loss

    settings = SFTConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=len(rows), report_to="none", use_cpu=True, bf16=False,
        gradient_checkpointing=False, shuffle_dataset=False, max_length=None,
    )  # fmt: skip
    data = Dataset.from_list([row | {"chat_template_kwargs": {"enable_thinking": False}} for row in rows])
    model = load_model(str(tiny_model_dir))
    trainer = SFTTrainer(model, args=settings, train_dataset=data, processing_class=tiny_tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    rendered = documents(rows, tiny_tokenizer, "off")
    examples = [encoded(str(number), document, tiny_tokenizer) for number, document in enumerate(rendered)]
    line_end = tiny_tokenizer("\n")["input_ids"][0]
    learned = []
    for row, labels in enumerate(batch["labels"]):
        kept = labels[labels != -100].tolist()
        if kept[-1] == line_end:
            last = int((labels != -100).nonzero().max())
            batch["labels"][row, last] = -100
            kept = kept[:-1]
        learned.append(kept)
    assert sorted(learned) == sorted(example.tokens[example.sections > 0].tolist() for example in examples)
    assert all(kept[-1] == tiny_tokenizer.eos_token_id for kept in learned)

    theirs = trainer.model.train()
    loss = trainer.compute_loss(theirs, batch)
    loss.backward()
    ours = load_model(str(tiny_model_dir)).train()
    room = 256 if together else max(len(example.tokens) for example in examples)
    packed = PackedExamples(examples, room, (1.0,), tiny_tokenizer.eos_token_id)
    assert (len(packed) == 1) == together
    items = [packed[row] for row in range(len(packed))]
    found = packed_loss(ours, {name: torch.stack([item[name] for item in items]) for name in items[0]})
    found.backward()
    assert float(found) == pytest.approx(float(loss), abs=1e-5)
    other = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, other[name].grad, rtol=0, atol=1e-5)
        assert parameter.grad.abs().sum() > 0
