"""Checks of QAT, recovery and GRPO on torch_xla's CPU device, run by xla_process.py."""

from itertools import islice

import torch
from loops import learn, train_grpo, train_qat, train_recovery_lora
from loops import one_update as updated
from safetensors.torch import load_file
from students import student_of
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from xla_process import CPU, MODEL, OUT, XLA, apart, difference, on_both, open_session

from qat_lora.backend import open_backend
from qat_lora.backend.xla import fallback_names
from qat_lora.data.batches import batches
from qat_lora.experiments.musclebob.questions import heldout_questions
from qat_lora.experiments.musclebob.validation import BobSampler
from qat_lora.kd.anchor import Anchor
from qat_lora.kd.targets import teacher_targets
from qat_lora.kd.training import heldout_figures, kd_loss
from qat_lora.kernels.head import Head
from qat_lora.kernels.optimizer import new_optimizer
from qat_lora.layer_qat import LayerPlan, train_layers
from qat_lora.lora.adapter import save_adapter
from qat_lora.lora.add import add_adapter
from qat_lora.models.architecture import decoder_layers
from qat_lora.models.loading import load_model, load_tokenizer
from qat_lora.quant.blockwise import compensate_block, first_inputs
from qat_lora.quant.init import initialise
from qat_lora.quant.linear import QuantLinear, quantized_layers
from qat_lora.quant.spec import QuantSpec
from qat_lora.quant.student import StudentSpec
from qat_lora.rl.grpo import GRPOPlan, PromptDataset, prompt_stream, roll_out
from qat_lora.rl.objective import Objective
from qat_lora.rl.policy import Prompts
from qat_lora.rl.rollout import Sampling, rollout
from qat_lora.run.session import Every
from qat_lora.train.loop import Plan
from qat_lora.train.losses import sparse_loss

SPEC = StudentSpec(mlp="balanced2/g32", attn="lut4/r4")
GRIDS = (
    "balanced2/g32", "int4/g32", "lut4/r4", "balanced3/tensor", "ternary/g32", "int2/g32+offset",
    "int2/g16+offset/s4x64", "int3/g16/s6", "int4/rows8", "int4/g32+zero",
)  # fmt: skip


class Cached(torch.utils.data.Dataset):
    """Random rows with random sparse targets, as KDCacheDataset gives them."""

    def __init__(self, count: int, length: int = 16, vocab: int = 512, width: int = 4):
        random = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(vocab, (count, length), generator=random)
        self.index = torch.randint(vocab, (count, length, width), generator=random)
        self.prob = torch.rand(count, length, width, generator=random).softmax(-1)

    def __len__(self):
        return len(self.tokens)

    def kept(self, i):
        return self.tokens.shape[1]

    def __getitem__(self, i):
        mask = torch.ones(self.tokens.shape[1], dtype=torch.uint8)
        entropy = -(self.prob[i] * self.prob[i].log()).sum(-1)
        item = {"tokens": self.tokens[i], "index": self.index[i], "prob": self.prob[i]}
        return item | {"mask": mask, "entropy": entropy}


def one_update(backend, loss_of=kd_loss) -> tuple[nn.Module, dict]:
    """A student after one update, and its figures."""
    student, plan = make_student(backend), Plan(1, 2, 1, 1e-3, 0, 1.0, seed=0)
    optimizer = new_optimizer(student, 1e-3, backend)
    stream = backend.prefetch(batches(Cached(4), 2, 1, 0))
    return student, updated(student, stream, loss_of, optimizer, plan, backend)


def make_student(backend, model: nn.Module | None = None) -> nn.Module:
    return backend.place(student_of(model or MODEL, SPEC))


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.cpu() for n, p in module.named_parameters() if p.grad is not None}


# -- training --------------------------------------------------------------------------------------------------------
def qat() -> dict:
    """train_qat with everything on: warm-up, accumulation, logging, evaluation, saving, more than one epoch."""

    def train(backend, session) -> None:
        student, data = make_student(backend), Cached(10)
        plan = Plan(5, 2, 2, 3e-3, 3, 1.0, seed=0)
        train_qat(student, data, plan, session, lambda step: heldout_figures(student, data, backend, 2, 5))

    return on_both("qat", train, Every(log=1, evaluate=3, save=2))


def recovery() -> dict:
    def train(backend, session) -> None:
        student, data = make_student(CPU).requires_grad_(False), Cached(6)
        model = backend.place(add_adapter(student, 2, 4, ("q", "v", "down"), seed=0))
        session.anchor = Anchor(Cached(7), 0.5)

        def evaluate(step: int) -> dict:
            save_adapter(model, OUT / f"adapter-{backend.kind}", "student")
            return heldout_figures(model, data, backend, 2, 4)

        train_recovery_lora(model, data, "kd", Plan(4, 2, 1, 3e-3, 1, 1.0, seed=0), session, evaluate)

    found = on_both("recovery", train, Every(log=1, evaluate=2, save=2))
    xla, cpu = (load_file(OUT / f"adapter-{name}" / "adapter_model.safetensors") for name in ("xla", "cpu"))
    return found | {"adapter": apart(xla, cpu)}


def layers() -> dict:
    """The layer stage of a four-block model."""
    config = LlamaConfig.from_pretrained(MODEL, num_hidden_layers=4)

    def train(backend, session) -> None:
        torch.manual_seed(0)
        student = make_student(backend, LlamaForCausalLM(config).eval())
        rows = list(islice(batches(Cached(4), 2, 1, 0), 2))
        train_layers(student, rows, LayerPlan(3, 1e-3, 1.0), session)

    return on_both("layers", train, Every(log=1, save=5))


def bf16() -> dict:
    """One bf16-autocast update of a student, as on a TPU."""
    backend = open_backend("xla", "bf16")
    student, figures = one_update(backend)
    with torch.no_grad():
        exact = kd_loss(make_student(CPU), next(batches(Cached(4), 2, 1, 0))).item()
    return {
        "loss": backend.fetch(figures["loss"])[0], "cpu": exact, "master": str(student.lm_head.weight.dtype),
        "auto": open_backend("xla").bf16,
    }  # fmt: skip


def late() -> dict:
    """Graphs compiled by the second of two updates, 1000 updates later and at a learning rate that has almost
    decayed."""
    weight = nn.Parameter(torch.ones(3, 5).to(XLA.device))
    optimizer = new_optimizer(nn.ParameterList([weight]), 1e-3, XLA, weight_decay=0.01)
    (group,), compiles = optimizer.param_groups, []
    for step, rate in ((0, 1e-3), (1000, 1e-9)):
        before = XLA.counters()["compiles"]
        group["step"], group["lr"] = step, rate
        weight.grad.add_(1)
        XLA.update(optimizer, 1.0)
        compiles.append(XLA.counters()["compiles"] - before)
    return {"compiles": compiles}


def planted() -> dict:
    """A host read in the step must be counted."""
    before = XLA.counters()["fallbacks"]

    def loss_of(model, batch):
        loss = kd_loss(model, batch)
        loss.item()
        return loss

    one_update(XLA, loss_of)
    return {"fallbacks": XLA.counters()["fallbacks"] - before, "names": fallback_names()}


# -- pieces ----------------------------------------------------------------------------------------------------------
def compensation() -> dict:
    """GPTQ on the first block: the share of codes on XLA, and of plainly rounded codes, that differ from the CPU's."""
    codes = {}
    for backend in (XLA, CPU):
        student = make_student(backend)
        block = decoder_layers(student)[0]
        codes["plain"] = encoded(block)
        hidden, calls = first_inputs(student, [{"tokens": Cached(4).tokens}], backend)
        compensate_block(block, hidden, calls[0], backend)
        codes[backend.kind] = encoded(block)
    share = {name: (codes[name] != codes["cpu"]).float().mean().item() for name in ("xla", "plain")}
    return share | {"fallbacks": XLA.counters()["fallbacks"]}


def encoded(block) -> torch.Tensor:
    layers = quantized_layers(block).values()
    return torch.cat([layer.quantizer.encode(layer.weight).cpu().flatten() for layer in layers])


def pieces() -> dict:
    """sparse_loss, teacher_targets and the fake-quant gradient against the CPU."""
    torch.manual_seed(0)
    hidden, head = torch.randn(2, 5, 8), torch.randn(40, 8)
    index, prob = torch.randint(40, (2, 5, 3)), torch.rand(2, 5, 3).softmax(-1)
    mask = torch.tensor([[1, 1, 0, 1, 1], [1, 0, 1, 1, 1]], dtype=torch.uint8)
    index[:, :, 2] = index[:, :, 0]  # a token twice
    out, results = {}, {}
    for name, trained, form in (("plain", True, {}), ("frozen and capped", False, {"cap": 5.0, "after": 0.5})):
        for backend in (XLA, CPU):
            h, w = (t.clone().to(backend.device) for t in (hidden, head))
            h, w = h.requires_grad_(), w.requires_grad_(trained)
            backend.step_boundary()
            loss = sparse_loss(h, Head(w, **form), *(t.to(backend.device) for t in (index, prob, mask)))
            backend.backward(loss)
            results[backend] = [t.cpu() for t in (loss.detach(), h.grad, *([w.grad] if trained else []))]
        out[name] = max(map(difference, results[XLA], results[CPU]))

    out["bf16 rows"] = bf16_rows()
    tokens, uniforms = Cached(2).tokens, torch.rand(2, 16, 6)
    for backend in (XLA, CPU):
        teacher = backend.place(load_model(MODEL))
        results[backend] = teacher_targets(teacher, tokens.to(backend.device), 5, uniforms.to(backend.device))
    out["targets"] = max(difference(results[XLA][n].float(), results[CPU][n].float()) for n in ("prob", "entropy"))
    for name in ("index", "tail"):
        out[name] = (results[XLA][name].cpu() == results[CPU][name]).float().mean().item()

    x = torch.randn(7, 64)
    for text in GRIDS:
        for backend in (XLA, CPU):
            torch.manual_seed(2)
            layer = QuantLinear(nn.Linear(64, 32), QuantSpec.parse(text))
            initialise(layer)
            backend.place(layer)
            backend.backward(layer(x.to(backend.device)).square().sum())
            results[backend] = gradients(layer)
        out[text] = apart(results[XLA], results[CPU])
    return out


def bf16_rows() -> float:
    """The relative error of the gradient of hidden states in bf16, where targets cancel most of the softmax, against
    the exact one for the same rounded factors and logits."""
    torch.manual_seed(0)
    hidden, head = torch.randn(64, 64), torch.randn(500, 64) / 2
    logits = (hidden.bfloat16() @ head.bfloat16().T).double()
    prob, index = (hidden @ head.T).topk(12)
    prob = prob.softmax(1)
    h, w = hidden.to(XLA.device).requires_grad_(), head.to(XLA.device)
    with torch.autocast("xla", dtype=torch.bfloat16):
        loss = sparse_loss(h[None], w, *(t.to(XLA.device)[None] for t in (index, prob, torch.ones(64))))
    XLA.backward(loss)
    exact = logits.softmax(1).scatter_add_(1, index, -prob.double()) @ head.bfloat16().double() / 64
    return float((h.grad.cpu() - exact).norm() / exact.norm())


def checkpointing() -> dict:
    """Gradients on XLA with recomputation against those without, and those without against the CPU's in fp64: in fp32
    the CPU's would add rounding that differs between CPUs."""
    out = {}
    for kind in ("all", "lora"):
        found = {}
        for name, backend in (("plain", XLA), ("recomputed", XLA), ("cpu", CPU)):
            model, batch = make_student(CPU), {key: value.unsqueeze(0) for key, value in Cached(3)[2].items()}
            if kind == "lora":
                torch.manual_seed(0)
                model = add_adapter(model.requires_grad_(False), 2, 2, ("q", "down"), seed=0)
                for n, p in model.named_parameters():
                    if "lora_B" in n:
                        nn.init.normal_(p, std=0.1)
            if backend is CPU:
                model.double()
                batch = {key: v.double() if v.is_floating_point() else v for key, v in batch.items()}
            backend.place(model)
            if name == "recomputed":
                backend.gradient_checkpointing(model)
            backend.backward(kd_loss(model.train(), backend.to_device(batch)))
            backend.step_boundary()
            found[name] = gradients(model)
        out |= {f"{kind} {name}": apart(found[name], found["plain"]) for name in ("recomputed", "cpu")}
    return out


# -- GRPO ------------------------------------------------------------------------------------------------------------
PROMPTS = [[5, 6, 7, 8], [40, 41], [30, 31, 32], [9]]


def policy(backend) -> nn.Module:
    model = load_model(MODEL)
    model.get_input_embeddings().weight.requires_grad_(False)
    return backend.place(model)


def generation() -> dict:
    """Greedy completions on both backends, and the compiles on XLA for each of two lengths, generated twice."""
    tokens, compiles = {}, []
    for backend in (CPU, XLA):
        model, prompts = policy(backend), Prompts.of(PROMPTS, 6, 0)
        placed = Prompts(**backend.to_device(vars(prompts)))
        for length in (8, 8, 40, 40):
            before = backend.counters().get("compiles", 0)
            done = rollout(model, placed, 2, length, Sampling(0.0), [2, 17], backend)
            said, mask = backend.to_host([done.tokens, done.mask])
            tokens[backend] = [said[mask].tolist(), mask.sum(2).tolist()]
            compiles.append(backend.counters().get("compiles", 0) - before)
    return {"same": tokens[CPU] == tokens[XLA], "compiles": compiles[4:], "fallbacks": XLA.counters()["fallbacks"]}


def grpo() -> dict:
    """Four steps on XLA with validation, logging and saving; and one update on the same rollouts on both backends."""

    def low_tokens(number: int, tokens: list[int], ended: bool) -> tuple[float, dict]:
        return sum(token < 256 for token in tokens) / max(1, len(tokens)), {}

    prompts = PromptDataset(Prompts.of(PROMPTS, 6, 0))
    plan = GRPOPlan(
        steps=4, batch_size=2, accumulation=2, learning_rate=3e-3, warmup_steps=1, clip_grad_norm=1.0, seed=0, group=4,
        length=8, ends=(2,), sampling=Sampling(top_k=300, top_p=0.99), objective=Objective(beta=0.05),
    )  # fmt: skip
    model, reference = policy(XLA), policy(XLA).requires_grad_(False)
    sampler = BobSampler(load_tokenizer(MODEL), XLA, (2,), 4, 200, 8)

    def evaluate(step: int) -> dict:
        """A validation whose last batch is padded."""
        questions = heldout_questions()[:3]
        sampled = sampler.answers(model, questions, 2, Sampling())
        greedy = sampler.answers(model, questions, 1, Sampling(0.0))
        return {"answers": len(sampled + greedy), "perplexity": sampler.perplexity(reference, sampled, 2)}

    session = open_session("grpo", XLA, Every(log=1, evaluate=2, save=2))
    train_grpo(model, reference, prompts, low_tokens, plan, session, evaluate)
    found = {"xla": session.run.metrics(), "new": 2, **XLA.counters(), "figures": {}}
    rollouts = roll_out(model, islice(prompt_stream(prompts, plan, XLA, 0), plan.accumulation), low_tokens, plan, XLA)
    for backend in (XLA, CPU):
        fresh, start = policy(backend), policy(backend).requires_grad_(False)
        for p in start.parameters():
            p.data.mul_(1.01)  # a reference that differs from the policy
        optimizer = new_optimizer(fresh, 1e-3, backend)
        figures = learn(fresh, start, rollouts, optimizer, plan, backend)
        found["figures"][backend.kind] = backend.fetch(*[figures[key] for key in ("loss", "kl", "grad_norm")])
        torch.save(rollouts, OUT / "rollouts.pt")
        rollouts = torch.load(OUT / "rollouts.pt", map_location="cpu", weights_only=False)
    return found
