"""Models of mantissa in lm-evaluation-harness: ``python -m mantissa.lm_eval --model mantissa --model_args pretrained=MODEL``.

The package ``lm_eval`` must be installed. In a program, ``MantissaLM("MODEL")`` goes where the harness takes a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ._model import Model, load

__all__ = ["MantissaLM", "main"]


@register_model("mantissa")
class MantissaLM(TemplateLM):  # type: ignore[misc]
    """A model, quantized or not, that the harness asks for probabilities and texts.

    ``pretrained`` is a folder, a GGUF file, or a name in the Hugging Face cache; ``kv`` the policy of the KV cache.
    """

    def __init__(
        self,
        pretrained: str | Model,
        *,
        kv: str | None = None,
        adapter: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        threads: int | None = None,
        memory: str | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self._model = (
            pretrained if isinstance(pretrained, Model)
            else load(pretrained, kv=kv, adapter=adapter, threads=threads, memory=memory)
        )
        self._name = "model" if isinstance(pretrained, Model) else pretrained
        self._length = int(max_length or self._model.context)
        self._new = int(max_gen_toks)

    @property
    def eot_token_id(self) -> int:
        """Token that stands before a text without a context: the tokenizer's first one, else token 0."""
        begin = self._model.encode("", bos=True)
        return begin[0] if begin else 0

    @property
    def max_length(self) -> int:
        """Tokens of a window."""
        return self._length

    @property
    def max_gen_toks(self) -> int:
        """New tokens of a text, unless a task says so."""
        return self._new

    @property
    def tokenizer_name(self) -> str:
        """Name under which the harness keeps rendered conversations."""
        return str(self._name).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the token ids of a text."""
        return self._model.encode(string, bos=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation with the model's chat template."""
        return self._model.render(chat_history)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether it is the most probable one."""
        answers = []
        for _name, context, continuation in requests:
            if not continuation:
                answers.append((0.0, True))
                continue
            tokens = [*context, *continuation][-self._length :]
            # A continuation longer than a window loses its first tokens, as in the harness's own models.
            kept = min(len(continuation), len(tokens) - 1)
            answers.append(self._model.score(tokens[:-kept], tokens[-kept:]))
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of whole texts, in windows that do not share a predicted token."""
        answers = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self._model.encode(request.args[0], bos=False), prefix_token=self.prefix_token_id,
                max_seq_len=self._length - 1, context_len=1,
            )
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            answers.append(sum(value for value, _ in self._loglikelihood_tokens(pairs)))
        return answers

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue texts up to one of their stop strings."""
        answers = []
        for request in requests:
            context, settings = request.args
            until = settings.get("until") or []
            stops = [until] if isinstance(until, str) else list(until)
            new = int(settings.get("max_gen_toks", self._new))
            sampled = bool(settings.get("do_sample", False))
            tokens = self._model.encode(context)[-max(1, self._length - new) :]
            text = ""
            stream = self._model.stream(
                tokens, max_new_tokens=min(new, self._length - len(tokens)),
                temperature=float(settings.get("temperature", 1.0)) if sampled else 0.0,
                top_p=float(settings.get("top_p", 1.0)), top_k=int(settings.get("top_k", 0) or 0),
            )
            for piece in stream:
                text += piece
                if any(stop in text for stop in stops if stop):
                    break
            stream.close()
            for stop in filter(None, stops):
                text = text.split(stop)[0]
            answers.append(text)
        return answers


def main() -> None:
    """Run the harness's command line, which knows the model ``mantissa``."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError:
        from lm_eval._cli import cli_evaluate
    cli_evaluate()


if __name__ == "__main__":
    # The class that is registered is the module's, whatever name the module runs under.
    main()
