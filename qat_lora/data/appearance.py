"""Text as a reader sees it: texts that look the same compare as equal, and invisible text counts as empty."""

import unicodedata

LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
DASHES = "\u2212\u2043"  # the minus sign and the hyphen bullet; all other dashes have category Pd
QUOTES = '"`\u00b4\u02b9\u02bb\u02bc\u2018\u2019\u201a\u201b\u201c\u201d\u201e\u201f\u2032'
SIGNS = "\u00a7\u00b6"  # § and ¶: punctuation that carries meaning
# FILLERS: invisible characters other than white space, controls (Cc) and formats (Cf), such as variation selectors, the
# grapheme joiner and the empty Braille cell. DRAWN: format characters that are visible.
FILLERS = {0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x3164, 0xFFA0, *range(0x180B, 0x1810),
           *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)}  # fmt: skip
DRAWN = {*range(0x0600, 0x0606), 0x06DD, 0x070F, 0x0890, 0x0891, 0x08E2, 0x110BD, 0x110CD}
MARKS = "".join(chr(code) for code in range(0x300, 0x10000) if unicodedata.category(chr(code))[0] == "M")
BLANKS = "".join(chr(code) for code in range(0x10000) if chr(code) not in LINE_ENDS and code not in DRAWN and (
    code in FILLERS or unicodedata.category(chr(code)) in ("Cc", "Cf", "Zs")))  # fmt: skip
WORD = rf"[\w{MARKS}]"  # one character of a word: \w alone would split words at combining marks


class _Glyphs(dict):
    """A table for str.translate that maps each code point to the text that replaces it in comparisons."""

    def __missing__(self, code: int) -> str:
        self[code] = found = self.of(chr(code))
        return found

    def of(self, char: str) -> str:
        kind = unicodedata.category(char)
        if char in LINE_ENDS:
            return "\n"
        if kind == "Zs" or char == "\t":
            return " "
        if ord(char) in FILLERS or (kind in ("Cc", "Cf") and ord(char) not in DRAWN):
            return ""
        if char in QUOTES or kind in ("Pi", "Pf"):
            return "'"
        if kind == "Pd" or char in DASHES:
            return "-"
        spelled = unicodedata.normalize("NFKC", char)
        if spelled != char:
            return spelled.translate(self)
        return "," if kind[0] == "P" and not char.isascii() and char not in SIGNS else char


GLYPHS = _Glyphs()


def visible(text: str) -> bool:
    """Whether a text has anything visible: False if it is empty or contains only white space, zero-width characters,
    controls, byte order marks or variation selectors."""
    return bool(text.translate(GLYPHS).strip())


def plain(text: str) -> str:
    """A text in one canonical form, for comparison: NFKC, without invisible characters, with one kind of space, line
    end, dash and quotation mark, and no punctuation except ASCII, § and ¶. The result is the same for a text's NFC,
    NFD, NFKC and NFKD."""
    text = text.translate(GLYPHS).replace(" \u0301", "'")  # NFKC turns a lone acute accent into this
    return unicodedata.normalize("NFKC", text)


def folded(text: str) -> str:
    """The result of `plain`, case-folded and with single spaces."""
    return " ".join(unicodedata.normalize("NFKC", plain(text).casefold()).split())
