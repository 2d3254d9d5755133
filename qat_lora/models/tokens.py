"""What a tokenizer puts in front of a text, and whether the model's embedding holds every id that it gives."""

from qat_lora.errors import UserError

BOS_SETTINGS = ("auto", "on", "off")


def bos_token(tokenizer, setting: str = "auto") -> int | None:
    """The id of the BOS token that a text begins with, or None where it begins with none.

    auto: BOS where the tokenizer itself writes it in front of a text, which a set bos_token alone does not tell; what
    else it adds (EOS, CLS, SEP) does not matter. on, off: whatever the tokenizer does. Raises UserError for another
    setting, and for "on" where the tokenizer has no BOS token.
    """
    if setting not in BOS_SETTINGS:
        raise UserError(f"--bos {setting!r} is not one of {', '.join(BOS_SETTINGS)}")
    bos = tokenizer.bos_token_id
    if setting == "on" and bos is None:
        raise UserError("--bos on: the tokenizer has no BOS token; use --bos off, or set bos_token in its config")
    if setting != "auto" or bos is None:
        return bos if setting == "on" else None
    plain, own = (tokenizer("a b", add_special_tokens=added)["input_ids"] for added in (False, True))
    return bos if own[: len(plain) + 1] == [bos, *plain] else None


def prompt_ids(tokenizer, text: str) -> list[int]:
    """Token ids of a text to continue: BOS in front where the tokenizer's convention asks for it and the text has
    none, and no EOS at the end, whatever the tokenizer adds."""
    ids, bos = tokenizer(text, add_special_tokens=False)["input_ids"], bos_token(tokenizer)
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


# -- ids beyond the embedding ----------------------------------------------------------------------------------------
# Named by tokenizers that a text model shares with its multimodal relatives (Gemma 3 1B: id 262144 of 262144 rows).
PLACEHOLDERS = ("image_token", "video_token", "audio_token")


def check_vocabulary(tokenizer, config, name: str, own: set[str]) -> None:
    """Raise UserError where the tokenizer gives ids beyond the rows of the model's embedding: some devices would
    silently read a wrong row. Those that are allowed are kept as `tokenizer.without_row`.

    own: the tokens that the model's files hold. Placeholders of images, video or audio may lie beyond the rows, and
    special tokens that transformers adds by itself (`<|endoftext|>` to a Qwen2 tokenizer, or to one from a .gguf file),
    unless they begin or end texts. Only a text that spells one gives it, and `check_ids` refuses that text.
    """
    rows = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    if rows is None:
        return
    names = {id: token for token, id in tokenizer.get_vocab().items() if id >= rows}
    if not names:
        return
    allowed = {tokenizer.special_tokens_map.get(kind) for kind in PLACEHOLDERS}
    allowed |= {token.content for token in tokenizer.added_tokens_decoder.values() if token.special} - own
    allowed -= {tokenizer.bos_token, tokenizer.eos_token}
    refused = {id: token for id, token in names.items() if token not in allowed}
    if refused:
        raise UserError(
            f"model {name!r}: its tokenizer gives ids up to {max(refused)} ({refused[max(refused)]!r}), beyond the "
            f"{rows} rows of its embedding; use the tokenizer that it was trained with, or resize the embedding"
        )
    tokenizer.without_row = names


def check_ids(ids, tokenizer) -> None:
    """Raise UserError where a text's ids hold one that the model's embedding has no row for."""
    names = getattr(tokenizer, "without_row", {})
    for id in names.keys() & set(ids) if names else ():
        raise UserError(f"the text holds {names[id]!r}, which the model has no embedding for; remove it from the text")
