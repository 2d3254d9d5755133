"""The subjects of the trials: every script that writes, small enough to run in seconds, and their inputs."""

import dataclasses
import json
import runpy
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compare
import server

OUT = "out"  # in every trial's folder; small or read-only disks are mounted here
RUN = f"{OUT}/run"
DEVICE = "cpu"


def plain() -> list[str]:
    return ["--device", DEVICE, "--precision", "fp32"]


@dataclass(frozen=True)
class Subject:
    """A command with small sizes, in a folder that holds its `inputs`.

    trains: running the command again resumes it, and its result is the folder RUN; the result of any other command is
    the contents of OUT and its standard output. late: a file that appears once a run holds everything it has before its
    end. ends: files written after the last checkpoint. spawned: run in a new interpreter, not as a forked child.
    reads: patterns of the files of finished runs that it reads.
    """

    name: str
    script: str
    flags: str
    inputs: tuple[str, ...]
    late: str = ""
    ends: tuple[str, ...] = ()
    spawned: bool = False
    reads: str = ""

    @property
    def argv(self) -> list[str]:
        return [*self.flags.split(), *plain()]

    @property
    def trains(self) -> bool:
        return bool(self.late)

    def start(self, folder: Path, log: str = "log") -> server.Process:
        return (server.spawn if self.spawned else server.start)(folder, self.script, *self.argv, log=log)

    def result(self, folder: Path, ended: server.Ended) -> dict[str, Any]:
        """The result of the command in `folder`."""
        base = folder.parents[1]
        if self.trains:
            return compare.result(folder / RUN, base, cache=self.script == "build_kd_cache")
        return compare.result(folder / OUT, base) | {"standard output": ended.out.splitlines()}


QAT = "--eval-rows 8 --eval-every 3 --save-every 2 --log-every 1 --batch-size 4 --warmup-steps 2"
LAW = (
    f"--model model --dataset law.jsonl --config law.yaml --output-dir {RUN} --resume auto --length 512 --batch-size 4 "
    "--accumulation-steps 1 --epochs 1 --lora-r 2 --eval-every 3 --eval-answers 2 --final-answers 3 --answer-rows 3 "
    "--max-new-tokens 6 --save-every 2 --log-every 1 --gradient-checkpointing false"
)
RECOVERY = (
    f"--checkpoint student.pt --model model --config recovery.yaml --output-dir {RUN} --resume auto --max-steps 16 "
    f"--recovery-r 2 {QAT}"
)

SUBJECTS = (
    Subject("teacher cache", "build_kd_cache",
        f"--model model --dataset text.txt --cache-dir {RUN} --config cache.yaml --max-rows 160 --rows-per-shard 8",
        ("model", "text.txt", "cache.yaml"), late="shard-00012.safetensors"),
    Subject("QAT", "train_qat",
        f"--model model --cache-dir cache --config qat.yaml --output-dir {RUN} --resume auto --layer-steps 2 "
        f"--layer-rows 8 --max-steps 16 {QAT}",
        ("model", "cache", "qat.yaml"), late="checkpoints/step_18"),
    Subject("recovery, KD", "train_recovery_lora", f"{RECOVERY} --kd-cache-dir cache",
        ("model", "cache", "student.pt", "recovery.yaml"), late="checkpoints/step_12"),
    Subject("recovery, SFT", "train_recovery_lora", f"{RECOVERY} --mode sft --dataset chat.jsonl --length 64",
        ("model", "chat.jsonl", "student.pt", "recovery.yaml"), late="checkpoints/step_12"),
    Subject("legal SFT", "train_cot_sft", LAW, ("model", "law.jsonl", "law.yaml"), late="checkpoints/step_6",
        ends=("final_evaluation.json", "adapter", "model")),
    Subject("legal SFT, int4", "train_cot_sft", f"{LAW} --quantize int4/g32", ("model", "law.jsonl", "law.yaml"),
        late="checkpoints/step_6", ends=("final_evaluation.json", "adapter", "model")),
    Subject("GRPO", "train_musclebob_improved",
        f"--model model --config bob.yaml --output-dir {RUN} --resume auto --num-samples 8 --epochs 1 --sft "
        "--sft-epochs 1 --sft-batch-size 4 --batch-size 2 --num-generations 4 --max-prompt-length 200 "
        "--max-completion-length 6 --validation-samples 1 --eval-every 2 --save-every 1",
        ("model", "bob.yaml"), late="checkpoints/step_4", ends=("model", "final_validation.json")),
    Subject("reservoir", "train_tinystories_reservoir",
        f"--dataset stories.txt --config stories.yaml --output-dir {RUN} --resume auto --tokenizer chars "
        "--heldout-fraction 0.2 --epochs 2 --batch-size 8 --block-size 32 --embedding 16 --hidden 24 --reservoirs "
        "diagonal:12,esn:8 --density 0.4 --warmup-steps 2 --eval-every 6 --save-every 4 --log-every 2",
        ("stories.txt", "stories.yaml"), late="checkpoints/step_24", ends=("best.pt", "samples.txt")),
    Subject("puzzles", "pretrain",
        f"data_path=puzzles --config puzzles.yaml output_dir={RUN} --resume auto checkpoint_path={OUT}/bucket "
        "global_batch_size=8 epochs=4 eval_interval=5 save_interval=4 log_interval=2 lr_warmup=2 halt_max_segments=3 "
        "arch.hidden_size=16 arch.num_heads=2 arch.L_cycles=2 compile=off",
        ("puzzles", "puzzles.yaml"), late="checkpoints/step_24", ends=("best.pt",)),
)  # fmt: skip
STUDENT, READS = "--checkpoint qat/best.pt --model model --adapter recovery/adapter", "qat/best.pt recovery/adapter/*"
ASK = "--model model --question When? --max-new-tokens 12"
TOOLS = (
    *(Subject(f"export, {name}", "export_model", f"{STUDENT} --format {form} --output-dir {OUT}/export",
              ("model", "qat", "recovery"), reads=READS)
      for name, form in (("GGUF", "gguf"), ("Hugging Face", "hf"), ("merged", "merged"))),
    Subject("report", "report_recovery",
            "--qat-run qat --recovery-run recovery --cache-dir cache --model model --rows 4 --new-tokens 4 "
            f"--output {OUT}/report.md", ("model", "cache", "qat", "recovery"),
            # the cache's summary.json holds nothing but times
            reads="qat/*.* recovery/*.* recovery/adapter/* cache/manifest.json cache/*.safetensors"),
    Subject("completions", "run_inference", f"{STUDENT} --prompt Hello --max-new-tokens 12",
            ("model", "qat", "recovery"), reads=READS),
    Subject("perplexity", "measure_perplexity", f"{STUDENT} --dataset text.txt --length 32 --max-windows 8",
            ("model", "text.txt", "qat", "recovery"), reads=READS),
    Subject("plots", "report_run", f"--run {OUT}/qat", ("qat",), reads="qat/metrics.jsonl"),
    Subject("verdict on GRPO", "analyze_training", f"--run {OUT}/bob", ("bob",),
            reads="bob/training_config.json bob/*_validation.json bob/checksums.json bob/metrics.jsonl"),
    Subject("questions after GRPO", "test_musclebob",
            f"--run bob --model model --samples 2 --output {OUT}/answers.json", ("model", "bob"),
            reads="bob/training_config.json bob/model/*"),
    Subject("legal assistant", "run_legal_assistant", f"--run law {ASK}", ("model", "law"),
            reads="law/config.yaml law/authorities.json law/adapter/* law/model/*"),
    Subject("legal assistant, int4", "run_legal_assistant", f"--run law4 {ASK}", ("model", "law4"),
            reads="law4/config.yaml law4/authorities.json law4/base.pt law4/adapter/* law4/model/*"),
    Subject("puzzle data", "build_puzzle_data", f"--kind sudoku4 --count 60 --output-dir {OUT}/puzzles", ()),
    *(Subject(f"legal dataset, {form}", "make_legal_dataset", f"--count 60 --output {OUT}/law.{form}", ())
      for form in ("jsonl", "parquet")),
)  # fmt: skip


def _with_two_workers(subject: Subject) -> Subject:
    flags = f"{subject.flags.replace('--batch-size 4', '--batch-size 2')} --num-chips 2"
    return dataclasses.replace(subject, name=f"{subject.name}, two workers", flags=flags, spawned=True)


BY_NAME = {subject.name: subject for subject in (*SUBJECTS, *TOOLS)}
WORKERS = (_with_two_workers(BY_NAME["QAT"]), _with_two_workers(BY_NAME["legal SFT"]))
PROGRAMS = tuple(
    dataclasses.replace(BY_NAME[name], name=f"{name}, its own interpreter", spawned=True)
    for name in ("QAT", "reservoir")
)
BY_NAME |= {subject.name: subject for subject in (*WORKERS, *PROGRAMS)}
FINISHED = {"qat": "QAT", "bob": "GRPO", "law": "legal SFT", "law4": "legal SFT, int4"}  # inputs that subjects made


# -- inputs ----------------------------------------------------------------------------------------------------------
PRESETS = {
    "cache": "length: 32\ntop_k: 6\n", "qat": "learning_rate: 0.002\nseed: 3\n",
    "recovery": "learning_rate: 0.003\nseed: 3\n", "law": "learning_rate: 0.002\nseed: 3\n",
    "bob": "learning_rate: 0.0002\nseed: 3\n", "stories": "learning_rate: 0.01\nseed: 3\n",
    "puzzles": "lr: 0.01\nseed: 3\n",
}  # fmt: skip
COMMANDS = {  # inputs that a script makes
    "cache": ("build_kd_cache", "--model model --dataset embedded --length 32 --max-rows 96 --rows-per-shard 16 "
              "--top-k 6 --cache-dir cache"),
    "student": ("train_qat", "--model model --cache-dir cache --max-steps 2 --output-dir student"),
    "puzzles": ("build_puzzle_data", "--kind sudoku4 --count 60 --output-dir puzzles"),
    "law.jsonl": ("make_legal_dataset", "--count 40 --output law.jsonl"),
    "recovery": ("train_recovery_lora", "--checkpoint qat/best.pt --kd-cache-dir cache --model model --output-dir "
                 f"recovery --max-steps 4 {QAT}"),
}  # fmt: skip
BEFORE = {"cache": ("model",), "student": ("cache",), "student.pt": ("student",), "recovery": ("qat", "cache")}


def make_input(inputs: Path, name: str) -> None:
    """Make one of `inputs` in a child, so that this process computes nothing. Those in BEFORE must exist."""
    inputs.mkdir(exist_ok=True)
    if name in COMMANDS:
        script, flags = COMMANDS[name]
        succeed(server.start(inputs, script, *flags.split(), *plain()).wait(), script)
    elif name == "student.pt":
        shutil.copy(inputs / "student" / "best.pt", inputs / name)
    elif not (inputs / name).exists():
        succeed(server.fork(inputs, _files).wait(), "the inputs")


def succeed(ended: server.Ended, what: str) -> server.Ended:
    if ended.code:
        raise SystemExit(f"{what} ended with exit code {ended.code}: {ended.err.strip()[-2000:]}")
    return ended


def _files() -> None:
    """Write the model, texts and presets to the working directory."""
    tiny = runpy.run_path(str(server.ROOT / "qat_lora" / "hardware" / "tiny.py"))
    tokenizer = tiny["tokenizer"]()
    model = tiny["model"](tokenizer)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(10)  # so that its distributions are far from uniform
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    for name, text in PRESETS.items():
        Path(f"{name}.yaml").write_text(text)
    tales = [f"Tom had {n} cats. He gave one to Ann and kept {n - 1}. Then it was night, day {n}." for n in range(60)]
    Path("stories.txt").write_text("\n".join(tales) + "\n")
    Path("text.txt").write_text("\n".join(tales * 3) + "\n")
    talks = [
        [{"role": "user", "content": f"How many cats had Tom on day {n}?"}, {"role": "assistant", "content": tale}]
        for n, tale in enumerate(tales)
    ]
    Path("chat.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
