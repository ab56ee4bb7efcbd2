"""How each family of byte-level vocabularies cuts text into words before merging.

The patterns are those of the models' own tokenizer.json files, as llama.cpp names them
(``tokenizer.ggml.pre``, llama-vocab.cpp). Several patterns apply one after another, each to the pieces the
one before has left; what a pattern does not match stays a piece of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import PreTokenizer as _Native
from tokenizers.pre_tokenizers import Sequence, Split

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"(?:{_CONTRACTION})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"(?:{_CONTRACTION})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"(?:{_CONTRACTION})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# A word by its case: capitals then small letters, as o200k (GPT-4o) and Tekken (Mistral) cut them.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}|{_REST_SLASH}"
_GPT4O = rf"{_CASED % ((f'(?:{_CONTRACTION})?',) * 2)}|\p{{N}}{{1,3}}|{_REST_SLASH}"
_SEED = (
    rf"(?:{_CONTRACTION})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BAILING = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ"
    "-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-"
    "𐳲𑢠-𑣟𞤀-𞥃"
)
_IDEOGRAPHS = r"[一-龥\u0800-一가-\uD7FF]+".replace(r"\u0800", "\u0800").replace(r"\uD7FF", "\ud7ff")


@dataclass(frozen=True, slots=True)
class _Family:
    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


_FAMILIES: dict[tuple[str, ...], _Family] = {
    (
        "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "gigachat",
        "mellum", "a.x-4.0", "modern-bert", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de",
    ): _Family((_GPT2,)),
    (
        "smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2",
    ): _Family((r"\p{N}", _GPT2)),
    (
        "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
        "jina-v5-nano",
    ): _Family((_LLAMA3,), whole_words=True, add_bos=True),
    ("dbrx", "smaug-bpe", "chatglm-bpe"): _Family((_LLAMA3,)),
    ("glm4", "glm5"): _Family((_LLAMA3,), whole_words=True),
    (
        "qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2", "kormo",
        "f2llmv2",
    ): _Family((_QWEN2,)),
    ("qwen35",): _Family((_QWEN35,)),
    ("tekken",): _Family((_TEKKEN,), whole_words=True, add_bos=True),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): _Family((_GPT4O,)),
    ("deepseek-llm",): _Family(
        (
            r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _IDEOGRAPHS,
            r"\p{N}+",
        )
    ),
    ("deepseek-coder",): _Family((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, r"\p{N}")),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): _Family(
        (r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)
    ),
    ("falcon",): _Family((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    ("default",): _Family((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    ("bailingmoe", "bailingmoe2", "llada-moe"): _Family((_BAILING,)),
    ("seed-coder",): _Family((_SEED,)),
    ("bloom", "poro-chat", "gpt3-finnish"): _Family((r" ?[^(\s|.,!?…。，、।۔،)]+",)),
    ("viking",): _Family((r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")),
}  # fmt: skip
_BY_NAME = {name: family for names, family in _FAMILIES.items() for name in names}


class PreTokenizer:
    """Cuts text into the words that are merged on their own.

    ``whole_words``: a word that is a token is that token, whatever its merges say; ``add_bos``: the family
    begins texts with its beginning-of-text token unless the file says otherwise; ``warnings``: what a user
    should know about this choice.
    """

    def __init__(self, family: _Family, warnings: tuple[str, ...] = ()) -> None:
        """Use ``named``."""
        self.whole_words = family.whole_words
        self.add_bos = family.add_bos
        self.warnings = warnings
        self._native: _Native = Sequence([Split(Regex(pattern), "isolated") for pattern in family.patterns])

    @classmethod
    def named(cls, name: object) -> PreTokenizer:
        """The pre-tokenizer that ``tokenizer.ggml.pre`` names.

        A file without a name is cut as llama.cpp does ("default"). A name that is not known is cut like
        GPT-4 and most newer vocabularies; both are told in ``warnings``, because the model may be fed other
        tokens than it was trained on.
        """
        if isinstance(name, str) and name in _BY_NAME:
            return cls(_BY_NAME[name])
        if not name:
            warning = (
                "the file does not say how its vocabulary cuts words (tokenizer.ggml.pre); guessing 'default'"
            )
            return cls(
                _BY_NAME["default"], (f"{warning}: answers may be worse; a newer conversion will help",)
            )
        warning = f"the file's way to cut words (tokenizer.ggml.pre = {name!r}) is not known"
        return cls(_Family((_LLAMA3,)), (f"{warning}; cutting like Llama 3: answers may be worse",))

    def split(self, text: str) -> list[str]:
        """The words of ``text``, which joined are ``text``."""
        return [word for word, _ in self._native.pre_tokenize_str(text)]


def pieces(text: str) -> Iterator[str]:
    """``text`` in pieces that are cut into words as the whole would be.

    Nothing else in the process runs while one is cut, so that long texts would hold everything up.
    """
    if len(text) <= PIECE_CHARACTERS:
        yield text
        return
    begin = 0
    for match in _BREAK.finditer(text):
        if match.end() - begin > PIECE_CHARACTERS:
            yield text[begin : match.end()]
            begin = match.end()
    yield text[begin:]


PIECE_CHARACTERS = 8192

LIKENESS = 16
"""Tokens by which a text that is cut anywhere may differ from the whole, for each cut, generously."""


def rough_pieces(text: str) -> Iterator[str]:
    """``text`` in pieces of the usual size, cut wherever they end: good enough to count its tokens."""
    for begin in range(0, len(text), PIECE_CHARACTERS):
        yield text[begin : begin + PIECE_CHARACTERS]


# Every family ends a word between a letter and a blank that another letter follows. Letters, to be safe, are
# those of ASCII and the common Chinese ones.
_BREAK = re.compile(r"[A-Za-z\u4e00-\u9fff](?=[ \n][A-Za-z\u4e00-\u9fff])")
