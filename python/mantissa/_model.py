"""Models that run on the processor."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from . import _core
from ._arguments import PathLike, memory_text, path_text
from ._tensor import Tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Completion", "GenerateSettings", "Model", "load"]


class GenerateSettings(TypedDict, total=False):
    """Settings of a continuation, as keywords of :meth:`Model.generate`, :meth:`Model.stream` and :meth:`Model.chat`."""

    max_new_tokens: int
    """Largest number of new tokens (128)."""
    temperature: float
    """Divisor of the logits before sampling; 0 is greedy (0)."""
    top_k: int
    """Number of tokens that can be sampled; 0 is all (0)."""
    top_p: float
    """Share of probability of the tokens that can be sampled (1)."""
    min_p: float
    """Least probability of a token that can be sampled, as a share of the largest (0)."""
    repetition_penalty: float
    """Divisor of the positive logits of tokens that occurred (1)."""
    seed: int
    """Seed of the sampling (0)."""
    ignore_eos: bool
    """Continue after an end token (False)."""
    logprobs: bool
    """Return the log-probability of each new token (False)."""


class Completion(NamedTuple):
    """Continuation of one prompt."""

    text: str
    """New text; empty for a model without a tokenizer."""
    tokens: list[int]
    """New token ids, without an end token."""
    logprobs: list[float]
    """Log-probability of each new token in nats, if asked for."""
    finish_reason: str
    """``"length"``, ``"stop token"`` or ``"caller"``."""


class Model:
    """A model that is loaded and runs on the processor. Made by :func:`load`."""

    def __init__(self, core: _core.CoreModel, path: str) -> None:
        self._core = core
        self._path = path

    @property
    def context(self) -> int:
        """Largest number of tokens of a sequence."""
        return self._core.context

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self._core.vocabulary

    def encode(self, text: str, *, bos: bool | None = None) -> list[int]:
        """Return the token ids of a text; ``bos`` overrides whether it begins with the tokenizer's first token.

        >>> import mantissa
        >>> model = mantissa.load("demo")
        >>> model.decode(model.encode("Once upon a time"))
        'Once upon a time'
        """
        return self._core.encode(text, bos)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens.

        >>> import mantissa
        >>> model = mantissa.load("demo")
        >>> model.decode([])
        ''
        """
        return self._core.decode(list(tokens))

    def _ids(self, prompt: str | Sequence[int], *, bos: bool | None = None) -> list[int]:
        return self.encode(prompt, bos=bos) if isinstance(prompt, str) else [int(token) for token in prompt]

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        **settings: Unpack[GenerateSettings],
    ) -> list[Completion]:
        """Continue prompts, which are texts or lists of token ids, many at once. See :class:`GenerateSettings`.

        Without a temperature, decoding is greedy. A prompt has the same continuation alone and among others.

        >>> import mantissa
        >>> [answer] = mantissa.load("demo").generate("Once upon a time", max_new_tokens=4)
        >>> len(answer.tokens)
        4
        """
        one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        many: Any = [prompts] if one else prompts
        ids = [self._ids(prompt) for prompt in many]
        return [Completion(*found) for found in self._core.generate(ids, **settings)]

    def chat(self, messages: Sequence[Mapping[str, Any]], **settings: Unpack[GenerateSettings]) -> Completion:
        """Answer a conversation, rendered by the model's chat template.

        >>> import mantissa
        >>> answer = mantissa.load("demo").chat([{"role": "user", "content": "A dog"}], max_new_tokens=8)
        >>> len(answer.tokens)
        8
        """
        return self.generate(self._ids(self.render(messages), bos=False), **settings)[0]

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text that the model's chat template makes of a conversation, up to where the answer begins.

        The template, a program of the model's author, runs in a process of its own, under limits of memory and time.

        >>> import mantissa
        >>> "A dog" in mantissa.load("demo").render([{"role": "user", "content": "A dog"}])
        True
        """
        import json

        return self._core.render(json.dumps([dict(message) for message in messages]))

    def stream(
        self, prompt: str | Sequence[int], **settings: Unpack[GenerateSettings]
    ) -> Generator[str, None, None]:
        """Continue one prompt and yield each piece of new text as it comes. Leaving the loop ends the computation.

        >>> import mantissa
        >>> model = mantissa.load("demo")
        >>> pieces = list(model.stream("Once upon a time", max_new_tokens=4))
        >>> "".join(pieces) == model.generate("Once upon a time", max_new_tokens=4)[0].text
        True
        """
        import queue
        import threading

        ids = self._ids(prompt)
        waiting: queue.SimpleQueue[str | BaseException | None] = queue.SimpleQueue()
        left = threading.Event()

        def told(_: int, piece: str) -> bool:
            if piece:
                waiting.put(piece)
            return left.is_set()

        def work() -> None:
            try:
                self._core.generate([ids], told, **settings)
                waiting.put(None)
            except BaseException as error:  # raised again where the pieces are read
                waiting.put(error)

        thread = threading.Thread(target=work, name="mantissa-stream", daemon=True)
        thread.start()
        try:
            while (item := waiting.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            left.set()
            thread.join()

    async def astream(
        self, prompt: str | Sequence[int], **settings: Unpack[GenerateSettings]
    ) -> AsyncIterator[str]:
        """Continue one prompt as :meth:`stream` does, without blocking an event loop.

        >>> import asyncio, mantissa
        >>> async def main(model):
        ...     return [piece async for piece in model.astream("Once upon a time", max_new_tokens=4)]
        >>> model = mantissa.load("demo")
        >>> asyncio.run(main(model)) == list(model.stream("Once upon a time", max_new_tokens=4))
        True
        """
        import asyncio

        pieces = self.stream(prompt, **settings)
        try:
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                yield piece
        finally:
            await asyncio.to_thread(pieces.close)

    def logprobs(self, tokens: str | Sequence[int]) -> list[float]:
        """Return the log-probability (nats) of each token but the first, given those before it.

        >>> import mantissa
        >>> all(value <= 0 for value in mantissa.load("demo").logprobs("Once upon a time"))
        True
        """
        return self._core.logprobs(self._ids(tokens))[0]

    def score(self, context: str | Sequence[int], continuation: str | Sequence[int]) -> tuple[float, bool]:
        """Return the log-probability (nats) of a continuation after a context, and whether greedy decoding would give it.

        >>> import mantissa
        >>> model = mantissa.load("demo")
        >>> [answer] = model.generate("Once upon a time", max_new_tokens=4)
        >>> model.score("Once upon a time", answer.tokens)[1]
        True
        """
        before, after = self._ids(context), self._ids(continuation, bos=False)
        values, greedy = self._core.logprobs([*before, *after])
        return sum(values[len(before) - 1 :]), all(greedy[len(before) - 1 :])

    def state_dict(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the float32 values of each weight, dequantized one by one, as a dense checkpoint has them.

        An adapter is not merged.

        >>> import mantissa
        >>> name, tensor = next(mantissa.load("demo").state_dict())
        >>> name, tensor.shape
        ('model.embed_tokens.weight', (2048, 128))
        """
        weights = _core.CoreWeights(self._path)
        for index, name in enumerate(weights.names()):
            read = weights.read(index)
            if read is not None:
                yield name, Tensor(read)

    def embed(self, texts: Sequence[str | Sequence[int]]) -> list[list[float]]:
        """Return the mean hidden state of each text, of unit length.

        >>> import mantissa
        >>> [vector] = mantissa.load("demo").embed(["Once upon a time"])
        >>> round(sum(x * x for x in vector), 3)
        1.0
        """
        return self._core.embed([self._ids(text) for text in texts])


def load(
    model: PathLike,
    *,
    kv: str | None = None,
    adapter: PathLike | None = None,
    draft: PathLike | None = None,
    threads: int | None = None,
    memory: str | int | None = None,
    strict: bool = False,
) -> Model:
    """Load a model, quantized or not, to run it. ``kv`` is the policy of its KV cache, such as ``"int8-head"``.

    ``draft`` is a smaller model of the same vocabulary, which proposes tokens: greedy text is the same, and comes faster.

    >>> import mantissa
    >>> mantissa.load("demo").context
    512
    """
    return Model(
        _core.CoreModel(
            os.fspath(model), kv=kv, adapter=path_text(adapter), draft=path_text(draft), threads=threads,
            memory=memory_text(memory), strict=strict,
        ),
        os.fspath(model),
    )
