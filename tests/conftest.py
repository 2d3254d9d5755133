"""Shared fixtures, among them a tiny tokenizer and a tiny random model, both built on the fly."""

import contextlib
import functools
import importlib.util
import itertools
import os
import signal
import sys
import tempfile
from pathlib import Path

os.environ["USE_TORCH_XLA"] = "0"  # set before transformers is imported, which would otherwise import torch_xla
# Also applies to processes that tests start. On two cores, two processes with two threads each slow each other down:
# one notebook took 672 s that way and 100 s with one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if cpu := os.environ.get("ATEN_CPU_CAPABILITY"):  # inductor would reuse code that it made for other instructions
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), f"inductor_{cpu}")))

import pytest  # what takes seconds is imported in fixtures: the process that hands out the tests needs none of it

# Slowest first: these files start before all others, so that no core is idle at the end. DEEP ones get the marker
# `deep`, which only `make test-deep` selects. SLOW ones take more than four seconds, and get the marker `slow`, which
# `make test-fast` deselects.
DEEP = (
    "hosts/test_hosts", "backend/test_xla_deep", "repo/test_notebook", "ahead/test_aot_deep",
    "repo/test_law_notebook", "ahead/test_recompiling", "hardware/test_checks", "hosts/test_rendezvous",
    "hosts/test_launch",
    "backend/test_xla_workers", "benchmarks/test_qat_quality", "scripts/test_compile_for_tpu", "faults/test_faults",
)  # fmt: skip
SLOW = (
    "scripts/test_pipeline", "scripts/test_shard", "scripts/test_cache_workers", "scripts/test_multi",
    "backend/test_xla", "scripts/test_train_cot_sft",
    "scripts/test_run_legal_assistant", "ahead/test_aot", "scripts/test_resuming", "scripts/test_pretrain",
    "scripts/test_cache_bucket", "kd/test_buckets",
    "scripts/test_bad_input", "scripts/test_moved_models", "scripts/test_bad_run", "scripts/test_measure_perplexity",
    "hosts/test_group", "scripts/test_train_musclebob", "train/test_memory", "scripts/test_train_tinystories",
    "scripts/test_smoke_test", "models/test_zoo_uses", "models/test_zoo_pipeline", "export/test_formats",
    "experiments/legal/test_citations", "scripts/test_export_model", "scripts/test_chat_template",
    "lora/test_adapter_targets", "experiments/athena/test_training", "lora/test_recovery", "backend/test_detect",
    "scripts/test_build_puzzle_data", "experiments/athena/test_builders",
    "rl/test_grpo", "scripts/test_report_recovery", "test_layer_qat", "experiments/athena/test_puzzles",
    "train/test_qat", "models/test_multimodal", "experiments/musclebob/test_rewards",
    "scripts/test_packaged_model", "repo/test_help", "backend/test_torch", "backend/test_heap",
    "models/test_gguf_models", "quant/test_calibration", "scripts/test_run_inference", "experiments/legal/test_rules",
    "quant/test_student", "rl/test_rollout", "repo/test_imports", "models/test_loading", "repo/test_passes",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(DEEP + SLOW)}
    names = {item: str(item.path.relative_to(Path(__file__).parent).with_suffix("")) for item in items}
    for item in items:
        if names[item] in places:
            item.add_marker(pytest.mark.deep if names[item] in DEEP else pytest.mark.slow)
        if item.get_closest_marker("xla") and not importlib.util.find_spec("torch_xla"):
            item.add_marker(pytest.mark.skip(reason="torch_xla is not installed"))
    items.sort(key=lambda item: places.get(names[item], len(places)))


@pytest.fixture(autouse=True)
def sigterm_as_before():
    """A training loop leaves its SIGTERM handler behind; undo that after each test."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
    if group := sys.modules.get("qat_lora.hosts.group"):
        group.SIGTERM.clear()


@pytest.fixture(params=["native", "torch"])
def kernels(request, monkeypatch):
    """Run a test with the C kernels, for tensors of any size, and with torch's operations."""
    from qat_lora.kernels import native

    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("no C compiler with OpenMP")
    monkeypatch.setattr(native, "SMALLEST", 1)


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """Byte-level BPE, 512 tokens, trained on Python's help topics; EOS `<|im_end|>`, pad `<|pad|>`."""
    from qat_lora.hardware import tiny

    return tiny.tokenizer()


@pytest.fixture(scope="session")
def tiny_model_dir(tiny_tokenizer, tmp_path_factory):
    """Folder with a random two-layer Llama and `tiny_tokenizer`, as save_pretrained writes them. Do not write to it."""
    from qat_lora.hardware import tiny

    folder = tmp_path_factory.mktemp("tiny_model")
    tiny.model(tiny_tokenizer).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def sharp_model_dir(tiny_model_dir, tiny_tokenizer, tmp_path_factory):
    """`tiny_model_dir` with ten times larger weights: its distributions are far from uniform, so 2 bits hurt."""
    from qat_lora.models.loading import load_model

    model = load_model(str(tiny_model_dir))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(10)
    folder = tmp_path_factory.mktemp("sharp_model")
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def gguf_file(sharp_model_dir, tmp_path_factory):
    """The model of `sharp_model_dir` as a .gguf file."""
    from packaged import gguf_bytes

    path = tmp_path_factory.mktemp("gguf") / "sharp.gguf"
    gguf_bytes(sharp_model_dir, path)
    return path


@pytest.fixture
def gemma_package(gguf_file, tmp_path, monkeypatch):
    """A package folder in `tmp_path` that provides `gguf_file` as gemma3-270m, whatever is installed."""
    from packaged import MODULE, make_package

    for name in [name for name in sys.modules if name.startswith(MODULE)]:
        monkeypatch.delitem(sys.modules, name)
    folder = make_package(tmp_path / "site", gguf_file.read_bytes())
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setenv("PYTHONPATH", f"{folder.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    yield folder
    for name in [name for name in sys.modules if name.startswith(MODULE)]:
        del sys.modules[name]


@pytest.fixture
def no_gemma(monkeypatch):
    """Hide the package of gemma3-270m, whatever is installed."""
    from packaged import MODULE

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == MODULE else find(name))


@pytest.fixture(scope="session")
def full_model_dir(tiny_tokenizer, tmp_path_factory):
    """full_model_dir(model): the model's folder, with random values in every parameter, so that each one matters."""
    import torch

    def make(model):
        random = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=random)
            parameter.data = 1 + 0.1 * noise if "norm" in name else 0.2 * noise
        folder = tmp_path_factory.mktemp(model.config.model_type)
        model.save_pretrained(folder)
        tiny_tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def sharp_cache(sharp_model_dir, tiny_tokenizer, tmp_path_factory):
    """KD cache of `sharp_model_dir`: 40 training and 8 held-out rows of 32 tokens, K = 8, 12 draws. Do not write to it.

    With 16 rows per shard the training rows take three files, the last of which is only partly full.
    """
    from qat_lora.backend import TorchBackend
    from qat_lora.data.chat import documents
    from qat_lora.data.packing import fingerprint, pack, split_heldout, tokenizer_fingerprint
    from qat_lora.data.text import read_rows
    from qat_lora.kd.cache import CacheSpec, write_cache
    from qat_lora.models.loading import load_model

    rows = pack(documents(read_rows("embedded"), tiny_tokenizer, "off"), tiny_tokenizer, 32, 48)
    train, heldout = split_heldout(rows, 8 / 48)
    spec = CacheSpec(
        teacher=str(sharp_model_dir), tokenizer=tokenizer_fingerprint(tiny_tokenizer), text=fingerprint(rows),
        precision="fp32", length=32, k=8, draws=12, vocab=512, seed=0, rows_per_shard=16, train_rows=40, heldout_rows=8,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("sharp_cache")
    split, backend = {"train": train, "heldout": heldout}, TorchBackend("cpu", "fp32")
    list(write_cache(folder, spec, split, load_model(str(sharp_model_dir)), backend, 4))
    return folder


@pytest.fixture(scope="session")
def backend():
    """The reference: one worker on the CPU, in fp32."""
    from qat_lora.backend import TorchBackend

    return TorchBackend("cpu", "fp32")


@pytest.fixture(scope="session")
def data(sharp_cache):
    """The training and the held-out rows of `sharp_cache`."""
    from qat_lora.kd.dataset import KDCacheDataset

    return KDCacheDataset(sharp_cache), KDCacheDataset(sharp_cache, "heldout")


@pytest.fixture
def make_session(tmp_path):
    """make_session(name, backend, save=0): a Session in the run directory of that name, resumed if it exists."""
    from qat_lora.run.rundir import Run
    from qat_lora.run.session import Every, Session

    def make(name, backend, save=0):
        path = tmp_path / name
        resumed = path.exists()
        path.mkdir(exist_ok=True)
        return Session(Run(path, resumed), backend, Every(log=1, save=save))

    return make


@pytest.fixture(scope="session")
def make_student(tmp_path_factory):
    """make_student(model_dir): best.pt of its untrained student, MLP at balanced2/g32 and attention at lut4/r4."""
    from qat_lora.models.loading import load_model
    from qat_lora.quant.init import initialise
    from qat_lora.quant.student import StudentSpec, quantize, save_student

    def make(model_dir):
        spec = StudentSpec(mlp="balanced2/g32", attn="lut4/r4")
        model = quantize(load_model(str(model_dir)), spec)
        initialise(model)
        path = tmp_path_factory.mktemp("student") / "best.pt"
        save_student(path, model, str(model_dir), spec, {})
        return path

    return make


@pytest.fixture(scope="session")
def make_adapter(tmp_path_factory):
    """make_adapter(model_dir): a PEFT folder with a random LoRA (q, down; rank 4, alpha 8) for it or its student."""
    import torch
    from peft import LoraConfig, get_peft_model

    from qat_lora.models.loading import load_model

    def make(model_dir):
        config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(load_model(str(model_dir)), config)
        random = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=random) * 0.2)
        folder = tmp_path_factory.mktemp("adapter")
        model.save_pretrained(folder, save_embedding_layers=False)
        return folder

    return make


@pytest.fixture
def dies_at(monkeypatch):
    """with dies_at(n): the loop inside, whichever it is, is interrupted in the optimiser step of its n-th update."""
    from qat_lora.train.loop import Update

    @contextlib.contextmanager
    def dying(number: int):
        calls, step = itertools.count(1), Update.step

        def deadly(self):
            if next(calls) == number:
                raise KeyboardInterrupt
            return step(self)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Update, "step", deadly)
            yield

    return dying


@pytest.fixture(scope="session")
def load_script():
    """load_script(name): scripts/<name>.py, or benchmarks/<name>.py, as a module; a subprocess would import torch again
    for each call."""
    root, patch = Path(__file__).resolve().parents[1], pytest.MonkeyPatch()

    @functools.cache
    def load(name: str):
        path = root / "scripts" / f"{name}.py"
        if not path.exists():
            path = root / "benchmarks" / f"{name}.py"
            patch.syspath_prepend(path.parent)  # as when it is run: benchmarks import modules from their own folder
        spec = importlib.util.spec_from_file_location(f"scripts_{name}", path)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look up their module
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def run(load_script):
    """run(script, *flags): main(parse(flags)), as the command line does."""
    from qat_lora.run.command_line import parse

    def main(script: str, *flags) -> None:
        module = load_script(script)
        module.main(parse(module.Config, script, list(map(str, flags))))

    return main


@pytest.fixture
def refusal(load_script, monkeypatch, capsys):
    """refusal(name, *flags): the error line of a script for bad input; also checks exit code 2 and no output."""
    from qat_lora.run.command_line import run_script

    def refuse(name: str, *flags) -> str:
        module = load_script(name)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, flags)])
        with pytest.raises(SystemExit) as stop:
            run_script(module.main, module.Config, name, module.__doc__)
        said = capsys.readouterr()
        assert stop.value.code == 2 and said.out == ""
        assert said.err.startswith("error: ") and said.err.count("\n") == 1
        return said.err

    return refuse
