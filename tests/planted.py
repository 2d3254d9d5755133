"""Does the suite catch a planted fault? Plants twenty faults in a copy of the checkout, one at a time, and names the
first test that fails.

python tests/planted.py            every fault (half an hour)
python tests/planted.py 3 16       some of them, by number
"""

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIERS = {"test": [], "test-deep": ["-m", "(deep or hosts) and not peer and not zoo and not faults"]}


@dataclass(frozen=True)
class Fault:
    """What goes wrong; the file; the text to replace, which occurs once, and its replacement; the folders and files in
    tests/ to run."""

    what: str
    file: str
    old: str
    new: str
    tests: str


FAULTS = (
    Fault(
        "wrong gradient of a scale", "kernels/fake_quant.py", "of_scale.sum_to_size(scale.shape) * ctx.gradient_scale",
        "of_scale.sum_to_size(scale.shape)", "quant",
    ),
    Fault(
        "lost mask", "train/losses.py", "mask.reshape(-1).float() / total", "torch.ones_like(mask.reshape(-1)) / total",
        "train",
    ),
    Fault(
        "unreduced worker", "backend/eager.py", "self.reduce([*gradients, *also])", "self.reduce([*also])",
        "backend scripts/test_multi.py",
    ),
    Fault("stale checkpoint", "run/checkpoint.py", "for path in found:", "for path in reversed(found):", "run"),
    Fault("dropped BOS", "data/packing.py", "if first is not None:", "if first is None:", "data"),
    Fault(
        "wrong bias correction", "kernels/optimizer.py", "start / math.sqrt(1 - betas[1] ** step)", "start", "train",
    ),
    Fault("unflushed file", "run/files.py", "os.fsync(file.fileno())", "pass", "run"),
    Fault("resumed at the first row", "train/loop.py", "self.stream(step - 1)", "self.stream(0)", "train run scripts"),
    Fault(
        "random numbers not restored", "run/session.py",
        'self.backend.set_rng_state(trainer["rng"][self.backend.rank % len(trainer["rng"])])', "pass", "run train",
    ),
    Fault(
        "divided by a micro-batch's tokens", "data/batches.py", "map(dataset.kept, chosen)",
        "map(dataset.kept, chosen[:batch_size])", "data",
    ),
    Fault("wrong upper clip", "rl/objective.py", "1 + objective.clip_high", "1 + objective.clip_low", "rl"),
    Fault("reversed KL", "rl/objective.py", "gap = reference - logp", "gap = logp - reference", "rl"),
    Fault("weights not tied again", "backend/eager.py", "        retie(module, groups)\n", "", "backend"),
    Fault("top tokens drawn again", "kd/targets.py", 'logits[each, index] = float("-inf")', "pass", "kd"),
    Fault("half bytes swapped in GGUF", "export/gguf_types.py", "q[..., :16] | q[..., 16:] << 4",
          "q[..., 16:] | q[..., :16] << 4", "export"),
    Fault("recompiled update", "backend/eager.py", 'set_to_none=self.kind != "xla"', "set_to_none=True", "backend"),
    Fault(
        "state kept from a halted row", "experiments/athena/model.py",
        "z_H = torch.where(out[:, None, None], model.H_init, carry.z_H)", "z_H = carry.z_H", "experiments/athena",
    ),
    Fault(
        "a token too few scored", "train/evaluation.py", "torch.arange(1, length) >= (", "torch.arange(1, length) > (",
        "train",
    ),
    Fault(
        "leak the wrong way round", "experiments/stories/reservoir.py",
        "torch.lerp(state, torch.addmm(drive, state, w).tanh(), leak)",
        "torch.lerp(torch.addmm(drive, state, w).tanh(), state, leak)", "experiments/stories",
    ),
    Fault("wrong exit code", "errors.py", '" ".join(str(error).split()), 2', '" ".join(str(error).split()), 1',
          "test_errors.py scripts"),
)  # fmt: skip


def caught(fault: Fault, copy: Path) -> str:
    """The tier and the first test that fail with the fault in the checkout `copy`, or "not caught"."""
    path = copy / "qat_lora" / fault.file
    text = path.read_text()
    assert text.count(fault.old) == 1, f"{fault.file} contains {fault.old!r} {text.count(fault.old)} times"
    path.write_text(text.replace(fault.old, fault.new))
    try:
        for tier, select in TIERS.items():
            tests = [f"tests/{name}" for name in fault.tests.split()]
            command = [sys.executable, "-m", "pytest", "-x", "-n", "logical", "--dist", "loadfile", *select, *tests]
            env = os.environ | {"PYTHONPATH": str(copy)}  # for the processes that tests start, too
            done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
            if failed := re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE):
                return f"{tier:10} {failed[1].removeprefix('tests/')}"
    finally:
        path.write_text(text)
    return "not caught"


def main() -> None:
    chosen = [int(number) for number in sys.argv[1:]] or range(1, len(FAULTS) + 1)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        subprocess.run(["git", "clone", "--quiet", ROOT, copy], check=True)
        for number in chosen:
            fault = FAULTS[number - 1]
            print(f"{number:2}  {fault.what:34}  {caught(fault, copy)}", flush=True)


if __name__ == "__main__":
    main()
