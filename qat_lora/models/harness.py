"""Models as lm-evaluation-harness sees them: ours on any backend, and .gguf files in llama.cpp itself."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.huggingface import HFLM
from torch import Tensor, nn
from torch.nn.functional import pad

from qat_lora.backend import TorchBackend
from qat_lora.errors import UserError, load_package

STEP = 128  # tokens: where every shape compiles its own graph, rows are padded to a multiple
NO_TEXT = (
    "--tasks: one of them generates text, which works on CPUs and GPUs only, not in llama.cpp; take multiple choice"
)


class Harness(HFLM):
    """A model of the harness with our forward pass. logits(tokens int64 [B, L]) → [B, L, V] on the device of the
    tokens; rows are padded on the right, with any token. model: what generates, if the tasks ask for that."""

    def __init__(self, logits: Callable[[Tensor], Tensor], config, tokenizer, batch_size: int, device, model=None):
        shell = SimpleNamespace(config=config, device=device)
        super().__init__(pretrained=shell, backend="causal", tokenizer=tokenizer, batch_size=batch_size)
        self.logits, self._model = logits, model or shell

    def _model_call(self, inps: Tensor, attn_mask=None, labels=None) -> Tensor:
        return self.logits(inps)

    def _model_generate(self, *words, **named) -> Tensor:
        if not isinstance(self._model, nn.Module):
            raise UserError(NO_TEXT)
        return super()._model_generate(*words, **named)


def on_backend(model: nn.Module, tokenizer, backend: TorchBackend, batch_size: int) -> Harness:
    """A model of ours, which is placed on the backend's device. Where shapes must not change, batches are padded to
    `batch_size` rows and a multiple of STEP tokens, and the logits are brought to the host."""

    @torch.no_grad()
    def logits(tokens: Tensor) -> Tensor:
        rows, length = tokens.shape
        if backend.static_shapes:
            tokens = pad(tokens, (0, -length % STEP, 0, batch_size - rows)).to(backend.device)
        with backend.autocast():
            found = model(input_ids=tokens, use_cache=False).logits
        return found.to("cpu")[:rows, :length].float() if backend.static_shapes else found.float()

    backend.place(model.eval())
    device = torch.device("cpu") if backend.static_shapes else backend.device
    generating = None if backend.static_shapes else model
    return Harness(logits, model.config, tokenizer, batch_size, device, generating)


class LlamaCpp(TemplateLM):
    """A .gguf file, with an adapter.gguf if one is given, in llama.cpp; of longer questions the last `length` tokens
    count. Raises UserError if llama-cpp-python is missing or the file cannot be loaded."""

    def __init__(self, path: str, adapter: str | None, length: int = 2048):
        super().__init__()
        otherwise = ", or give the student's --checkpoint"
        load_package("llama_cpp", f"--model {path}", otherwise, "llama-cpp-python")
        from llama_cpp import Llama

        self.length, self.last = length, ((), None)
        try:
            self.model = Llama(path, n_ctx=length, n_batch=length, logits_all=True, verbose=False, lora_path=adapter)
        except (ValueError, RuntimeError) as error:
            raise UserError(f"--model {path} cannot be loaded by llama.cpp ({error}); export it again") from error

    @property
    def eot_token_id(self) -> int:
        return self.model.token_eos()

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        begins = self.model._model.add_bos_token() if add_special_tokens is None else add_special_tokens
        return self.model.tokenize(string.encode(), add_bos=begins, special=True)

    def _loglikelihood_tokens(self, requests, **_) -> list[tuple[float, bool]]:
        found = []
        for _, context, continuation in requests:
            tokens, count = (context + continuation)[-self.length - 1 :], len(continuation)
            logits = self._logits(tuple(tokens[:-1]))[-count:]
            wanted = torch.tensor(continuation)[:, None]
            score = logits.log_softmax(-1).gather(1, wanted).sum()
            found.append((float(score), bool((logits.argmax(-1, True) == wanted).all())))
        return found

    def _logits(self, tokens: tuple[int, ...]) -> Tensor:
        if self.last[0] != tokens:  # choices of one token share their context
            self.model.reset()
            self.model.eval(tokens)
            self.last = tokens, torch.tensor(self.model.scores[: len(tokens)])
        return self.last[1]

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False):
        raise UserError(NO_TEXT)

    def generate_until(self, requests, disable_tqdm: bool = False):
        raise UserError(NO_TEXT)
