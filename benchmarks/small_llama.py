"""Train a small Llama on Python's help topics, whose inputs 256 divides, as llama.cpp's k-quants need.

    python benchmarks/small_llama.py   # ten minutes on one core

It writes a model folder: 2.6M weights, 1,024 tokens of byte-level BPE. qat_quality.py and served.py take it as --model.
The last tenth of the text is kept for measuring.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from qat_lora.data.options import TextSource
from qat_lora.data.packing import stream
from qat_lora.hardware import tiny
from qat_lora.run.command_line import run_script
from qat_lora.run.files import check_new
from qat_lora.run.options import ScriptConfig, option

STEPS, ROWS, LENGTH, RATE = 600, 8, 256, 3e-3


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    output_dir: str = option("runs/small_llama", "new folder for the model")


def main(cfg: Config) -> None:
    folder = Path(cfg.output_dir)
    check_new(folder)
    if cfg.dry_run:
        return
    torch.manual_seed(cfg.seed)
    tokenizer = tiny.tokenizer(1024)
    tokens, _ = stream(TextSource().documents(tokenizer), tokenizer)
    tokens = tokens.long()
    edge = len(tokens) * 9 // 10
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=256, intermediate_size=512, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True,
            bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, step / 50) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / STEPS)))
    )
    for step in range(STEPS):
        rows = torch.stack([tokens[start : start + LENGTH] for start in torch.randint(0, edge - LENGTH, (ROWS,))])
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            with torch.no_grad():
                held = tokens[edge : edge + 16 * LENGTH].view(16, LENGTH)
                print(
                    f"{step + 1}: loss {loss:.3f}, held out {model(input_ids=held, labels=held).loss:.3f}", flush=True
                )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    run_script(main, Config, "small_llama", __doc__)
