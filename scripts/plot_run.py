# PYTHON_ARGCOMPLETE_OK
"""How did a run go? Draws every figure that it logged into plots/metrics.png of its directory.

    python scripts/plot_run.py
    python scripts/plot_run.py --run runs/v2_q4

Without --run it takes the run under runs/ that logged last. Prints the picture's path; a run may still be going.
"""

from dataclasses import dataclass

from qat_lora.run import options as opt
from qat_lora.run.command_line import check_command_line, run_script
from qat_lora.run.options import ScriptConfig


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    run: str | None = opt.run(None, "run directory; default: the one under runs/ that logged last")


if __name__ == "__main__":
    check_command_line(Config, "plot_run", __doc__)  # before the imports that take seconds

from pathlib import Path

from qat_lora.run.console import say
from qat_lora.run.plots import plot_run
from qat_lora.run.rundir import newest_run


def main(cfg: Config) -> None:
    path = Path(cfg.run) if cfg.run else newest_run(Path("runs"))
    say(f"run {path}" if cfg.dry_run else str(plot_run(path)))


if __name__ == "__main__":
    run_script(main, Config, "plot_run", __doc__)
