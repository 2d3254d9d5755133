"""Texts that look the same compare as equal, and invisible text counts as empty."""

import unicodedata

import pytest

from qat_lora.data.appearance import folded, plain, visible

FORMS = ("NFC", "NFD", "NFKC", "NFKD")


@pytest.mark.parametrize("text", [
    "", " \n\t", "\u200b", "\u00ad\u2060", "\ufeff", "\ufe0f", "\u00a0\u3000", "\x00\x1b\x7f", "\u2800", "\u3164",
    "\u034f", "\U000e0020", "\u202e\u200f",
])  # fmt: skip
def test_invisible_texts(text):
    assert not visible(text) and visible(f"{text}x{text}")


@pytest.mark.parametrize("text", [".", "—", "\u0600", "👍", "\u0915\u094d"])
def test_visible_texts(text):
    assert visible(text)


@pytest.mark.parametrize("one, other", [
    ("caf\u00e9", "cafe\u0301"), ("3\u00a0May 2027", "3 May  2027"), ("landlord’s", "landlord's"),
    ("1990–1995", "1990-1995"), ("Ｓ ５（１）", "s 5(1)"), ("con\u00adtract", "contract"), ("Straße", "STRASSE"),
    ("ﬁne", "fine"), ("a\u200bb\ufeff", "ab"), ("Magistrates´", "Magistrates'"), ("“So”", "'So'"),
])  # fmt: skip
def test_texts_that_look_the_same_are_equal(one, other):
    assert folded(one) == folded(other)


def test_other_texts_stay_different():
    assert len({folded(text) for text in ("cafe", "café", "£5", "$5", "5", "कि", "की", "a b", "ab")}) == 9
    assert plain("A\r\nB\u2028C") == "A\n\nB\nC", "line ends are kept"


@pytest.mark.parametrize("form", FORMS)
def test_the_unicode_normal_form_does_not_matter(form):
    text = "".join(chr(code) for code in range(0x20, 0x3400) if unicodedata.category(chr(code)) != "Cn")
    for at in range(0, len(text), 3):
        said = f"a{text[at]}b {text[at : at + 3]}"
        assert folded(unicodedata.normalize(form, said)) == folded(said) == folded(folded(said)), ascii(said)
