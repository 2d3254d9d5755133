# PYTHON_ARGCOMPLETE_OK
"""How did a run go? Writes one page with its result, plots, samples and settings.

    python scripts/report_run.py
    python scripts/report_run.py --run runs/v2_q4

Without --run it takes the run under runs/ that logged last; the run may still be in progress. It prints the path of
report.html, a single file that you can open or send anywhere. The plots are also in plots/metrics.png.
"""

from dataclasses import dataclass

from qat_lora.run import options as opt
from qat_lora.run.command_line import check_command_line, run_script
from qat_lora.run.options import ScriptConfig


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    run: str | None = opt.run(None, "run directory [the one under runs/ that logged last]")


if __name__ == "__main__":
    check_command_line(Config, "report_run", __doc__)  # before the imports that take seconds

from pathlib import Path

from qat_lora.run.console import say
from qat_lora.run.report import write_report
from qat_lora.run.rundir import newest_run


def main(cfg: Config) -> None:
    path = Path(cfg.run) if cfg.run else newest_run(Path("runs"))
    say(f"run {path}" if cfg.dry_run else str(write_report(path)))


if __name__ == "__main__":
    run_script(main, Config, "report_run", __doc__)
