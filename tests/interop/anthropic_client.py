#!/usr/bin/env python3
"""Drives `mantissa serve` with the `anthropic` package: messages, streams, tools, counts of tokens.

Usage: anthropic_client.py [--url http://127.0.0.1:8080] [--key KEY]

Prints a line for each check; exits 1 if one fails.
"""

import argparse
import sys
import traceback

import anthropic
import jsonschema

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"name": "get_weather", "description": "Weather of a city", "input_schema": WEATHER}]
ASK = [{"role": "user", "content": "Tell me a story."}]
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


@check
def message(client, model):
    reply = client.messages.create(model=model, max_tokens=12, system="You are brief.", messages=ASK)
    assert reply.type == "message" and reply.role == "assistant" and reply.content[0].type == "text"
    assert reply.stop_reason in ("max_tokens", "end_turn") and 0 < reply.usage.output_tokens <= 12
    assert reply.usage.input_tokens > 0


@check
def stream(client, model):
    ask = {"model": model, "max_tokens": 16, "messages": ASK, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens
    names = [event.type for event in client.messages.create(**ask, stream=True)]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]


@check
def stop(client, model):
    ask = {"model": model, "max_tokens": 24, "messages": ASK, "extra_body": {"temperature": 0}}
    text = client.messages.create(**ask).content[0].text
    word = text[len(text) // 2:][:3]
    cut = client.messages.create(**ask, stop_sequences=[word])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", word)
    assert word not in "".join(block.text for block in cut.content)


@check
def tools(client, model):
    ask = {"model": model, "max_tokens": 400, "messages": ASK, "tools": TOOLS, "extra_body": {"temperature": 1.0}}
    reply = client.messages.create(**ask, tool_choice={"type": "tool", "name": "get_weather"})
    [call] = reply.content
    assert (call.type, call.name, reply.stop_reason) == ("tool_use", "get_weather", "tool_use")
    jsonschema.validate(call.input, WEATHER)
    with client.messages.stream(**ask, tool_choice={"type": "any", "disable_parallel_tool_use": True}) as events:
        [streamed] = events.get_final_message().content
    assert streamed.name == "get_weather"
    jsonschema.validate(streamed.input, WEATHER)
    history = [
        *ASK,
        {"role": "assistant", "content": [{"type": "tool_use", "id": call.id, "name": call.name, "input": call.input}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sun"}]},
    ]
    assert client.messages.create(model=model, max_tokens=4, messages=history, tools=TOOLS).content


@check
def count_tokens(client, model):
    count = client.messages.count_tokens(model=model, messages=ASK).input_tokens
    more = client.messages.count_tokens(model=model, messages=ASK, system="You are brief.").input_tokens
    assert 0 < count < more
    usage = client.messages.create(model=model, max_tokens=1, messages=ASK).usage
    assert usage.input_tokens + usage.cache_read_input_tokens == count


@check
def faults(client, model):
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    for change, field in [
        ({"max_tokens": 0}, "max_tokens"), ({"extra_body": {"temperature": -1}}, "temperature"), ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "user", "content": [image]}]}, "image input is not supported"),
        ({"tool_choice": {"type": "tool", "name": "missing"}, "tools": TOOLS}, "missing"),
        ({"tools": [{"name": "a", "input_schema": {"type": "nothing"}}], "tool_choice": {"type": "any"}}, "tools"),
    ]:
        try:
            client.messages.create(**{"model": model, "max_tokens": 4, "messages": ASK, **change})
        except anthropic.BadRequestError as error:
            assert error.body["type"] == "error" and error.body["error"]["type"] == "invalid_request_error"
            assert field in error.body["error"]["message"], (field, error.body)
        else:
            raise AssertionError(f"{change} was accepted")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--key", default="none")
    args = parser.parse_args()
    client = anthropic.Anthropic(base_url=args.url, api_key=args.key, max_retries=0)
    model = next(iter(client.models.list())).id
    failed = 0
    for function in CHECKS:
        try:
            function(client, model)
            print(f"ok      {function.__name__}")
        except Exception:
            failed += 1
            print(f"FAILED  {function.__name__}")
            traceback.print_exc()
    print(f"anthropic {anthropic.__version__}: {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
