"""Evaluation of a fine-tune on legal chains of thought: answers to held-out questions, and their scores."""

from pathlib import Path

from torch import nn

from qat_lora.data.supervised import named
from qat_lora.errors import UserError
from qat_lora.experiments.legal.answers import invented, messages, response, score
from qat_lora.experiments.legal.authorities import Authorities
from qat_lora.experiments.legal.data import LegalData
from qat_lora.experiments.legal.figures import figure
from qat_lora.experiments.legal.sections import NUMBERS, Answer
from qat_lora.rl.sampler import GREEDY, Sampler
from qat_lora.run.console import say
from qat_lora.run.files import read_json, write_json
from qat_lora.run.rundir import Run
from qat_lora.train.intervals import shown
from qat_lora.train.supervised import heldout_sections

STAGES = ("baseline", "final")  # stages of a run, each with its evaluation_file


def evaluation_file(stage: str) -> str:
    """The name of the file in the run directory that holds the rates and answers of a stage."""
    return f"{stage}_evaluation.json"


class LegalEvaluation:
    """Generates answers to held-out questions and scores their format, figures and citations."""

    def __init__(self, sampler: Sampler, data: LegalData):
        self.sampler, self.data = sampler, data
        self.authorities = Authorities(data.authorities)
        lengths = [len(sampler.prompt(messages(row["question"]))) for row in data.questions]
        self.questions = [row for row, length in zip(data.questions, lengths) if length <= sampler.prompt_length]
        if not self.questions:
            raise UserError(
                f"no held-out question fits --max-prompt-length {sampler.prompt_length}; raise it to {max(lengths)}"
            )
        if len(self.questions) < len(lengths) and sampler.backend.is_main:
            say(
                f"{len(lengths) - len(self.questions)} held-out questions do not fit --max-prompt-length "
                f"{sampler.prompt_length} and are left out"
            )
        long = sum(len(sampler.tokenizer(response(row))["input_ids"]) >= sampler.length for row in self.questions)
        if long and sampler.backend.is_main:
            say(
                f"{long} of {len(self.questions)} held-out rows have answers that do not fit --max-new-tokens "
                f"{sampler.length}: the model's answers are cut off there and count as wrong; raise it"
            )
        without = [row["id"] for row in self.questions if not figure(row["answer"])]
        if without and sampler.backend.is_main:
            say(
                f"{len(without)} of {len(self.questions)} held-out rows have answers without a figure "
                f"({named(without)}): accuracy leaves them out"
            )

    def answer(self, model: nn.Module, count: int) -> tuple[list[dict], list[Answer]]:
        """Greedy answers to `count` held-out rows, spread evenly over them."""
        count = min(count, len(self.questions))
        rows = [self.questions[at * len(self.questions) // count] for at in range(count)]
        said = self.sampler.generate(model, [messages(row["question"]) for row in rows], 1, GREEDY)
        return rows, [Answer.read(text, ended) for text, ended in said]

    def glance(self, model: nn.Module, batch_size: int, count: int) -> dict[str, float]:
        """Held-out loss and perplexity by section, and rates over `count` answers."""
        figures = heldout_sections(model, self.data.heldout, self.sampler.backend, batch_size, NUMBERS)
        if count:
            rows, answers = self.answer(model, count)
            figures |= {name: found["rate"] for name, found in score(answers, rows, self.authorities).items()}
        return figures

    def write(self, model: nn.Module, count: int, run: Run, stage: str) -> dict:
        """Write <stage>_evaluation.json with rates, intervals and every answer, unless a resumed run already has it;
        returns {stage: rates}."""
        path = run.path / evaluation_file(stage)
        there = self.sampler.backend.group.on_main(lambda: _read_rates(path) if path.exists() else None)
        if there:
            return {stage: there}
        rows, answers = self.answer(model, count)
        rates = score(answers, rows, self.authorities)
        if run.writes:
            told = [
                {"id": row["id"], "question": row["question"], "wanted": row["answer"], "said": answer.text,
                 "ended": answer.ended, "formatted": answer.formatted,
                 "invented": invented(answer, row, self.authorities)}
                for row, answer in zip(rows, answers)
            ]  # fmt: skip
            write_json(path, {"rates": rates, "answers": told})
            say(f"{stage}: {shown(rates)}, {len(rows)} answers")
        return {stage: rates}


def _read_rates(path: Path) -> dict:
    """The rates that `write` wrote before. Raises UserError if the file is damaged."""
    rates = read_json(path).get("rates")
    if not isinstance(rates, dict) or not all(isinstance(r, dict) and "rate" in r for r in rates.values()) or not rates:
        raise UserError(f"{path} is damaged; delete it to repeat the evaluation")
    return rates


def quality(run: Run, figures: dict) -> list[str]:
    """Lines with the held-out perplexity and the rates of the answers, each with its value before training."""
    lines = [line for line in run.metrics() if "heldout_ppl" in line]
    first, last = lines[0]["heldout_ppl"], lines[-1]["heldout_ppl"]
    said = [f"held-out perplexity of the answers {last:.2f}; before training {first:.2f}"]
    for name, rate in figures.get("final", {}).items():
        before = figures["baseline"].get(name)
        said.append(
            f"{name} {rate['rate']:.1%} (95% interval {rate['low']:.1%}–{rate['high']:.1%})"
            + (f"; before training {before['rate']:.1%}" if before else "")
            + (f"; {without} rows without a figure" if (without := rate.get("without_figure")) else "")
        )
    return said
