"""Shared fixtures: a tokenizer and a random model, both tiny and made on the spot."""

import os

os.environ["USE_TORCH_XLA"] = "0"  # before any import of transformers, which otherwise imports torch_xla by itself

import pytest

# ChatML. As with Qwen3, a prompt with thinking off holds an empty block, so that the model goes straight to the answer.
CHAT_TEMPLATE = """
{%- set no_thought = '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking else '' %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{{- no_thought if message.role == 'assistant' }}
{{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' + no_thought if add_generation_prompt }}
"""


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """Byte-level BPE, 512 tokens, trained on Python's help topics; EOS `<|im_end|>`, pad `<|pad|>`."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
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


@pytest.fixture(scope="session")
def tiny_model_dir(tiny_tokenizer, tmp_path_factory):
    """Folder with a random two-layer Llama and `tiny_tokenizer`, as save_pretrained writes them. Do not write to it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tiny_tokenizer.eos_token_id,
        pad_token_id=tiny_tokenizer.pad_token_id,
    )
    folder = tmp_path_factory.mktemp("tiny_model")
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder
