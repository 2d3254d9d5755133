# PYTHON_ARGCOMPLETE_OK
"""What stories does a trained story model tell, and how well does it predict a text?

    python scripts/tell_stories.py --run runs/tale --prompt "Once upon a time" --temperature 0.7 --length 200
    python scripts/tell_stories.py --run runs/tale --measure other.txt

The model is the best.pt of a finished run of train_tinystories_reservoir.py, without --run that of the newest one.
Without --prompt, each line of standard input is the beginning of a story (end with Ctrl-D); an empty line starts one
from nothing. A story ends where the model ends it, or after --length tokens; every story starts from the same seed.
--measure FILE prints bits per byte, nats/token and perplexity over a whole .txt, .jsonl or .parquet text, in the
windows of the run's own evaluation; bits per byte can be compared between models with different tokenizers.
docs/reservoir.md is the runbook. Runs on CPU and CUDA.
"""

from dataclasses import dataclass

from qat_lora.run import options as opt
from qat_lora.run.command_line import check_command_line, run_script
from qat_lora.run.options import ScriptConfig


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    run: str | None = opt.model(None, "run directory of train_tinystories_reservoir.py [the newest]")
    prompt: str | None = opt.data(None, "beginning of a story [each line of standard input]")
    measure: str | None = opt.data(None, "measure this text instead of telling stories: .txt, .jsonl or .parquet")
    length: int = opt.run(200, "most tokens that a story goes on for", "--max-new-tokens", at_least=1)
    temperature: float = opt.run(0.8, "sampling temperature; 0 is greedy")
    top_k: int = opt.run(50, "sample from this many of the most probable tokens; 0 samples from all")
    top_p: float = opt.run(0.9, "sample from the most probable tokens that hold this share of the probability")
    batch_size: int = opt.run(16, "windows measured at a time", at_least=1)


if __name__ == "__main__":
    check_command_line(Config, "tell_stories", __doc__)  # before the imports that take seconds

from collections.abc import Iterator
from pathlib import Path

from qat_lora.backend import open_backend
from qat_lora.data.text import nfc
from qat_lora.errors import UserError
from qat_lora.experiments.stories.evaluation import heldout, tell
from qat_lora.experiments.stories.models import load_run, trained
from qat_lora.experiments.stories.text import text_to_measure, tokens_of
from qat_lora.rl.completion import check_device
from qat_lora.rl.rollout import Sampling
from qat_lora.run.console import say, typed_lines
from qat_lora.run.rundir import newest_run


def main(cfg: Config) -> None:
    check_device(cfg.device)
    sampling = Sampling(cfg.temperature, cfg.top_k, cfg.top_p)
    if cfg.measure is not None and cfg.prompt is not None:
        raise UserError("--measure tells no story, so --prompt has no use; leave one of them out")
    run = Path(cfg.run) if cfg.run else newest_run(Path("runs/train_tinystories_reservoir"))
    backend = open_backend(cfg.device, cfg.precision)
    model, stories, length = load_run(run)
    if cfg.measure is not None:
        stories = text_to_measure(cfg.measure, stories.tokenizer)
    elif cfg.prompt is not None:
        tokens_of(stories.tokenizer, cfg.prompt)
    rule = f"temperature {cfg.temperature}" if cfg.temperature else "greedy"
    what = f"measuring {cfg.measure}" if cfg.measure is not None else f"{rule}, at most {cfg.length} tokens"
    say(f"{run} on {backend}: {trained(model):,} trained parameters; {what}")
    if cfg.dry_run:
        return
    backend.place(model)
    if cfg.measure is not None:
        figures = heldout(model, stories, length, cfg.batch_size, backend)
        return show(figures, len(stories.heldout), stories.heldout_bytes)
    for text in prompts(cfg):
        try:
            begin = tokens_of(stories.tokenizer, text)
        except UserError as error:
            say(f"not told: {error}")  # the next line may work
            continue
        backend.seed(cfg.seed)
        print(f"{tell(model, stories, begin, cfg.length, sampling, backend)}\n", flush=True)


def prompts(cfg: Config) -> Iterator[str]:
    return map(nfc, typed_lines("beginning of a story") if cfg.prompt is None else [cfg.prompt])


def show(figures: dict[str, float], tokens: int, size: int) -> None:
    say(f"text   {tokens:,} tokens, {size:,} bytes")
    say(f"bits   {figures['bits_per_byte']:.4f} bits per byte")
    say(f"NLL    {figures['heldout_nll']:.4f} nats/token, perplexity {figures['heldout_ppl']:.4g}")


if __name__ == "__main__":
    run_script(main, Config, "tell_stories", __doc__)
