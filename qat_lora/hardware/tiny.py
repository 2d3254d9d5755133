"""A tiny tokenizer and a tiny random model, both built on the fly, for checks and tests."""

from pathlib import Path

import torch
from transformers import AttentionInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# transformers' own attention, under a name that our extensions do not use (qat_lora.models.attention).
PLAIN = "plain_sdpa"
AttentionInterface.register(PLAIN, sdpa_attention_forward)
masking_utils.AttentionMaskInterface.register(PLAIN, masking_utils.sdpa_mask)

# ChatML. As in Qwen3, a prompt with thinking off contains an empty block, so that the model answers directly.
CHAT_TEMPLATE = """
{%- set no_thought = '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking else '' %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{{- no_thought if message.role == 'assistant' }}
{{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' + no_thought if add_generation_prompt }}
"""


def tokenizer(size: int = 512):
    """Byte-level BPE, `size` tokens, trained on Python's help topics; EOS `<|im_end|>`, pad `<|pad|>`."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((topics[key] for key in sorted(topics)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )


def model(tokenizer):
    """A random two-layer Llama in fp32 with the vocabulary of `tokenizer`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def save(folder: Path) -> Path:
    """Write the tiny model and its tokenizer as save_pretrained does, unless they are there; returns the folder."""
    if not (folder / "tokenizer_config.json").exists():
        text = tokenizer()
        model(text).save_pretrained(folder)
        text.save_pretrained(folder)
    return folder
