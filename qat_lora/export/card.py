"""The model card of an export: README.md, made from the files of the run and the export alone."""

from pathlib import Path

import yaml

from qat_lora.export.source import Source
from qat_lora.models.packaged import PACKAGED
from qat_lora.quant.student import StudentSpec
from qat_lora.run.console import command

LOADING = {  # with the variable `folder`; LORA and ADAPTER are empty without an adapter
    "gguf": 'from llama_cpp import Llama\n\nmodel = Llama(f"{folder}/model.gguf"LORA)\n'
    'print(model("Hello", max_tokens=20)["choices"][0]["text"])',
    "mlx": "from mlx_lm import generate, load\n\nmodel, tokenizer = load(folderLORA)\n"
    'print(generate(model, tokenizer, prompt="Hello", max_tokens=20))',
    "hf": 'from transformers import pipeline\n\nmodel = pipeline("text-generation", f"{folder}ADAPTER")\n'
    'print(model("Hello", max_new_tokens=20)[0]["generated_text"])',
}
LORA = {"gguf": ', lora_path=f"{folder}/adapter.gguf"', "mlx": ', adapter_path=f"{folder}/adapter"'}
DOWNLOAD = 'from huggingface_hub import snapshot_download\n\nfolder = snapshot_download("{name}")\n'
LIBRARIES = {"gguf": "gguf", "mlx": "mlx"}


def card(source: Source, record: dict, folder: Path, hub: str | None = None) -> str:
    """The card of an export to `folder`, or to the repository `hub`, with this export.json."""
    kind, info, name = record["format"], record["info"], source.name
    base = PACKAGED[name].hub if name in PACKAGED else Path(name).name if Path(name).exists() else name
    head = {
        "base_model": base, "license": licence(name), "library_name": LIBRARIES.get(kind, "transformers"),
        "tags": ["quantization-aware-training", kind],
    }  # fmt: skip
    rows = {
        "base": base,
        "quantisers": str(StudentSpec(**record["quantisers"])) if record["quantisers"] else "none: full precision",
        "bits per quantised weight": f"{record['bits_per_weight']:.3f} in these files",
        "size": ", ".join(f"{file}: {sizes['written'] / 1e6:.1f} MB" for file, sizes in record["bytes"].items()),
        "adapter": {None: "none", "lora": "in files of its own", "merged": "added to the weights"}[
            record["adapter_as"]
        ],
    }
    if "heldout_kl" in info:
        measured = f"of {info['heldout_rows']} held-out rows of its cache, at update {info['step']}, without an adapter"
        rows["perplexity"] = f"{info['heldout_ppl']:.2f} ({measured})"
        rows["KL to the teacher"] = f"{info['heldout_kl']:.3f} nats a token (the same rows)"
    rows["made at commit"] = record["commit"]
    table = "\n".join(f"| {what} | {value} |" for what, value in rows.items())
    beside = record["adapter_as"] == "lora"
    code = LOADING.get(kind, LOADING["hf"]).replace("LORA", LORA.get(kind, "") if beside else "")
    code = code.replace("ADAPTER", "/adapter" if beside else "")
    code = (DOWNLOAD.format(name=hub) if hub else f'folder = "{folder}"\n') + code
    again = command("measure_perplexity", checkpoint=source.checkpoint, adapter=source.adapter, dataset="TEXT")
    measure = (
        f"\nTo measure the student again, on a text of yours:\n\n```bash\n{again}\n```\n" if source.checkpoint else ""
    )
    return (
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n# {folder.name}\n\n|  |  |\n|---|---|\n{table}\n"
        f"{measure}\nTo load it:\n\n```python\n{code}\n```\n"
    )


def licence(name: str) -> str:
    """The licence of a base model: a packaged one's, or that of the card in its folder; "unknown" if neither says."""
    if name in PACKAGED:
        return PACKAGED[name].licence
    path = Path(name) / "README.md"
    parts = path.read_text(encoding="utf-8", errors="replace").split("---\n") if path.is_file() else []
    try:
        return str(yaml.safe_load(parts[1])["license"]) if len(parts) > 2 and not parts[0] else "unknown"
    except (yaml.YAMLError, KeyError, TypeError):
        return "unknown"
