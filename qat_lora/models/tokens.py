"""Whether a text begins with BOS, and whether the model's embedding has a row for every token id."""

from qat_lora.errors import UserError

BOS_SETTINGS = ("auto", "on", "off")


def bos_token(tokenizer, setting: str = "auto") -> int | None:
    """The id of the BOS token that a text begins with, or None if it begins with none.

    auto: BOS if the tokenizer itself puts it in front of a text (not every tokenizer with a bos_token does); other
    tokens that it adds (EOS, CLS, SEP) do not matter. on, off: whatever the tokenizer does. Raises UserError for "on"
    if the tokenizer has no BOS token.
    """
    bos = tokenizer.bos_token_id
    if setting == "on" and bos is None:
        raise UserError("--bos on: the tokenizer has no BOS token; use --bos off, or set bos_token in its config")
    if setting != "auto" or bos is None:
        return bos if setting == "on" else None
    plain, own = (tokenizer("a b", add_special_tokens=added)["input_ids"] for added in (False, True))
    return bos if own[: len(plain) + 1] == [bos, *plain] else None


def prompt_ids(tokenizer, text: str) -> list[int]:
    """Token ids of a text to continue: with BOS in front if the tokenizer adds one and the text has none yet, and never
    with EOS at the end."""
    ids, bos = tokenizer(text, add_special_tokens=False)["input_ids"], bos_token(tokenizer)
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def encoded(text: str, prompt: int | None, tokenizer) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of a text, without BOS and EOS, and each token's range of characters; for a fast tokenizer.

    prompt: characters of the text that are a prompt. Their tokens are those of the prompt alone, as in generation.
    Usually the tokens of the whole text begin with those; if not ("Answer: " and "4", where " 4" is one token), the
    rest is tokenised apart. Raises UserError if the tokenizer cannot do that, because it puts a space before a text.
    """

    def encode(part: str) -> tuple[list[int], list[tuple[int, int]]]:
        # verbose=False: long texts are cut into rows later, so the warning about the model's context would be wrong.
        done = tokenizer(part, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        return list(done["input_ids"]), list(done["offset_mapping"])

    ids, places = encode(text)
    if prompt is None or begins_with(ids, text[:prompt], tokenizer):
        return ids, places
    first, rest = encode(text[:prompt]), encode(text[prompt:])
    if tokenizer.decode(first[0] + rest[0]) != tokenizer.decode(ids):
        raise UserError(
            f"the tokenizer joins the end of the prompt, {text[:prompt][-10:]!r}, with the answer, and cannot tokenise "
            "the answer alone; remove the space from the end of the prompt or chat template"
        )
    return first[0] + rest[0], first[1] + [(prompt + start, prompt + end) for start, end in rest[1]]


def begins_with(ids: list[int], prompt: str, tokenizer) -> bool:
    """Whether the tokens of a text begin with those of a prompt, its beginning."""
    own = tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
    return ids[: len(own)] == own


def special_tokens(tokenizer) -> set[str]:
    return {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}


# -- ids beyond the embedding ----------------------------------------------------------------------------------------
# In tokenizers shared with multimodal models (Gemma 3 1B's has id 262144, but its embedding only 262144 rows).
PLACEHOLDERS = ("image_token", "video_token", "audio_token")


def check_vocabulary(tokenizer, config, name: str, own: set[str]) -> None:
    """Raise UserError if the tokenizer has ids beyond the rows of the model's embedding, for which some devices would
    silently read a wrong row. Stores the allowed ones in `tokenizer.without_row`.

    own: the tokens in the model's files. Allowed beyond the rows are placeholders of images, video or audio, and
    special tokens that transformers adds (`<|endoftext|>` to a Qwen2 tokenizer or one from a .gguf file), except for
    BOS and EOS. They occur only in a text that spells one out, and `check_ids` refuses that text.
    """
    rows = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    if rows is None:
        return
    names = {id: token for token, id in tokenizer.get_vocab().items() if id >= rows}
    if not names:
        return
    allowed = {tokenizer.special_tokens_map.get(kind) for kind in PLACEHOLDERS}
    allowed |= special_tokens(tokenizer) - own
    allowed -= {tokenizer.bos_token, tokenizer.eos_token}
    refused = {id: token for id, token in names.items() if token not in allowed}
    if refused:
        raise UserError(
            f"model {name!r}: its tokenizer gives ids up to {max(refused)} ({refused[max(refused)]!r}), beyond the "
            f"{rows} rows of its embedding; use the tokenizer that the model was trained with, or resize the embedding"
        )
    tokenizer.without_row = names


def check_ids(ids, tokenizer) -> None:
    """Raise UserError if a text has a token id for which the model's embedding has no row."""
    names = getattr(tokenizer, "without_row", {})
    for id in names.keys() & set(ids) if names else ():
        raise UserError(
            f"the text contains {names[id]!r}, for which the model has no embedding; remove it from the text"
        )
