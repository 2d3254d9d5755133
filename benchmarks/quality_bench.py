"""One cell of qat_quality.py: trains a student, with our scripts or a baseline's method, and measures it."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from qat_lora.backend import TorchBackend, open_backend
from qat_lora.errors import UserError
from qat_lora.hosts.revision import revision
from qat_lora.kd.dataset import KDCacheDataset
from qat_lora.kd.training import heldout_figures
from qat_lora.lora.adapter import adapter_values, load_adapter
from qat_lora.models.loading import empty_model, load_model
from qat_lora.quant.rates import usual_rates
from qat_lora.quant.spec import QuantSpec
from qat_lora.quant.student import StudentSpec, bits_per_weight, load_student, quantize
from qat_lora.run.files import read_json, write_atomically
from qat_lora.run.metrics import Share, Total
from qat_lora.run.rundir import Run
from qat_lora.run.session import Every, Session
from qat_lora.train.evaluation import text_figures
from qat_lora.train.loop import Plan, Stage, StageState, restore, row_stream, tokens_of

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
BATCH = 4
ADAPTER_RATE = {2: 1e-3, 4: 5e-4}  # peak learning rate of adapters by bits; weights and scales use train_qat.py's


def core_seconds() -> float:
    """Core-seconds that this process and its finished children have taken."""
    return sum(os.times()[:4])


class Clock:
    """What a cell costs: seconds, and core-seconds of its process and those that it starts, without measuring."""

    def __init__(self, whole: bool, cores: float = 0.0):
        """whole: whether all of the cell runs in this process; otherwise its cost is unknown. cores: core-seconds taken
        before the cell."""
        self.whole, self.began, self.cores = whole, time.time(), cores
        self.moments: list[tuple[float, float]] = []  # times, and core-seconds until then, while a script runs
        self.pauses: list[tuple[float, float, float]] = []  # times, and the seconds and core-seconds that do not count

    def cost(self, file: Path | None = None) -> dict:
        """What was spent until now, or until a script wrote `file`."""
        if not self.whole:
            return {"seconds": None, "core_seconds": None}
        now, cores = time.time(), core_seconds()
        if file:
            now = file.stat().st_mtime
            cores = max((spent for moment, spent in self.moments if moment <= now), default=0.0)
        before = [pause for pause in self.pauses if pause[0] < now]
        seconds, cores = now - self.began, cores - self.cores
        return {
            "seconds": round(seconds - sum(pause[1] for pause in before)),
            "core_seconds": round(cores - sum(pause[2] for pause in before)),
        }

    @contextmanager
    def stopped(self):
        """Context that costs nothing."""
        now, cores = time.time(), core_seconds()
        yield
        self.pauses.append((now, time.time() - now, core_seconds() - cores))

    def run(self, command: list) -> int:
        """Run a command; return its exit code."""
        before = core_seconds()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as started:
            process = psutil.Process(started.pid)
            while started.poll() is None:
                with suppress(psutil.NoSuchProcess):  # it has just ended
                    self.moments.append((time.time(), before + sum(process.cpu_times()[:2])))
                with suppress(subprocess.TimeoutExpired):
                    started.wait(timeout=1)
        return started.returncode


class Bench:
    """One cell: its quantisers and rows, and how to train and measure its student. cfg: Config of qat_quality.py."""

    def __init__(self, cfg, backend: TorchBackend, out: Path):
        self.cfg, self.backend = cfg, backend
        self.grid, self.method, seed = cfg.cell.split(",")
        self.seed, self.out = int(seed), out
        self.spec, self.bits = StudentSpec(self.grid, self.grid), QuantSpec.parse(self.grid).bits
        self.steps = cfg.steps if self.bits == 2 else cfg.steps_4bit
        self.train, self.heldout = (KDCacheDataset(out / "cache", split) for split in ("train", "heldout"))
        self.folder = out / "cells" / cfg.cell.replace("/", "-").replace(",", "_")
        self.clock = Clock(whole=not self.folder.exists())
        self.folder.mkdir(parents=True, exist_ok=True)
        self.measured = torch.load(out / "measured.pt", weights_only=True)

    def base(self) -> nn.Module:
        """Load the full-precision model, anew each time, so that no copy stays in memory during training."""
        return load_model(self.cfg.model)

    def calibration(self, count: int) -> Tensor:
        """The first training rows, at most `count`, [rows, length]."""
        return torch.stack([self.train[row]["tokens"] for row in range(min(count, len(self.train)))])

    def rate(self, model: nn.Module) -> float:
        """The default peak learning rate of train_qat.py's end-to-end stage for a student of `model`."""
        student = quantize(empty_model(self.cfg.model), self.spec)
        student.load_state_dict(model.state_dict(), strict=False, assign=True)  # shares the weights
        return usual_rates(student)[0]

    def student(self, path: Path) -> nn.Module:
        return load_student(path, base=self.base())[0]

    def measure(self, model: nn.Module, stage: str, memory: float, cost: dict | None = None) -> dict:
        """Measure a student; return a row of the results. cost: what it took, by default all that was done so far."""
        cost = cost or self.clock.cost()
        with self.clock.stopped():
            figures = self.figures(model)
        bits = bits_per_weight(quantize(empty_model(self.cfg.model), self.spec), adapter_values(model))
        return {
            "cell": self.cfg.cell, "grid": self.grid, "method": self.method, "stage": stage, "seed": self.seed,
            "commit": revision(), "steps": self.steps, **cost, "peak_memory_mb": round(memory), "bits": bits, **figures,
        }  # fmt: skip

    def figures(self, model: nn.Module) -> dict:
        """Perplexity and KL of a student on each of the measured texts."""
        backend, teacher, figures = open_backend(self.cfg.device, "fp32"), self.base(), {}
        for placed in (model.eval(), teacher):
            backend.place(placed)
        for name, own in self.measured.items():
            got = text_figures(model, own["tokens"], own["scored"], backend, BATCH, teacher, own.get("given"))
            figures[name] = {"ppl": got["ppl"], "kl": got["kl"], "gap": got["nll"] - own["nll"], "teacher": own["ppl"]}
        return figures

    def script(self, name: str, run: Path, **flags) -> dict:
        """Run one of the project's scripts, or resume it; return its summary."""
        own = {"output_dir": run, "resume": "auto", "device": self.cfg.device, "precision": self.cfg.precision}
        own |= {"batch_size": BATCH, "eval_rows": len(self.heldout), "save_every": 50, "seed": self.seed}
        words = [word for key, value in (own | flags).items() for word in (f"--{key.replace('_', '-')}", str(value))]
        ended = (run / "summary.json").exists() and read_json(run / "summary.json")["status"] == "finished"
        code = 0 if ended else self.clock.run([sys.executable, SCRIPTS / f"{name}.py", *words])
        if code:  # it has printed its error
            raise SystemExit(code)
        summary = read_json(run / "summary.json")
        if summary["status"] != "finished":
            raise UserError(f"{run} was stopped; resume it with the same command")
        return summary

    def qat(self, **flags) -> tuple[Path, dict]:
        run = self.folder / "qat"
        flags = {"layer_rows": self.cfg.calibration_rows, "max_steps": 0, "eval_every": self.steps // 2} | flags
        flags = {"model": self.cfg.model, "cache_dir": self.out / "cache", "mlp": self.grid, "attn": self.grid} | flags
        return run, self.script("train_qat", run, **flags)

    def adapter(self, student: Path, run: Path, rank: int, targets: tuple[str, ...], **flags) -> tuple[nn.Module, dict]:
        """Train a recovery LoRA on an eighth of the tokens; return the student with it, and the summary of the run."""
        summary = self.script(
            "train_recovery_lora", run, checkpoint=student, cache_dir=self.out / "cache", lora_r=rank,
            targets=",".join(targets), max_steps=self.steps // 8, eval_every=max(1, self.steps // 32),
            learning_rate=ADAPTER_RATE[self.bits],
            seed=self.seed + 1000,  # another order: on the rows that QAT has just seen, an adapter gains nothing
            **flags,
        )  # fmt: skip
        return load_adapter(self.student(student), run / "adapter", student), summary

    def fit(self, model: nn.Module, loss_of, learning_rate: float) -> None:
        """Train a baseline's placed model, or resume it, and load its best held-out state."""
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW(trained.values(), learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        run = Run(self.folder / "fit", resumed=(self.folder / "fit").exists())
        run.path.mkdir(exist_ok=True)
        session = Session(run, self.backend, Every(log=10, evaluate=self.steps // 4, save=50))
        best, kept = session.best("heldout_kl"), run.path / "best.pt"
        plan = Plan(self.steps, BATCH, 1, learning_rate, 10, 1.0, self.seed)

        def evaluate(step: int) -> dict:
            figures = heldout_figures(model, self.heldout, self.backend, BATCH, len(self.heldout))
            if best.take(figures, kept.exists()):
                values = {name: p.detach() for name, p in trained.items()}
                write_atomically(kept, lambda file: torch.save(values, file))
            return figures

        stream = row_stream(self.train, plan, self.backend)
        model.train()
        for update in Stage("fit", session, plan, optimizer, stream, StageState(model, optimizer), evaluate):
            for batch in update:
                with self.backend.autocast():
                    loss = loss_of(model, batch)
                self.backend.backward(loss)
                update.add(loss=Share(loss), tokens=Total(tokens_of(batch)))
            update.record(grad_norm=update.step())
        restore(model, torch.load(kept, weights_only=True))
