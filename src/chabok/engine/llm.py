"""The Python API: a model as an object that continues prompts and answers conversations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import index
from os import PathLike
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeGuard, Unpack, cast, overload

from chabok.engine.closing import Closing
from chabok.engine.handle import Handle
from chabok.engine.load import Loaded, Options, OptionValues, Template, TextSide, load
from chabok.engine.request import Completion, Constraint, Request, SamplingParams, Token
from chabok.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from chabok.checkpoints.progress import Progress
    from chabok.text.grammar import Grammars

Prompt: TypeAlias = str | Sequence[int]
"""Text, or token ids."""

Message: TypeAlias = Mapping[str, Any]
"""One turn of a conversation: {"role": "user", "content": "Hello"}."""

GREEDY = SamplingParams()


class Stream(Closing):
    """An answer as it is written: iterate for tokens; then ``completion`` has the whole of it.

    Leaving a ``with`` block, or ``close()``, ends the generation early.
    """

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        token = self._handle.next()
        if token is None:
            raise StopIteration
        return token

    @property
    def completion(self) -> Completion:
        """The whole answer; waits for its end."""
        return self._handle.result()

    def close(self) -> None:
        """Stop generating; what was written so far is in ``completion``, with finish_reason "cancelled"."""
        if not self._handle.done:
            self._handle.cancel()

    def __del__(self) -> None:
        self.close()  # nobody can read it any more


class LLM(Closing):
    """A language model, loaded and ready.

    model: the path of a GGUF file, a short name (``chabok list``), or a source such as ``hf:owner/repo``. It
    is downloaded if it is not there.
    threads: to compute with; None for the physical cores this process may use.
    context: most tokens of prompt and answer together; None for the model's own, 8192 at most.
    max_batch: sequences that are worked on at a time; others wait.
    kv_memory: bytes of key-value cache; None for four contexts, but a quarter of the free memory at most.
    pack: keep the kernels' layout of the weights on disk, so that the next start takes no time.
    budget_s: seconds a step may take while something is being generated; long prompts are cut to fit.
    max_queue: requests that may wait for their turn; more are refused with a BusyError.
    prefix_disk: keep the keys and values of prompts on disk, so that the same beginning is read from there
    after the next start. They tell what was asked, so this is for the caller to decide.
    prefix_disk_bytes: most that those of all models may take; None for 4 GB, but a quarter of the free disk
    at most.
    progress: is told about downloads and preparation (``chabok.checkpoints.progress.Progress``).

        with LLM("smollm2") as llm:
            print(llm.generate("The sea is", SamplingParams(max_tokens=32)).text)

    Safe to use from several threads; their requests share the batch. Whatever goes wrong is a
    ``chabok.errors.ChabokError`` whose text says what to do.
    """

    def __init__(
        self,
        model: str | PathLike[str] = "smollm2",
        *,
        progress: Progress | None = None,
        **options: Unpack[OptionValues],
    ) -> None:
        started = perf_counter()
        self._set(load(model, Options.of(options), progress), perf_counter() - started)

    @classmethod
    def of(cls, loaded: Loaded, load_s: float = 0.0) -> LLM:
        """An LLM of parts that are loaded already."""
        llm = cls.__new__(cls)
        llm._set(loaded, load_s)
        return llm

    def _set(self, loaded: Loaded, load_s: float) -> None:
        self._loaded = loaded
        self.engine = loaded.engine
        self.load_s = load_s
        """Seconds it took to load."""

    @property
    def name(self) -> str:
        """The model's own name."""
        return self._loaded.model.name

    @property
    def context(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.engine.context

    @property
    def tokenizer(self) -> TextSide:
        """What turns text into tokens and back."""
        return self._loaded.tokenizer

    @property
    def template(self) -> Template:
        """What turns a conversation into tokens."""
        return self._loaded.template

    @property
    def grammars(self) -> Grammars:
        """Makes constraints: ``llm.generate(prompt, constraint=llm.grammars.json_schema(schema))``."""
        return self._loaded.grammars

    # Text and tokens.

    def tokenize(
        self, text: str, *, special: bool = False, add_bos: bool | None = None, limit: int | None = None
    ) -> list[int]:
        """Token ids of a text.

        special: text that looks like a special token (<|im_end|>) becomes one. add_bos: begin with the token
        that begins a text; by default if the model wants it. limit: raise RequestError, soon, if there are
        more tokens.
        """
        if not isinstance(text, str):
            raise RequestError(f"a text must be a string, not {type(text).__name__}")
        tokens = self._loaded.tokenizer.encode(text, special=special, add_bos=add_bos, limit=limit)
        return self._within(tokens, limit)

    def _within(self, tokens: list[int], limit: int | None) -> list[int]:
        if limit is not None and len(tokens) > limit:
            raise RequestError(
                f"the prompt has more than {limit} tokens, but the context is {self.context} tokens "
                "(prompt and answer together); shorten the prompt or open the model with a larger context"
            )
        return tokens

    def detokenize(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids."""
        return self._loaded.tokenizer.decode(_ids(tokens), skip_special)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, possibly part of a character."""
        return self._loaded.tokenizer.token_bytes(token)

    def tokenize_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        token_limit: int | None = None,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation in the model's own format, up to where its answer begins.

        token_limit: see the limit of ``tokenize``. variables: further names its template knows, such as
        enable_thinking.
        """
        if isinstance(messages, str) or not (
            isinstance(messages, Sequence) and all(isinstance(message, Mapping) for message in messages)
        ):
            raise RequestError(
                'messages must be a list such as [{"role": "user", "content": "Hello"}]; '
                "to continue a plain text, use generate()"
            )
        try:
            tokens = self._loaded.template.encode(messages, tools=tools, token_limit=token_limit, **variables)
        except RecursionError:
            raise RequestError("the messages are nested too deep") from None
        return self._within(tokens, token_limit)

    # Generation.

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of strings, to the type checker
        self,
        prompts: str,
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        constraint: Constraint | None = None,
    ) -> Completion: ...
    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of strings, to the type checker
        self,
        prompts: str,
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        constraint: Constraint | None = None,
    ) -> Stream: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: Literal[False] = False,
        constraint: Constraint | None = None,
    ) -> list[Completion]: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: Literal[True],
        constraint: Constraint | None = None,
    ) -> list[Stream]: ...
    @overload
    def generate(
        self,
        prompts: Sequence[int],
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        constraint: Constraint | None = None,
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: Sequence[int],
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        constraint: Constraint | None = None,
    ) -> Stream: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: bool = False,
        constraint: Constraint | None = None,
    ) -> Completion | Stream | list[Completion] | list[Stream]:
        """Continue one prompt, or several at once.

        A prompt is text or token ids. One prompt gives one Completion, a list of prompts a list of them, in
        order; with ``stream``, a Stream each. params: for all, or one per prompt; by default greedy up to the
        end of the text or the context. constraint: what every answer must look like, made by ``grammars``.
        """
        if is_prompt(prompts):
            one = self.engine.submit(self.request(prompts, single(params), constraint))
            return Stream(one) if stream else _results([one])[0]
        handles: list[Handle] = []
        try:
            for prompt, each in zip(each_prompt(prompts), per_prompt(params, len(prompts)), strict=True):
                handles.append(self.engine.submit(self.request(prompt, each, constraint), bounded=False))
        except BaseException:
            _cancel(handles)
            raise
        return [Stream(handle) for handle in handles] if stream else _results(handles)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, constraint: Constraint | None = None
    ) -> Stream:
        """Continue a prompt, token by token."""
        return Stream(self.engine.submit(self.request(prompt, params, constraint)))

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        stream: Literal[False] = False,
        constraint: Constraint | None = None,
    ) -> Completion: ...
    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        stream: Literal[True],
        constraint: Constraint | None = None,
    ) -> Stream: ...
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        stream: bool = False,
        constraint: Constraint | None = None,
    ) -> Completion | Stream:
        """Answer a conversation: [{"role": "user", "content": "Hello"}].

        tools: descriptions of functions, as the model's chat template takes them. constraint: what the answer
        must look like, made by ``grammars``.
        """
        handle = self.engine.submit(self.chat_request(messages, params, tools=tools, constraint=constraint))
        return Stream(handle) if stream else _results([handle])[0]

    def logits(self, prompt: Prompt) -> NDArray[np.float32]:
        """Scores of the token after each position of a prompt: float32[n, vocab]."""
        import numpy as np

        request = self.request(prompt, SamplingParams(max_tokens=0))
        request.prompt_logits = True
        handle = self.engine.submit(request)
        _results([handle])
        return np.concatenate(handle.prompt_logits)

    def request(
        self, prompt: Prompt, params: SamplingParams | None = None, constraint: Constraint | None = None
    ) -> Request:
        """What the engine is asked in order to continue a prompt."""
        arrived = perf_counter()
        if isinstance(prompt, str):
            tokens = self.tokenize(prompt, limit=self.context)
        else:
            tokens = _ids(prompt)
        took = perf_counter() - arrived
        return Request(tokens, params or GREEDY, arrived=arrived, tokenize_s=took, constraint=constraint)

    def chat_request(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        constraint: Constraint | None = None,
    ) -> Request:
        """What the engine is asked in order to answer a conversation."""
        arrived = perf_counter()
        tokens = self.tokenize_chat(messages, tools, token_limit=self.context)
        took = perf_counter() - arrived
        return Request(tokens, params or GREEDY, arrived=arrived, tokenize_s=took, constraint=constraint)

    # Life.

    def close(self) -> None:
        """Release threads and memory; requests that have not ended fail."""
        self.engine.close()

    def __repr__(self) -> str:
        return f"LLM({self.name!r}, context={self.context})"


def is_prompt(value: Prompt | Sequence[Prompt]) -> TypeGuard[Prompt]:
    """Whether it is one prompt (text or token ids) rather than a list of them."""
    if isinstance(value, str):
        return True
    if isinstance(value, bytes | bytearray | Mapping) or not (
        hasattr(value, "__getitem__") and hasattr(value, "__len__")
    ):
        raise RequestError(f"a prompt must be text or token ids, not {type(value).__name__}")
    return len(value) > 0 and hasattr(value[0], "__index__")


def each_prompt(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """The prompts of a list that is not itself a prompt."""
    return cast(Sequence[Prompt], prompts)


def _ids(prompt: Sequence[int]) -> list[int]:
    try:
        return [index(token) for token in prompt]
    except TypeError:
        raise RequestError(f"a prompt must be text or a list of token ids, not {_short(prompt)}") from None


def _short(value: object) -> str:
    """A value in one line."""
    return " ".join(f"{value!r:.80}".split())


def single(params: SamplingParams | Sequence[SamplingParams] | None) -> SamplingParams | None:
    """The parameters of one prompt."""
    if params is None or isinstance(params, SamplingParams):
        return params
    raise RequestError("params must be one SamplingParams for one prompt")


def per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, n: int
) -> Sequence[SamplingParams | None]:
    """The parameters of each of n prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * n
    if not isinstance(params, Sequence) or not all(
        each is None or isinstance(each, SamplingParams) for each in params
    ):
        raise RequestError(f"params must be SamplingParams, one for all or one each, not {_short(params)}")
    if len(params) != n:
        raise RequestError(f"there are {n} prompts, but {len(params)} params; give one for all or one each")
    return params


def _results(handles: list[Handle]) -> list[Completion]:
    try:
        return [handle.result() for handle in handles]
    except BaseException:
        _cancel(handles)
        raise


def _cancel(handles: list[Handle]) -> None:
    for handle in handles:
        if not handle.done:
            handle.cancel()
