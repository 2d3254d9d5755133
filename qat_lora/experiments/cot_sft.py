"""A fine-tune on legal chains of thought: its data, its exam, and the model that it leaves behind."""

import dataclasses
import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from qat_lora.backend import TorchBackend
from qat_lora.backend.tiles import tiles
from qat_lora.data.authorities import Authorities
from qat_lora.data.legal import generate
from qat_lora.data.legal_answers import (
    checked_rows,
    document,
    group,
    invented,
    messages,
    readable,
    response,
    same,
    score,
)
from qat_lora.data.sections import NUMBERS, Answer
from qat_lora.data.sft import (
    Example,
    PackedExamples,
    checked,
    deduplicated,
    encoded,
    named,
    split_by_length,
    split_groups,
)
from qat_lora.data.text import read_rows
from qat_lora.errors import UserError
from qat_lora.models.adapter import load_adapter
from qat_lora.models.architecture import decoder_layers, eager_experts, hidden_states, unwrap
from qat_lora.models.loading import empty_model, load_model
from qat_lora.models.writing import write_model
from qat_lora.quant.init import initialise
from qat_lora.quant.linear import freeze, quantized_layers
from qat_lora.quant.spec import QuantSpec
from qat_lora.quant.student import StudentSpec, empty_student, head_of, load_student, quantize, student_content
from qat_lora.rl.ask import GREEDY, Asker
from qat_lora.run.files import new_folder, read_json, write_json
from qat_lora.run.rundir import Run, say
from qat_lora.sft import heldout_sections

LOGIT_GAP = 1e-4  # largest difference of a logit between adapter and merged model
GENERATED = "generated"
NO_HUB = f'use "{GENERATED}" or a local .jsonl or .parquet file'


# -- data ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class LawData:
    """Packed rows to train on and to measure, the held-out rows as they are, what may be cited, and what was left
    out: ids by reason."""

    train: PackedExamples
    heldout: PackedExamples
    questions: list[dict]
    authorities: list[str]
    examples: int
    left_out: dict[str, list[str]] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """What there is, for people."""
        reasons = {reason: ids for reason, ids in self.left_out.items() if ids}
        return [
            f"{self.examples} examples in {len(self.train)} rows of {self.train.tokens.shape[1]} tokens "
            f"({self.train.filled:.0%} filled), {len(self.questions)} held out, {len(self.authorities)} authorities",
            *(f"left out, {reason}: {len(ids)} ({named(ids)})" for reason, ids in reasons.items()),
        ]

    def write(self, folder: Path) -> None:
        """data.json and authorities.json."""
        ids = [row["id"] for row in self.questions]
        write_json(folder / "data.json", {"train": self.examples, "heldout": ids, "left_out": self.left_out})
        write_json(folder / "authorities.json", {"authorities": self.authorities})


def law_rows(dataset: str, split: str, count: int, seed: int) -> list[dict]:
    """The checked rows of a dataset, or `count` generated ones."""
    if dataset != GENERATED:
        return checked_rows(list(read_rows(dataset, split=split, fix=NO_HUB)))
    if split != "train":
        raise UserError(f"--dataset-split {split} needs a hub dataset: the generated one has no splits")
    return checked_rows(list(generate(count, seed)))


def law_data(
    rows: list[dict], tokenizer, length: int, weights: tuple[float, ...], heldout_fraction: float, seed: int,
    together: bool = True, thinks: bool = False,
) -> LawData:  # fmt: skip
    """Checked rows without duplicates, split by groups, rendered, and packed. A row that is too long is left out and
    reported, never cut. weights: of the sections; together: several examples per row; thinks: whether the chat
    template renders with thinking on."""
    rows, twice = deduplicated(rows, same)
    whole = [readable(row) for row in rows]
    odd = [row["id"] for row, good in zip(rows, whole) if not good]
    rows = [row for row, good in zip(rows, whole) if good]
    if not rows:
        raise UserError(f"rows {named(odd)}: a line of every row begins like a section's title; fix the rows")
    train, heldout = split_groups(rows, group, heldout_fraction, seed)
    known = {row["id"]: row for row in heldout}
    sides: list[list[Example]] = []
    long: list[Example] = []
    for side in (train, heldout):
        short, too_long = split_by_length(
            checked([encoded(row["id"], document(row, tokenizer, thinks), tokenizer) for row in side]), length
        )
        sides.append(short)
        long += too_long
    end = tokenizer.eos_token_id
    most = f", up to {max(len(example.tokens) for example in long)}" if long else ""
    return LawData(
        PackedExamples(sides[0], length, weights, end, together=together),
        PackedExamples(sides[1], length, (1.0,) * len(NUMBERS), end, together=together),
        [known[example.id] for example in sides[1]],
        sorted(Authorities(row["case_citation"] for row in rows).names),
        len(sides[0]),
        {
            "the same question as an earlier row": [row["id"] for row in twice],
            "a line begins like a section's title": odd,
            f"longer than {length} tokens{most}": [example.id for example in long],
        },
    )


def section_weights(text: str | None) -> tuple[float, ...]:
    """Weights of the sections in their order, from "answer=2,citation=2"; 1 where nothing is said."""
    weights = dict.fromkeys(NUMBERS, 1.0)
    for part in filter(None, (text or "").split(",")):
        name, _, value = part.partition("=")
        try:
            weight = float(value)
        except ValueError:
            weight = -1.0
        if name.strip() not in weights or not (weight == 0 or 1e-6 <= weight <= 1e6):
            raise UserError(
                f"--section-weights: {part!r} is not NAME=WEIGHT with a name of {', '.join(NUMBERS)} and a weight that "
                "is 0 or from 1e-6 to 1e6"
            )
        weights[name.strip()] = weight
    if not weights["citation"]:
        raise UserError(
            "--section-weights: citation=0 would leave the answer's end unlearned, which follows it; use e.g. 1e-3"
        )
    return tuple(weights.values())


STAGES = ("baseline", "final")  # of a run, each with its evaluation_file


def evaluation_file(stage: str) -> str:
    """The name of the file in the run directory with the rates and answers of a stage."""
    return f"{stage}_evaluation.json"


# -- exam ------------------------------------------------------------------------------------------------------------
class LawExam:
    """Asks held-out questions and counts: format, right answers, citations."""

    def __init__(self, asker: Asker, data: LawData):
        self.asker, self.data = asker, data
        self.authorities = Authorities(data.authorities)
        lengths = [len(asker.prompt(messages(row["question"]))) for row in data.questions]
        self.questions = [row for row, length in zip(data.questions, lengths) if length <= asker.prompt_length]
        if not self.questions:
            raise UserError(
                f"no held-out question fits --max-prompt-length {asker.prompt_length}; raise it to {max(lengths)}"
            )
        if len(self.questions) < len(lengths) and asker.backend.is_main:
            say(f"{len(lengths) - len(self.questions)} held-out questions do not fit --max-prompt-length "
                f"{asker.prompt_length} and are not asked")  # fmt: skip
        long = sum(len(asker.tokenizer(response(row))["input_ids"]) >= asker.length for row in self.questions)
        if long and asker.backend.is_main:
            say(f"{long} of {len(self.questions)} held-out rows have answers that do not fit --max-new-tokens "
                f"{asker.length}: the model's are cut off there and count as wrong; raise it")  # fmt: skip

    def ask(self, model: nn.Module, count: int) -> tuple[list[dict], list[Answer]]:
        """Greedy answers to `count` held-out rows, spread evenly over them."""
        rows = [self.questions[at * len(self.questions) // count] for at in range(count)] \
            if count < len(self.questions) else self.questions  # fmt: skip
        said = self.asker.ask(model, [messages(row["question"]) for row in rows], 1, GREEDY)
        return rows, [Answer.read(text, ended) for text, ended in said]

    def glance(self, model: nn.Module, batch_size: int, count: int) -> dict[str, float]:
        """Held-out loss and perplexity by section, and rates over `count` answers."""
        figures = heldout_sections(model, self.data.heldout, self.asker.backend, batch_size, NUMBERS)
        if count:
            rows, answers = self.ask(model, count)
            figures |= {name: found["rate"] for name, found in score(answers, rows, self.authorities).items()}
        return figures

    def write(self, model: nn.Module, count: int, run: Run, stage: str) -> dict:
        """Write <stage>_evaluation.json with rates, intervals and every answer, once: a resumed run has it."""
        path = run.path / evaluation_file(stage)
        there = self.asker.backend.group.on_main(lambda: _read_rates(path) if path.exists() else None)
        if there:
            return {stage: there}
        rows, answers = self.ask(model, count)
        rates = score(answers, rows, self.authorities)
        if run.writes:
            told = [
                {"id": row["id"], "question": row["question"], "wanted": row["answer"], "said": answer.text,
                 "ended": answer.ended, "formatted": answer.formatted,
                 "invented": invented(answer, row, self.authorities)}
                for row, answer in zip(rows, answers)
            ]  # fmt: skip
            write_json(path, {"rates": rates, "answers": told})
            say(f"{stage}: " + ", ".join(f"{name} {rate['rate']:.1%} ({rate['low']:.1%}–{rate['high']:.1%})"
                                         for name, rate in rates.items()) + f", {len(rows)} answers")  # fmt: skip
        return {stage: rates}


def _read_rates(path: Path) -> dict:
    """What `write` has written before. Raises UserError where it is damaged."""
    rates = read_json(path).get("rates")
    if not isinstance(rates, dict) or not all(isinstance(r, dict) and "rate" in r for r in rates.values()) or not rates:
        raise UserError(f"{path} is damaged; delete it, and it is measured again")
    return rates


# -- model -----------------------------------------------------------------------------------------------------------
def load_base(name: str, quantizer: str, whole: bool) -> nn.Module:
    """The model, its linear layers quantised if asked for and frozen; without values where not `whole`."""
    if not QuantSpec.parse(quantizer):
        return load_model(name) if whole else empty_model(name)
    spec = base_spec(quantizer)
    if not whole:
        return empty_student({"model": name, "spec": dataclasses.asdict(spec)})
    student = quantize(load_model(name), spec)
    initialise(student)
    freeze(student)
    return student


def base_spec(quantizer: str) -> StudentSpec:
    return StudentSpec(mlp=quantizer, attn=quantizer)


def base_content(base: nn.Module, name: str, quantizer: str) -> dict | None:
    """What a quantised base's file holds, the student that an adapter on it belongs to; to be taken before there is
    an adapter. None for a base in full precision."""
    return student_content(base, name, base_spec(quantizer), {}) if quantized_layers(base) else None


@torch.no_grad()
def merged(
    model: nn.Module, name: str, checkpoint: Path | None, adapter: Path | None, tokens: Tensor, backend: TorchBackend
) -> tuple[nn.Module, float | None]:
    """The whole trained model on the CPU, with the adapter, read back from its folder, merged into the weights; and the
    largest difference of a logit over `tokens` between the two, None without an adapter. Both are computed in fp64, so
    that what shows is the merged weights' rounding to fp32 and not the order of sums. checkpoint: the file of a
    quantised base.

    Raises UserError where the folder's adapter is not what was trained.
    """
    trained = backend.to_host({n: p for n, p in model.named_parameters() if p.requires_grad})
    model.to("meta")
    whole = load_student(checkpoint, name)[0] if checkpoint else load_model(name)
    if adapter is None:
        for key, value in whole.named_parameters():
            value.copy_(trained[key])
        return whole, None
    adapted = load_adapter(whole, adapter, checkpoint)
    back = dict(adapted.named_parameters())
    for key, value in trained.items():
        if key not in back or not torch.equal(back[key], value):
            raise UserError(f"{adapter}: {key} reads back otherwise than it was trained; check the disk")
    ids = tokens.unsqueeze(0)
    with eager_experts(adapted):
        before = exact_hidden_states(adapted, ids)
        for layer in adapted.modules():
            if isinstance(layer, LoraLayer):
                layer.double().merge()
                layer.float()
        whole = adapted.unload()
        gap = _largest_gap(whole, exact_hidden_states(whole, ids), before)
    if gap > LOGIT_GAP:
        say(f"warning: adapter and merged model differ by {gap:.1e} in a logit, more than {LOGIT_GAP:g}; use adapter/")
    return whole, gap


def exact_hidden_states(model: nn.Module, ids: Tensor) -> Tensor:
    """What the head of an fp32 model reads of tokens [1, L], [1, L, H] in fp64: computed so, or in fp32 where the
    model's own code knows no other type (xglm, inkling2)."""
    try:
        with in_fp64(model):
            return hidden_states(model, ids)
    except RuntimeError:
        return hidden_states(model, ids).double()


@contextmanager
def in_fp64(model: nn.Module) -> Iterator[None]:
    """An fp32 model that computes in fp64, one decoder layer after the other: as a whole it would take three times the
    memory."""
    layers, embedding, head = decoder_layers(model), unwrap(model).get_input_embeddings(), model.get_output_embeddings()
    apart = {id(module) for part in (*layers, embedding, head) for module in part.modules()}
    beside = [module for module in model.modules() if id(module) not in apart]  # norms, rotations

    def widen(module: nn.Module, given: tuple) -> None:
        module.double()

    def narrow(module: nn.Module, given: tuple, out: Tensor | tuple) -> None:
        module.float()

    hooks = [embedding.register_forward_hook(lambda module, given, out: out.double())]
    for layer in layers:
        hooks += [layer.register_forward_pre_hook(widen), layer.register_forward_hook(narrow, always_call=True)]
    try:
        for module in beside:
            module._apply(lambda t: t.double() if t.is_floating_point() else t, recurse=False)
        yield
    finally:
        for module in beside:
            module._apply(lambda t: t.float() if t.is_floating_point() else t, recurse=False)
        for hook in hooks:
            hook.remove()


def _largest_gap(model: nn.Module, one: Tensor, other: Tensor) -> float:
    """The largest difference of a logit between two hidden states [1, L, H] in fp64; [L, V] never exists."""
    head = head_of(model)
    strips = (head.strip(rows, torch.float64) for rows in tiles(len(head.weight), one.shape[1], one.device))
    return max(float((strip.logits(one) - strip.logits(other)).abs().max()) for strip in strips)


def write_whole(model: nn.Module, tokenizer, folder: Path) -> None:
    """The model as transformers loads it; what an earlier process has left there is written anew."""
    if folder.is_file():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    with new_folder(folder) as part:
        write_model(model, tokenizer, part, folder)


# -- Weights & Biases ------------------------------------------------------------------------------------------------
def wandb_mirror(project: str, folder: Path, config: dict):
    """mirror(step, values) for a Run, which sends every line of metrics.jsonl there too: to the same curves after a
    resume, to new ones from another run in the same folder. Raises whatever wandb does."""
    import wandb

    name = f"{folder.resolve()} {read_json(folder / 'manifest.json').get('started')}"
    session = wandb.init(
        project=project, name=folder.name, dir=str(folder), resume="allow", config=config,
        id=hashlib.sha256(name.encode()).hexdigest()[:16],
    )  # fmt: skip
    return lambda step, values: session.log(values, step=step)
