"""What counts as the same answer: one normalisation for every model and every language.

Texts are compared after NFKC, case folding, every decimal digit as ASCII, Arabic yeh and kaf as their Persian
twins, no tatweel, no zero-width characters, blanks as single spaces, and no punctuation or quotes around.
Numbers are read in any decimal digits of Unicode, with the separators of their scripts.
"""

from __future__ import annotations

import re
import unicodedata

_ZERO_WIDTH = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\u0640"))  # and tatweel
_TWINS = str.maketrans({"ي": "ی", "ى": "ی", "ك": "ک", "ۀ": "ه"})
_BLANKS = re.compile(r"\s+")
_AROUND = " \t\n.,;:!?\"'`*_()[]{}«»“”‘’„‚<>。、，！？：；؟،؛।…"

# Spaces that are written inside of numbers only (ISO 31-0), before NFKC makes usual ones of them.
_GROUPING = re.compile(r"(?<=\d)[\u00a0\u2009\u202f'’](?=\d{3}(?!\d))")
_MARKS = str.maketrans({"٫": ".", "٬": ",", "−": "-", "﹣": "-", "－": "-", "–": "-", "٪": "%"})
_NUMBER = re.compile(
    # Thousands, also in the groups of two of Indian English; else digits as they come. A minus counts where
    # nothing is before it that it could subtract from. Counts are bounded, so that no answer takes long.
    r"(?<![\w.)])-?(?:\d{1,3}(?:,\d{2,3}){0,6},\d{3}(?!\d)|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,3}(?!\d))?"
    r"|(?:\d{1,3}(?:,\d{2,3}){0,6},\d{3}(?!\d)|\d+)(?:\.\d+)?|\.\d+"
)
LONGEST = 100_000
"""Characters of an answer that are looked at, from its end."""


def ascii_digits(text: str) -> str:
    """Every decimal digit of Unicode (Persian, Arabic, Devanagari, fullwidth ...) as 0 to 9."""
    return "".join(
        letter
        if letter.isascii()
        else str(digit)
        if (digit := unicodedata.decimal(letter, None)) is not None
        else letter
        for letter in text
    )


def normal(text: str) -> str:
    """A text as it is compared."""
    text = unicodedata.normalize("NFKC", text).translate(_ZERO_WIDTH).translate(_TWINS)
    return _BLANKS.sub(" ", ascii_digits(text).casefold()).strip(_AROUND)


def words(text: str) -> list[str]:
    """The words of a normalised text, without what stands around each."""
    return [word for each in normal(text).split() if (word := each.strip(_AROUND))]


def numbers(text: str, *, decimal: str = ".") -> list[float]:
    """The numbers in a text, in order. decimal: ``,`` where 1.234,5 is one thousand and more."""
    text = ascii_digits(text[-LONGEST:])
    text = _GROUPING.sub("", text)
    text = unicodedata.normalize("NFKC", text).translate(_ZERO_WIDTH).translate(_MARKS)
    if decimal == ",":
        text = text.translate(str.maketrans(".,", ",."))
    return [float(found.group().replace(",", "")) for found in _NUMBER.finditer(text)]


def last_number(text: str, *, decimal: str = ".") -> float | None:
    """The last number of an answer, which is where a worked answer ends; None: there is none."""
    found = numbers(text, decimal=decimal)
    return found[-1] if found else None
