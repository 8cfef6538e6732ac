#!/usr/bin/env python3
"""Drives `mantissa serve` with the `ollama` package: list, show, chat, generate, embed, ps, tools, faults.

Usage: ollama_client.py [--url http://127.0.0.1:8080] [--key KEY]

Prints a line for each check; exits 1 if one fails.
"""

import argparse
import asyncio
import json
import sys
import traceback
from importlib.metadata import version

import httpx
import ollama

ASK = [{"role": "user", "content": "Tell me a story."}]
GREEDY = {"temperature": 0, "num_predict": 16, "repeat_penalty": 1.0}
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


@check
def listed(client, model):
    [entry, *_] = client.list().models
    assert entry.model == model and entry.size > 0 and len(entry.digest) == 64 and entry.modified_at
    assert entry.details.family and entry.details.parameter_size and entry.details.quantization_level


@check
def shown(client, model):
    found = client.show(model)
    family = found.modelinfo["general.architecture"]
    assert found.modelinfo[f"{family}.context_length"] > 0 and found.details.family == family
    assert {"completion", "embedding"} <= set(found.capabilities)
    assert client.show(model + ":latest").modelinfo == found.modelinfo


@check
def running(client, model):
    [entry, *_] = client.ps().models
    assert entry.model == model and entry.context_length > 0 and entry.size_vram == 0


def check_times(end):
    assert end.done and end.done_reason in ("stop", "length") and end.created_at
    assert 0 < end.eval_count and 0 < end.prompt_eval_count
    assert end.total_duration >= end.load_duration + end.prompt_eval_duration + end.eval_duration > 0


@check
def chat(client, model):
    whole = client.chat(model, ASK, options=GREEDY)
    assert whole.message.role == "assistant"
    check_times(whole)
    parts = list(client.chat(model, ASK, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    check_times(parts[-1])
    assert parts[-1].eval_count == whole.eval_count


@check
def generate(client, model):
    whole = client.generate(model, "Once upon a time", options=GREEDY)
    check_times(whole)
    parts = list(client.generate(model, "Once upon a time", options=GREEDY, stream=True))
    assert "".join(part.response for part in parts) == whole.response
    raw = client.generate(model, "Once upon a time", raw=True, options=GREEDY)
    assert raw.response and raw.prompt_eval_count <= whole.prompt_eval_count
    stopped = client.generate(model, "Once upon a time", raw=True, options=GREEDY | {"stop": [raw.response[3:6]]})
    assert raw.response.startswith(stopped.response) and len(stopped.response) <= 3
    assert client.generate(model, keep_alive="5m").done_reason == "load"


@check
def asynchronous(client, model):
    async def all_at_once():
        other = ollama.AsyncClient(client._client.base_url.__str__(), headers=dict(client._client.headers))
        answers = await asyncio.gather(*(other.chat(model, ASK, options=GREEDY) for _ in range(4)))
        assert len({answer.message.content for answer in answers}) == 1

    asyncio.run(all_at_once())


@check
def forms(client, model):
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    reply = client.chat(model, ASK, format=schema, options={"num_predict": 100})
    assert json.loads(reply.message.content)["colour"] in ("red", "blue")
    reply = client.generate(model, "A number as JSON:", format="json", options={"num_predict": 200, "seed": 1})
    if reply.done_reason == "stop":
        assert isinstance(json.loads(reply.response), dict)


def get_weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: name of the city
    """
    return f"sun in {city}"


@check
def tools(client, model):
    reply = client.chat(model, ASK, tools=[get_weather], options=GREEDY)
    assert reply.message.role == "assistant"
    call = {"function": {"name": "get_weather", "arguments": {"city": "Bern"}}}
    history = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_name": "get_weather", "content": "sun"},
    ]
    try:
        client.chat(model, history, tools=[get_weather], options=GREEDY)
    except ollama.ResponseError as error:
        # Some templates know no results of tools.
        assert error.status_code == 400 and "chat template" in error.error, error.error


@check
def embed(client, model):
    one, two = client.embed(model, ["a dog", "a cat"]).embeddings
    assert len(one) == len(two) and one != two
    assert abs(sum(x * x for x in one) - 1) < 1e-4
    assert client.embed(model, "a cat").embeddings == [two]
    old = client.embeddings(model, "a cat").embedding
    assert len(old) == len(one)


@check
def faults(client, model):
    for status, field, call in [
        (404, "expected", lambda: client.show("missing")),
        (400, "options.mirostat", lambda: client.chat(model, ASK, options={"mirostat": 2})),
        (400, "temperature", lambda: client.chat(model, ASK, options={"temperature": -1})),
        (400, "messages[0].role", lambda: client.chat(model, [{"role": "robot", "content": "a"}])),
        (400, "suffix", lambda: client.generate(model, "a", suffix="b")),
        (501, "--also", lambda: client.pull("missing")),
        (501, "--also", lambda: client.create("other", from_=model)),
        (501, "--also", lambda: client.copy(model, "other")),
        (501, "--also", lambda: client.delete(model)),
    ]:
        try:
            call()
        except ollama.ResponseError as error:
            assert error.status_code == status and field in error.error, (status, field, error)
        else:
            raise AssertionError(f"{field} was accepted")
    assert client.pull(model).status == "success"


@check
def root(client, _):
    url = client._client.base_url
    assert httpx.get(url).text == "Ollama is running"
    assert httpx.head(url).status_code == 200
    assert httpx.get(url.join("/api/version")).json()["version"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--key")
    args = parser.parse_args()
    headers = {"Authorization": f"Bearer {args.key}"} if args.key else {}
    client = ollama.Client(args.url, headers=headers)
    model = client.list().models[0].model
    failed = 0
    for function in CHECKS:
        try:
            function(client, model)
            print(f"ok      {function.__name__}")
        except Exception:
            failed += 1
            print(f"FAILED  {function.__name__}")
            traceback.print_exc()
    print(f"ollama {version('ollama')}: {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
