"""Which of our files does one update pass through? docs/architecture.md lists them; test_passes.py compares.

    python tests/repo/passes.py qat      # an update of scripts/train_qat.py
    python tests/repo/passes.py grpo     # a prompt of scripts/train_musclebob_improved.py: rollout, reward and update

Runs the script on a tiny model, on the CPU, and prints each file of which a function is called in the second update, in
the order of the first call, with the functions; what the batches' own thread calls counts in any update.
"""

import os
import random
import sys
import tempfile
import threading
from pathlib import Path

from qat_lora.errors import ROOT
from qat_lora.experiments.musclebob import validation
from qat_lora.hardware import tiny
from qat_lora.run.command_line import parse
from qat_lora.run.scripts import load_script
from qat_lora.run.session import Session

SMALL = "--max-steps 3 --eval-every 0 --save-every 0 --device cpu --precision fp32"
COMMANDS = {
    "qat": ("train_qat", f"--cache-dir cache --batch-size 2 --accumulation-steps 1 --output-dir run {SMALL}"),
    "grpo": (
        "train_musclebob_improved",
        f"--batch-size 1 --num-generations 2 --num-samples 4 --max-prompt-length 160 --max-new-tokens 4 "
        f"--validation-samples 1 --output-dir run {SMALL}",
    ),
}
CACHE = "--length 16 --batch-size 4 --max-rows 24 --top-k 4 --cache-dir cache --device cpu --precision fp32"


class Passed:
    """Calls of our functions: {file: [names of its functions]}, in the order of the first call."""

    def __init__(self):
        self.files: dict[str, list[str]] = {}
        self.on = self.begun = False  # in the second update; in the first one or later

    def __call__(self, frame, event: str, _) -> None:
        other = threading.current_thread() is not threading.main_thread()
        if event != "call" or not (self.on or (other and self.begun)):
            return
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and "/tests/" not in str(path) and "site-packages" not in str(path):
            functions = self.files.setdefault(str(path.relative_to(ROOT)), [])
            if frame.f_code.co_qualname not in functions:
                functions.append(frame.f_code.co_qualname)


def passed(name: str) -> dict[str, list[str]]:
    """{file: its functions} that the second update of a run calls, in the order of the first call."""
    script, words = COMMANDS[name]
    calls, steps, reward = Passed(), Session.steps, validation.reward

    def watched(self, *given, **named):
        for step in steps(self, *given, **named):
            calls.on, calls.begun = step == 2, True
            yield step
            calls.on = False

    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        model = ["--model", str(tiny.save(Path(folder) / "model"))]
        os.chdir(folder)
        try:
            if "cache" in words:
                run("build_kd_cache", [*model, *CACHE.split()])
            Session.steps = watched
            validation.reward = lambda parts: reward(parts) + random.random()  # else a random model's are all the same
            threading.setprofile(calls)
            sys.setprofile(calls)
            run(script, [*model, *words.split()])
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            Session.steps, validation.reward = steps, reward
            os.chdir(before)
    return calls.files


def run(script: str, words: list[str]) -> None:
    module = load_script(script)
    module.main(parse(module.Config, script, words))


if __name__ == "__main__":
    for path, functions in passed(sys.argv[1]).items():
        print(f"{path}: {', '.join(functions)}")
