# PYTHON_ARGCOMPLETE_OK
"""Did a run of train_musclebob_improved.py learn the new name? Prints a verdict and any sign of trouble.

    python scripts/analyze_training.py
    python scripts/analyze_training.py --run runs/musclebob
    python scripts/analyze_training.py --run runs/bob-0,runs/bob-1,runs/bob-2

That script teaches a small language model a new name for a character (SFT, then GRPO). This one reads the validations
and metrics.jsonl of its runs: did GRPO improve on the model it started from, and are there signs of reward hacking,
answers that do not end, collapse, or a name that appears in unrelated answers? It also redraws plots/training.png.
Without --run it takes the newest run; for several runs it adds a table. docs/musclebob.md is the runbook.
"""

from dataclasses import dataclass

from qat_lora.run import options as opt
from qat_lora.run.command_line import check_command_line, run_script
from qat_lora.run.options import ScriptConfig


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    run: str | None = opt.run(None, "run directory, or several separated by commas [the newest]")


if __name__ == "__main__":
    check_command_line(Config, "analyze_training", __doc__)  # before the imports that take seconds

from pathlib import Path

from qat_lora.errors import UserError
from qat_lora.experiments.musclebob.validation import STAGES, VALIDATIONS, plot, read_training_config, read_validations
from qat_lora.run.console import say
from qat_lora.run.files import check_files
from qat_lora.run.rundir import Run, newest_run

SPILT, PERPLEXITY, CUT_OFF, TIES, ENTROPY = 0.05, 1.5, 0.2, 0.7, 0.25  # limits of a healthy run
LITTLE = 0.1  # a rate, or a change of a rate or reward, below this is small


def main(cfg: Config) -> None:
    paths = [Path(p) for p in cfg.run.split(",")] if cfg.run else [newest_run(Path("runs/train_musclebob_improved"))]
    found = {path: read_run(path) for path in paths}
    if cfg.dry_run:
        return say("\n".join(map(str, paths)))
    for path, (stages, lines, length) in found.items():
        say(f"{path}\n" + "\n".join(f"  {line}" for line in verdict(stages, lines)))
        say(f"  {plot(lines, path / 'plots' / 'training.png', length)}")
    if len(found) > 1:
        say(table({str(path): stages for path, (stages, _, _) in found.items()}))


def read_run(path: Path) -> tuple[dict, list[dict], int]:
    """A run's validations by stage, its metrics and its limit on answer length. Raises UserError for other folders."""
    if not (path / "training_config.json").exists():
        raise UserError(
            f"{path} is not a run of train_musclebob_improved.py (no training_config.json); give a run directory"
        )
    check_files(path, "training_config.json", "metrics.jsonl", *VALIDATIONS.values())
    longest = read_training_config(path)["max_new_tokens"]
    stages, lines = read_validations(path), Run(path, resumed=False).metrics()
    if "baseline" not in stages or not lines:
        raise UserError(f"{path} has logged nothing yet; let it train for a while")
    return stages, lines, longest


def verdict(stages: dict, lines: list[dict]) -> list[str]:
    """The lines to print: what was learned, then every sign of trouble."""
    rewards = [line for line in lines if "reward" in line]
    said = [f"{name}: {shown(stage)}" for name, stage in stages.items()]
    if not rewards and "final" in stages:
        return [*said, learned(stages["baseline"], stages["final"]), "this run had SFT only, no GRPO"]
    if not rewards:
        return [*said, "no GRPO update yet"]
    if "final" not in stages:
        return [*said, "not finished, so no verdict yet", *signs(rewards)]
    before, after = stages.get("post_sft", stages["baseline"]), stages["final"]
    said.append(learned(before, after))
    gained = after["sampled"]["musclebob"]["rate"] - before["sampled"]["musclebob"]["rate"]
    return said + outcome(stages["baseline"], after, gained, rewards) + signs(rewards)


def learned(before: dict, after: dict) -> str:
    """Whether the name is used more often in one validation than in another."""
    start, end = before["sampled"]["musclebob"], after["sampled"]["musclebob"]
    moved = f"{start['rate']:.1%} → {end['rate']:.1%}"
    if end["low"] > start["high"]:
        return f"learned: {moved}; the 95% intervals do not overlap"
    if end["high"] < start["low"]:
        return f"unlearned: {moved}; the 95% intervals do not overlap"
    return f"not learned: {moved}; the 95% intervals overlap"


CALM = "lower --learning-rate or raise --beta"


def outcome(baseline: dict, after: dict, gained: float, rewards: list[dict]) -> list[str]:
    """A line for each sign of trouble at the end of a run. gained: by how much GRPO raised the held-out rate."""
    early, late = _ends(rewards)
    spilt, ratio = after["sampled"]["spilt"]["rate"], after["perplexity"] / baseline["perplexity"]
    rose = late["reward"] - early["reward"]
    found = {
        f"over-generalised: {spilt:.1%} of the unrelated answers use the new name; {CALM}": spilt > SPILT,
        f"incoherent: perplexity {ratio:.2f} times that of the baseline; {CALM}": ratio > PERPLEXITY,
        f"reward hacking: the reward rose by {rose:.2f} but the held-out rate did not; read transcripts.md": rose
        > LITTLE
        and gained < LITTLE / 2,
    }
    return [line for line, holds in found.items() if holds]


def signs(rewards: list[dict]) -> list[str]:
    """A line for each sign of trouble in the GRPO updates."""
    early, late = _ends(rewards)
    explore = "use --sft, a higher --fewshot-ratio, --temperature or --num-generations"
    found = {
        f"no termination: {late['clipped_ratio']:.0%} of the answers are cut off; raise --max-new-tokens or "
        "use --sft": late["clipped_ratio"] > CUT_OFF,
        f"collapse: entropy fell from {early['entropy']:.2f} to {late['entropy']:.2f}; {CALM}": late["entropy"]
        < ENTROPY * early["entropy"],
        f"starved: in {late['zero_variance']:.0%} of the groups all answers have the same reward; {explore}": late[
            "zero_variance"
        ]
        > TIES
        and late["target_rate"] < LITTLE,
        f"nothing left to learn: {late['target_rate']:.0%} of the answers about him use the new name, and in "
        f"{late['zero_variance']:.0%} of the groups all answers have the same reward; stop earlier": late[
            "zero_variance"
        ]
        > TIES
        and late["target_rate"] > 1 - LITTLE,
    }
    return [line for line, holds in found.items() if holds]


def _ends(lines: list[dict]) -> tuple[dict, dict]:
    """Means over the first and the last fifth of the logged updates; target_rate only over updates that have it."""
    size = max(1, len(lines) // 5)
    names = ("reward", "entropy", "clipped_ratio", "zero_variance", "target_rate")
    columns = [{n: [li[n] for li in part if n in li] for n in names} for part in (lines[:size], lines[-size:])]
    return tuple({n: sum(column) / max(1, len(column)) for n, column in part.items()} for part in columns)


def shown(stage: dict) -> str:
    rate, spilt = stage["sampled"]["musclebob"], stage["sampled"]["spilt"]
    return (
        f"{rate['rate']:.1%} ({rate['low']:.1%}–{rate['high']:.1%}) of {rate['count']} use the new name, "
        f"{spilt['rate']:.1%} of the unrelated answers do, perplexity {stage['perplexity']:.2f}"
    )


def table(runs: dict[str, dict]) -> str:
    """A Markdown row per run: the share of answers with the new name after each stage, and the side effects."""
    lines = [
        "| run | baseline | after SFT | after GRPO | unrelated answers | perplexity / baseline's | cut off |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, stages in runs.items():
        cells = []
        for stage in STAGES:
            rate = stages[stage]["sampled"]["musclebob"] if stage in stages else None
            cells.append(f"{rate['rate']:.1%} ({rate['low']:.1%}–{rate['high']:.1%})" if rate else "–")
        last = stages.get("final", stages.get("post_sft", stages["baseline"]))
        cells.append(f"{last['sampled']['spilt']['rate']:.1%}")
        cells.append(f"{last['perplexity'] / stages['baseline']['perplexity']:.2f}")
        cells.append(f"{last['sampled']['cut_off']['rate']:.1%}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    run_script(main, Config, "analyze_training", __doc__)
