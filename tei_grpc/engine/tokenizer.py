"""Texts to encodings and back: one immutable tokenizer shared by all threads, prompts, truncation, offsets."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import tokenizers
from numpy.typing import NDArray

from tei_grpc import cpus
from tei_grpc.config import EngineConfig
from tei_grpc.engine import validation
from tei_grpc.engine.request import task_is_cancelled
from tei_grpc.engine.templating import encode_pair, encode_unlocked
from tei_grpc.engine.words import words_of
from tei_grpc.errors import TeiError, TokenizationError, UnavailableError, is_failure
from tei_grpc.loading.chat_template import PairTemplate
from tei_grpc.loading.failures import library_errors
from tei_grpc.loading.model_config import ModelConfig
from tei_grpc.loading.tokenizer_files import read_tokenizer
from tei_grpc.types import Encoding, Input, SimpleToken, TruncationDirection

T = TypeVar("T")
Form = Callable[[Iterator[SimpleToken]], T]

# Below this many characters a text is tokenized where it stands: that takes less than a hop to another thread and back,
# and keeps the event loop for well under a millisecond.
INLINE_CHARS = 256

PLAIN_CHARS = 8  # per token that a model takes; longer texts are likely to be cut

MAX_WORKERS = 64
ANY_TEXT = "a"  # that a tokenizer is tried with
CLOSED = "The server is shutting down"


class Tokenizer:
    """The model's tokenizer. Truncation is an argument of each call, never a state of the shared object."""

    def __init__(self, model: ModelConfig, config: EngineConfig) -> None:
        self.workers = count_workers(config)
        self._model = model
        self._tokenizer = load(model.folder, model.hf_config)
        self._tokenizer.encode_special_tokens = config.split_special_tokens
        self._words = words_of(self._tokenizer)
        # what may be put before an input: the longest prompt
        self._added_chars = max(map(len, [model.default_prompt or "", *model.prompts.values()]))
        self._is_closed = False
        self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="tokenizer")

    def close(self) -> None:
        """End the pool; what has not begun fails with UnavailableError."""
        self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def encode(self, input: Input) -> Encoding:
        """The input as the model will see it. Raises ValidationError, TokenizationError."""
        return await self._run(input.chars + self._added_chars, lambda: self._encode_one(input))

    async def encode_all(self, inputs: Sequence[Input]) -> list[Encoding]:
        """As `encode`, together. Raises what it raises for the first one that has an error."""
        chars = sum(input.chars + self._added_chars for input in inputs)
        return await self._run(chars, lambda: self._encode_all(inputs))

    async def tokenize(
        self, text: str, form: Form[T], *, add_special_tokens: bool = True, prompt_name: str | None = None
    ) -> T:
        """What `form` makes of every token of the prompt and the text. Raises ValidationError, TokenizationError.

        It is called where the text is tokenized, so that no more tokens exist at a time than there are threads for.
        """
        text = validation.resolve_prompt(self._model, prompt_name) + text
        return await self._run(len(text), lambda: form(self._tokenize(text, add_special_tokens)))

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids; ids outside the vocabulary are skipped. Raises TokenizationError."""
        return await self._run(len(ids), lambda: self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        try:
            if size <= INLINE_CHARS:
                return work()
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except TeiError:
            raise
        except asyncio.CancelledError:
            if self._is_closed and not task_is_cancelled():
                raise UnavailableError(CLOSED) from None
            raise
        except BaseException as error:
            if not is_failure(error):
                raise
            if self._is_closed:
                raise UnavailableError(CLOSED) from None
            raise TokenizationError("tokenizer error: the input could not be tokenized") from error

    def _encode_one(self, input: Input) -> Encoding:
        text = self._plain(input)
        found = None if text is None else self._encode_plain([text])[0]
        return found or self._encode(input)

    def _encode_all(self, inputs: Sequence[Input]) -> list[Encoding]:
        """Those that are a text and nothing else together, which is faster; then one by one those that must be."""
        plain = {place: text for place, input in enumerate(inputs) if (text := self._plain(input)) is not None}
        found = dict(zip(plain, self._encode_plain([*plain.values()]), strict=True))
        return [found.get(place) or self._encode(input) for place, input in enumerate(inputs)]

    def _plain(self, input: Input) -> str | None:
        """The text as it is tokenized, unless there is more to an input; a long one may have to be cut."""
        model = self._model
        if input.pair is not None or len(input.text) > PLAIN_CHARS * model.max_input_length:
            return None
        prompt = validation.resolve_prompt(model, input.prompt_name)
        return None if prompt and not model.include_prompt else self._cased(prompt + input.text)

    def _encode_plain(self, texts: Sequence[str]) -> list[Encoding | None]:
        """None for what is to be cut or refused."""
        try:
            encodings = self._encode_whole(texts)
        except Exception:  # of which text it is shows when each is tokenized alone
            return [None] * len(texts)
        return [each if 0 < len(each.input_ids) <= self._model.max_input_length else None for each in encodings]

    def _encode_whole(self, texts: Sequence[str]) -> list[Encoding]:
        if self._words is not None:
            return [Encoding(ids) for ids in self._words.encode(texts)]
        encodings = self._tokenizer.encode_batch_fast(texts)
        return [Encoding(np.array(each.ids, np.int32), type_ids(each)) for each in encodings]

    def _encode(self, input: Input) -> Encoding:
        if self._model.template is not None and input.pair is not None:
            return self._encode_templated(self._model.template, input)
        prompt = "" if input.pair is not None else validation.resolve_prompt(self._model, input.prompt_name)
        text, pair = self._cut(input)
        first = encode_unlocked(self._tokenizer, self._cased(prompt + text))
        second = None if pair is None else encode_unlocked(self._tokenizer, self._cased(pair))
        limit, whole, tokens = self._model.max_input_length, len(first), _tokens(first, second)
        if input.truncate:
            truncate(self._tokenizer, first, second, limit, input.truncation_direction)
        encoding = self._tokenizer.post_process(first, second)
        validation.check_tokens(len(encoding.ids), limit)
        cut_in_front = whole - len(first) if input.truncation_direction is TruncationDirection.LEFT else 0
        return Encoding(
            np.array(encoding.ids, np.int32),
            type_ids(encoding),
            0 if self._model.include_prompt or not prompt else max(0, self._prompt_tokens(prompt) - cut_in_front),
            is_cut=(text, pair) != (input.text, input.pair) or _tokens(first, second) < tokens,
        )

    def _encode_templated(self, template: PairTemplate, input: Input) -> Encoding:
        limit = self._model.max_input_length
        chars = validation.max_chars(limit)
        validation.check_chars(len(input.text), limit)
        document = cut(input.pair or "", chars, input.truncation_direction)
        encoding = encode_pair(self._tokenizer, template, replace(input, pair=document), limit)
        validation.check_tokens(len(encoding.input_ids), limit)
        return replace(encoding, is_cut=encoding.is_cut or document != input.pair)

    def _cased(self, text: str) -> str:
        return text.lower() if self._model.lower_case else text

    def _cut(self, input: Input) -> tuple[str, str | None]:
        """Drop what truncation would drop anyway, before it costs tokenizing; `max_chars` characters stay."""
        limit = validation.max_chars(self._model.max_input_length)
        if input.chars <= limit:
            return input.text, input.pair
        if input.pair is None:
            return cut(input.text, limit, input.truncation_direction), None
        half = limit // 2
        return cut(input.text, half, input.truncation_direction), cut(input.pair, half, input.truncation_direction)

    def _prompt_tokens(self, prompt: str) -> int:
        """Leading tokens that belong to the prompt, the special ones before it included, the closing one not."""
        encoding = self._tokenizer.encode(self._cased(prompt))
        return len(encoding.ids) - sum(encoding.special_tokens_mask[-1:])

    def _tokenize(self, text: str, add_special_tokens: bool) -> Iterator[SimpleToken]:
        cased = self._cased(text)
        encoding = encode_unlocked(self._tokenizer, cased, add_special_tokens=add_special_tokens)
        source = text if len(text) == len(cased) else cased  # a few letters change their length with their case
        return simple_tokens(self._tokenizer, encoding, source)


def count_workers(config: EngineConfig) -> int:
    """Threads that tokenize: as many as `config` says, or one less than there are cores."""
    return config.tokenization_workers or min(max(cpus.available() - 1, 1), MAX_WORKERS)


def load(folder: Path, hf_config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of `folder`, truncation and padding switched off. Raises StartupError, also if it is of no use."""
    tokenizer = read_tokenizer(folder, hf_config)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    with library_errors(f"the tokenizer of `{folder}` fails at any text"):
        tokenizer.encode(ANY_TEXT)
    return tokenizer


def type_ids(encoding: tokenizers.Encoding) -> NDArray[np.int32] | None:
    """The tokens' types; None when all are 0. A single text may have others: Funnel's first token is of type 2."""
    types = encoding.type_ids
    return np.array(types, np.int32) if any(types) else None


def _tokens(first: tokenizers.Encoding, second: tokenizers.Encoding | None) -> int:
    return len(first) + (0 if second is None else len(second))


def truncate(
    tokenizer: tokenizers.Tokenizer,
    first: tokenizers.Encoding,
    second: tokenizers.Encoding | None,
    limit: int,
    direction: TruncationDirection,
) -> None:
    """Cut the texts, in place, so that with special tokens they fit `limit` tokens; the longer one gives first."""
    room = max(0, limit - tokenizer.num_special_tokens_to_add(second is not None))
    side: Literal["left", "right"] = direction.value
    keep_first, keep_second = longest_first(len(first), len(second) if second is not None else 0, room)
    keep(first, keep_first, side)
    if second is not None:
        keep(second, keep_second, side)


def keep(encoding: tokenizers.Encoding, tokens: int, side: Literal["left", "right"]) -> None:
    """Cut, in place, so that the library remembers one piece of what it cut off.

    It keeps all that is cut off, in pieces as long as what stays, and joins every piece of the one text of a pair with
    every piece of the other: seconds and gigabytes for two long texts. A second cut forgets the pieces of the first.
    """
    if tokens > 0:  # where nothing stays, all is one piece anyway
        encoding.truncate(tokens + 1, direction=side)
    encoding.truncate(tokens, direction=side)


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Tokens of each text that fit `room`, as the tokenizers library's `longest_first` strategy keeps them."""
    if first + second <= room:
        return first, second
    shorter = min(first, second)
    if 2 * shorter <= room:  # the longer text alone gives way
        shorter, longer = shorter, room - shorter
    else:
        shorter, longer = room // 2, room - room // 2
    return (longer, shorter) if first > second else (shorter, longer)


def cut(text: str, chars: int, direction: TruncationDirection) -> str:
    """The head of `text`, or its tail when it is truncated on the left."""
    if len(text) <= chars:
        return text
    return text[-chars:] if direction is TruncationDirection.LEFT else text[:chars]


def simple_tokens(tokenizer: tokenizers.Tokenizer, encoding: tokenizers.Encoding, text: str) -> Iterator[SimpleToken]:
    """Tokens with UTF-8 byte offsets into `text` (the library counts characters) and the text they stand for."""
    byte_of = byte_offsets(text)
    rows = zip(encoding.ids, encoding.special_tokens_mask, encoding.offsets, strict=True)
    for token, special, (start, stop) in rows:
        if special:
            yield SimpleToken(token, tokenizer.id_to_token(token) or "", True, None, None)
        else:
            yield SimpleToken(token, text[start:stop], False, byte_of[start], byte_of[stop])


def byte_offsets(text: str) -> Sequence[int]:
    """For each character position of `text`, its end included: the UTF-8 byte at which it starts."""
    if text.isascii():
        return range(len(text) + 1)
    return list(accumulate((len(char.encode()) for char in text), initial=0))
