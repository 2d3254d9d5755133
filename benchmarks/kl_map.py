"""Where does a student's KL to its teacher sit: in which blocks and layers, at which positions, at which tokens?

    python benchmarks/kl_map.py --dataset wiki.txt --checkpoints runs/q2/layerwise.pt,runs/q2/best.pt

Measured in fp32 on windows of 512 tokens of the last tenth of --dataset, whose first nine tenths give the frequencies
of tokens. For each student:

  position, frequency, entropy   the mean KL of the positions of a kind, and the share of the whole KL that they hold
  error                          of the hidden states after each block, relative to the larger norm
  first token                    norm of its hidden state after each block, over the teacher's: the attention sink
  block, kind                    KL of the teacher with only these of the student's layers, over two windows

Writes kl_map.json, kl_map.md and kl_map.png to --output-dir.
"""

import json
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn

from qat_lora.data.options import TextSource
from qat_lora.data.packing import stream
from qat_lora.errors import UserError
from qat_lora.hosts.revision import revision
from qat_lora.layer_qat import relative_error
from qat_lora.models.architecture import decoder_layers
from qat_lora.models.loading import load_model
from qat_lora.quant.linear import quantized_layers
from qat_lora.quant.student import load_student, plain_model, read_student
from qat_lora.run.command_line import run_script
from qat_lora.run.options import ScriptConfig, option
from qat_lora.train.evaluation import windows

WINDOW, ALONE = 512, 2
POSITIONS = (1, 2, 4, 16, 64, 256, WINDOW)  # the first of each kind, and the end
COUNTS = (0, 1, 10, 100, 1000, 10**9)
ENTROPIES = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 99.0)


@dataclass(frozen=True, kw_only=True)
class Config(TextSource, ScriptConfig):
    checkpoints: str | None = option(None, "students of one base model, in the order of training")
    windows: int = option(8, "windows to measure", at_least=ALONE)
    output_dir: str = option("runs/kl_map", "folder for the figures, the table and the picture")


@torch.no_grad()
def main(cfg: Config) -> None:
    if not cfg.checkpoints:
        raise UserError("--checkpoints is missing; give one or more student files, e.g. runs/NAME/best.pt")
    paths = cfg.checkpoints.split(",")
    bases = {read_student(path)["model"] for path in paths}
    if len(bases) > 1:
        raise UserError(f"--checkpoints have different base models ({', '.join(sorted(bases))}); give those of one")
    if cfg.dry_run:
        return
    base, out = bases.pop(), Path(cfg.output_dir)
    tokenizer = cfg.tokenizer(base)
    bos = cfg.bos_token(tokenizer)
    tokens, _ = stream(cfg.documents(tokenizer), tokenizer, bos=bos)
    edge = len(tokens) * 9 // 10
    rows, _ = windows(tokens[edge:], WINDOW, WINDOW, cfg.windows, bos)
    rows = rows.long()
    counts = torch.bincount(tokens[:edge].long(), minlength=int(tokens.max()) + 1)
    teacher = load_model(base).eval()
    found = {"model": base, "commit": revision(), "windows": len(rows), "students": []}
    for path in paths:
        found["students"].append({"checkpoint": path} | mapped(path, teacher, rows, counts))
        print(f"{path}: KL {found['students'][-1]['kl']:.3f}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    (out / "kl_map.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / "kl_map.md").write_text(report(found))
    plot(found, out / "kl_map.png")
    print(f"{out}/kl_map.md")


def mapped(path: str, teacher: nn.Module, rows: Tensor, counts: Tensor) -> dict:
    student = load_student(path)[0].eval()
    kl, entropy, error, first = [], [], [], []
    for row in rows:
        (own, mine), (wanted, its) = (seen(model, row) for model in (student, teacher))
        kl.append(divergence(its, mine))
        entropy.append(-(its.exp() * its).sum(-1))
        error.append(torch.stack([relative_error(a, b)[1:].mean() for a, b in zip(own, wanted)]))
        first.append(torch.stack([a[0].norm() / b[0].norm() for a, b in zip(own, wanted)]))
    kl, entropy = torch.stack(kl), torch.stack(entropy)
    place = torch.arange(1, WINDOW).expand_as(kl)
    ordered = kl.flatten().sort(descending=True).values
    return {
        "kl": kl.mean().item(), "windows": kl.mean(1).tolist(),
        "position": shares(kl, place, POSITIONS), "frequency": shares(kl, counts[rows[:, 1:]], COUNTS),
        "entropy": shares(kl, entropy, ENTROPIES),
        "worst tenth": (ordered[: len(ordered) // 10].sum() / ordered.sum()).item(),
        "error": torch.stack(error).mean(0).tolist(), "first token": torch.stack(first).mean(0).tolist(),
    } | alone(student, teacher, rows[:ALONE])  # fmt: skip


def seen(model: nn.Module, row: Tensor) -> tuple[list[Tensor], Tensor]:
    """The hidden states [L, H] after each block, and the log-probabilities [L − 1, V] of the next tokens."""
    states = []

    def keep(_, __, out):
        states.append((out if isinstance(out, Tensor) else out[0])[0])

    hooks = [block.register_forward_hook(keep) for block in decoder_layers(model)]
    logits = model(input_ids=row[None], use_cache=False).logits[0, :-1].float()
    for hook in hooks:
        hook.remove()
    return states, logits.log_softmax(-1)


def divergence(its: Tensor, mine: Tensor) -> Tensor:
    """KL(teacher‖student) at each position [L − 1]."""
    return (its.exp() * (its - mine)).sum(-1)


def shares(kl: Tensor, values: Tensor, edges: tuple) -> list[dict]:
    """For positions whose value is in [edge, next edge): how many, their mean KL, and their share of the whole KL."""
    found = []
    for low, high in pairwise(edges):
        those = kl[(values >= low) & (values < high)]
        if len(those):
            share = (those.sum() / kl.sum()).item()
            found.append({"from": low, "count": len(those), "kl": those.mean().item(), "share": share})
    return found


def alone(student: nn.Module, teacher: nn.Module, rows: Tensor) -> dict:
    """KL of the teacher with one block, or one kind of layer, of the student."""
    names = list(quantized_layers(student))
    weights = plain_model(student).state_dict()
    blocks = {id(p): number for number, block in enumerate(decoder_layers(teacher)) for p in block.parameters()}
    own = dict(teacher.named_parameters())
    its = [seen(teacher, row)[1] for row in rows]
    groups: dict[str, dict] = {"block": {}, "kind": {}}
    for name in names:
        if (number := blocks.get(id(own.get(f"{name}.weight")))) is not None:  # not the head; experts have other names
            groups["block"].setdefault(number, []).append(f"{name}.weight")
            groups["kind"].setdefault(name.rsplit(".", 1)[-1], []).append(f"{name}.weight")

    def measure(chosen: list[str]) -> float:
        with replaced(own, {name: weights[name] for name in chosen}):
            return torch.stack([divergence(mine, seen(teacher, row)[1]) for mine, row in zip(its, rows)]).mean().item()

    return {group: {str(key): measure(chosen) for key, chosen in members.items()} for group, members in groups.items()}


@contextmanager
def replaced(parameters: dict[str, nn.Parameter], values: dict[str, Tensor]):
    """Context in which these parameters have other values."""
    before = {name: parameters[name].data for name in values}
    for name, value in values.items():
        parameters[name].data = value
    yield
    for name, value in before.items():
        parameters[name].data = value


# -- report ----------------------------------------------------------------------------------------------------------
def report(found: dict) -> str:
    students = found["students"]
    names = [Path(s["checkpoint"]).stem for s in students]
    lines = [
        f"# Where the KL of students of {found['model']} sits", "",
        f"{found['windows']} windows of {WINDOW} tokens, fp32, commit {found['commit']}. Mean KL (share of the whole).",
    ]  # fmt: skip
    head = ["| " + " | ".join(["", *names]) + " |", "|---|" + "---:|" * len(names)]
    lines += ["", *head, "| all | " + " | ".join(f"{s['kl']:.3f}" for s in students) + " |"]
    lines += ["| the worst tenth of positions | " + " | ".join(f"{s['worst tenth']:.0%}" for s in students) + " |"]
    for kind in ("position", "frequency", "entropy"):
        for place, entry in enumerate(students[0][kind]):
            cells = [f"{s[kind][place]['kl']:.3f} ({s[kind][place]['share']:.0%})" for s in students]
            lines.append(f"| {kind} from {entry['from']} ({entry['count']}) | " + " | ".join(cells) + " |")
    for kind in students[0]["kind"]:
        lines.append(f"| only {kind} | " + " | ".join(f"{s['kind'][kind]:.3f}" for s in students) + " |")
    return "\n".join([*lines, "", "![](kl_map.png)", ""])


def plot(found: dict, path: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6))
    for student in found["students"]:
        label = Path(student["checkpoint"]).stem
        axes[0].plot(student["error"], label=label)
        axes[1].plot(student["first token"], label=label)
        axes[2].plot(list(student["block"].values()), label=label)
    for axis, title in zip(axes, ("error of hidden states", "norm of the first token / teacher's", "KL, one block")):
        axis.set_title(title)
        axis.set_xlabel("block")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    run_script(main, Config, "kl_map", __doc__)
