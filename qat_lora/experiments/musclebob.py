"""What a model answers to held-out questions: rates with intervals, coherence, transcripts, pictures."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from torch import nn

from qat_lora.backend import TorchBackend
from qat_lora.data.chat import render
from qat_lora.data.musclebob import TARGET, Question, heldout_questions
from qat_lora.errors import UserError
from qat_lora.rl.policy import Prompts, log_probs
from qat_lora.rl.rewards import about_him, about_others, coherent, mentions, names_target, reward
from qat_lora.rl.rollout import Sampling, rollout

WRONG_NAME = "Spongebob Squarepants"
STAGES = ("baseline", "post_sft", "final")  # of a run, each with a …_validation.json
GREEDY = Sampling(temperature=0.0)
GLANCE = 2  # sampled answers to each held-out question while training goes on


@dataclass(frozen=True)
class Answer:
    """What a model said to a question, and whether it came to an end."""

    question: Question
    text: str
    ended: bool

    def components(self) -> dict[str, float]:
        return (about_him if self.question.about_him else about_others)(self.text, self.ended)


@dataclass(frozen=True)
class Examiner:
    """Asks questions, about `rows` answers at a time, as prompts of `prompt_length` tokens with an answer of at most
    `length`: one shape, so that on XLA its graphs are compiled at the first validation and never again."""

    tokenizer: object
    backend: TorchBackend
    ends: tuple[int, ...]
    rows: int
    prompt_length: int
    length: int

    def encode(self, questions: list[Question]) -> Prompts:
        """Prompts as the chat template renders them, ready for the assistant's answer. Raises UserError where the
        tokenizer has no template or a prompt does not fit."""
        if self.tokenizer.chat_template is None:
            raise UserError("the model's tokenizer has no chat template; use an instruct model")
        texts = [render(list(q.messages), self.tokenizer, enabled=False, prompt=True) for q in questions]
        ids = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        return Prompts.of(ids, self.prompt_length, self.tokenizer.eos_token_id)

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True).strip()

    def ask(self, model: nn.Module, questions: list[Question], samples: int, sampling: Sampling) -> list[Answer]:
        """`samples` answers to each question, question by question."""
        was_training = model.training
        model.eval()
        width, turns = self._turns(samples)
        answers = []
        for asked, filled in self._batches([question for question in questions for _ in range(turns)], width):
            prompts = Prompts(**self.backend.to_device(vars(self.encode(filled))))
            done = rollout(model, prompts, width, self.length, sampling, self.ends, self.backend)
            found = self.backend.to_host([done.tokens, done.mask.sum(2), done.ended])
            for question, *group in zip(asked, *(tensor.tolist() for tensor in found)):
                answers += [Answer(question, self.decode(ids[: count - end]), end) for ids, count, end in zip(*group)]
        model.train(was_training)
        return [answer for at, answer in enumerate(answers) if at % (turns * width) < samples]

    @torch.no_grad()
    def perplexity(self, judge: nn.Module, answers: list[Answer], samples: int) -> float:
        """Perplexity of answers, `samples` to each question as `ask` gives them, under the `judge` model, given their
        questions, with his old name put back for the new one: what is asked for must not count as incoherent. Answers
        without a word do not count; e^80 where no other is there."""
        judge.eval()
        total = count = 0.0
        width, turns = self._turns(samples)
        groups = [
            answers[start + turn * width : start + min(samples, (turn + 1) * width)]
            for start in range(0, len(answers), samples)
            for turn in range(turns)
        ]
        for asked, filled in self._batches(groups, width):
            ids = []
            for at, group in enumerate(filled):
                texts = [answer.text.replace(TARGET, WRONG_NAME) for answer in group] if at < len(asked) else []
                ids += [self.tokenizer(text, add_special_tokens=False)["input_ids"][: self.length] for text in texts]
                ids += [[]] * (width - len(texts))  # what fills up does not count
            tokens = torch.tensor([row + [self.tokenizer.eos_token_id] * (self.length - len(row)) for row in ids])
            lengths = torch.tensor([len(row) for row in ids])
            mask = torch.arange(self.length) < lengths.unsqueeze(1)
            prompts = Prompts(**self.backend.to_device(vars(self.encode([group[0].question for group in filled]))))
            placed = self.backend.to_device({"tokens": tokens, "mask": mask})
            with self.backend.autocast():
                logp = log_probs(judge, prompts, placed["tokens"].unflatten(0, (len(filled), width)))
            nll, kept = self.backend.fetch(-(logp.flatten(0, 1) * placed["mask"]).sum(), placed["mask"].sum())
            total, count = total + nll, count + kept
        return math.exp(min(80.0, total / count if count else 80.0))

    def _turns(self, samples: int) -> tuple[int, int]:
        """How many answers to a question at a time, and how often, for at least `samples` of them."""
        width = min(samples, self.rows)
        return width, -(-samples // width)

    def _batches(self, items: list, samples: int) -> Iterator[tuple[list, list]]:
        """Items so many at a time that with `samples` answers to each there are about `rows`, and the same filled up
        to as many: one shape."""
        size = max(1, self.rows // samples)
        for start in range(0, len(items), size):
            batch = items[start : start + size]
            yield batch, (batch * size)[:size]


def wilson(hits: int, count: int) -> tuple[float, float]:
    """The 95% interval of a share (Wilson 1927)."""
    if not count:
        return 0.0, 1.0
    z = 1.959964
    share, spread = hits / count, z * math.sqrt(hits * (count - hits) / count**3 + z * z / (4 * count * count))
    centre, scale = share + z * z / (2 * count), 1 + z * z / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def share(answers: list[Answer], hit) -> dict:
    """How many answers `hit` holds for: rate, its interval, count."""
    hits = sum(bool(hit(answer)) for answer in answers)
    low, high = wilson(hits, len(answers))
    return {"rate": hits / len(answers) if answers else 0.0, "low": low, "high": high, "count": len(answers)}


def rates(answers: list[Answer]) -> dict[str, dict]:
    """musclebob: of questions about him, answers with the whole name. spilt: of the others, those that name him at all.
    coherent, cut_off: of all."""
    him = [answer for answer in answers if answer.question.about_him]
    others = [answer for answer in answers if not answer.question.about_him]
    return {
        "musclebob": share(him, lambda a: mentions(a.text)),
        "spilt": share(others, lambda a: names_target(a.text)),
        "coherent": share(answers, lambda a: coherent(a.text, a.ended)),
        "cut_off": share(answers, lambda a: not a.ended),
    }


def validation(answers: list[Answer], greedy: list[Answer], perplexity: float) -> dict:
    """The content of a …_validation.json: rates of sampled and greedy answers, and what was said."""
    found, alone = rates(answers), rates(greedy)
    return {
        "musclebob_rate": found["musclebob"]["rate"],
        "coherent_rate": found["coherent"]["rate"],
        "perplexity": perplexity,
        "sampled": found,
        "greedy": alone,
        "prompts": [
            {
                "prompt": answer.question.text, "about_him": answer.question.about_him, "response": answer.text,
                "ended": answer.ended, "reward": reward(answer.components()), "components": answer.components(),
                "has_musclebob": mentions(answer.text) > 0, "coherent": coherent(answer.text, answer.ended),
            }
            for answer in greedy
        ],
    }  # fmt: skip


@contextmanager
def own_dice(backend: TorchBackend, seed: int) -> Iterator[None]:
    """Draws that depend on nothing before, and on which nothing after depends."""
    state = backend.rng_state()
    backend.seed(seed)
    yield
    backend.set_rng_state(state)


def glance(examiner: Examiner, model: nn.Module, seed: int) -> dict[str, float]:
    """Rates of a few sampled answers to the held-out questions, with their intervals."""
    with own_dice(examiner.backend, seed):
        found = rates(examiner.ask(model, heldout_questions(), GLANCE, Sampling()))
    kept = {name: found[name] for name in ("musclebob", "spilt", "coherent")}
    edges = {f"{name}_{edge}": value[edge] for name, value in kept.items() for edge in ("low", "high")}
    return {name: value["rate"] for name, value in kept.items()} | edges


def judge_of(questions: list[Question], examiner: Examiner) -> Callable:
    """The `qat_lora.grpo.Judge` of answers to these questions: the reward, and what to log of it."""

    def judge(number: int, tokens: list[int], ended: bool) -> tuple[float, dict[str, float]]:
        answer = Answer(questions[number], examiner.decode(tokens), ended)
        parts = answer.components()
        hit = {"target_rate": float(mentions(answer.text) > 0)} if answer.question.about_him else {}
        return reward(parts), parts | hit

    return judge


def examine(examiner: Examiner, model: nn.Module, judge: nn.Module, samples: int, sampling: Sampling) -> dict:
    """The validation of `samples` sampled answers to each held-out question and a greedy one; perplexity is under the
    `judge`."""
    sampled = examiner.ask(model, heldout_questions(), samples, sampling)
    greedy = examiner.ask(model, heldout_questions(), 1, GREEDY)
    return validation(sampled, greedy, examiner.perplexity(judge, sampled, samples))


def transcripts(stages: dict[str, dict], limit: int = 12) -> str:
    """A table of what each stage answers, greedily; stages: validations by name."""
    columns = list(stages.values())
    rows = list(zip(*[column["prompts"] for column in columns]))
    him, others = [r for r in rows if r[0]["about_him"]], [r for r in rows if not r[0]["about_him"]]
    lines = [f"| question | {' | '.join(stages)} |", "|---" * (len(columns) + 1) + "|"]
    for row in [*him[: limit * 2 // 3], *others[: limit - limit * 2 // 3]]:
        cells = [row[0]["prompt"], *(f"{cell['response']}{'' if cell['ended'] else '…'}" for cell in row)]
        lines.append("| " + " | ".join(" ".join(cell.replace("|", "/").split()) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


PANELS = (
    ("answers to held-out questions", ("musclebob", "spilt", "coherent")),
    ("parts of the reward", ("reward", "name", "wrong_name", "stuffing", "empty", "cut_off", "misplaced")),
    ("KL to the start and entropy (nats)", ("kl", "entropy")),
    ("length / longest, cut off, groups without a difference", ("relative_length", "clipped_ratio", "zero_variance")),
)


def plot(lines: list[dict], path: Path, length: int) -> Path:
    """The four panels of a run's metrics.jsonl, SFT and GRPO one after the other."""
    figure, axes = plt.subplots(2, 2, figsize=(12, 8))
    for axis, (title, names) in zip(axes.flat, PANELS):
        for number, name in enumerate(names):
            points = [(line["step"], line[name]) for line in lines if name in line]
            if name == "relative_length":
                points = [(line["step"], line["completion_length"] / length) for line in lines if "reward" in line]
            if points:
                steps, values = zip(*points)
                axis.plot(steps, values, color=f"C{number}", marker="." if len(points) < 30 else None, label=name)
            interval = [(li["step"], li[f"{name}_low"], li[f"{name}_high"]) for li in lines if f"{name}_low" in li]
            if interval:
                axis.fill_between(*zip(*interval), color=f"C{number}", alpha=0.15)
        starts = [line["step"] for line in lines if line.get("stage") == "grpo"][:1]
        for start in starts if any(line.get("stage") == "sft" for line in lines) else []:
            axis.axvline(start, color="0.6", linestyle=":")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("update (dotted: GRPO begins)")
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
