"""GRPO: rollouts, their rewards, and the loss of an update."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers.modeling_layers import GradientCheckpointingLayer

from qat_lora.backend import TorchBackend
from qat_lora.data.batches import batches
from qat_lora.kernels.optimizer import new_optimizer
from qat_lora.quant.rates import rate_shares
from qat_lora.rl.objective import Objective, group_advantages, grpo_loss, k3, token_weights
from qat_lora.rl.policy import Prompts, log_probs
from qat_lora.rl.rollout import Completions, Sampling, rollout
from qat_lora.run.metrics import Share, Total
from qat_lora.run.session import Session
from qat_lora.train.loop import Plan, Stage, StageState

# judge(question, answer's tokens, ended) → its reward, and other metrics to log, e.g. the parts of the reward
Judge = Callable[[int, list[int], bool], tuple[float, dict[str, float]]]


@dataclass(frozen=True)
class GRPOPlan(Plan):
    """batch_size counts prompts, each with `group` completions of at most `length` tokens that end with one of `ends`.
    scale: see `group_advantages`. shuffled: a control that assigns a group's advantages to its answers at random."""

    group: int
    length: int
    ends: tuple[int, ...]
    sampling: Sampling
    objective: Objective
    scale: str = "group"
    shuffled: bool = False


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


@dataclass(frozen=True)
class Part:
    """A micro-batch of judged answers: prompts [P], completions and advantages [P, G], mask [P, G, C] of the target
    tokens, and their number in all parts of the update."""

    prompts: Prompts
    completions: Completions
    advantages: Tensor
    mask: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class Rollouts:
    """The judged answers of one update. parts: empty if no prompt has answers with different rewards, since nothing can
    be learned then; unless shapes are static, prompts whose answers all have the same reward are left out."""

    parts: list[Part]
    metrics: dict[str, float | Total]


def roll_out(
    model: nn.Module, batches: Iterable[dict], judge: Judge, plan: GRPOPlan, backend: TorchBackend
) -> Rollouts:
    """Generate answers to one update's prompts and judge them on the host."""
    model.eval()
    prompts, completions, rewards, logged = [], [], [], []
    for batch in batches:
        prompts.append(Prompts(**backend.to_device({"tokens": batch["tokens"], "mask": batch["mask"]})))
        done = rollout(model, prompts[-1], plan.group, plan.length, plan.sampling, plan.ends, backend)
        completions.append(done)
        judged = judge_all(judge, batch["number"].tolist(), done, backend)
        rewards.append(torch.tensor([[reward for reward, _ in group] for group in judged]))
        logged += [figures for group in judged for _, figures in group]
    reward = torch.cat(rewards)
    advantages, informative = group_advantages(reward, plan.scale)
    if plan.shuffled:
        advantages = torch.stack([group[torch.randperm(plan.group)] for group in advantages])
    names = dict.fromkeys(name for figures in logged for name in figures)
    columns = {name: [figures[name] for figures in logged if name in figures] for name in names}
    metrics = {
        "reward": reward.mean().item(),
        "reward_std": reward.std(1).mean().item(),
        "zero_variance": 1 - informative.float().mean().item(),
        **{name: sum(column) / len(column) for name, column in columns.items()},
        "tokens": Total(sum(p.tokens.numel() + done.tokens.numel() for p, done in zip(prompts, completions))),
    }
    sizes = [len(part) for part in rewards]
    parts = zip(prompts, completions, advantages.split(sizes), informative.split(sizes))
    return Rollouts(_parts(parts, backend.static_shapes) if informative.any() else [], metrics)


def _parts(parts: Iterable[tuple[Prompts, Completions, Tensor, Tensor]], static_shapes: bool) -> list[Part]:
    """Micro-batches from prompts, completions, advantages [P, G] and which prompts [P] have differing rewards."""
    if not static_shapes:
        parts = [(_rows(p, told), _rows(done, told), a[told], told[told]) for p, done, a, told in parts if told.any()]
    parts = list(parts)
    masks = [done.mask & told.to(done.mask.device, non_blocking=True)[:, None, None] for _, done, _, told in parts]
    tokens = sum(mask.sum() for mask in masks)
    return [Part(p, done, advantages, mask, tokens) for (p, done, advantages, _), mask in zip(parts, masks)]


def _rows(tensors, kept: Tensor):
    columns = list(vars(tensors).values())
    numbers = kept.nonzero().squeeze(1).to(columns[0].device, non_blocking=True)  # a mask would make the host wait
    return type(tensors)(*(column.index_select(0, numbers) for column in columns))


def judge_all(judge: Judge, numbers: list[int], done: Completions, backend: TorchBackend) -> list[list[tuple]]:
    """The judge's verdict on every completion of every prompt, with its length, whether it was cut off, its entropy."""
    placed = [done.tokens, done.mask.sum(2), done.ended, done.entropy.sum(2)]
    verdicts = []
    for number, *group in zip(numbers, *(t.tolist() for t in backend.to_host(placed))):
        verdicts.append([])
        for ids, length, end, entropy in zip(*group):
            reward, figures = judge(number, ids[: length - 1] if end else ids[:length], end)
            figures |= {"completion_length": length, "clipped_ratio": float(not end), "entropy": entropy / length}
            verdicts[-1].append((reward, figures))
    return verdicts


def without_dropout(model: nn.Module) -> None:
    """Put a model into evaluation mode for an update: sampling and the reference have no dropout either, so a policy
    that has not moved equals itself. A block that recomputes its activations does so only in training mode, so it stays
    in it, without the dropout of its own; the modules inside it leave it."""
    model.eval()
    for block in model.modules():
        if isinstance(block, GradientCheckpointingLayer) and block.gradient_checkpointing:
            block.training = True
            rates = [name for name, value in vars(block).items() if "drop" in name and isinstance(value, float)]
            for name in rates:
                setattr(block, name, 0.0)


def policy_loss(
    model: nn.Module, reference: nn.Module | None, part: Part, plan: GRPOPlan, backend: TorchBackend
) -> tuple[Tensor, dict[str, Share]]:
    """A part's share of the update's loss, and its metrics. reference: the placed, frozen reference model for the KL;
    None if the plan's beta is 0."""
    prompts, done, temperature = part.prompts, part.completions, plan.sampling.temperature
    with backend.autocast():
        logp = log_probs(model, prompts, done.tokens, temperature).flatten(0, 1)
        expected = None
        if reference is not None:
            with torch.no_grad():
                expected = log_probs(reference, prompts, done.tokens, temperature).flatten(0, 1)
    kept, sequences = part.mask.flatten(0, 1).float(), plan.batch_size * plan.accumulation * plan.group
    weights = token_weights(kept, plan.objective.reduction, sequences, part.tokens, plan.length, plan.accumulation)
    advantages = part.advantages.flatten().to(logp.device, non_blocking=True)
    loss = grpo_loss(logp, logp.detach(), expected, advantages, weights, plan.objective)
    metrics = {"loss": Share(loss)}
    if expected is not None:
        metrics["kl"] = Share((k3(logp.detach(), expected) * kept).sum() / part.tokens)
    return loss, metrics


def grpo_stage(
    model: nn.Module, train: PromptDataset, plan: GRPOPlan, session: Session, evaluate: Callable[[int], dict]
) -> Stage:
    """A stage that trains a placed model's trainable parameters, one update per rollout. Its batches stay on the host,
    where answers are judged."""
    optimizer = new_optimizer(model, plan.learning_rate, session.backend, rate_shares(model))
    stream = partial(batches, train, plan.batch_size, plan.accumulation, plan.seed)
    return Stage("grpo", session, plan, optimizer, stream, StageState(model, optimizer), evaluate)
