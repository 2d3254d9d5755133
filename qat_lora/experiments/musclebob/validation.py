"""Validation on held-out questions: rates with intervals, coherence, transcripts and plots, and the files of a run that
hold them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from qat_lora.backend import TorchBackend
from qat_lora.backend.machine import check_memory
from qat_lora.backend.sharding import shards_of, takes_part, whole_values
from qat_lora.errors import UserError
from qat_lora.experiments.musclebob.questions import TARGET, Question, heldout_questions
from qat_lora.experiments.musclebob.rewards import about_him, about_others, coherent, mentions, names_target, reward
from qat_lora.models.compiling import placed
from qat_lora.models.generate import end_tokens
from qat_lora.models.loading import empty_model, load_model
from qat_lora.models.writing import write_model
from qat_lora.quant.student import StudentSpec, load_student, plain_model, save_student
from qat_lora.rl.policy import Prompts, log_probs
from qat_lora.rl.rollout import Sampling
from qat_lora.rl.sampler import GREEDY, Sampler
from qat_lora.run.console import attempt, command, say, summarise
from qat_lora.run.files import new_folder, read_json, write_atomically, write_json, writing
from qat_lora.run.report import write_report
from qat_lora.run.rundir import Run
from qat_lora.train.evaluation import perplexity
from qat_lora.train.intervals import share, shown
from qat_lora.train.loop import restore

WRONG_NAME = "Spongebob Squarepants"
STAGES = ("baseline", "post_sft", "final")
VALIDATIONS = {stage: f"{stage}_validation.json" for stage in STAGES}  # in the run directory
ANSWER = 100  # lower bound on the bytes that an answer takes: a short text and its object
ROWS = 80  # answers generated at a time; a decoding step costs hardly more for 80 than for 8
GLANCE = 2  # sampled answers per held-out question in an evaluation during training


def read_training_config(folder: Path) -> dict:
    """Read training_config.json of a run directory; raises UserError if it is damaged."""
    found = read_json(folder / "training_config.json")
    if not {"model", "max_prompt_length", "max_new_tokens"} <= found.keys():
        raise UserError(f"{folder}/training_config.json is damaged; restore it")
    return found


def read_validations(folder: Path) -> dict[str, dict]:
    """The validations that exist in a run directory, by stage; raises UserError if one is damaged."""
    found = {stage: read_json(folder / name) for stage, name in VALIDATIONS.items() if (folder / name).exists()}
    for stage, content in found.items():
        if not {"sampled", "prompts", "perplexity"} <= content.keys():
            raise UserError(f"{folder / VALIDATIONS[stage]} is damaged; restore it, or start a new run")
    return found


@dataclass(frozen=True)
class Answer:
    """A model's answer to a question, and whether it ended before the length limit."""

    question: Question
    text: str
    ended: bool

    def components(self) -> dict[str, float]:
        return (about_him if self.question.about_him else about_others)(self.text, self.ended)


def check_samples(option: str, samples: int) -> None:
    """Raise UserError if there is not enough memory for `samples` answers to each held-out question."""
    check_memory(samples * len(heldout_questions()) * ANSWER, f"{option} {samples}", option)


class BobSampler(Sampler):
    """Samples answers to questions, and measures their perplexity."""

    @classmethod
    def of(
        cls, model: nn.Module, tokenizer, backend: TorchBackend, prompt_length: int, length: int, thinks: bool = False,
        rows: int = ROWS,
    ) -> "BobSampler":  # fmt: skip
        """A sampler whose answers end with the tokens that end the model's."""
        return cls(tokenizer, backend, tuple(end_tokens(model, tokenizer)), rows, prompt_length, length, thinks)

    def answers(
        self, model: nn.Module, questions: list[Question], samples: int, sampling: Sampling, seed: int = 0
    ) -> list[Answer]:
        """`samples` answers to each question, ordered by question."""
        said = self.generate(model, [question.messages for question in questions], samples, sampling, seed)
        asked = [question for question in questions for _ in range(samples)]
        return [Answer(question, text, ended) for question, (text, ended) in zip(asked, said)]

    @torch.no_grad()
    def perplexity(self, judge: nn.Module, answers: list[Answer], samples: int) -> float:
        """Perplexity of answers under the `judge` model, given their questions; `samples` per question, in the order of
        `answers`. The old name is put back in place of the new one, so that using the new name does not count as
        incoherent. Empty answers are left out; if all are empty, the perplexity is e^80."""
        judge.eval()
        measured = []
        width, turns = self.turns(samples)
        groups = [
            answers[start + turn * width : start + min(samples, (turn + 1) * width)]
            for start in range(0, len(answers), samples)
            for turn in range(turns)
        ]
        every, workers = list(self.batches(groups, width)), self.backend.world_size
        for number in range(self.backend.rank, len(every) + -len(every) % workers, workers):
            asked, filled = every[number % len(every)]
            ids = []
            for at, group in enumerate(filled):
                texts = [answer.text.replace(TARGET, WRONG_NAME) for answer in group] if at < len(asked) else []
                ids += [self.tokenizer(text, add_special_tokens=False)["input_ids"][: self.length] for text in texts]
                ids += [[]] * (width - len(texts))  # padding, which does not count
            tokens = torch.tensor([row + [self.tokenizer.eos_token_id] * (self.length - len(row)) for row in ids])
            lengths = torch.tensor([len(row) for row in ids])
            mask = torch.arange(self.length) < lengths.unsqueeze(1)
            asked_of = self.encode([group[0].question.messages for group in filled])
            prompts = Prompts(**self.backend.to_device(vars(asked_of)))
            placed = self.backend.to_device({"tokens": tokens, "mask": mask})
            with self.backend.autocast():
                logp = log_probs(judge, prompts, placed["tokens"].unflatten(0, (len(filled), width)))
            measured += [self.backend.fetch(-(logp.flatten(0, 1) * placed["mask"]).sum(), placed["mask"].sum())]
        shares = [pair for turn in zip(*self.backend.group.gather(measured)) for pair in turn][: len(every)]
        total, count = map(sum, zip(*shares))
        return perplexity(total / count if count else math.inf)


def rates(answers: list[Answer]) -> dict[str, dict]:
    """Shares of answers. musclebob: of answers to questions about him, those with the whole name. spilt: of the other
    answers, those with any part of the name. coherent, cut_off: of all answers."""
    him = [answer for answer in answers if answer.question.about_him]
    others = [answer for answer in answers if not answer.question.about_him]
    return {
        "musclebob": share(him, lambda a: mentions(a.text)),
        "spilt": share(others, lambda a: names_target(a.text)),
        "coherent": share(answers, lambda a: coherent(a.text, a.ended)),
        "cut_off": share(answers, lambda a: not a.ended),
    }


def glance(sampler: BobSampler, model: nn.Module, seed: int) -> dict[str, float]:
    """Rates over a few sampled answers to the held-out questions, with their intervals."""
    found = rates(sampler.answers(model, heldout_questions(), GLANCE, Sampling(), seed))
    kept = {name: found[name] for name in ("musclebob", "spilt", "coherent")}
    edges = {f"{name}_{edge}": value[edge] for name, value in kept.items() for edge in ("low", "high")}
    return {name: value["rate"] for name, value in kept.items()} | edges


def judge_of(questions: list[Question], sampler: BobSampler) -> Callable:
    """The `qat_lora.rl.grpo.Judge` for these questions: returns the reward and the values to log with it."""

    def judge(number: int, tokens: list[int], ended: bool) -> tuple[float, dict[str, float]]:
        answer = Answer(questions[number], sampler.decode(tokens), ended)
        parts = answer.components()
        hit = {"target_rate": float(mentions(answer.text) > 0)} if answer.question.about_him else {}
        return reward(parts), parts | hit

    return judge


def validation_of(
    sampler: BobSampler, model: nn.Module, judge: nn.Module, samples: int, sampling: Sampling, seed: int = 0,
    questions: list[Question] | None = None,
) -> dict:  # fmt: skip
    """Validate with `samples` sampled answers and one greedy answer to each of the questions, by default the held-out
    ones; perplexity is measured under the `judge`. Returns the content of a …_validation.json: rates of sampled and
    greedy answers, and the greedy answers."""
    questions = questions or heldout_questions()
    sampled = sampler.answers(model, questions, samples, sampling, seed)
    greedy = sampler.answers(model, questions, 1, GREEDY)
    found = rates(sampled)
    return {
        "musclebob_rate": found["musclebob"]["rate"],
        "coherent_rate": found["coherent"]["rate"],
        "perplexity": sampler.perplexity(judge, sampled, samples),
        "sampled": found,
        "greedy": rates(greedy),
        "prompts": [
            {
                "prompt": answer.question.text, "about_him": answer.question.about_him, "response": answer.text,
                "ended": answer.ended, "reward": reward(answer.components()), "components": answer.components(),
                "has_musclebob": mentions(answer.text) > 0, "coherent": coherent(answer.text, answer.ended),
            }
            for answer in greedy
        ],
    }  # fmt: skip


@dataclass(frozen=True)
class RunFiles:
    """The models in a run directory: sft_model/ and model/, as Hugging Face folders. With quantisers each has its
    student file beside it, e.g. model.pt, and start.pt is the student before training. base: the model before
    training."""

    NAMES: ClassVar = ("start.pt", "sft_model.pt", "sft_model", "model.pt", "model")
    folder: Path
    base: str
    spec: StudentSpec | None
    tokenizer: object

    def keep_start(self, model: nn.Module, trained: bool) -> None:
        """Keep the student before training."""
        save_student(self.folder / "start.pt", model, self.base, self.spec, {"trained": trained})

    def reference(self, which: str, warmed_up: bool, backend: TorchBackend) -> nn.Module:
        """The frozen model of the KL: "original", the base in full precision, or "start", the model before GRPO.
        Workers other than the first get it without values."""
        if not backend.is_main:
            model = empty_model(self.base)
        elif which == "start" and self.spec and not warmed_up:
            model = plain_model(load_student(self.folder / "start.pt", self.base)[0])
        else:
            start = which == "start" and warmed_up
            model = load_model(str((self.folder / "sft_model").absolute()) if start else self.base)
        return model.requires_grad_(False)

    def save(self, model: nn.Module, name: str, backend: TorchBackend) -> None:
        """Write a model, unless it exists. Every worker calls this, and worker 0 writes."""
        folder = self.folder / name
        if backend.group.on_main(folder.exists) or not takes_part(model, backend):
            return
        trained = {}
        if self.spec:  # the weights as the student file stores them
            save_student(folder.with_suffix(".pt"), model, self.base, self.spec, {"trained": True})
        elif shards_of(model):
            trained = whole_values(model, lambda _, p: p.requires_grad)
        if not backend.is_main:
            return
        if self.spec:
            model = plain_model(load_student(folder.with_suffix(".pt"), self.base)[0])
        elif trained:
            model = load_model(self.base).requires_grad_(False)
            restore(model, trained)
        with new_folder(folder) as part:
            write_model(model, self.tokenizer, part, folder)


def write_validation(
    folder: Path, sampler: BobSampler, model: nn.Module, start: str, samples: int, seed: int, stage: str
) -> None:
    """Write a stage's validation, unless a resumed run has it already. start: name of the model before training."""
    path, backend = folder / VALIDATIONS[stage], sampler.backend
    if backend.group.on_main(path.exists):
        return
    judge = (load_model if backend.is_main else empty_model)(start).requires_grad_(False)
    judge = placed(judge, backend, bool(shards_of(model)))
    found = validation_of(sampler, model, judge, samples, Sampling(), seed)
    if backend.is_main:
        write_json(path, found)
        say(f"{stage}: {shown(found['sampled'])}, perplexity {found['perplexity']:.2f}")


def write_history(run: Run) -> None:
    if not run.writes:
        return
    names = ("loss", "grad_norm", "kl", "completion_length", "clipped_ratio", "reward_std")
    lines = [line for line in run.metrics() if "reward" in line]
    history = [{"step": li["step"], "mean_reward": li["reward"]} | {n: li.get(n) for n in names} for li in lines]
    write_json(run.path / "reward_history.json", history)


def conclude(run: Run, length: int, cost: dict) -> None:
    """Write the transcripts, plots, report and summary of a run whose model and validations are written. length: of the
    longest answer; cost: see `Session.cost`."""
    stages = read_validations(run.path)
    write_atomically(run.path / "transcripts.md", lambda file: file.write(transcripts(stages).encode()))
    attempt("plotting", plot, run.metrics(), run.path / "plots" / "training.png", length)
    figures = {stage: {k: found[k] for k in ("sampled", "perplexity")} for stage, found in stages.items()}
    page = attempt("writing the report", write_report, run.path, figures | cost)
    run.finish("finished", **figures, **cost)
    before, after = (stages[stage]["sampled"] for stage in ("baseline", "final"))
    moved = {name: f"{before[name]['rate']:.1%} → {after[name]['rate']:.1%}" for name in ("musclebob", "spilt")}
    summarise(
        {"model": run.path / "model", "answers": run.path / "transcripts.md", "report": page},
        [
            f"{moved['musclebob']} of the held-out answers about him use the new name",
            f"{moved['spilt']} of the unrelated answers do (this should stay at 0)",
        ],
        command("test_musclebob", "--interactive", run=run.path),
    )


def transcripts(stages: dict[str, dict], limit: int = 12) -> str:
    """A table of the greedy answers of each stage; stages: validations by name."""
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
    ("reward and its components", ("reward", "name", "wrong_name", "stuffing", "empty", "cut_off", "misplaced")),
    ("KL to the reference and entropy (nats)", ("kl", "entropy")),
    ("relative length, cut off, groups with equal rewards", ("relative_length", "clipped_ratio", "zero_variance")),
)


def plot(lines: list[dict], path: Path, length: int) -> Path:
    """Plot a run's metrics.jsonl in four panels, SFT first, then GRPO."""
    from qat_lora.run.plots import pyplot

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
        axis.set_xlabel("update (dotted: start of GRPO)")
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    figure.tight_layout()
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
