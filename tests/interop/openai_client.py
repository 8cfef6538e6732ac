#!/usr/bin/env python3
"""Drives `mantissa serve` with the `openai` package (3.x): every endpoint of OpenAI's API, with streams, tools, schemas.

Usage: openai_client.py [--url http://127.0.0.1:8080] [--key KEY] [--many N]

Prints a line for each check; exits 1 if one fails. --many N generates N replies to a JSON schema and checks each.
"""

import argparse
import base64
import concurrent.futures
import json
import struct
import sys
import traceback

import jsonschema
import openai

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog", "bird"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {},
                                                                         "additionalProperties": False}}},
]
ASK = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Tell me a story."}]
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


@check
def models(client, model):
    assert model in [entry.id for entry in client.models.list()]
    assert client.models.retrieve(model).id == model


@check
def chat(client, model):
    ask = lambda **more: client.chat.completions.create(model=model, messages=ASK, max_tokens=12, temperature=0, **more)
    whole = ask(logprobs=True, top_logprobs=3)
    choice = whole.choices[0]
    assert choice.finish_reason in ("length", "stop") and choice.message.role == "assistant"
    assert whole.usage.completion_tokens <= 12 and whole.usage.total_tokens > whole.usage.completion_tokens
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in choice.logprobs.content)
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == choice.message.content, (text, choice.message.content)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.id == chunks[0].id for chunk in chunks)


@check
def sampling(client, model):
    ask = lambda **more: client.chat.completions.create(model=model, messages=ASK, max_tokens=16, **more)
    texts = lambda reply: [choice.message.content for choice in reply.choices]
    first, again, other = (texts(ask(seed=seed, temperature=1.5, n=2)) for seed in (1, 1, 2))
    assert first == again and first != other and first[0] != first[1], (first, again, other)
    greedy = texts(ask(temperature=0))[0]
    stop = greedy[len(greedy) // 2:][:3]
    cut = ask(temperature=0, stop=[stop]).choices[0]
    assert cut.finish_reason == "stop" and stop not in cut.message.content
    assert greedy.startswith(cut.message.content)
    extra = {"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.2}
    reply = ask(seed=3, temperature=0.9, top_p=0.8, presence_penalty=0.5, frequency_penalty=0.5, extra_body=extra)
    assert reply.choices[0].message.content
    biased = ask(temperature=0, logit_bias={"10": 100}, logprobs=True)
    assert len({token.token for token in biased.choices[0].logprobs.content}) == 1


@check
def cached_tokens(client, model):
    messages = [{"role": "user", "content": "The story of the little dog and the big red ball. " * 8}]
    ask = lambda: client.chat.completions.create(model=model, messages=messages, max_tokens=2)
    ask()
    assert ask().usage.prompt_tokens_details.cached_tokens >= 64


@check
def schema(client, model):
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
    for seed in range(4):
        reply = client.chat.completions.create(model=model, messages=ASK, max_tokens=400, seed=seed, temperature=1,
                                               response_format=form)
        assert reply.choices[0].finish_reason == "stop", reply
        jsonschema.validate(json.loads(reply.choices[0].message.content), SCHEMA)
    chunks = client.chat.completions.create(model=model, messages=ASK, max_tokens=400, seed=9, stream=True,
                                            response_format=form)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    jsonschema.validate(json.loads(text), SCHEMA)
    refused(client.chat.completions.create, model=model, messages=ASK, response_format={
        "type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}})


@check
def tools(client, model):
    ask = lambda **more: client.chat.completions.create(model=model, messages=ASK, tools=TOOLS, max_tokens=400, seed=5,
                                                        temperature=1, **more)
    reply = ask(tool_choice={"type": "function", "function": {"name": "get_weather"}}).choices[0]
    [call] = reply.message.tool_calls
    assert (call.function.name, reply.finish_reason) == ("get_weather", "tool_calls"), reply
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    whole = ask(tool_choice="required", parallel_tool_calls=True).choices[0]
    several = whole.message.tool_calls
    assert several and len({call.id for call in several}) == len(several)
    streamed, finish = {}, None
    for chunk in ask(tool_choice="required", parallel_tool_calls=True, stream=True):
        if chunk.choices:
            finish = chunk.choices[0].finish_reason or finish
        for part in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
            call = streamed.setdefault(part.index, {"name": "", "arguments": ""})
            call["name"] += part.function.name or ""
            call["arguments"] += part.function.arguments or ""
    # A small model may call tools up to the token limit.
    assert finish == whole.finish_reason in ("tool_calls", "length")
    assert [call["name"] for call in streamed.values()] == [call.function.name for call in several]
    assert [call["arguments"] for call in streamed.values()] == [call.function.arguments for call in several]
    # The results go back to the model.
    result = [
        *ASK, {"role": "assistant", "content": None, "tool_calls": [{
            "id": "abcdefghi", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "12:00"},
    ]
    reply = client.chat.completions.create(model=model, messages=result, tools=TOOLS, max_tokens=8)
    assert reply.choices[0].message.content is not None or reply.choices[0].message.tool_calls
    none = ask(tool_choice="none").choices[0]
    assert not none.message.tool_calls
    refused(ask, tool_choice={"type": "function", "function": {"name": "missing"}})


@check
def completions(client, model):
    ask = lambda **more: client.completions.create(model=model, prompt="Once upon a time", temperature=0, **more)
    whole = ask(max_tokens=10, logprobs=2)
    choice = whole.choices[0]
    assert "".join(choice.logprobs.tokens) == choice.text and len(choice.logprobs.top_logprobs[0]) == 2
    assert "".join(chunk.choices[0].text for chunk in ask(max_tokens=10, stream=True) if chunk.choices) == choice.text
    echo = ask(max_tokens=1, echo=True, logprobs=1).choices[0]
    assert echo.text.startswith("Once upon a time") and echo.logprobs.token_logprobs[0] is None
    assert all(x <= 0 for x in echo.logprobs.token_logprobs[1:])
    batch = client.completions.create(model=model, prompt=["Once", "The dog"], max_tokens=4, temperature=0)
    assert [choice.index for choice in batch.choices] == [0, 1]
    ids = client.completions.create(model=model, prompt=[5, 6, 7], max_tokens=4)
    assert ids.usage.prompt_tokens == 3


@check
def responses(client, model):
    ask = lambda **more: client.responses.create(model=model, input="Tell me a story.", temperature=0, **more)
    whole = ask(max_output_tokens=12)
    assert whole.id.startswith("resp_") and whole.output[0].content[0].text == whole.output_text
    assert whole.status in ("completed", "incomplete") and whole.usage.output_tokens <= 12
    events = list(ask(max_output_tokens=12, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    form = {"format": {"type": "json_schema", "name": "animal", "schema": SCHEMA, "strict": True}}
    jsonschema.validate(json.loads(ask(text=form, max_output_tokens=400).output_text), SCHEMA)
    tool = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}
    reply = ask(tools=[tool], tool_choice="required", max_output_tokens=400, parallel_tool_calls=False)
    [call] = reply.output
    assert call.type == "function_call" and call.name == "get_weather"
    jsonschema.validate(json.loads(call.arguments), WEATHER)
    deltas = {}
    for event in ask(tools=[tool], tool_choice="required", max_output_tokens=400, parallel_tool_calls=False, stream=True):
        if event.type == "response.function_call_arguments.delta":
            deltas[event.item_id] = deltas.get(event.item_id, "") + event.delta
    assert list(deltas.values()) == [call.arguments]
    history = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather in Bern?"}]},
        {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
        {"type": "function_call_output", "call_id": call.call_id, "output": "sun"},
    ]
    assert client.responses.create(model=model, input=history, max_output_tokens=4).output
    refused(client.responses.create, model=model, input="a", previous_response_id="resp_1")


@check
def embeddings(client, model):
    texts = ["The dog is big.", "The cat is small.", "The dog is big."]
    floats = client.embeddings.create(model=model, input=texts, encoding_format="float").data
    assert len(floats) == 3 and floats[0].embedding == floats[2].embedding != floats[1].embedding
    assert abs(sum(x * x for x in floats[0].embedding) - 1) < 1e-4
    raw = client.embeddings.with_raw_response.create(model=model, input=texts[0], encoding_format="base64")
    data = base64.b64decode(json.loads(raw.text)["data"][0]["embedding"])
    values = struct.unpack(f"<{len(data) // 4}f", data)
    assert all(abs(a - b) < 1e-6 for a, b in zip(values, floats[0].embedding))
    assert client.embeddings.create(model=model, input=[[5, 6, 7], [8]]).usage.prompt_tokens == 4


@check
def faults(client, model):
    create = client.chat.completions.create
    for more, field in [
        ({"temperature": -1}, "temperature"), ({"top_p": 2}, "top_p"), ({"n": 100_000}, "n"),
        ({"max_tokens": "many"}, "max_tokens"), ({"logit_bias": {"999999999": 1}}, "logit_bias"),
        ({"response_format": {"type": "sound"}}, "response_format"), ({"stop": ["a"] * 1000}, "stop"),
        ({"top_logprobs": 1000, "logprobs": True}, "top_logprobs"), ({"messages": "Hi"}, "messages"),
    ]:
        error = refused(create, **{"model": model, "messages": ASK, **more})
        assert field in str(error.body), (field, error.body)
    # A single model answers for any name; --strict-model refuses them.
    if len(list(client.models.list())) == 1:
        assert create(model="no-such-model", messages=ASK, max_tokens=1).model == model
    error = refused(client.models.retrieve, model="no-such-model", kind=openai.NotFoundError)
    assert "no-such-model" in str(error.body)
    error = refused(create, model=model, messages=[{"role": "user", "content": "word " * 200_000}])
    assert "context" in str(error.body)


def refused(function, kind=openai.BadRequestError, **arguments):
    try:
        function(**arguments)
    except kind as error:
        return error
    raise AssertionError(f"{arguments.keys()} were accepted")


def generate_many(client, model, count):
    """Returns the numbers of replies to the schema that are valid, that were cut, and that are neither."""
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}

    def one(seed):
        reply = client.chat.completions.create(model=model, messages=ASK, max_tokens=400, seed=seed,
                                               temperature=[0.0, 0.7, 1.0, 1.5][seed % 4], response_format=form)
        choice = reply.choices[0]
        try:
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)
            return "valid"
        except Exception:
            print(choice, file=sys.stderr)
            return "cut" if choice.finish_reason == "length" else "invalid"

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(one, range(count)))
    return {kind: results.count(kind) for kind in ("valid", "cut", "invalid")}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--key", default="none")
    parser.add_argument("--many", type=int, default=0)
    parser.add_argument("--only")
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.url + "/v1", api_key=args.key, max_retries=0)
    model = next(iter(client.models.list())).id
    failed = 0
    for function in CHECKS:
        if args.only and function.__name__ != args.only:
            continue
        try:
            function(client, model)
            print(f"ok      {function.__name__}")
        except Exception:
            failed += 1
            print(f"FAILED  {function.__name__}")
            traceback.print_exc()
    if args.many:
        counts = generate_many(client, model, args.many)
        print(f"schema: {counts}")
        failed += counts["valid"] != args.many
    print(f"openai {openai.__version__}: {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
