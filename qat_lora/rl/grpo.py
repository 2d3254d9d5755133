"""GRPO: rollouts, their rewards, and the loss of an update."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers.modeling_layers import GradientCheckpointingLayer

from qat_lora.backend import TorchBackend
from qat_lora.backend.sharding import whole
from qat_lora.data.batches import batches, seed_of
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
    """The judged answers of one update. parts: of this worker; empty if no prompt of any worker has answers with
    different rewards, since nothing can be learned then. A single worker without static shapes also leaves out the
    prompts whose answers all have the same reward."""

    parts: list[Part]
    metrics: dict[str, float | Total]


def roll_out(
    model: nn.Module, batches: Iterable[dict], judge: Judge, plan: GRPOPlan, backend: TorchBackend
) -> Rollouts:
    """Generate answers to one update's prompts and judge them on the host. batches: of `prompt_stream`."""
    model.eval()
    prompts, completions, judged, seeds = [], [], [], []
    with whole(model):  # workers generate answers of different lengths
        for batch in batches:
            prompts.append(Prompts(**backend.to_device({"tokens": batch["tokens"], "mask": batch["mask"]})))
            seeds.append(batch["seed"])
            backend.seed(seeds[-1])
            done = rollout(model, prompts[-1], plan.group, plan.length, plan.sampling, plan.ends, backend)
            completions.append(done)
            judged.append(judge_all(judge, batch["number"].tolist(), done, backend))
    gathered = backend.group.gather((judged, seeds[0]))
    micro_batches = [micro for turn in zip(*(theirs for theirs, _ in gathered)) for micro in turn]
    every = [group for micro in micro_batches for group in micro]
    reward = torch.tensor([[reward for reward, _ in group] for group in every])
    logged = [figures for group in every for _, figures in group]
    advantages, informative = group_advantages(reward, plan.scale)
    if plan.shuffled:
        generator = torch.Generator().manual_seed(gathered[0][1])
        advantages = torch.stack([group[torch.randperm(plan.group, generator=generator)] for group in advantages])
    names = dict.fromkeys(name for figures in logged for name in figures)
    columns = {name: [figures[name] for figures in logged if name in figures] for name in names}
    metrics = {
        "reward": reward.mean().item(),
        "reward_std": reward.std(1).mean().item(),
        "zero_variance": 1 - informative.float().mean().item(),
        **{name: sum(column) / len(column) for name, column in columns.items()},
        "tokens": Total(sum(p.tokens.numel() + done.tokens.numel() for p, done in zip(prompts, completions))),
    }
    if not informative.any():
        return Rollouts([], metrics)
    lengths = torch.tensor([[float(figures["completion_length"]) for _, figures in group] for group in every])
    tokens = backend.to_device({"tokens": lengths[informative].sum()})["tokens"]
    mine = slice(backend.rank, None, backend.world_size)
    parts = zip(prompts, completions, *(of.split(plan.batch_size)[mine] for of in (advantages, informative)))
    # a worker without rows would not join the reduction, and those that share a model out run the same passes
    return Rollouts(_parts(parts, tokens, backend.static_shapes or backend.world_size > 1), metrics)


def _parts(parts: Iterable[tuple[Prompts, Completions, Tensor, Tensor]], tokens: Tensor, all_rows: bool) -> list[Part]:
    """Micro-batches from prompts, completions, advantages [P, G] and which prompts [P] have differing rewards. tokens:
    target tokens in the update. all_rows: whether the others stay in, masked."""
    if not all_rows:
        parts = [(_rows(p, told), _rows(done, told), a[told], told[told]) for p, done, a, told in parts if told.any()]
    return [
        Part(p, done, a, done.mask & told.to(done.mask.device, non_blocking=True)[:, None, None], tokens)
        for p, done, a, told in parts
    ]


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
    kept, micros = part.mask.flatten(0, 1).float(), plan.accumulation * backend.world_size
    sequences = plan.batch_size * micros * plan.group
    weights = token_weights(kept, plan.objective.reduction, sequences, part.tokens, plan.length, micros)
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
    stream = partial(prompt_stream, train, plan, session.backend)
    return Stage("grpo", session, plan, optimizer, stream, StageState(model, optimizer), evaluate)


def prompt_stream(train: PromptDataset, plan: GRPOPlan, backend: TorchBackend, start: int) -> Iterator[dict]:
    """This worker's micro-batches of prompts from update number `start` on, see data.batches. Each has a `seed` for its
    answers, which depends only on its place among the micro-batches of all updates and workers."""
    place = backend.rank, backend.world_size
    places = count(start * plan.accumulation * backend.world_size + backend.rank, backend.world_size)
    for index, batch in zip(places, batches(train, plan.batch_size, plan.accumulation, plan.seed, start, *place)):
        yield batch | {"seed": seed_of(plan.seed, index)}
