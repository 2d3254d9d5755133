"""What happens between the steps of a training loop: record, evaluate, save, stop."""

import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from tqdm import tqdm

from qat_lora.backend import TorchBackend
from qat_lora.backend.devices import local
from qat_lora.backend.sharding import save_shards
from qat_lora.errors import STOPS, UserError, first_line
from qat_lora.hosts.group import SIGTERM, notice_sigterm
from qat_lora.run.checkpoint import KEEP, load_checkpoint, restore_files, save_checkpoint
from qat_lora.run.console import PAUSE, say, time_left
from qat_lora.run.files import writing
from qat_lora.run.metrics import Metric, Ratio, Value, line_of, parts_of
from qat_lora.run.rundir import Run


@dataclass(frozen=True)
class Every:
    """Intervals in steps: log a line, evaluate, save a checkpoint; 0 means only at the end of a stage."""

    log: int = 10
    evaluate: int = 0
    save: int = 0


@dataclass
class Best:
    """The lowest value of a held-out figure; the state that reached it is kept in a file.

    value: inf before the first. rows: how many rows it was measured on, if known. Values measured on a different number
    of rows, after a resume with another --eval-rows, are not comparable: the first of them replaces the kept one."""

    figure: str
    value: float = math.inf
    rows: int | None = None

    def take(self, figures: dict, there: bool = True) -> bool:
        """Whether the state with these figures is the best so far and should be kept. there: whether the kept file
        exists; if not, any state counts as better."""
        value, rows = figures[self.figure], figures.get("heldout_rows")
        same = there and (self.rows is None or rows in (None, self.rows))
        if not math.isfinite(value) or (same and value >= self.value):
            return False
        self.value, self.rows = value, rows or self.rows
        return True


class Session:
    """Drives the steps of a run's stages, and lets an interrupted run resume.

        session = Session(run, backend, every)
        for step in session.steps("qat", total, state, load, evaluate):
            …one update…
            session.record(loss=Share(loss), tokens=Total(tokens), lr=Last(lr))

    Steps are counted from 1 across all stages of a run; a stage that a resumed run has already passed yields nothing.
    A loss that is not finite stops the run before anything bad is saved. On SIGTERM to any worker, the session finishes
    the step, saves a checkpoint and exits with status "preempted". Values given to `record` may be device scalars: they
    are fetched only when logged, and then combined over the workers. Every worker has a session; only the first one
    writes.
    """

    def __init__(
        self,
        run: Run,
        backend: TorchBackend,
        every: Every,
        shown: tuple[str, ...] = (),
        saved: Callable[[Path], None] | None = None,
        keep: int = KEEP,
        files: Sequence[str] = (),
        anchor=None,
    ):
        """shown: figures to show next to the progress bar. saved(folder): called by worker 0 with every checkpoint that
        it has written, e.g. to copy it elsewhere; if it fails, training continues. keep: how many checkpoints to keep.
        files: files and folders of the run directory that a resumed run relies on; checkpoints keep copies of them, and
        a resumed run restores them to their state at its checkpoint. anchor: the kd.anchor.Anchor that loops add."""
        self.run, self.backend, self.every, self.shown, self.saved, self.keep = run, backend, every, shown, saved, keep
        self.files, self.anchor = [run.metrics_path.name, *files], anchor
        self.copying = True  # whether the last call of `saved` succeeded
        self.offset = 0  # steps of the stages before this one
        self.kinds: dict[str, type[Metric]] = {}  # {name: kind} of the recorded figures
        self.pending: list[dict[str, Value]] = []
        self.interval: list[dict[str, float]] = []
        self.seconds: dict[str, float] = {}  # {stage: seconds in its steps}, without evaluation, saving and start-up
        self.logged_seconds = 0.0
        self.resumed = load_checkpoint(run.path, backend.group) if run.resumed else None
        if run.resumed:  # without a checkpoint, the run's files go back to its start
            files, step = (self.resumed[2]["files"], self.resumed[2]["step"]) if self.resumed else ({}, 0)
            backend.group.on_main(lambda: restore_files(run.path, files, self.files, step))
        if self.resumed:
            say(f"resuming at step {self.resumed[2]['step']} of stage {self.resumed[2]['stage']}")

    def steps(
        self,
        stage: str,
        total: int,
        state: Callable[[], tuple[dict, dict]],
        load: Callable[[dict, dict], None],
        evaluate: Callable[[int], dict] | None = None,
    ) -> Iterator[int]:
        """Yield the step numbers of one stage, counted from 1; log, evaluate and save between them.

        state() → (model tensors, trainer state) to save, called in every worker (the first one's is saved);
        load(tensors, trainer) restores them; evaluate(step) → figures to log, called before the first step (on
        XLA this also compiles the evaluation), at its interval and at the end.
        """
        first = self._restore(stage, total, load)
        self.stage, self.state = stage, state
        hidden = None if self.backend.is_main else True  # one bar for all workers, and only on a terminal
        notice_sigterm()
        if evaluate and first == 1:
            self._evaluate(0, evaluate)
        self.total, self.first, self.started = total, first, time.monotonic()
        self.told = self.started  # time of the last printed line
        self.bar = tqdm(range(first, total + 1), initial=first - 1, total=total, desc=stage, disable=hidden)
        for step in self.bar:
            started = time.monotonic()
            yield step
            self._after(step, total, started, evaluate)
        self.offset += total
        self.state = None  # it holds the optimiser, and the next stage has its own

    def period(self, step: int, total: int) -> tuple[int, int]:
        """(A step's number in its period, the period's length) for the schedule of the learning rate. A stage of
        `total` steps is one period; each extension of the run adds another."""
        ends = [0, *(end - self.offset for end in self.run.ended), total]
        begun = max(end for end in ends if 0 <= end < step)
        return step - begun, min(end for end in ends if end >= step) - begun

    def record(self, **metrics: Metric | Ratio | Value) -> None:
        """Record the figures of one step, combined according to their types (run.metrics). Call it once per step."""
        parts = parts_of(metrics)
        self.kinds |= {name: type(part) for name, part in parts.items()}
        self.pending.append({name: part.value for name, part in parts.items()})

    def best(self, figure: str) -> "Best":
        """The lowest value so far of a held-out figure, from the run's log."""
        best = Best(figure)
        for line in self.run.metrics() if self.run.writes else ():  # other hosts may have no log
            if figure in line:
                best.take(line)
        return best

    def cost(self) -> dict:
        """Seconds of each stage's steps, peak memory of the largest worker, and XLA's counters."""
        memory = {"peak_memory_mb": round(max(self.backend.group.gather(self.backend.peak_memory_mb())), 1)}
        seconds = {stage: round(value, 1) for stage, value in self.seconds.items()}
        return {"seconds": seconds} | memory | self.backend.counters()

    def _restore(self, stage: str, total: int, load) -> int:
        """The first step to run: 1, the step after the checkpoint, or total + 1 for a stage that is done."""
        if self.resumed is None:
            return 1
        tensors, trainer, meta = self.resumed
        if meta["stage"] != stage:
            return total + 1
        load(tensors, trainer["stage"])
        self.backend.set_rng_state(trainer["rng"][self.backend.rank % len(trainer["rng"])])
        self.interval = trainer["interval"]
        self.seconds, self.logged_seconds = trainer["seconds"], trainer["logged_seconds"]
        self.resumed = None
        return meta["step"] - self.offset + 1

    def _after(self, step: int, total: int, started: float, evaluate) -> None:
        def due(interval: int) -> bool:
            return step == total or bool(interval and step % interval == 0)

        # read once: a signal that comes during the lines below waits for the next step
        stopping = self.backend.group.stop(SIGTERM.is_set())
        log, test, save = due(self.every.log), evaluate and due(self.every.evaluate), stopping or due(self.every.save)
        if log or test or save:
            self._fetch(self.offset + step)
        self.seconds[self.stage] = self.seconds.get(self.stage, 0.0) + time.monotonic() - started
        if log:
            self._log(self.offset + step)
        if test:
            self._evaluate(step, evaluate)
        if save:
            self._save(self.offset + step)
        if self.bar.disable and self.run.writes and step < total and time.monotonic() - self.told >= PAUSE:
            say(f"{self.stage}: {step:,} of {total:,} updates, {self._time_left(step)}")
            self.told = time.monotonic()
        if stopping:
            SIGTERM.clear()
            self.run.finish("preempted", step=self.offset + step)
            say(f"SIGTERM: saved step {self.offset + step}; resume with --resume auto")
            raise SystemExit(0)

    def _evaluate(self, step: int, evaluate) -> None:
        self.backend.tidy()
        figures = evaluate(step)
        self.backend.tidy()
        if not all(map(math.isfinite, figures.values())):
            self._refuse(self.offset + step, figures)
        self.run.log(self.offset + step, {"stage": self.stage, **figures})

    def _refuse(self, step: int, values: dict) -> None:
        self.run.finish("failed", step=step)
        saved = any(self.run.path.glob("checkpoints/step_*"))
        rest = f"the last good checkpoint is kept in {self.run.path}; " if saved else ""
        fix = f"start a new run with a lower learning rate (--learning-rate, or that of stage {self.stage})"
        raise UserError(f"step {step}: {values} is not finite; {rest}{fix}")

    def _fetch(self, last: int) -> None:
        """Fetch the pending figures to the host; stop at the first that is not finite, before anything is saved."""
        names = [[n for n, v in values.items() if isinstance(v, Tensor)] for values in self.pending]
        numbers = iter(self.backend.fetch(*[self.pending[i][n] for i, ns in enumerate(names) for n in ns]))
        mine = [values | {n: next(numbers) for n in names[i]} for i, values in enumerate(self.pending)]
        for i, shares in enumerate(zip(*self.backend.group.gather(mine))):
            summed = {name for name in shares[0] if self.kinds[name].summed}
            values = {n: sum(share[n] for share in shares) if n in summed else v for n, v in shares[0].items()}
            if not all(map(math.isfinite, values.values())):
                self._refuse(last - len(self.pending) + 1 + i, values)
            self.interval.append(values)
        self.pending = []

    def _log(self, step: int) -> None:
        figures = line_of(self.interval, self.kinds)
        busy = sum(self.seconds.values())
        figures["tokens_per_s"] = figures["tokens"] / max(1e-9, busy - self.logged_seconds)
        self.bar.set_postfix({name: f"{figures[name]:.3g}" for name in self.shown if name in figures})
        note = "" if step == self.offset + self.total else self._time_left(step - self.offset)
        self.run.log(step, {"stage": self.stage, **figures, **self.backend.counters()}, note)
        self.told = time.monotonic()
        self.interval, self.logged_seconds = [], busy

    def _time_left(self, step: int) -> str:
        """The remaining time of this stage, in words; "" on a terminal, where the bar shows it."""
        done, total = step - self.first + 1, self.total - self.first + 1
        return time_left(done, total, time.monotonic() - self.started) if self.bar.disable else ""

    def _save(self, step: int) -> None:
        rng = self.backend.group.gather(self.backend.to_host(self.backend.rng_state()))
        tensors, stage_state = self.state()
        if isinstance(tensors.get("model"), dict):
            tensors = self._save_shards(step, tensors)
        self.backend.group.on_main(lambda: self._write(step, rng, tensors, stage_state))

    def _save_shards(self, step: int, state: dict) -> Path:
        """Write every worker's shards to a folder, which `_write` makes part of the checkpoint."""
        group, folder = self.backend.group, self.run.path / "checkpoints" / f".part_shards_{step}"
        bad = next((name for name, shard in state["model"].items() if not local(shard).isfinite().all()), None)
        if found := [name for name in group.gather(bad) if name]:
            group.on_main(lambda: self._refuse(step, {found[0]: "the updated parameter"}))
        group.on_main(lambda: shutil.rmtree(folder, ignore_errors=True))
        with writing(folder):
            save_shards(state, folder)
        group.on_main(lambda: self._check_shards(folder))
        return folder

    def _check_shards(self, folder: Path) -> None:
        for rank in range(self.backend.world_size):
            if not any(folder.glob(f"__{rank}_*")):
                raise UserError(
                    f"{folder} lacks the shards of {self.backend.group.name(rank)}; with --shard on, all hosts have to "
                    "read and write one --output-dir"
                )

    def _write(self, step: int, rng: list[dict], tensors: dict[str, Tensor] | Path, stage_state: dict) -> None:
        trainer = {
            "stage": stage_state,
            "rng": rng,
            "interval": self.interval,
            "seconds": self.seconds,
            "logged_seconds": self.logged_seconds,
        }
        if isinstance(tensors, dict):
            tensors = self.backend.to_host(tensors)
            bad = next((name for name, tensor in tensors.items() if not tensor.isfinite().all()), None)
            if bad:  # the loss of this step was finite, its update was not
                self._refuse(step, {bad: "the updated parameter"})
        trainer, meta = self.backend.to_host(trainer), {"stage": self.stage, "done": step - self.offset}
        written = save_checkpoint(self.run.path, step, tensors, trainer, meta, self.keep, self.files)
        if self.saved:
            self._copy_out(written)

    def _copy_out(self, written: Path) -> None:
        """Call `saved`; of several failures in a row, warn about the first only."""
        try:
            self.saved(written)
            self.copying = True
        except STOPS:
            raise
        except BaseException as error:  # every cloud package has its own exceptions
            if self.copying:
                say(
                    f"warning: {written.name} was not copied ({first_line(error)}); training continues, and the next "
                    "checkpoint will be copied if possible"
                )
            self.copying = False
