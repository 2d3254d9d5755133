"""Do the formulas of step_cost.py agree with CPU processes of this machine? `step_on_paper.py --part check` runs it.

Each number of workers is a job (gloo, one thread each, SmolLM2-135M's shape with fewer blocks, random weights and
rows). For each stage, with whole models and with shards, it measures the rates of a matrix product and of the
collectives, all workers at the same time, then updates of `MICRO` micro-batches: their time, and the bytes that pass
the loopback interface. One worker also counts the operations of an update.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import transformers
from one_update import update
from scaling import rows
from step_cost import STAGES, bytes_sent, config_of, empty, micro_batch_flops, traffic, trained
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from qat_lora.backend import TorchBackend
from qat_lora.errors import UserError
from qat_lora.hosts.environment import Timeouts
from qat_lora.hosts.group import Group
from qat_lora.hosts.launch import Job, connect, spawn
from qat_lora.hosts.revision import revision
from qat_lora.kd.training import kd_loss
from qat_lora.kernels.optimizer import new_optimizer
from qat_lora.models.architecture import unwrap
from qat_lora.models.compiling import placed
from qat_lora.quant.init import initialise
from qat_lora.train.loop import Plan

SHAPE = "smollm2-135m"
MICRO, ROWS, LENGTH = 2, 2, 128  # micro-batches of an update and worker, their rows, tokens of a row
SIZE = 2**23  # fp32 numbers of a tensor that is reduced or gathered: 32 MB
COUNTERS = Path("/proc/net/dev")


# -- what every worker runs ------------------------------------------------------------------------------------------
def measure(cfg, path: Path, group: Group, local_rank: int) -> None:
    """Measure everything in one job; worker 0 writes the figures to `path`."""
    torch.set_num_threads(1)
    if group.world_size > 1:
        connect(group, "gloo")
    backend = TorchBackend("cpu", "fp32", group)
    found = {}
    for stage in STAGES:
        for shard in (False, True)[: 1 + (group.world_size > 1)]:
            rates = {"product": product_rate(cfg.steps, backend)}
            for name in ("all_reduce", "all_gather") if group.world_size > 1 else ():
                rates[name] = collective_rate(name, cfg.steps, backend)
            found[f"{stage} {shard}"] = rates | updates(cfg, backend, stage, shard)
    if backend.is_main:
        path.write_text(json.dumps(found), encoding="utf-8")


def slowest(function: Callable, backend: TorchBackend) -> float:
    """Seconds that function() takes in the slowest worker; all start together."""
    backend.group.gather(None)
    started = time.perf_counter()
    function()
    return max(backend.group.gather(time.perf_counter() - started))


def product_rate(steps: int, backend: TorchBackend) -> float:
    """FLOP/s of a worker in the product of an MLP layer."""
    config = config_of(SHAPE)
    x = torch.randn(ROWS * LENGTH, config.hidden_size)
    weight = torch.randn(config.hidden_size, config.intermediate_size)
    seconds = [slowest(lambda: [x @ weight for _ in range(50)], backend) for _ in range(1 + steps)]
    return 50 * 2 * x.numel() * config.intermediate_size / median(seconds[1:])


def collective_rate(name: str, steps: int, backend: TorchBackend) -> float:
    """Bytes/s that a worker sends in a collective, see `bytes_sent`."""
    share, part, workers = torch.ones(SIZE), torch.ones(SIZE // backend.world_size), backend.world_size
    run = {"all_reduce": lambda: dist.all_reduce(share), "all_gather": lambda: dist.all_gather_into_tensor(share, part)}
    seconds = median([slowest(run[name], backend) for _ in range(1 + steps)][1:])
    return (1 + (name == "all_reduce")) * (workers - 1) / workers * share.nbytes / seconds


def updates(cfg, backend: TorchBackend, stage: str, shard: bool) -> dict:
    """Median seconds and mean bytes of an update; with one worker, also its operations."""
    torch.manual_seed(cfg.seed)
    model = transformers.AutoModelForCausalLM.from_config(config_of(SHAPE, num_hidden_layers=cfg.layers))
    model = placed(trained(model, stage, cfg.rank, partial(initialise, search=False)), backend, shard).train()
    plan = Plan(
        steps=cfg.steps, batch_size=ROWS, accumulation=MICRO, learning_rate=1e-6, warmup_steps=0,
        clip_grad_norm=1.0, seed=cfg.seed,
    )  # fmt: skip
    optimizer = new_optimizer(model, 1e-6, backend)
    stream = repeat(rows(cfg, config_of(SHAPE).vocab_size, backend.device))
    run = partial(update, model, stream, kd_loss, optimizer, plan, backend)
    found = {}
    if backend.world_size == 1:  # the fused attention of the CPU is not counted
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            run()
        found["flops"] = counter.get_total_flops()
    run()
    before = sent_on_loopback(backend)
    seconds = [slowest(run, backend) for _ in range(cfg.steps)]
    return found | {"seconds": median(seconds), "bytes": (sent_on_loopback(backend) - before) / cfg.steps}


def sent_on_loopback(backend: TorchBackend) -> int:
    """Bytes that all workers have sent through the loopback interface so far, with headers."""
    backend.group.gather(None)
    line = next(line for line in COUNTERS.read_text(encoding="utf-8").splitlines() if line.strip().startswith("lo:"))
    backend.group.gather(None)
    return int(line.split()[9])


# -- what is compared ------------------------------------------------------------------------------------------------
def check(cfg) -> None:
    """Run the jobs, and print what the formulas predict beside what they measured."""
    counts = [int(count) for count in cfg.workers.split(",")]
    if counts[0] != 1 or not COUNTERS.exists():
        raise UserError(f"--part check needs --workers to start with 1 ({cfg.workers}), and Linux for {COUNTERS}")
    cfg = dataclasses.replace(cfg, batch_size=ROWS, length=LENGTH)
    print(f"{SHAPE} with {cfg.layers} blocks, {MICRO}×{ROWS}×{LENGTH} tokens a worker, commit {revision()}")
    if cfg.dry_run:
        return
    found = {}
    with TemporaryDirectory() as folder:
        for count in counts:
            path = Path(folder, f"{count}.json")
            spawn(Job(partial(measure, cfg, path), cfg.debug, Timeouts()), count)
            found[count] = json.loads(path.read_text(encoding="utf-8"))
    models = {
        stage: trained(empty(config_of(SHAPE, num_hidden_layers=cfg.layers)), stage, cfg.rank) for stage in STAGES
    }
    compare_operations(models, found[1])
    compare_bytes(models, found)
    compare_seconds(models, found)


def compare_operations(models: dict[str, nn.Module], one: dict) -> None:
    print(
        "\n| operations of an update | predicted, 10⁹ | counted, 10⁹ | predicted / counted | counted / s / product's |"
    )
    print("|---|---:|---:|---:|---:|")
    for stage, model in models.items():
        logits = 1 + unwrap(model).get_output_embeddings().weight.requires_grad
        here, job = MICRO * micro_batch_flops(model, ROWS, LENGTH, False, logits), one[f"{stage} False"]
        rate = job["flops"] / job["seconds"] / job["product"]
        print(f"| {stage} | {here / 1e9:.1f} | {job['flops'] / 1e9:.1f} | {here / job['flops']:.3f} | {rate:.2f} |")


def kinds(models: dict[str, nn.Module], found: dict[int, dict]) -> Iterator[tuple]:
    """Yield the start of a line, the traffic and the figures of each kind of update of several workers, and the figures
    of one worker."""
    for count in [count for count in found if count > 1]:
        for stage, model in models.items():
            for shard in (False, True):
                start = f"| {count} | {stage}{', shared out' * shard} |"
                yield (
                    start,
                    count,
                    traffic(model, count, shard),
                    found[count][f"{stage} {shard}"],
                    found[1][f"{stage} False"],
                )


def compare_bytes(models: dict[str, nn.Module], found: dict[int, dict]) -> None:
    print("\n| workers | stage | MB that a worker sends, predicted | measured | predicted / measured |")
    print("|---:|---|---:|---:|---:|")
    for start, count, whole, job, _ in kinds(models, found):
        sent, real = bytes_sent(whole, count, MICRO, gloo=True), job["bytes"] / count
        print(f"{start} {sent / 1e6:.2f} | {real / 1e6:.2f} | {sent / real:.3f} |")


def compare_seconds(models: dict[str, nn.Module], found: dict[int, dict]) -> None:
    """Predicted: one worker's seconds at the rate that each worker now has, plus the bytes at the rates of their
    collectives, since a CPU's cores do both."""
    print("\n| workers | stage | GFLOP/s of a product (one worker) | GB/s, all-reduce, all-gather |", end="")
    print(" s, predicted: computing + network | s, measured | predicted / measured |\n|---:|---|" + "---:|" * 5)
    for start, count, whole, job, one in kinds(models, found):
        sent = bytes_sent(whole, count, MICRO, gloo=True)
        gathered = bytes_sent(dataclasses.replace(whole, scattered=0, reduced=0), count, MICRO)
        computing = one["seconds"] * one["product"] / job["product"]
        network = gathered / job["all_gather"] + (sent - gathered) / job["all_reduce"]
        print(
            f"{start} {job['product'] / 1e9:.0f} ({one['product'] / 1e9:.0f}) | {job['all_reduce'] / 1e9:.2f}, "
            f"{job['all_gather'] / 1e9:.2f} | {computing:.2f} + {network:.2f} | {job['seconds']:.2f} | "
            f"{(computing + network) / job['seconds']:.2f} |"
        )
