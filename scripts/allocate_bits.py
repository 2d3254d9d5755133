# PYTHON_ARGCOMPLETE_OK
"""Which layers need more bits? Chooses a quantiser for each layer, for a number of bits per weight or megabytes.

    python scripts/allocate_bits.py --cache-dir caches/text_L256 --bits 2.5 --output runs/bits.yaml
    python scripts/train_qat.py --config runs/bits.yaml --cache-dir caches/text_L256 --init gptq

Measures how much the distillation loss rises when one layer alone is quantised, for every layer, on a few rows of the
KD cache; then gives bits to the layers where they save the most. Writes a preset for train_qat.py, which can be edited.
Minutes on two cores with the embedded model.
"""

from dataclasses import dataclass
from typing import Literal

from qat_lora.quant.targets import HELD
from qat_lora.run import options as opt
from qat_lora.run.command_line import check_command_line, run_script
from qat_lora.run.options import ScriptConfig

USUAL = "int2/g64,int3/g64,int4/g64"
TYPICAL = 1024  # inputs and outputs of a layer, to order quantisers by their size


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    model: str | None = opt.model(None, "base model [the cache's teacher]")
    cache_dir: str | None = opt.data(None, "KD cache (folder or URL), made by build_kd_cache.py", "--kd-cache-dir")
    rows: int = opt.data(4, "training rows of the cache to measure on", at_least=1)
    bits: float | None = opt.quantiser(None, "bits per weight of all layers together", above=0, at_most=16)
    megabytes: float | None = opt.quantiser(None, "size of the whole model instead, in MB", above=0)
    quantisers: str | None = opt.quantiser(None, f"quantisers to choose from [{USUAL}]")
    target: Literal[*HELD] | None = opt.quantiser(None, "choose from what this reader holds exactly instead")
    output: str = opt.run("runs/bits.yaml", "preset to write")


if __name__ == "__main__":
    check_command_line(Config, "allocate_bits", __doc__)  # before the imports that take seconds

import math
from collections import Counter
from pathlib import Path

import yaml
from torch import nn

from qat_lora.backend import open_backend
from qat_lora.data.batches import first_batches
from qat_lora.errors import UserError
from qat_lora.export.targets import check_target
from qat_lora.kd.allocation import Choice, allocate, sensitivities
from qat_lora.kd.dataset import open_splits, teacher_of
from qat_lora.models.loading import empty_model, load_model, load_tokenizer
from qat_lora.quant.linear import quantized_layers
from qat_lora.quant.spec import QuantSpec
from qat_lora.quant.student import StudentSpec, bits_per_weight, megabytes, quantize
from qat_lora.run.console import command, say
from qat_lora.run.files import write_atomically


def main(cfg: Config) -> None:
    menu = check(cfg)
    model = cfg.model or teacher_of(cfg.cache_dir)
    train, _ = open_splits(cfg.cache_dir, model, load_tokenizer(model))
    text = "|".join(map(str, menu))
    smallest = quantize(empty_model(model), StudentSpec(text, text))  # each layer with the fewest bits
    if cfg.quantisers:
        check_fits(menu, smallest)
    budget = budget_of(cfg, smallest)
    if cfg.target:
        say(check_target(cfg.target, model, smallest))
    say(f"{model}: {len(quantized_layers(smallest))} layers, each one of {', '.join(map(str, menu))}")
    if cfg.dry_run:
        return
    backend = open_backend(cfg.device, cfg.precision)
    rows = first_batches(train, cfg.rows, math.gcd(cfg.rows, 4), cfg.seed)
    chosen = allocate(sensitivities(load_model(model), menu, rows, backend), budget)
    options = preset(chosen)
    student = quantize(empty_model(model), StudentSpec(**options))
    given = ("cache_dir", "bits", "megabytes", "quantisers", "target", "rows", "seed")
    made = command("allocate_bits", model=cfg.model, **{name: getattr(cfg, name) for name in given})
    content = f"# {made}\n" + yaml.safe_dump({"model": model, **options}, sort_keys=False, width=10**6)
    write_atomically(Path(cfg.output), lambda file: file.write(content.encode()))
    say(table(chosen))
    say(f"{bits_per_weight(student):.3f} bits per weight, {megabytes(student):.1f} MB")
    say(f"next: {command('train_qat', config=cfg.output, cache_dir=cfg.cache_dir)}")


def check(cfg: Config) -> list[QuantSpec]:
    """The quantisers to choose from, the fewest bits first. Raises UserError for options that no run could use."""
    if (cfg.bits is None) == (cfg.megabytes is None):
        raise UserError("give either --bits or --megabytes, e.g. --bits 2.5")
    if not cfg.cache_dir:
        raise UserError("--cache-dir is missing; build a cache with build_kd_cache.py")
    if cfg.target and cfg.quantisers:
        raise UserError(f"--target {cfg.target} names the quantisers; leave out --quantisers {cfg.quantisers}")
    texts = "|".join(HELD[cfg.target].values()) if cfg.target else (cfg.quantisers or USUAL).replace(",", "|")
    menu = list(dict.fromkeys(QuantSpec.alternatives(texts)))
    if len(menu) < 2:
        raise UserError(f"--quantisers {cfg.quantisers}: there must be two or more to choose from, e.g. {USUAL}")
    return sorted(menu, key=lambda spec: spec.code_bits(TYPICAL**2) + spec.scale_bits(TYPICAL, TYPICAL))


def check_fits(menu: list[QuantSpec], smallest: nn.Module) -> None:
    """Raise UserError for a quantiser that fits no layer."""
    for spec in menu:
        errors = []
        for name, layer in quantized_layers(smallest).items():
            try:
                spec.check(name, *layer.quantizer.shape[-2:])
                break
            except UserError as error:
                errors.append(error)
        else:
            raise errors[0]


def budget_of(cfg: Config, smallest: nn.Module) -> float:
    """The bits of codes and scales that all layers may have together; raises UserError if they are too few."""
    layers = quantized_layers(smallest).values()
    fewest, weights = sum(layer.quantizer.bits for layer in layers), sum(layer.weight.numel() for layer in layers)
    if cfg.bits is not None:
        budget, asked, least = cfg.bits * weights, f"--bits {cfg.bits:g}", fewest / weights
    else:
        least = megabytes(smallest)
        budget, asked = fewest + (cfg.megabytes - least) * 8e6, f"--megabytes {cfg.megabytes:g}"
    if budget < fewest:
        raise UserError(f"{asked} cannot be met: these quantisers take at least {math.ceil(least * 1e3) / 1e3:g}")
    return budget


def preset(chosen: dict[str, Choice]) -> dict[str, str]:
    """The options of train_qat.py: the most frequent quantiser, and the layers with others."""
    usual = Counter(choice.quantiser for choice in chosen.values()).most_common(1)[0][0]
    own = ",".join(f"{name}={choice.quantiser}" for name, choice in chosen.items() if choice.quantiser != usual)
    return {"mlp": usual, "attn": usual} | ({"layers": own} if own else {})


def table(chosen: dict[str, Choice]) -> str:
    """How many layers of each kind have which quantiser."""
    kinds: dict[str, Counter] = {}
    for name, choice in chosen.items():
        kinds.setdefault(name.rpartition(".")[2], Counter())[choice.quantiser] += 1
    return "\n".join(
        f"{kind}: " + ", ".join(f"{count} {quantiser}" for quantiser, count in sorted(found.items()))
        for kind, found in kinds.items()
    )


if __name__ == "__main__":
    run_script(main, Config, "allocate_bits", __doc__)
