"""Writes models of published widths with random weights, and tokenizers as large as their vocabularies, because speed
and memory depend on shapes only.

    python benchmarks/shapes.py qwen3-0.6b /tmp/qwen3

The weights are stored in bf16, as most published ones are. A benchmark trains two models at once; where two do not fit
into 24 GB, the model has only the number of layers in FEWER, unless `whole` is set.
"""

import json
import sys
from itertools import product
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CONFIGS = {
    "smollm2-135m": ("LlamaConfig", {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3,
    }),
    "llama3-1b": ("LlamaConfig", {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    }),
    "qwen3-0.6b": ("Qwen3Config", {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    }),
    "gemma3-270m": ("Gemma3TextConfig", {
        "vocab_size": 262144, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256,
        "sliding_window": 512,
    }),
}  # fmt: skip
FEWER = {"llama3-1b": 2, "qwen3-0.6b": 6}
TRAINED = 4096  # tokens learned from text; the others are pairs of these, and hardly ever occur
START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_model(name: str, folder: Path | str, whole: bool = False) -> Path:
    """Write the model `name` with its tokenizer as a Hugging Face folder, and return the folder. whole: keep all
    layers."""
    kind, sizes = CONFIGS[name]
    if name in FEWER and not whole:
        sizes = {**sizes, "num_hidden_layers": FEWER[name]}
    special = {"eos_token_id": 1, "pad_token_id": 1, "bos_token_id": None}
    config = getattr(transformers, kind)(
        **sizes, **special, tie_word_embeddings=True, max_position_embeddings=2048, initializer_range=0.02
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    make_tokenizer(sizes["vocab_size"]).save_pretrained(folder)
    return Path(folder)


def make_tokenizer(size: int) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE of `size` tokens with a chat template."""
    trained = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=TRAINED,
        special_tokens=[START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(topics.values(), trainer)
    vocabulary = trained.get_vocab()
    known = sorted(token for token in vocabulary if token not in (START, END))
    merges = [tuple(pair) for pair in _merges(trained)]
    for pair in product(known, known):
        if len(vocabulary) == size:
            break
        if "".join(pair) not in vocabulary:
            vocabulary["".join(pair)] = len(vocabulary)
            merges.append(pair)
    whole = _byte_level(models.BPE(vocabulary, merges))
    whole.add_special_tokens([START, END])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=whole, eos_token=END, pad_token=END)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return tokenizer


def _merges(tokenizer: Tokenizer) -> list[list[str]]:
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]


if __name__ == "__main__":
    print(make_model(*sys.argv[1:]))
