"""GRPO learns what is rewarded and nothing else, in one batch or in micro-batches, uninterrupted or resumed."""

import json
from dataclasses import replace

import pytest
import torch
from loops import learn, train_grpo, train_plain

from qat_lora.data.packing import Rows, TextDataset
from qat_lora.models.loading import load_model
from qat_lora.rl.grpo import GRPOPlan, Part, PromptDataset, judge_all, roll_out
from qat_lora.rl.objective import Objective
from qat_lora.rl.policy import Prompts
from qat_lora.rl.rollout import Completions, Sampling
from qat_lora.train.loop import Plan
from qat_lora.train.losses import text_loss
from qat_lora.train.optimizer import new_optimizer

END = 2
TEXTS = [[5, 6, 7, 8], [40, 41], [30, 31, 32], [9], [12, 13], [50, 51, 52, 53], [60, 61], [70]]


def judge(number: int, tokens: list[int], ended: bool) -> tuple[float, dict]:
    """The reward is the share of tokens below 256."""
    share = sum(token < 256 for token in tokens) / max(1, len(tokens))
    return share, {"share": share}


def make_plan(**changes) -> GRPOPlan:
    values = {
        "steps": 12, "batch_size": 2, "accumulation": 1, "learning_rate": 5e-3, "warmup_steps": 0, "seed": 0,
        "clip_grad_norm": 1.0, "group": 8, "length": 6, "ends": (END,), "sampling": Sampling(),
        "objective": Objective(beta=0.01),
    }  # fmt: skip
    return GRPOPlan(**values | changes)


@pytest.fixture
def prompts():
    return PromptDataset(Prompts.of(TEXTS, 6, 0))


@pytest.fixture
def new_model(sharp_model_dir, backend):
    def make():
        model = load_model(str(sharp_model_dir))
        model.get_input_embeddings().weight.requires_grad_(False)
        return backend.place(model)

    return make


@pytest.fixture
def train(new_model, make_session, prompts, backend):
    """train(name, …): a trained model and what it logged."""

    def run(name="run", save=0, **changes):
        model, reference, session = new_model(), new_model().requires_grad_(False), make_session(name, backend, save)
        backend.seed(0)
        train_grpo(model, reference, prompts, judge, make_plan(**changes), session)
        return model, [line for line in session.run.metrics() if "loss" in line]

    return run


def gain(lines: list[dict]) -> float:
    return sum(line["share"] for line in lines[-4:]) / 4 - sum(line["share"] for line in lines[:4]) / 4


# -- learning --------------------------------------------------------------------------------------------------------
def test_rewarded_behaviour_is_learned_and_controls_learn_nothing(train):
    steps = {"steps": 40, "learning_rate": 1e-2}
    assert gain(train("real", **steps)[1]) > 0.3
    assert gain(train("shuffled", shuffled=True, **steps)[1]) < 0.1
    assert abs(gain(train("still", steps=40, learning_rate=1e-12)[1])) < 0.1


def test_metrics_of_an_update(train):
    _, lines = train(steps=3)
    wanted = {"reward", "reward_std", "zero_variance", "share", "completion_length", "clipped_ratio", "loss", "kl",
              "entropy", "grad_norm", "tokens", "lr"}  # fmt: skip
    assert wanted <= lines[0].keys()
    first = lines[0]
    assert first["kl"] == pytest.approx(0, abs=1e-6) and 0 < first["entropy"] < 6.24
    assert 1 <= first["completion_length"] <= 6 and first["tokens"] == 2 * (6 + 8 * 6)
    assert lines[2]["kl"] > 1e-6


def test_tied_groups_change_nothing(new_model, make_session, prompts, backend):
    """Not even through the KL to the reference: they are left out, and counted."""
    model, reference, session = new_model(), new_model().requires_grad_(False), make_session("run", backend)
    before = [p.clone() for p in model.parameters()]
    train_grpo(model, reference, prompts, lambda *_: (0.5, {}), make_plan(steps=2), session)
    for line in [line for line in session.run.metrics() if "loss" in line]:
        assert (line["zero_variance"], line["loss"], line["grad_norm"]) == (1, 0, 0) and "kl" not in line
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))


@pytest.mark.parametrize("reduction", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_masking_a_tied_group_equals_leaving_it_out(new_model, prompts, backend, monkeypatch, reduction):
    """On XLA, where shapes are static, it is masked; elsewhere it is not computed at all."""
    found = []
    for static in (False, True):
        model, reference = new_model(), new_model().requires_grad_(False)
        for p in reference.parameters():
            p.data.mul_(1.01)
        optimizer = new_optimizer([{"params": [p for p in model.parameters() if p.requires_grad], "lr": 1e-3}], backend)
        plan = make_plan(batch_size=3, objective=Objective(reduction, beta=0.05))
        backend.seed(3)
        with monkeypatch.context() as patch:
            patch.setattr(backend, "static_shapes", static)
            batch = stack([prompts[i] for i in range(3)])
            rollouts = roll_out(model, [batch], lambda n, ids, _: (float(n != 1 and ids[0] < 256), {}), plan, backend)
        assert rollouts.metrics["zero_variance"] == pytest.approx(1 / 3)
        assert [len(part.prompts.tokens) for part in rollouts.parts] == [3 if static else 2]
        figures = learn(model, reference, rollouts, optimizer, plan, backend)
        found.append({name: float(value) for name, value in figures.items()})
    assert found[0] == pytest.approx(found[1], rel=1e-4) and found[0]["kl"] > 0


@pytest.mark.parametrize("reduction", ["grpo", "dr_grpo", "dapo"])
def test_micro_batches_equal_one_batch(new_model, prompts, backend, reduction):
    """Training on the same rollouts as one batch of four prompts and as four batches of one."""
    found = []
    for size in (4, 1):
        model = new_model()
        optimizer = new_optimizer([{"params": [p for p in model.parameters() if p.requires_grad], "lr": 1e-3}], backend)
        plan = make_plan(batch_size=size, accumulation=4 // size, objective=Objective(reduction, beta=0.0))
        backend.seed(3)
        items = [prompts[i] for i in range(4)]
        whole = roll_out(model, [stack(items)], judge, make_plan(batch_size=4), backend)
        rollouts = whole if size == 4 else split(whole)
        found.append((learn(model, None, rollouts, optimizer, plan, backend), list(model.parameters())))
    assert found[0][0]["loss"].item() == pytest.approx(found[1][0]["loss"].item(), abs=1e-6)
    assert found[0][0]["grad_norm"].item() == pytest.approx(found[1][0]["grad_norm"].item(), rel=1e-4)


def test_bnpo_of_micro_batches_is_their_mean(new_model, prompts, backend):
    """The gradient of the same micro-batch twice equals that of the micro-batch alone."""
    norms = []
    for parts in (1, 2):
        model = new_model()
        optimizer = new_optimizer([{"params": [p for p in model.parameters() if p.requires_grad], "lr": 1e-3}], backend)
        plan = make_plan(batch_size=1, accumulation=parts, objective=Objective("bnpo", beta=0.0))
        backend.seed(3)
        rollouts = roll_out(model, [stack([prompts[0]])], judge, plan, backend)
        rollouts = replace(rollouts, parts=rollouts.parts * parts)
        norms.append(learn(model, None, rollouts, optimizer, plan, backend)["grad_norm"].item())
    assert norms[1] == pytest.approx(norms[0], rel=1e-5) and norms[0] > 0


def stack(items: list[dict]) -> dict:
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


def split(whole):
    """The rollouts of one batch as micro-batches of one prompt each."""
    (part,) = whole.parts

    def row(tensors, i: int):
        return type(tensors)(*(value[i : i + 1] for value in vars(tensors).values()))

    rows = range(len(part.prompts.tokens))
    prompts, done = ([row(tensors, i) for i in rows] for tensors in (part.prompts, part.completions))
    parts = zip(prompts, done, part.advantages.split(1), part.mask.split(1))
    return replace(whole, parts=[Part(*each, part.tokens) for each in parts])


def test_the_judge_sees_the_answer_without_its_end_token(backend):
    tokens = torch.tensor([[[5, 6, END, END], [5, 6, 7, 8]]])
    mask = torch.tensor([[[1, 1, 1, 0], [1, 1, 1, 1]]]).bool()
    seen = []

    def judge(number, ids, ended):
        seen.append((number, ids, ended))
        return 0.0, {}

    done = Completions(tokens, mask, mask.float(), mask.float(), torch.tensor([[True, False]]))
    verdicts = judge_all(judge, [4], done, backend)
    assert seen == [(4, [5, 6], True), (4, [5, 6, 7, 8], False)]
    assert [figures["completion_length"] for _, figures in verdicts[0]] == [3, 4]
    assert [figures["entropy"] for _, figures in verdicts[0]] == [1, 1]


# -- resuming --------------------------------------------------------------------------------------------------------
def test_a_resumed_run_equals_an_uninterrupted_one(train, dies_at):
    whole, lines = train("whole", save=5)
    with dies_at(8):  # three updates after the checkpoint
        train("run", save=5)
    resumed, again = train("run", save=5)
    assert all(torch.equal(p, q) for p, q in zip(resumed.parameters(), whole.parameters()))
    assert stripped(again) == stripped(lines)


def stripped(lines: list[dict]) -> list[str]:
    return [json.dumps({k: v for k, v in line.items() if k != "tokens_per_s"}) for line in lines]


def test_sft_learns_completions(new_model, make_session, backend):
    tokens = torch.randint(3, 512, (1, 12), generator=torch.Generator().manual_seed(0)).int().repeat(8, 1)
    mask = torch.zeros(8, 12, dtype=torch.uint8)
    mask[:, 8:] = 1
    data, session = TextDataset(Rows(tokens, mask), completions_only=True), make_session("sft", backend)
    plan = Plan(20, 4, 1, 1e-2, 2, 1.0, seed=0)
    train_plain(new_model(), data, text_loss, plan, session)
    losses = [line["loss"] for line in session.run.metrics() if "loss" in line]
    assert losses[-1] < 0.5 * losses[0]
