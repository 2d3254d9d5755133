"""Makes docs/models.md: what can be done with each model type, tried on tiny random models on the CPU and on XLA.

python tests/models/zoo_table.py     (make models)

About two hours on two cores. What has been found is kept in runs/models/ under the commit, so that the same command
resumes; delete the file to try again. A model type that gives other numbers than plain transformers ends the command.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import transformers
import zoo
import zoo_uses

from qat_lora.hosts.revision import revision

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "models.md"
USES, ON_XLA = tuple(zoo_uses.USES), zoo_uses.ON_XLA
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"  # compiles in half the time
ABORTED = "torch_xla aborts the process"
# What of a refusal goes into the table: the reason, without names and figures.
SHORT = {
    r"model type \S+ \(\w+\) is not supported: (.*); use another model": r"\1",
    r"model type \S+ cannot be trained block by block: (.*); use .*": r"\1",
    r"model type \S+ cannot be sampled from here: (.*); use another model": r"\1",
    r"model type \S+ carries (a state from token to token), so (on XLA.*); use .*": r"\2, because the model carries \1",
    r"mlp=.* quantises nothing: .*": "its blocks hold no plain linear layers or experts",
    r"model '[^']*' is a \S+: (GGUF export supports .*)": r"\1",
    r"model '[^']*' (.*)": r"\1",
    r"(.* differ)( by|s by) [\d.e+-]+.*": r"\1",
}
HEAD = """# Supported models

What works with each model type, as `make models` found with transformers {version}. It tries each use on a tiny random
model of every type in transformers' table of causal language models, with settings that exercise what is special about
the type (windows, soft caps, multipliers, biases, several kinds of blocks), and compares the result with the model's
own forward pass. "yes" means that the numbers agree; a number in brackets means that the use is refused, for the reason
below. Every model is compared in the same way when it is loaded, so one published with other settings is refused rather
than computed wrongly. A model's type is the `model_type` in its config.json.

- *cache, perplexity*: `build_kd_cache.py`, `measure_perplexity.py`
- *QAT*: `train_qat.py`; *block by block*: its `--layer-steps` and `--init gptq`
- *recovery*: `train_recovery_lora.py`; *SFT*: `train_cot_sft.py`; *GRPO*: `train_musclebob_improved.py`
- *HF*, *GGUF*: `export_model.py`; GGUF for a model with the usual settings of its type
- *XLA*: cache, QAT, recovery, SFT and GRPO on torch_xla's CPU device; "yes" means the same as on the CPU, otherwise the
  cell lists the uses that differ

Mixtures of experts, linear attention, sliding windows and multimodal folders need no options. Where several examples in
one row cannot be kept apart (linear attention, encoders used as decoders), SFT trains on one example per row. A type
that is refused for GRPO can still be fine-tuned with `--eval-answers 0 --final-answers 0`, because SFT generates
answers only for evaluation.
"""


# -- measuring -------------------------------------------------------------------------------------------------------
def measured(device: str, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """By model type and use, "yes" or the reason against it; from the file of an earlier call as far as that goes."""
    path = ROOT / "runs" / "models" / f"{revision()}-{device}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    uses = ON_XLA if device == "xla" else USES

    def known() -> dict[str, dict]:
        return {(line := json.loads(text)).pop("name"): line for text in path.read_text().splitlines()}

    while todo := [name for name in names if name not in known()]:
        environment = os.environ | ({"PJRT_DEVICE": "CPU", "XLA_FLAGS": QUICK} if device == "xla" else {})
        print(f"{device}: {len(todo)} model types to try", flush=True)
        command = [sys.executable, zoo_uses.__file__, device, ";".join(uses), *todo]
        with path.open("a") as file:
            done = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.DEVNULL)
        if done.returncode > 0:
            sys.exit(f"{' '.join(command[:4])} … ended with exit code {done.returncode}")
        left = next((name for name in todo if name not in known()), None)
        if done.returncode < 0 and left == todo[0]:  # by a signal, and not for what came before in the same process
            found = {"name": left}
            for use in uses:
                alone = subprocess.run([*command[:3], use, left], env=environment, capture_output=True, text=True)
                found |= json.loads(alone.stdout) if alone.returncode == 0 else {use: ABORTED}
            with path.open("a") as file:
                file.write(json.dumps(found) + "\n")
    return known()


def shortened(reason: str) -> str:
    for pattern, short in SHORT.items():
        reason = re.sub(f"^{pattern}$", short, reason)
    return reason


# -- the page --------------------------------------------------------------------------------------------------------
def page(cpu: dict[str, dict[str, str]], xla: dict[str, dict[str, str]]) -> str:
    notes: dict[str, int] = {}

    def cell(outcome: str) -> str:
        return "yes" if outcome == "yes" else f"[{notes.setdefault(outcome, len(notes) + 1)}]"

    lines, refused = [], []
    for name in sorted(cpu):
        here = {use: shortened(outcome) for use, outcome in cpu[name].items()}
        if len({here[use] for use in USES if use != "GGUF"} | {"yes"}) == 2 and "yes" not in here.values():
            refused.append(f"- `{name}`: {here['QAT']}")
            continue
        there = {use: shortened(xla[name][use]) for use in ON_XLA}
        apart = [f"{use} {cell(there[use])}" for use in ON_XLA if there[use] != here[use]]
        cells = [f"`{name}`", *(cell(here[use]) for use in USES), "; ".join(apart) or "yes"]
        lines.append(f"| {' | '.join(cells)} |")
    head = f"| model type | {' | '.join(USES)} | XLA |\n|{'---|' * (len(USES) + 2)}"
    parts = [HEAD.format(version=transformers.__version__), "\n".join([head, *lines]), "## Reasons"]
    parts.append("\n".join(f"{number}. {note}" for note, number in notes.items()))
    parts += ["## Refused when loaded", "\n".join(refused)]
    parts += ["## Not text models", "\n".join(f"- `{name}` {why}" for name, why in zoo.NO_TEXT_MODEL.items())]
    return "\n\n".join(parts) + "\n"


def read_page(text: str) -> dict[str, dict[str, str]]:
    """By model type and use, what the page says of the CPU."""
    notes = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    found = {name: dict.fromkeys(USES, reason) for name, reason in re.findall(r"^- `(\S+)`: (.*)$", text, re.MULTILINE)}
    for name, cells in re.findall(r"^\| `(\S+)` \| (.*) \|$", text, re.MULTILINE):
        found[name] = {
            use: notes[cell.strip("[]")] if cell != "yes" else "yes" for use, cell in zip(USES, cells.split(" | "))
        }
    return found


def main() -> None:
    cpu = measured("cpu", zoo.names())
    xla = measured("xla", [name for name in cpu if "yes" in {cpu[name].get(use) for use in ON_XLA}])
    for device, found in (("cpu", cpu), ("xla", xla)):
        if wrong := {name: line["error"] for name, line in found.items() if "error" in line}:
            sys.exit(f"{device}: other numbers than plain transformers', or no line: {json.dumps(wrong, indent=1)}")
    TABLE.write_text(page(cpu, xla))
    print(f"{TABLE}: {len(cpu)} model types")


if __name__ == "__main__":
    main()
