"""The uses of a model type, each tried once on a tiny model and compared with the model's own results.

python tests/models/zoo_uses.py cpu|xla USE;… NAME …   prints a JSON line per model type: for each use, "yes" or the
one-line error that refuses it.
"""

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import zoo
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from qat_lora.backend import TorchBackend, open_backend
from qat_lora.data.supervised import Example, PackedExamples
from qat_lora.errors import UserError
from qat_lora.export.gguf import gguf_refusal, plan_gguf, write_gguf
from qat_lora.export.hf import write_hf
from qat_lora.export.source import load_source
from qat_lora.kd.targets import teacher_targets
from qat_lora.lora.add import add_adapter
from qat_lora.models.architecture import packs
from qat_lora.models.loading import load_model
from qat_lora.models.multimodal import full_class
from qat_lora.quant.blockwise import check_blocks
from qat_lora.quant.init import initialise
from qat_lora.quant.linear import freeze
from qat_lora.quant.student import StudentSpec, quantize, save_student
from qat_lora.rl.policy import Prompts, log_probs
from qat_lora.rl.rollout import Sampling, check_answers, rollout
from qat_lora.train.evaluation import text_figures
from qat_lora.train.losses import text_loss
from qat_lora.train.supervised import packed_loss

CPU = TorchBackend("cpu", "fp32")
CLOSE = 1e-4
LENGTH, NEW = 24, 6
PROMPTS = ([7, 9, 200, 31, 5, 77, 8], [40, 3, 99])
NO_END = (zoo.VOCAB + 50,)  # so that no completion ends early


def assert_close(ours, theirs) -> None:
    """Assert that values are equal up to rounding, relative to the largest of theirs."""
    ours, theirs = (torch.as_tensor(values).detach().cpu().double() for values in (ours, theirs))
    gap, largest = (ours - theirs).abs().max(), theirs.abs().max().clamp(min=1)
    assert gap <= CLOSE * largest, f"differs by {gap:.1e} of {largest:.1e}"


def rows() -> Tensor:
    return torch.randint(1, zoo.VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def log_probs_of(made: nn.Module, tokens: Tensor) -> Tensor:
    """The model's own log-probabilities [B, L − 1] of the tokens [B, L], without the first."""
    with torch.no_grad():
        logp = made(input_ids=tokens, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    return logp.gather(2, tokens[:, 1:, None]).squeeze(2)


def learns(model: nn.Module, loss: Tensor, backend: TorchBackend) -> None:
    """Assert that a backward pass gives finite gradients that are not all zero."""
    backend.backward(loss)
    backend.step_boundary()
    sizes = [p.grad.abs().max().cpu() for p in model.parameters() if p.requires_grad and p.grad is not None]
    assert sizes and torch.stack(sizes).isfinite().all() and max(sizes) > 0


def student(folder: Path) -> nn.Module:
    made = quantize(load_model(str(folder)), StudentSpec())
    initialise(made)
    return made


# -- uses ------------------------------------------------------------------------------------------------------------
def perplexity(folder: Path, backend: TorchBackend) -> None:
    """Compare perplexity and the content of a cache with the logits of plain transformers."""
    made, tokens = load_model(str(folder)), rows()
    plain = full_class("", AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        probs = plain(input_ids=tokens, use_cache=False).logits.softmax(-1)
    backend.place(made)
    figures = text_figures(made, tokens, torch.full((2,), LENGTH - 1), backend, 2)
    assert_close(figures["nll"], -log_probs_of(plain, tokens).mean())
    given = backend.to_device({"tokens": tokens, "uniforms": torch.full((2, LENGTH, 4), 0.5)})
    targets = teacher_targets(made, given["tokens"], 4, given["uniforms"])
    backend.step_boundary()
    assert_close(targets["prob"], probs.gather(2, targets["index"].cpu()))


def qat(folder: Path, backend: TorchBackend) -> None:
    """Run one training step of a student; its loss equals that of its frozen copy on the CPU."""
    batch = {"tokens": rows(), "mask": torch.ones(2, LENGTH)}
    frozen = student(folder)
    freeze(frozen)
    with torch.no_grad():
        wanted = text_loss(frozen, batch)
    made = backend.place(student(folder)).train()
    loss = text_loss(made, backend.to_device(batch))
    learns(made, loss, backend)
    assert_close(loss, wanted)


def layers(folder: Path, backend: TorchBackend) -> None:
    check_blocks(load_model(str(folder)))


def recovery(folder: Path, backend: TorchBackend) -> None:
    """Run one training step of a new adapter on a frozen student."""
    batch, frozen = {"tokens": rows(), "mask": torch.ones(2, LENGTH)}, student(folder)
    freeze(frozen)
    with torch.no_grad():
        wanted = text_loss(frozen, batch)
    model = add_adapter(frozen.requires_grad_(False), 2, 2, ("auto",), 0)
    loss = text_loss(backend.place(model).train(), backend.to_device(batch))
    learns(model, loss, backend)
    assert_close(loss, wanted)


def sft(folder: Path, backend: TorchBackend) -> None:
    """The loss of examples of several lengths, packed in one row if possible, is the sum of their separate losses; and
    the model accepts an adapter."""
    add_adapter(load_model(str(folder)).requires_grad_(False), 2, 2, ("all",), 0)
    made, random = load_model(str(folder)), np.random.RandomState(3)
    examples = [
        Example(str(n), random.randint(1, zoo.VOCAB, n).astype(np.int32), np.arange(n).clip(3, 4).astype(np.uint8) - 3)
        for n in (14, 10, 17)
    ]
    alone = [log_probs_of(made, torch.tensor(e.tokens).long()[None])[0, 3:] for e in examples]
    backend.place(made)
    cost = 0.0
    for group in [examples] if packs(made) else [[example] for example in examples]:
        packed = PackedExamples(group, 48, (1.0,), 0)
        assert len(packed) == 1
        batch = backend.to_device({key: value.unsqueeze(0) for key, value in packed[0].items()})
        with torch.no_grad():
            cost += backend.fetch(packed_loss(made, batch | {"total": batch["weights"].new_ones(())}))[0]
    assert_close(cost, -torch.cat(alone).sum())


def grpo(folder: Path, backend: TorchBackend) -> None:
    """Greedy completions and their log-probabilities equal those of the model's own forward pass over the text."""
    made = load_model(str(folder))
    check_answers(made, backend.static_shapes)
    wanted = []
    for text in PROMPTS:
        row = torch.tensor([text])
        for _ in range(NEW):
            with torch.no_grad():
                best = made(input_ids=row, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            row = torch.cat([row, best], 1)
        wanted.append((row[0, len(text) :], log_probs_of(made, row)[0, len(text) - 1 :]))
    prompts = Prompts.of(list(PROMPTS), 8, 0)
    prompts = Prompts(**backend.to_device({"tokens": prompts.tokens, "mask": prompts.mask}))
    done = rollout(backend.place(made), prompts, 2, NEW, Sampling(temperature=0.0), NO_END, backend)
    with torch.no_grad():
        scored = log_probs(made, prompts, done.tokens)
    backend.step_boundary()
    for (tokens, logp), said, *ours in zip(wanted, done.tokens.cpu(), done.logp, scored):
        assert said.tolist() == [tokens.tolist()] * 2
        for values in ours:
            assert_close(values, logp.expand(2, -1))


def export_hf(folder: Path, backend: TorchBackend) -> None:
    with exported(folder) as (source, out):
        write_hf(source, out, out, False)
        plain = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
        assert_close(log_probs_of(plain, rows()), log_probs_of(source.student, rows()))


def export_gguf(folder: Path, backend: TorchBackend) -> None:
    """Uses a model with its default settings, because settings that llama.cpp does not support are refused."""
    plain = folder.with_name("published")
    save(json.loads((folder / "config.json").read_text())["model_type"], plain, strong=False)
    if reason := gguf_refusal(str(plain)):
        raise UserError(reason)
    with exported(plain) as (source, out):
        write_gguf(source, plan_gguf(source), out, out)


@contextlib.contextmanager
def exported(folder: Path):
    """The student of a model, read as in `export_model.py`, and an empty folder."""
    with TemporaryDirectory() as there:
        path, out = Path(there) / "best.pt", Path(there) / "out"
        save_student(path, student(folder), str(folder), StudentSpec(), {"trained": True})
        out.mkdir()
        yield load_source(str(path)), out


USES: dict[str, Callable] = {
    "cache, perplexity": perplexity, "QAT": qat, "block by block": layers, "recovery": recovery, "SFT": sft,
    "GRPO": grpo, "HF": export_hf, "GGUF": export_gguf,
}  # fmt: skip
ON_XLA = ("cache, perplexity", "QAT", "recovery", "SFT", "GRPO")


def save(name: str, folder: Path, **options) -> None:
    zoo.model(name, whole=True, **options).save_pretrained(folder)
    zoo.tokenizer().save_pretrained(folder)


def outcomes(name: str, backend: TorchBackend, uses: Iterable[str]) -> dict[str, str]:
    """For each use, "yes" or the one-line error that refuses it. Raises if the results differ from the model's, or if
    an error is longer than a line."""
    with TemporaryDirectory() as there:
        folder, found = Path(there) / "model", {}
        try:
            save(name, folder)
        except UserError as error:  # a multimodal model that no class can load
            return dict.fromkeys(uses, str(error))
        for use in uses:
            try:
                USES[use](folder, backend)
                found[use] = "yes"
            except UserError as error:
                found[use] = str(error).replace(str(folder), name).replace(str(folder.with_name("published")), name)
                assert len(found[use].splitlines()) == 1
        return found


def main(device: str, uses: list[str], names: list[str]) -> None:
    # open XLA before any backward pass on the CPU, which would break XLA's in this process
    backend = open_backend(device, "fp32")
    for name in names:
        try:
            found = outcomes(name, backend, uses)
        except Exception as error:
            found = {"error": re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:300]}
        print(json.dumps({"name": name} | found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].split(";"), sys.argv[3:])
