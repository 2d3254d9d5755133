"""Whether a text begins with BOS, and whether the model's embedding has a row for every token id."""

from collections.abc import Iterable

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


def encoded_in_turns(text: str, prompts: Iterable[int], tokenizer) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of a text, without BOS and EOS, and each token's range of characters (empty for a slow tokenizer).

    prompts: characters up to which the text is a prompt. The tokens up to each are those of the prompt alone, as in
    generation. Usually the tokens of the whole text are that anyway; if not ("Answer: " and "4", of which " 4" is a
    token), what follows the prompt is tokenised apart. Raises UserError if the tokenizer cannot do that, because it
    puts a space in front of every text.
    """

    def encode(start: int, end: int) -> tuple[list[int], list[tuple[int, int]]]:
        # verbose=False: long texts are cut into rows later, so the warning about the model's context would be wrong.
        done = tokenizer(
            text[start:end], add_special_tokens=False, verbose=False, return_offsets_mapping=tokenizer.is_fast
        )
        return list(done["input_ids"]), [(start + a, start + b) for a, b in done.get("offset_mapping", ())]

    begin, fixed, last, ids, places = 0, ([], []), 0, [], []
    for end in sorted({*prompts, len(text)} - {0}):
        longer = encode(begin, end)
        if [*fixed[0], *longer[0]][: len(ids)] != ids:
            begin, fixed = last, (ids, places)
            longer = encode(begin, end)
            if tokenizer.decode(ids + longer[0]) != tokenizer.decode(encode(0, end)[0]):
                raise UserError(
                    f"the tokenizer joins the end of the prompt, {text[:last][-10:]!r}, with the answer, and cannot "
                    "tokenise the answer alone; remove the space from the end of the prompt or chat template"
                )
        last, ids, places = end, fixed[0] + longer[0], fixed[1] + longer[1]
    return ids, places


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
