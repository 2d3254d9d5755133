"""How fast an experiment's updates are at the shapes of a run, and where their time goes."""

import copy
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import transformers
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from qat_lora.ahead.aot import CHIPS, DETECTED
from qat_lora.ahead.trial import Trial, open_trial
from qat_lora.backend.detect import tpu_chips
from qat_lora.hardware.experiments import LANGUAGE_MODELS, tried
from qat_lora.hardware.place import Figures, Machine, Skipped
from qat_lora.hardware.tiny import PLAIN
from qat_lora.models.architecture import decoder_layers, text_config, unwrap
from qat_lora.quant.student import freeze_plain_tables
from qat_lora.train.memory import peak_phase

# Peak dense bf16 TFLOP/s by name, from NVIDIA's data sheets (SXM where there are several).
PEAKS = {"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "A100": 312, "L40S": 362, "L40": 181, "L4": 121}
KINDS = {  # kinds of kernels and operators, by the first pattern that their name matches
    "communication": r"nccl|all_?reduce",
    "attention": r"flash|fmha|attention|attn",
    "matrix products": r"gemm|nvjet|cutlass|matmul|::(add)?mm$|::bmm|cublas|linear",
    "quantiser": r"_quantise|_gradients",
    "optimiser": r"adam|foreach|multi_tensor|_update_moments|_apply_moves",
    "copies": r"memcpy|memset|copy|to_copy|\bcat|fill",
    "LM head": r"^_softmax|^_normalise",
    "reductions": r"reduce|softmax|norm|::sum|::mean|argmax|sort|topk",
    "elementwise": r"elementwise|vectorized|triton|aten::",
}
PHASES = {"teacher cache": "a teacher pass", "SFT and GRPO": "GRPO"}  # of the dry run's estimate; others: training
UPDATES = {"tiny": 4, "real": 8}


def measure(name: str, place: Machine) -> Figures:
    """An experiment's figures: milliseconds of an update, tokens per second, model FLOPs utilisation, peak memory
    beside the dry run's estimate, share of time by kind of kernel and, for a language model, the same update of plain
    fine-tuning."""
    found: Figures = {}

    @contextmanager
    def profiled() -> Iterator[None]:
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        with profile(activities=kinds) as seen:
            yield
        found["time by kernel"] = shares(seen, place.device == "cuda")

    around = None if place.device in ("tpu", "xla") else profiled  # torch's profiler does not see XLA's kernels
    how = {"updates": UPDATES[place.size], "around": around}
    backend = tried(name, place.size, place.model, place.device, "auto", **how)
    phase = list(backend.seconds)[-1]
    seconds, tokens = backend.seconds[phase], backend.trained[phase]
    figures = {"phase": phase, "ms": seconds * 1e3, "tokens/s": tokens / seconds, "precision": backend.precision}
    if not backend.shares_host_memory:
        trained = backend.estimate.keys() & {PHASES.get(name, "training")}
        _, parts = peak_phase({key: backend.estimate[key] for key in trained} or backend.estimate, backend)
        figures |= {"peak GB": backend.peaks[phase] / 1e9, "dry run's estimate GB": sum(parts.values()) / 1e9}
    figures |= found
    if name in LANGUAGE_MODELS:
        rows = backend.batch["tokens"]
        if peak := peak_flops(backend.name):
            figures["MFU"] = model_flops(backend.placed[0], tokens, rows.shape[1]) / seconds / peak
        config = plain_config(backend)
        try:
            plain, memory = plain_update(config, rows, backend)
        except torch.OutOfMemoryError:
            return figures | {"plain ms": "out of memory"}
        figures |= {
            "plain ms": plain * 1e3, "plain tokens/s": rows.numel() / plain,
            "step / plain": seconds / plain * rows.numel() / tokens,
        } | ({} if backend.shares_host_memory else {"plain peak GB": memory / 1e9})  # fmt: skip
    backend.release()
    return figures


def measure_compiled(place: Machine) -> Figures:
    """Milliseconds of an update of QAT and of plain fine-tuning on its rows, each as it is and with its decoder blocks
    in torch.compile."""
    backend = open_trial(place.device, "auto")
    if backend.static_shapes:
        raise Skipped("XLA compiles everything")
    if not backend.compiles("on"):
        raise Skipped("torch.compile does not work here")
    found = {}
    for compile, name in (("off", "as it is"), ("on", "compiled")):
        options = place.size, place.model, place.device, "auto", "--compile", compile
        backend = tried("QAT", *options, updates=UPDATES[place.size])
        rows, config = backend.batch["tokens"], plain_config(backend)
        found[f"QAT {name} ms"] = 1e3 * backend.seconds["qat: update"]
        found[f"plain {name} ms"] = 1e3 * plain_update(config, rows, backend, compiled=compile == "on")[0]
        backend.release()
    return found | {"QAT compiled / plain compiled": found["QAT compiled ms"] / found["plain compiled ms"]}


def plain_config(backend: Trial):
    """The settings of the model that was trained, with transformers' own attention. Frees the model's memory."""
    config = copy.deepcopy(unwrap(backend.placed[0]).config)
    config._attn_implementation = PLAIN
    backend.release()
    return config


def plain_update(config, rows: torch.Tensor, backend: Trial, compiled: bool = False) -> tuple[float, float]:
    """(seconds, peak bytes) of an update of plain fine-tuning on rows [B, L]: Hugging Face's own loss over full logits,
    torch's clipping and its fused AdamW, on a model of the same shapes whose embedding and head are frozen."""
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = backend.place(freeze_plain_tables(made)).train()
    for block in decoder_layers(model) if compiled else ():
        block.compile(dynamic=False)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-5, fused=not backend.static_shapes)

    def update() -> None:
        with backend.autocast():
            loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        backend.step_boundary()

    for _ in range(2):
        update()
    backend.wait()
    backend.forget_peak()
    started, count = time.perf_counter(), UPDATES["tiny" if backend.shares_host_memory else "real"]
    for _ in range(count):
        update()
    backend.wait()
    return (time.perf_counter() - started) / count, backend.peak_memory_mb() * 2**20


def shares(seen: profile, on_gpu: bool) -> str:
    """The share of time by kind, of the GPU's kernels or of the operators on the CPU."""
    times: dict[str, float] = {}
    for event in seen.key_averages():
        if event.is_user_annotation or (on_gpu and event.device_type != DeviceType.CUDA):
            continue
        kind = next((kind for kind, names in KINDS.items() if re.search(names, event.key, re.IGNORECASE)), "other")
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        times[kind] = times.get(kind, 0.0) + spent
    whole = sum(times.values()) or 1.0
    parts = sorted(times.items(), key=lambda item: -item[1])
    return ", ".join(f"{kind} {spent / whole:.0%}" for kind, spent in parts if spent >= 0.005 * whole)


def peak_flops(name: str) -> float | None:
    """Peak bf16 operations per second of a device by its name; None if we do not know it."""
    if chips := [chip for chip in (DETECTED.get(chip, chip) for chip in tpu_chips()) if chip in CHIPS]:
        return CHIPS[chips[0]].teraflops * 1e12
    return next((peak * 1e12 for key, peak in PEAKS.items() if re.search(rf"\b{key}\b", name)), None)


def model_flops(model: nn.Module, tokens: int, length: int) -> float:
    """Floating-point operations that an update needs: for each weight of a linear layer and each token 2 forward, 2 for
    the gradient of the input, and 2 for that of the weight if it is trained; causal attention 6 for each pair of tokens
    and each channel of the queries. Nothing for what is computed twice, or for elementwise work."""
    text = text_config(unwrap(model))
    linear = sum(
        (6 if module.weight.requires_grad else 4) * module.weight.numel()
        for module in model.modules()
        if isinstance(module, nn.Linear)
    )
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return tokens * (linear + 6 * text.num_hidden_layers * length * text.num_attention_heads * width)
