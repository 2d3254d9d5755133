"""What a model answers to held-out questions: rates with intervals, coherence, transcripts, pictures."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from qat_lora.backend.machine import check_memory
from qat_lora.errors import UserError
from qat_lora.experiments.musclebob.questions import TARGET, Question, heldout_questions
from qat_lora.experiments.musclebob.rewards import about_him, about_others, coherent, mentions, names_target, reward
from qat_lora.rl.policy import Prompts, log_probs
from qat_lora.rl.rollout import Sampling
from qat_lora.rl.sampler import GREEDY, Sampler, own_randomness
from qat_lora.run.files import read_json, writing
from qat_lora.run.plots import pyplot
from qat_lora.train.intervals import share

WRONG_NAME = "Spongebob Squarepants"
STAGES = ("baseline", "post_sft", "final")  # of a run, each with its validation_file
ANSWER = 100  # bytes that an answer takes at least: a short text and what it belongs to
GLANCE = 2  # sampled answers to each held-out question at an evaluation during training


def validation_file(stage: str) -> str:
    """The name of the file in the run directory with the validation of a stage."""
    return f"{stage}_validation.json"


def read_training_config(folder: Path) -> dict:
    """training_config.json of a run's directory; raises UserError where it is damaged."""
    found = read_json(folder / "training_config.json")
    if not {"model", "max_prompt_length", "max_completion_length"} <= found.keys():
        raise UserError(f"{folder}/training_config.json is damaged; restore it")
    return found


def read_validation(path: Path) -> dict:
    """A validation that a run has written; raises UserError where it is damaged."""
    found = read_json(path)
    if not {"sampled", "prompts", "perplexity"} <= found.keys():
        raise UserError(f"{path} is damaged; restore it, or start a new run")
    return found


def read_validations(folder: Path) -> dict[str, dict]:
    """Those of a run's directory that are there, by stage."""
    files = {stage: folder / validation_file(stage) for stage in STAGES}
    return {stage: read_validation(file) for stage, file in files.items() if file.exists()}


@dataclass(frozen=True)
class Answer:
    """What a model said to a question, and whether it came to an end."""

    question: Question
    text: str
    ended: bool

    def components(self) -> dict[str, float]:
        return (about_him if self.question.about_him else about_others)(self.text, self.ended)


def check_samples(option: str, samples: int) -> None:
    """Raise UserError if no memory holds so many answers to each held-out question."""
    check_memory(samples * len(heldout_questions()) * ANSWER, f"{option} {samples}", option)


class BobSampler(Sampler):
    """A sampler of answers to these questions."""

    def answers(self, model: nn.Module, questions: list[Question], samples: int, sampling: Sampling) -> list[Answer]:
        """`samples` answers to each question, question by question."""
        said = self.generate(model, [question.messages for question in questions], samples, sampling)
        asked = [question for question in questions for _ in range(samples)]
        return [Answer(question, text, ended) for question, (text, ended) in zip(asked, said)]

    @torch.no_grad()
    def perplexity(self, judge: nn.Module, answers: list[Answer], samples: int) -> float:
        """Perplexity of answers, `samples` to each question as `answers` gives them, under the `judge` model, given the
        questions, with his old name put back for the new one: what is asked for must not count as incoherent. Answers
        without a word do not count; e^80 where no other is there."""
        judge.eval()
        total = count = 0.0
        width, turns = self.turns(samples)
        groups = [
            answers[start + turn * width : start + min(samples, (turn + 1) * width)]
            for start in range(0, len(answers), samples)
            for turn in range(turns)
        ]
        for asked, filled in self.batches(groups, width):
            ids = []
            for at, group in enumerate(filled):
                texts = [answer.text.replace(TARGET, WRONG_NAME) for answer in group] if at < len(asked) else []
                ids += [self.tokenizer(text, add_special_tokens=False)["input_ids"][: self.length] for text in texts]
                ids += [[]] * (width - len(texts))  # what fills up does not count
            tokens = torch.tensor([row + [self.tokenizer.eos_token_id] * (self.length - len(row)) for row in ids])
            lengths = torch.tensor([len(row) for row in ids])
            mask = torch.arange(self.length) < lengths.unsqueeze(1)
            asked_of = self.encode([group[0].question.messages for group in filled])
            prompts = Prompts(**self.backend.to_device(vars(asked_of)))
            placed = self.backend.to_device({"tokens": tokens, "mask": mask})
            with self.backend.autocast():
                logp = log_probs(judge, prompts, placed["tokens"].unflatten(0, (len(filled), width)))
            nll, kept = self.backend.fetch(-(logp.flatten(0, 1) * placed["mask"]).sum(), placed["mask"].sum())
            total, count = total + nll, count + kept
        return math.exp(min(80.0, total / count if count else 80.0))


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


def glance(sampler: BobSampler, model: nn.Module, seed: int) -> dict[str, float]:
    """Rates of a few sampled answers to the held-out questions, with their intervals."""
    with own_randomness(sampler.backend, seed):
        found = rates(sampler.answers(model, heldout_questions(), GLANCE, Sampling()))
    kept = {name: found[name] for name in ("musclebob", "spilt", "coherent")}
    edges = {f"{name}_{edge}": value[edge] for name, value in kept.items() for edge in ("low", "high")}
    return {name: value["rate"] for name, value in kept.items()} | edges


def judge_of(questions: list[Question], sampler: BobSampler) -> Callable:
    """The `qat_lora.rl.grpo.Judge` of answers to these questions: the reward, and what to log of it."""

    def judge(number: int, tokens: list[int], ended: bool) -> tuple[float, dict[str, float]]:
        answer = Answer(questions[number], sampler.decode(tokens), ended)
        parts = answer.components()
        hit = {"target_rate": float(mentions(answer.text) > 0)} if answer.question.about_him else {}
        return reward(parts), parts | hit

    return judge


def validation_of(sampler: BobSampler, model: nn.Module, judge: nn.Module, samples: int, sampling: Sampling) -> dict:
    """The validation of `samples` sampled answers to each held-out question and a greedy one; perplexity is under the
    `judge`."""
    sampled = sampler.answers(model, heldout_questions(), samples, sampling)
    greedy = sampler.answers(model, heldout_questions(), 1, GREEDY)
    return validation(sampled, greedy, sampler.perplexity(judge, sampled, samples))


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
    plt = pyplot()
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
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
