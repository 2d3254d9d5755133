"""Teaching a model by what its own answers are worth: rollout, rewards, one update."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from qat_lora.backend import TorchBackend
from qat_lora.data.batches import batches
from qat_lora.errors import UserError
from qat_lora.qat import Plan, parameter_groups, resumable
from qat_lora.rl.loss import Objective, group_advantages, grpo_loss, k3, token_weights
from qat_lora.rl.policy import Prompts, log_probs
from qat_lora.rl.rollout import Completions, Sampling, rollout
from qat_lora.run.schedule import set_learning_rates
from qat_lora.run.session import Session

# judge(question, answer's tokens, ended) → what it is worth, and further figures to log, such as its parts
Judge = Callable[[int, list[int], bool], tuple[float, dict[str, float]]]


@dataclass(frozen=True)
class GRPOPlan(Plan):
    """batch_size counts prompts, each with `group` completions of at most `length` tokens that end with one of `ends`.
    scale: see `group_advantages`. shuffled: a control in which a group's advantages are dealt out to its answers at
    random."""

    group: int
    length: int
    ends: tuple[int, ...]
    sampling: Sampling
    objective: Objective
    scale: str = "group"
    shuffled: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.group < 2:
            raise UserError(f"--num-generations {self.group}: an answer is judged beside others; use 2 or more")
        if self.length < 1:
            raise UserError(f"--max-completion-length {self.length} leaves no room for an answer; use 1 or more")
        if not self.sampling.temperature:
            raise UserError("--temperature 0 gives every answer of a prompt alike; use 1, say")
        group_advantages(torch.zeros(1, 2), self.scale)


class PromptDataset(Dataset):
    """Prompts of one length as items: tokens and mask [L], and the question's number."""

    def __init__(self, prompts: Prompts):
        self.prompts = prompts

    def kept(self, i: int) -> int:
        return int(self.prompts.mask[i].sum())

    def __len__(self):
        return len(self.prompts.tokens)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"tokens": self.prompts.tokens[i], "mask": self.prompts.mask[i], "number": torch.tensor(i)}


def train_grpo(
    model: nn.Module,
    reference: nn.Module | None,
    train: PromptDataset,
    judge: Judge,
    plan: GRPOPlan,
    session: Session,
    evaluate: Callable[[int], dict],
) -> None:
    """Train what a placed model leaves trainable by GRPO, one update for each rollout.

    reference: the placed, frozen model that the KL is taken to; None where the plan's beta is 0.
    """
    backend = session.backend
    optimizer = backend.optimizer(parameter_groups(model, plan.learning_rate, plan.learning_rate))
    stream = None
    for step in session.steps("grpo", plan.steps, *resumable(model, optimizer), evaluate):
        stream = stream or batches(train, plan.batch_size, plan.accumulation, plan.seed, step - 1)
        factor = plan.learning_rate_factor(step)
        set_learning_rates(optimizer, factor)
        answered = answer(model, stream, judge, plan, backend)
        figures = learn(model, reference, answered, optimizer, plan, backend)
        session.record(**answered.figures, **figures, lr=plan.learning_rate * factor)


@dataclass(frozen=True)
class Answered:
    """The rollouts of one update: prompts, completions and advantages [P, G] of each micro-batch, which groups [P] tell
    answers apart, and figures to log. Where shapes may differ, no others are kept."""

    parts: list[tuple[Prompts, Completions, Tensor, Tensor]]
    figures: dict[str, float]


def answer(model: nn.Module, stream: Iterator[dict], judge: Judge, plan: GRPOPlan, backend: TorchBackend) -> Answered:
    """Roll out one update's prompts and judge the answers, on the host."""
    model.eval()
    prompts, completions, rewards, logged = [], [], [], []
    for _ in range(plan.accumulation):
        batch = next(stream)
        prompts.append(Prompts(**backend.to_device({"tokens": batch["tokens"], "mask": batch["mask"]})))
        done = rollout(model, prompts[-1], plan.group, plan.length, plan.sampling, plan.ends, backend)
        completions.append(done)
        judged = judge_all(judge, batch["number"].tolist(), done, backend)
        rewards.append(torch.tensor([[worth for worth, _ in group] for group in judged]))
        logged += [figures for group in judged for _, figures in group]
    reward = torch.cat(rewards)
    advantages, informative = group_advantages(reward, plan.scale)
    if plan.shuffled:
        advantages = torch.stack([group[torch.randperm(plan.group)] for group in advantages])
    names = dict.fromkeys(name for figures in logged for name in figures)
    columns = {name: [figures[name] for figures in logged if name in figures] for name in names}
    figures = {
        "reward": reward.mean().item(),
        "reward_std": reward.std(1).mean().item(),
        "zero_variance": 1 - informative.float().mean().item(),
        **{name: sum(column) / len(column) for name, column in columns.items()},
        "tokens": sum(p.tokens.numel() + done.tokens.numel() for p, done in zip(prompts, completions)),
    }
    sizes = [len(part) for part in rewards]
    parts = zip(prompts, completions, advantages.split(sizes), informative.split(sizes))
    if backend.kind != "xla":
        parts = [(_rows(p, told), _rows(done, told), a[told], told[told]) for p, done, a, told in parts if told.any()]
    return Answered(list(parts), figures)


def _rows(tensors, kept: Tensor):
    return type(tensors)(*(tensor[kept] for tensor in vars(tensors).values()))


def judge_all(judge: Judge, numbers: list[int], done: Completions, backend: TorchBackend) -> list[list[tuple]]:
    """judge's verdict on every completion of every prompt, with its length, whether it was cut off, and the entropy."""
    placed = [done.tokens, done.mask.sum(2), done.ended, done.entropy.sum(2)]
    verdicts = []
    for number, *group in zip(numbers, *(t.tolist() for t in backend.to_host(placed))):
        verdicts.append([])
        for ids, length, end, entropy in zip(*group):
            worth, figures = judge(number, ids[: length - 1] if end else ids[:length], end)
            figures |= {"completion_length": length, "clipped_ratio": float(not end), "entropy": entropy / length}
            verdicts[-1].append((worth, figures))
    return verdicts


def learn(
    model: nn.Module,
    reference: nn.Module | None,
    answered: Answered,
    optimizer: torch.optim.Optimizer,
    plan: GRPOPlan,
    backend: TorchBackend,
) -> dict[str, Tensor | int]:
    """One optimiser update on judged answers; the figures to record, as device scalars. Groups that do not tell answers
    apart are left out; where none does, nothing is updated, and there is no KL to record."""
    if not any(told.any() for *_, told in answered.parts):
        return {"loss": 0.0, "grad_norm": 0.0}
    model.train()
    masks = [done.mask & told.to(done.mask.device)[:, None, None] for _, done, _, told in answered.parts]
    sequences, tokens = plan.batch_size * plan.accumulation * plan.group, sum(mask.sum() for mask in masks)
    sums = dict.fromkeys(("loss", "kl") if reference is not None else ("loss",), torch.zeros_like(tokens).float())
    for (prompts, done, advantages, _), mask in zip(answered.parts, masks):
        with backend.autocast():
            logp = log_probs(model, prompts, done.tokens, plan.sampling.temperature).flatten(0, 1)
            expected = None
            if reference is not None:
                with torch.no_grad():
                    expected = log_probs(reference, prompts, done.tokens, plan.sampling.temperature).flatten(0, 1)
        kept = mask.flatten(0, 1).float()
        weights = token_weights(kept, plan.objective.reduction, sequences, tokens, plan.length, plan.accumulation)
        advantages = advantages.flatten().to(logp.device)
        loss = grpo_loss(logp, logp.detach(), expected, advantages, weights, plan.objective)
        backend.backward(loss)
        sums["loss"] = sums["loss"] + loss.detach()
        if expected is not None:
            sums["kl"] = sums["kl"] + (k3(logp.detach(), expected) * kept).sum() / tokens
        backend.step_boundary()
    return {**sums, "grad_norm": backend.update(optimizer, plan.clip_grad_norm)}
