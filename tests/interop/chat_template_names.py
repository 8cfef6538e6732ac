#!/usr/bin/env python3
"""Compares the chat templates that `--chat-template NAME` knows with llama.cpp's templates of these names.

Usage: chat_template_names.py

Prints a line for each name; exits 1 if a text differs. Beginning and end of text are the tokenizer's in llama.cpp, so both
are empty here, except where llama.cpp writes a text for the end. Needs `pip install jinja2 llama-cpp-python`.
"""

import ctypes
import pathlib
import sys

import jinja2
import llama_cpp

FOLDER = pathlib.Path(__file__).parents[2] / "crates/mantissa-model/src/chat/templates"
# Where the name, or the end of a text, is another one there.
NAMES = {"llama2": "llama2-sys-bos"}
ENDS = {"zephyr": "<|endoftext|>", "phi3": "", "gemma": ""}
# llama.cpp leaves out the spaces around an answer that the makers of Llama 2 write, and its names of the ends.
CURED = {"llama2": lambda text: text.replace("<s>", "").replace("]Hi there<", "] Hi there <")}
CONVERSATIONS = [
    [("user", "Hello"), ("assistant", "Hi there"), ("user", "Who are you?")],
    [("system", "Be brief"), ("user", "Hello")],
    [("system", "Be brief"), ("user", "Hello"), ("assistant", "Hi there"), ("user", "Who are you?")],
]


def theirs(name, messages):
    chat = (llama_cpp.llama_chat_message * len(messages))(
        *(llama_cpp.llama_chat_message(role.encode(), content.encode()) for role, content in messages)
    )
    buffer = ctypes.create_string_buffer(1 << 16)
    size = llama_cpp.llama_chat_apply_template(name.encode(), chat, len(messages), True, buffer, len(buffer))
    return buffer.raw[:size].decode() if size >= 0 else None


def main():
    engine = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    failed = 0
    for path in sorted(FOLDER.glob("*.jinja")):
        name, template = path.stem, engine.from_string(path.read_text())
        for conversation in CONVERSATIONS:
            messages = [{"role": role, "content": content} for role, content in conversation]
            end = ENDS.get(name, "</s>")
            own = template.render(messages=messages, add_generation_prompt=True, bos_token="", eos_token=end)
            other = theirs(NAMES.get(name, name), conversation)
            other = CURED.get(name, lambda text: text)(other) if other is not None else None
            if own != other:
                failed += 1
                print(f"DIFFERS {name}:\n  ours   {own!r}\n  theirs {other!r}")
        print(f"done    {name}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
