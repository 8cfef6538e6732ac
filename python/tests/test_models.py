"""Models that run, and single tensors."""

from __future__ import annotations

import json
import math
import multiprocessing
import subprocess
from pathlib import Path

import pytest

import mantissa


@pytest.fixture(scope="module")
def model() -> mantissa.Model:
    return mantissa.load("demo")


def test_a_continuation_is_that_of_the_command(command: str, model: mantissa.Model) -> None:
    printed = subprocess.run(
        [command, "run", "demo", "-p", "Once upon a time", "-n", "16", "--temperature", "0", "--json", "--quiet"],
        check=True, capture_output=True, text=True,
    )
    [answer] = model.generate("Once upon a time", max_new_tokens=16)
    assert json.loads(printed.stdout)["tokens"] == answer.tokens
    assert answer.finish_reason in ("length", "stop token")


def test_prompts_have_the_same_continuation_alone_and_together(model: mantissa.Model) -> None:
    prompts = ["Once upon a time", "The dog", "def f(x):"]
    together = model.generate(prompts, max_new_tokens=12, logprobs=True)
    alone = [model.generate(prompt, max_new_tokens=12, logprobs=True)[0] for prompt in prompts]
    assert together == alone
    assert all(len(answer.logprobs) == len(answer.tokens) for answer in together)
    sampled = [model.generate("The dog", max_new_tokens=8, temperature=1.0, seed=seed)[0].tokens for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_a_stream_can_be_left(model: mantissa.Model) -> None:
    stream = model.stream("Once upon a time", max_new_tokens=200, ignore_eos=True)
    assert next(stream)
    stream.close()
    whole = "".join(model.stream("Once upon a time", max_new_tokens=20))
    assert whole == model.generate("Once upon a time", max_new_tokens=20)[0].text


def test_log_probabilities_are_those_of_an_evaluation(model: mantissa.Model) -> None:
    tokens = model.encode("Once upon a time there was a dog.")
    scored = model.logprobs(tokens)
    assert len(scored) == len(tokens) - 1
    [answer] = model.generate([tokens[:4]], max_new_tokens=1, logprobs=True, ignore_eos=True)
    assert math.isclose(answer.logprobs[0], model.logprobs([*tokens[:4], answer.tokens[0]])[-1], abs_tol=1e-4)


def test_what_a_model_cannot_run_is_refused(model: mantissa.Model) -> None:
    with pytest.raises(mantissa.InputError, match="context"):
        model.generate("a", max_new_tokens=model.context)
    with pytest.raises(mantissa.InputError, match="below"):
        model.generate([[model.vocabulary]])
    with pytest.raises(mantissa.InputError, match="none"):
        model.logprobs([])
    with pytest.raises(mantissa.InputError, match="kv"):
        mantissa.load("demo", kv="int99")


def _child(_: int) -> float:
    return mantissa.evaluate("demo", text="default", context=64, threads=2).nll


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_run_jobs(method: str) -> None:
    here = _child(0)
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map(_child, range(2)) == [here, here]


def test_a_draft_changes_no_greedy_token(model: mantissa.Model, tmp_path: Path) -> None:
    mantissa.quantize("demo", "rtn-int4-g32", out=tmp_path / "small", verify=False)
    drafted = mantissa.load("demo", draft=tmp_path / "small")
    [alone] = model.generate("Once upon a time", max_new_tokens=24)
    assert drafted.generate("Once upon a time", max_new_tokens=24) == [alone]
    with pytest.raises(mantissa.InputError):
        mantissa.load("demo", draft="nowhere")


def test_pieces_of_a_stream_are_whole_characters(model: mantissa.Model) -> None:
    prompt = [*model.encode("é"), *model.encode("日本", bos=False)]
    pieces = list(model.stream(prompt, max_new_tokens=48, temperature=5.0, seed=3, ignore_eos=True))
    [answer] = model.generate([prompt], max_new_tokens=48, temperature=5.0, seed=3, ignore_eos=True)
    assert "".join(pieces) == answer.text and all(pieces)


def test_an_unknown_setting_is_refused(model: mantissa.Model) -> None:
    with pytest.raises(TypeError):
        model.generate("Once", temprature=0.5)  # type: ignore[call-arg]


def test_more_prompts_than_run_at_once(model: mantissa.Model) -> None:
    prompts = [f"There were {count} dogs" for count in range(70)]
    answers = model.generate(prompts, max_new_tokens=3)
    assert [answer.tokens for answer in answers[-2:]] == [
        model.generate(prompt, max_new_tokens=3)[0].tokens for prompt in prompts[-2:]
    ]
