"""Text to tokens and back, as the model file defines it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from chabok.errors import CheckpointError, RequestError
from chabok.text.bpe import ByteLevelBPE
from chabok.text.detokenizer import Detokenizer
from chabok.text.pretokenizers import PreTokenizer
from chabok.text.specials import SpecialTokens
from chabok.text.spm import SentencePiece
from chabok.text.vocabulary import Vocabulary, flag

_UNSUPPORTED = {"t5": "a unigram vocabulary", "bert": "a WordPiece vocabulary", "rwkv": "an RWKV vocabulary"}


class Tokenizer:
    """The tokenizer of one model file; token for token that of llama.cpp on the same file.

    ``vocab_size``: tokens in the vocabulary; ``bos_id``: the token that begins a text, if there is one;
    ``eos_ids``: every token that ends a generation (end of text, of turn, of message); ``add_bos``: whether
    the model wants its texts to begin with ``bos_id``; ``warnings``: what a user should know about this
    file.
    """

    def __init__(self, vocabulary: Vocabulary, metadata: Mapping[str, object]) -> None:
        """Use ``from_gguf``."""
        self.vocabulary = vocabulary
        self.vocab_size = len(vocabulary)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.eos_ids = vocabulary.eos_ids
        self.warnings: tuple[str, ...] = ()
        kind = metadata.get("tokenizer.ggml.model")
        self._model: ByteLevelBPE | SentencePiece
        if kind == "gpt2":
            pre = PreTokenizer.named(metadata.get("tokenizer.ggml.pre"))
            self.warnings = pre.warnings
            self._model = ByteLevelBPE(vocabulary, metadata, pre)
            self._prefix_space = False
            add_bos = pre.add_bos
        elif kind == "llama":
            self._model = SentencePiece(vocabulary, metadata)
            self._prefix_space = self._model.prefix_space
            add_bos = True
        else:
            what = _UNSUPPORTED.get(str(kind), "a kind that is not known")
            raise CheckpointError(
                f"tokenizer.ggml.model is {kind!r}, {what}; supported are 'gpt2' (byte-level BPE) "
                "and 'llama' (SentencePiece)"
            )
        self.add_bos = flag(metadata, "add_bos_token", add_bos) and self.bos_id is not None
        self._plain = SpecialTokens(vocabulary.tokens, vocabulary.user_defined)
        self._control = SpecialTokens(vocabulary.tokens, vocabulary.control)
        self._special = SpecialTokens(vocabulary.tokens, vocabulary.user_defined + vocabulary.control)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """Build from the metadata of a GGUF file (its ``tokenizer.ggml.*`` keys)."""
        return cls(Vocabulary(metadata), metadata)

    def encode(
        self,
        text: str,
        *,
        special: bool = False,
        add_bos: bool | None = None,
        continuation: bool = False,
        limit: int | None = None,
    ) -> list[int]:
        """The tokens of ``text``.

        ``special``: recognise control tokens such as <|im_end|>; without it, text that looks like one is
        only text. Tokens that the model's author defined as plain additions are matched either way.
        ``add_bos``: begin with ``bos_id`` (default: when the model wants it). ``continuation``: the text
        follows other text, so nothing is put before it. A lone surrogate, which no UTF-8 text can hold,
        becomes U+FFFD. ``limit``: stop soon after so many tokens; of a longer text, only that it is longer
        can be told from what is returned.
        """
        fragments = self.split_special(text) if special else [text]
        return self.encode_fragments(
            fragments, add_bos=False if continuation else add_bos, continuation=continuation, limit=limit
        )

    def split_special(self, text: str) -> list[int | str]:
        """``text`` with each control or added token in it replaced by its id."""
        return self._special.split(text)

    def split_control(self, text: str) -> list[int | str]:
        """``text`` with each control token in it replaced by its id; added tokens stay text."""
        return self._control.split(text)

    def encode_fragments(
        self,
        fragments: Iterable[int | str],
        *,
        add_bos: bool | None = None,
        continuation: bool = False,
        limit: int | None = None,
    ) -> list[int]:
        """The tokens of fragments that are token ids already or text, in which nothing is a control token.

        ``limit``: see ``encode``.
        """
        ids: list[int] = []
        if add_bos if add_bos is not None else self.add_bos:
            if self.bos_id is None:
                raise RequestError("add_bos was asked for, but this model has no beginning-of-text token")
            ids.append(self.bos_id)
        after_special = not continuation
        for fragment in fragments:
            for piece in (
                self._plain.split(_well_formed(fragment)) if isinstance(fragment, str) else (fragment,)
            ):
                if isinstance(piece, int):
                    ids.append(piece)
                    after_special = True
                elif piece:
                    # SentencePiece puts a space in front of a text, llama.cpp in front of each that follows
                    # a token.
                    text = " " + piece if self._prefix_space and after_special else piece
                    ids += self._model.encode(text, None if limit is None else limit - len(ids))
                    after_special = False
                if limit is not None and len(ids) > limit:
                    return ids
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True, *, continuation: bool = False) -> str:
        """The text of ``ids``; bytes that are no UTF-8 become U+FFFD.

        ``skip_special``: leave out control tokens. ``continuation``: the ids follow other text, so a space
        that the first of them begins with is text too (only SentencePiece vocabularies with a space prefix
        differ).
        """
        stream = self.stream(skip_special=skip_special, continuation=continuation)
        return "".join(map(stream.push, ids)) + stream.finish()

    def stream(
        self, *, skip_special: bool = True, continuation: bool = True, visible: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """A detokenizer for tokens that come one by one, by default a generation that continues a prompt.

        ``visible``: control tokens that are text all the same, such as those that mark tool calls.
        """
        return Detokenizer(
            self,
            skip_special=skip_special,
            strip_space=self._prefix_space and not continuation,
            visible=visible,
        )

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, a control token's being its text; possibly part of a character."""
        if not 0 <= token < self.vocab_size:
            raise RequestError(f"token {token} is not in the vocabulary, which has {self.vocab_size} tokens")
        return self._model.token_bytes(token)

    def is_special(self, token: int) -> bool:
        """Whether a token stands for structure (a turn, an end) and not for text."""
        return 0 <= token < self.vocab_size and self.vocabulary.is_control(token)


def _well_formed(text: str) -> str:
    """``text`` with surrogate pairs joined and lone surrogates replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
