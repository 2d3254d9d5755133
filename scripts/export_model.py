# PYTHON_ARGCOMPLETE_OK
"""Export a trained model for other programs: a low-bit student to a Hugging Face folder or to GGUF for llama.cpp.

    python scripts/export_model.py --checkpoint runs/q2/best.pt --format gguf --output-dir exports/q2
    python scripts/export_model.py --checkpoint runs/q2/best.pt --adapter runs/q2-lora/adapter --format hf \\
        --output-dir exports/q2-hf
    python scripts/export_model.py --checkpoint runs/q2/best.pt --adapter runs/q2-lora/adapter --format gguf \\
        --adapter-as merged --output-dir exports/q2-merged
    python scripts/export_model.py --model runs/legal/model --format gguf --output-dir exports/legal

hf      a folder for AutoModelForCausalLM with the weights level·scale in fp32 (fp16 would round them), 4 bytes each;
        the adapter is in adapter/, for PeftModel
merged  the same folder with the adapter added to the weights
gguf    model.gguf with the trained codes and scales, each tensor in the smallest GGUF type that holds it, F16 if none
        does; docs/qat-recovery.md lists the types. The adapter is adapter.gguf, for llama.cpp's --lora; with
        --adapter-as merged it is added to its layers, which become F16. --model without a student: any model in full
        precision, e.g. a fine-tuned or merged one; its matrices become F16

compressed-tensors, gptq, autoround, awq, mlx
        a folder with the trained codes, packed, for vLLM, SGLang and transformers, or for mlx-lm; other matrices are in
        fp16, vectors in fp32. The adapter is in adapter/, in PEFT's form or in mlx-lm's

Every export also has the tokenizer, the chat template, export.json (its sources, types, bits and sizes) and README.md,
a model card. The files are read back and compared with the student, code by code, before the folder is moved to its
place. Nothing is overwritten. A model of 135M weights takes about a minute.
"""

from dataclasses import dataclass
from typing import Literal

from qat_lora.run import options as opt
from qat_lora.run.command_line import check_command_line, run_script
from qat_lora.run.options import ScriptConfig


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    checkpoint: str | None = opt.model(None, "student: the best.pt of train_qat.py")
    model: str | None = opt.model(
        None, "the student's base, if it has moved; without --checkpoint, the model to export as GGUF"
    )
    adapter: str | None = opt.model(None, "adapter trained on the student: the adapter/ of train_recovery_lora.py")
    format: Literal["hf", "merged", "gguf", "compressed-tensors", "gptq", "autoround", "awq", "mlx"] = opt.run(
        "gguf", "format: hf (adapter beside the model), merged (adapter added to the weights), gguf, or packed codes"
    )
    output_dir: str | None = opt.run(None, "new folder to write the export to, e.g. exports/q2")
    gguf_type: Literal[
        "auto", "TQ1_0", "TQ2_0", "Q2_0", "Q2_K", "Q3_K", "Q4_0", "Q4_K", "Q4_1", "Q5_0", "Q5_K", "Q5_1", "Q6_K",
        "Q8_0", "F16",
    ] = opt.run(
        "auto", "GGUF type of the quantised tensors; auto is the smallest that holds each tensor exactly"
    )  # fmt: skip
    adapter_as: Literal["lora", "merged"] | None = opt.run(
        None, "adapter in GGUF: lora (a file of its own) or merged (its layers become F16) [lora]"
    )
    push_to_hub: str | None = opt.run(None, "also upload the export to a new private repository of the hub: USER/NAME")


if __name__ == "__main__":
    check_command_line(Config, "export_model", __doc__)  # before the imports that take seconds

from pathlib import Path

from qat_lora.errors import UserError
from qat_lora.export.card import card
from qat_lora.export.gguf import ADAPTER_FILE, MODEL_FILE, GGUFPlan, plan_gguf, stored_bits, summary, write_gguf
from qat_lora.export.hf import hf_bytes, write_hf
from qat_lora.export.hub import check_repository, push
from qat_lora.export.packed import FILE, plan_packed, rounding, write_packed
from qat_lora.export.source import Source, load_source, provenance
from qat_lora.export.targets import LAYOUTS, every_format
from qat_lora.hosts.revision import revision
from qat_lora.quant.student import bits_per_weight
from qat_lora.run.console import say
from qat_lora.run.files import check_new, new_folder, write_json


def main(cfg: Config) -> None:
    check(cfg)
    source = load_source(cfg.checkpoint, cfg.adapter, cfg.model)
    exports = {"gguf": export_gguf, "hf": export_hf, "merged": export_hf}
    exports.get(cfg.format, export_packed)(cfg, source)
    if cfg.push_to_hub and not cfg.dry_run:
        say(f"uploaded to {push(Path(cfg.output_dir), cfg.push_to_hub)}")
    if cfg.dry_run and cfg.checkpoint:
        say("\nin every format, without an adapter:\n" + "\n".join(f"  {line}" for line in every_format(source)))


def check(cfg: Config) -> None:
    if not cfg.checkpoint and not cfg.model:
        raise UserError("--checkpoint is missing; give e.g. runs/q2/best.pt, or --model FOLDER for full precision")
    if cfg.output_dir is None:
        raise UserError("--output-dir is missing; give e.g. exports/q2")
    if not cfg.checkpoint:
        given = [f"--format {cfg.format}"] * (cfg.format != "gguf") + ["--adapter"] * bool(cfg.adapter)
        given += [f"--gguf-type {cfg.gguf_type}"] * (cfg.gguf_type not in ("auto", "F16"))
        if given:
            raise UserError(f"{given[0]} is for a student; give its --checkpoint, or leave it out: --model becomes F16")
    if cfg.format == "merged" and not cfg.adapter:
        raise UserError("--format merged needs the --adapter to merge; give one, or use --format hf")
    if cfg.adapter_as and (cfg.format != "gguf" or not cfg.adapter):
        raise UserError(f"--adapter-as {cfg.adapter_as} is for --format gguf with an --adapter; leave it out")
    if cfg.gguf_type != "auto" and cfg.format != "gguf":
        raise UserError(f"--gguf-type {cfg.gguf_type} is for --format gguf; leave it out")
    check_new(Path(cfg.output_dir))
    if cfg.push_to_hub:
        check_repository(cfg.push_to_hub)


def introduce(cfg: Config, source: Source) -> None:
    what = f"student {cfg.checkpoint} of {source.name}" if cfg.checkpoint else f"model {source.name} in full precision"
    say(what + (f", adapter {cfg.adapter}" if cfg.adapter else ""))


# -- HF --------------------------------------------------------------------------------------------------------------
def export_hf(cfg: Config, source: Source) -> None:
    merged, target = cfg.format == "merged", Path(cfg.output_dir)
    computed = hf_bytes(source, merged)
    adapter = "added to them" if merged else "beside them in adapter/" if source.loras else "none"
    introduce(cfg, source)
    say(f"  baked weights in fp32, adapter {adapter}; {computed / 1e6:.2f} MB computed")
    if cfg.dry_run:
        return
    with new_folder(target) as folder:
        write_hf(source, folder, target, merged)
        real = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
        describe(cfg, folder, source, record(cfg, source, {"all": "F32"}, 32.0, {"weights": (computed, real)}))
    say(f"wrote {target}: {real / 1e6:.2f} MB, read back and equal to the student bit for bit")


# -- packed codes ----------------------------------------------------------------------------------------------------
def export_packed(cfg: Config, source: Source) -> None:
    target, plan = Path(cfg.output_dir), plan_packed(source, LAYOUTS[cfg.format])
    computed, bits = plan.bytes(), plan.bits()
    introduce(cfg, source)
    say(f"  {len(plan.layers)} layers packed for {cfg.format}; {rounding(source, plan)}")
    say(f"bits per quantised weight: {bits:.3f} in the file, {bits_per_weight(source.student):.3f} in the student")
    say(f"computed: {computed / 1e6:.2f} MB")
    if cfg.dry_run:
        return
    with new_folder(target) as folder:
        write_packed(source, plan, folder, target)
        real = (folder / FILE).stat().st_size
        types = {name: str(quantizer.spec) for name, quantizer in plan.layers.items()}
        describe(cfg, folder, source, record(cfg, source, types, bits, {FILE: (computed, real)}))
    say(f"wrote {target}: {real / 1e6:.2f} MB, read back: every code, scale, offset and plain value is the planned one")


# -- GGUF ------------------------------------------------------------------------------------------------------------
def export_gguf(cfg: Config, source: Source) -> None:
    merged, target = cfg.adapter_as == "merged", Path(cfg.output_dir)
    plan = plan_gguf(source, cfg.gguf_type, merged)
    computed = {MODEL_FILE: plan.model_bytes, ADAPTER_FILE: plan.adapter_bytes}
    introduce(cfg, source)
    show_plan(source, plan, computed)
    if merged:
        alone = plan_gguf(source, cfg.gguf_type).model_bytes
        say(f"merging adds {(computed[MODEL_FILE] - alone) / 1e6:.2f} MB to {alone / 1e6:.2f} MB")
    if cfg.dry_run:
        return
    with new_folder(target) as folder:
        write_gguf(source, plan, folder, target)
        sizes = {f.name: (computed[f.name], f.stat().st_size) for f in sorted(folder.glob("*.gguf"), reverse=True)}
        types = {f"{line['class']} {line['quantiser']}": line["type"] for line in summary(source, plan)}
        describe(cfg, folder, source, record(cfg, source, types, stored_bits(plan), sizes))
    for name, (expected, real) in sizes.items():
        say(f"wrote {target / name}: {real / 1e6:.2f} MB ({expected / 1e6:.2f} computed)")
    say("read back: every code, scale, offset and plain value is the planned one, bit for bit")
    model, adapter = target / MODEL_FILE, target / ADAPTER_FILE
    lora = (f" --lora {adapter}", f" --lora_path {adapter}") if ADAPTER_FILE in sizes else ("", "")
    say(f"to serve it: llama-server -m {model}{lora[0]}")
    say(f"or: pip install 'llama-cpp-python[server]' && python -m llama_cpp.server --model {model}{lora[1]}")


def show_plan(source: Source, plan: GGUFPlan, computed: dict[str, int]) -> None:
    for line in summary(source, plan):
        say(
            f"  {line['class']:<16}{line['quantiser']:<16}{line['type']:<5}{line['tensors']:>4} tensors"
            f"{line['bytes'] / 1e6:>9.2f} MB  {line['note']}"
        )
    if plan.adapter_writer:
        values = sum(value.numel() for value in plan.adapter.values())
        say(f"  {'adapter':<16}{'—':<16}{'F32':<5}{len(plan.adapter):>4} tensors{4 * values / 1e6:>9.2f} MB  exact")
    for note in plan.notes:
        say(f"  {note}")
    if source.checkpoint:
        student = bits_per_weight(source.student)
        say(f"bits per quantised weight: {stored_bits(plan):.3f} in the file, {student:.3f} in the student")
    say("computed: " + ", ".join(f"{name} {size / 1e6:.2f} MB" for name, size in computed.items() if size))


def describe(cfg: Config, folder: Path, source: Source, made: dict) -> None:
    """Write export.json and the model card."""
    write_json(folder / "export.json", made)
    (folder / "README.md").write_text(card(source, made, Path(cfg.output_dir), cfg.push_to_hub), encoding="utf-8")


def record(cfg: Config, source: Source, types: dict, bits: float, sizes: dict[str, tuple[int, int]]) -> dict:
    """The content of export.json."""
    own_file = cfg.adapter and cfg.format != "merged" and cfg.adapter_as != "merged"
    return {
        "format": cfg.format,
        "adapter_as": ("lora" if own_file else "merged") if cfg.adapter else None,
        **provenance(source),
        "types": types,
        "bits_per_weight": bits,
        "student_bits_per_weight": bits_per_weight(source.student),
        "bytes": {name: {"computed": computed, "written": real} for name, (computed, real) in sizes.items()},
        "commit": revision(),
    }


if __name__ == "__main__":
    run_script(main, Config, "export_model", __doc__)
