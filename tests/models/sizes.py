"""Sizes of small models with the tiny tokenizer."""

TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 2, "pad_token_id": 0,
    "bos_token_id": None,
}  # fmt: skip
