"""Completions equal HF's own generation; the script compares models under equal conditions and refuses bad input."""

import io
import sys
import threading

import pytest
import torch
from patience import PATIENCE
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from qat_lora.errors import UserError
from qat_lora.lora.adapter import load_adapter
from qat_lora.models.loading import load_model, load_tokenizer
from qat_lora.quant.student import load_student
from qat_lora.rl.completion import Pieces, Stream, complete

PROMPT = "The assignment statement"
NEW = 12


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir, tiny_tokenizer, tmp_path_factory):
    """`tiny_model_dir` with large weights and an untied LM head, so that it does not just repeat its last token."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("talker")
    config = LlamaConfig.from_pretrained(tiny_model_dir, tie_word_embeddings=False, initializer_range=0.3)
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def model(model_dir):
    return load_model(str(model_dir))


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return load_tokenizer(str(model_dir))


@pytest.fixture(scope="module")
def student_file(make_student, model_dir):
    return make_student(model_dir)


@pytest.fixture(scope="module")
def adapter_dir(make_adapter, model_dir):
    return make_adapter(model_dir)


@pytest.fixture
def infer(run, model_dir, capsys):
    """infer(*flags): the completions that a run prints, as (label, text) pairs."""

    def said(*flags) -> list[tuple[str, str]]:
        base = [] if "--checkpoint" in flags else ["--model", model_dir]
        run("run_inference", "--device", "cpu", "--precision", "fp32", "--max-new-tokens", NEW, *flags, *base)
        blocks = [block.split("\n", 1) for block in capsys.readouterr().out.split("--- ")[1:]]
        return [(label, text[:-1]) for label, text in blocks]

    return said


def user(text: str, system: str | None = None) -> list[dict]:
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": text}]


def greedy(model, tokenizer, text) -> list[int]:
    """New tokens of HF's own greedy generation."""
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW)
    return output[0, ids.shape[1] :].tolist()


# -- complete -------------------------------------------------------------------------------------------------------
def test_greedy_equals_generate(model, tokenizer):
    expected = greedy(model, tokenizer, PROMPT)
    assert complete(model, tokenizer, PROMPT, max_new_tokens=NEW) == tokenizer.decode(expected)
    assert len(expected) == NEW
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    briefly = complete(model, tokenizer, user("Hi", system="Be brief."), max_new_tokens=NEW)
    assert briefly == tokenizer.decode(greedy(model, tokenizer, text))
    assert briefly != complete(model, tokenizer, user("Hi"), max_new_tokens=NEW)


def test_a_student_and_its_adapter_generate_like_any_model(tokenizer, student_file, adapter_dir, model):
    student, _ = load_student(student_file)
    alone = complete(student, tokenizer, PROMPT, max_new_tokens=NEW)
    assert alone == tokenizer.decode(greedy(student, tokenizer, PROMPT))
    adapted = load_adapter(student, adapter_dir)
    assert not any(parameter.requires_grad for parameter in adapted.parameters())
    both = complete(adapted, tokenizer, PROMPT, max_new_tokens=NEW)
    assert both == tokenizer.decode(greedy(adapted.merge_and_unload(), tokenizer, PROMPT))
    assert len({alone, both, complete(model, tokenizer, PROMPT, max_new_tokens=NEW)}) == 3


def test_generation_ends_at_an_eos_of_the_model_or_of_the_tokenizer(model, tokenizer):
    tokens = greedy(model, tokenizer, PROMPT)
    end = next(i for i in range(1, NEW) if tokens[i] not in tokens[:i])
    expected = tokenizer.decode(tokens[: end + 1])
    model.generation_config.eos_token_id = [tokens[end], 511]
    assert complete(model, tokenizer, PROMPT, max_new_tokens=NEW) == expected

    model.generation_config.eos_token_id = None
    other = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    other.eos_token = tokenizer.convert_ids_to_tokens(tokens[end])
    assert complete(model, other, PROMPT, max_new_tokens=NEW) == expected


def test_pad_may_be_eos(model, tokenizer, caplog, recwarn):
    other = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    expected = complete(model, tokenizer, user(PROMPT), max_new_tokens=NEW)
    for pad in (other.eos_token, None):
        other.pad_token = pad
        assert complete(model, other, user(PROMPT), max_new_tokens=NEW) == expected
    assert not caplog.records and not recwarn.list


def test_sampling_follows_seed_temperature_and_top_p_and_ignores_the_defaults_of_the_model(model, tokenizer):
    def say(seed, **options):
        torch.manual_seed(seed)
        return complete(model, tokenizer, user(PROMPT), max_new_tokens=NEW, **options)

    plain = say(1), say(1, temperature=1.0)
    assert plain[1] == say(1, temperature=1.0) != say(2, temperature=1.0)
    assert say(1, temperature=1.0, top_p=1e-6) == say(1, temperature=1e-4) == plain[0] != plain[1]
    model.generation_config.update(top_k=1, temperature=0.01, top_p=0.1, repetition_penalty=9.0, do_sample=True)
    assert (say(1), say(1, temperature=1.0)) == plain


SHIPPED = {
    "no_repeat_ngram_size": 1, "encoder_no_repeat_ngram_size": 1, "sequence_bias": [[[5], 100.0]], "max_time": 1e-9,
    "num_beams": 3, "num_return_sequences": 2, "stop_strings": ["e", " "], "typical_p": 0.01, "min_p": 0.99,
    "forced_bos_token_id": 7, "forced_eos_token_id": 2, "suppress_tokens": [*range(3, 200)], "bad_words_ids": [[9]],
    "begin_suppress_tokens": [*range(3, 400)], "min_new_tokens": 30, "exponential_decay_length_penalty": [1, 9.0],
    "epsilon_cutoff": 0.9, "eta_cutoff": 0.9, "guidance_scale": 3.0, "diversity_penalty": 1.0, "num_beam_groups": 3,
    "renormalize_logits": True, "penalty_alpha": 0.9, "prompt_lookup_num_tokens": 3, "watermarking_config": {},
    "constraints": [1], "force_words_ids": [[5]], "use_cache": False, "return_dict_in_generate": True,
    "output_scores": True, "cache_implementation": "static",
}  # fmt: skip


@pytest.mark.parametrize("name", SHIPPED)
def test_the_settings_that_a_model_ships_with_decide_nothing(model, tokenizer, name):
    def say(temperature: float) -> str:
        torch.manual_seed(1)
        pieces = []
        text = complete(model, tokenizer, user(PROMPT), max_new_tokens=NEW, temperature=temperature,
                        streamer=Pieces(tokenizer, pieces.append))  # fmt: skip
        assert "".join(pieces) == text
        return text

    plain = say(0), say(1.0)
    model.generation_config.update(**{name: SHIPPED[name]}, do_sample=True)
    setattr(model.generation_config, name, SHIPPED[name])  # also settings that this version of transformers has dropped
    assert (say(0), say(1.0)) == plain
    assert getattr(model.generation_config, name) == SHIPPED[name]


# -- streaming -------------------------------------------------------------------------------------------------------
SAYS = "Hello, world!\nIt 's 3 . n't\n\n  «ça» สวัสดีครับ ขอบคุณ 日本語のテキスト 🏳️‍🌈 é́ 'm"


def tokenizers():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = sorted({*SAYS, *SAYS.replace(" ", " ▁").split(" "), "▁"} - {" "})
    table = {token: i for i, token in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    space = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    meta = Tokenizer(models.Unigram([(token, -1.0) for token in table], 0, byte_fallback=True))
    meta.pre_tokenizer, meta.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    fallback = Tokenizer(models.BPE(table, [], byte_fallback=True, unk_token="▁"))
    fallback.decoder = space
    pieces = Tokenizer(models.WordPiece({"[UNK]": 0, **{w: i for i, w in enumerate(words, 1)}}, unk_token="[UNK]"))
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    cleaned = {"clean_up_tokenization_spaces": True}
    for inner, facts in ((meta, {}), (meta, cleaned), (fallback, {}), (pieces, cleaned)):
        made = PreTrainedTokenizerFast(tokenizer_object=inner, **facts)
        made.add_special_tokens({"additional_special_tokens": ["<|x|>"]})
        yield made


@pytest.mark.parametrize("kind", range(5))
def test_streamed_pieces_are_the_decoded_text_for_any_tokenizer(kind, tiny_tokenizer):
    tokenizer = [*tokenizers(), tiny_tokenizer][kind]
    special = tokenizer.convert_tokens_to_ids(["<|x|>", "<|im_start|>"][kind == 4])
    random = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(tokenizer) + 3, (200, 40), generator=random).tolist()  # with ids beyond the vocabulary
    said = tokenizer(SAYS, add_special_tokens=False)["input_ids"]
    for ids in [said, [*said[:5], special, *said[5:]], *drawn]:
        pieces: list[str] = []
        stream = Pieces(tokenizer, pieces.append)
        stream.put(torch.tensor([[1, 2]]))
        for number in ids:
            stream.put(torch.tensor([number]))
        stream.end()
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


def test_text_without_spaces_is_shown_as_soon_as_a_character_is_complete(tiny_tokenizer):
    shown: list[str] = []
    stream = Pieces(tiny_tokenizer, shown.append)
    stream.put(torch.tensor([[1]]))
    text = "สวัสดีครับ日本語のテキスト"
    for number in tiny_tokenizer(text, add_special_tokens=False)["input_ids"]:
        stream.put(torch.tensor([number]))
    assert "".join(shown) == text and all(len(piece) <= 1 for piece in shown)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"temperature": 1e-40}, r"temperature 1e-40 must be 0 \(greedy\) or at least 1e-06"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"top_p": 0.0}, "outside"),
        ({"max_new_tokens": 512}, "do not fit the model's context of 512"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "the prompt is empty"),
    ],
)
def test_complete_refuses_bad_options(model, tokenizer, options, words):
    prompt = options.pop("prompt", PROMPT)
    with pytest.raises(UserError, match=words):
        complete(model, tokenizer, prompt, **{"max_new_tokens": NEW} | options)


def test_a_missing_template_and_one_that_refuses_are_reported(model, tokenizer):
    other = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    other.chat_template = None
    with pytest.raises(UserError, match="no chat template: give one"):
        complete(model, other, user(PROMPT), max_new_tokens=NEW)
    other.chat_template = "{{ raise_exception('no system role') if messages[0].role == 'system' }}{{ messages }}"
    with pytest.raises(UserError, match="refuses the messages: no system role"):
        complete(model, other, user(PROMPT, system="s"), max_new_tokens=NEW)


def test_generation_stops_when_the_stream_is_no_longer_read(model, tokenizer, backend, monkeypatch):
    """The 50th of 100 tokens waits until the reader has left."""
    calls, left, forward = [], threading.Event(), model.forward

    def patient(*args, **kwargs):
        calls.append(None)
        assert len(calls) < 50 or left.wait(PATIENCE)
        return forward(*args, **kwargs)

    noticed = property(lambda stream: left.is_set(), lambda stream, value: left.set())
    monkeypatch.setattr(Stream, "left", noticed)
    monkeypatch.setattr(model, "forward", patient)
    pieces = iter(Stream(model, tokenizer, PROMPT, backend, max_new_tokens=100))
    assert next(pieces)
    pieces.close()
    assert 0 < len(calls) <= 50


def test_a_stream_with_turns_yields_at_every_token(model, tokenizer, backend, monkeypatch):
    monkeypatch.setattr("qat_lora.rl.completion._final", lambda tokenizer, ids: "")  # all text is held back
    assert list(Stream(model, tokenizer, PROMPT, backend, turns=True, max_new_tokens=9)).count("") >= 9
    assert len(list(Stream(model, tokenizer, PROMPT, backend, max_new_tokens=9))) == 1  # at its end


# -- the script -----------------------------------------------------------------------------------------------------
def test_streamed_text_equals_the_completion(infer, model, tokenizer, model_dir):
    ((label, text),) = infer("--prompt", PROMPT)
    assert label == f"base {model_dir}"
    assert text == complete(model, tokenizer, user(PROMPT), max_new_tokens=NEW)
    ((_, raw),) = infer("--prompt", PROMPT, "--raw")
    assert raw == complete(model, tokenizer, PROMPT, max_new_tokens=NEW) != text


def test_compare_generates_with_every_stage(infer, model, tokenizer, student_file, adapter_dir, model_dir):
    flags = ["--checkpoint", student_file, "--adapter", adapter_dir, "--prompt", PROMPT]
    said = infer("--compare", *flags)
    student, _ = load_student(student_file)
    expected = [complete(each, tokenizer, user(PROMPT), max_new_tokens=NEW) for each in (model, student)]
    expected.append(complete(load_adapter(student, adapter_dir), tokenizer, user(PROMPT), max_new_tokens=NEW))
    labels = [f"base {model_dir}", f"student {student_file}", f"student {student_file} + {adapter_dir}"]
    assert said == list(zip(labels, expected))
    assert infer(*flags) == said[-1:]
    on_base = infer("--compare", "--adapter", adapter_dir, "--prompt", PROMPT)
    assert on_base[0] == said[0] and on_base[1][1] not in expected


def test_every_completion_starts_from_the_same_seed(infer, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{PROMPT}\n\n{PROMPT}\n"))
    first, second = infer("--temperature", "1", "--seed", "4")
    assert first == second
    assert infer("--temperature", "1", "--seed", "5", "--prompt", PROMPT) != [first]


def test_each_line_of_standard_input_is_a_prompt(infer, model, tokenizer, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n  \ntwo"))
    expected = [complete(model, tokenizer, user(prompt), max_new_tokens=NEW) for prompt in ("one", "two")]
    assert [text for _, text in infer()] == expected


@pytest.mark.parametrize("more", [[], ["--prompt", PROMPT]])
def test_too_many_new_tokens_for_any_prompt_are_refused_before_the_first_prompt(refusal, tiny_model_dir, more):
    said = refusal("run_inference", "--model", tiny_model_dir, "--device", "cpu", "--max-new-tokens", 10**12, *more)
    assert f"--max-new-tokens {10**12} leaves no room for a prompt" in said


def test_dry_run_generates_nothing(infer):
    assert infer("--prompt", PROMPT, "--dry-run") == []


@pytest.mark.parametrize(
    "flags, words",
    [
        pytest.param(["--device", "xla"], "use --device cpu or cuda", marks=pytest.mark.xla),
        (["--max-new-tokens", "0"], "--max-new-tokens 0 must be at least 1"),
        (["--top-p", "1.5"], "--top-p 1.5 must be above 0 and at most 1"),
        (["--raw", "--system", "s"], "which --raw turns off"),
        (["--raw", "--chat-template", "chatml"], "--raw uses no chat template"),
        (["--compare"], "nothing to compare with the base model"),
    ],
)
def test_bad_flags(refusal, monkeypatch, flags, words):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")  # restored after the test, because --device xla changes it
    assert words in refusal("run_inference", *flags)
