#!/usr/bin/env python3
"""llama-server's command line and own endpoints over `mantissa serve`, for llama.cpp's server tests.

Takes llama-server's flags, starts `mantissa serve` on a free port, and translates requests and responses of the
endpoints that only llama-server has (/completion, /props, /slots, /metrics in its form, ...) and its additions to
others (timings, system_fingerprint, defaults of sampling). It computes no token: where `mantissa serve` lacks
something, the tests fail.

Environment: MANTISSA (the binary), MANTISSA_MODEL (folder of stories260K).
"""

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time

from aiohttp import ClientSession, ClientTimeout, web

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    " + message['content'] + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
COMMAND_R = (
    "{% for message in messages %}{{ '<|START_OF_TURN_TOKEN|>' + {'system': '<|SYSTEM_TOKEN|>',"
    " 'user': '<|USER_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>'}[message['role']] + message['content']"
    " + '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "command-r": COMMAND_R}
FINGERPRINT = "b0-mantissa"


def parse(argv):
    """Flags of llama-server as a dictionary; those without a value are True."""
    flags, at = {}, 0
    while at < len(argv):
        name = argv[at].lstrip("-")
        has_value = at + 1 < len(argv) and (not argv[at + 1].startswith("-") or argv[at + 1].lstrip("-").isdigit())
        flags[name] = argv[at + 1] if has_value else True
        at += 2 if has_value else 1
    return flags


class Shim:
    def __init__(self, flags):
        self.flags = flags
        self.slots = int(flags.get("parallel", 1))
        self.n_ctx = int(flags.get("ctx-size", 2048))
        # Each slot has its part, unless they share one cache.
        self.context = self.n_ctx if "kv-unified" in flags else self.n_ctx // self.slots
        self.n_predict = int(flags.get("n-predict", -1))
        self.seed = int(flags.get("seed", 42))
        self.temperature = float(flags.get("temp", 0.8))
        self.key = flags.get("api-key")
        names = sorted(str(flags.get("alias", "model")).split(","))
        self.aliases, self.name = names, names[0]
        self.counters = {name: 0.0 for name in ("prompt", "cached", "prompt_s", "predicted", "predicted_s", "decode")}
        self.folder = tempfile.mkdtemp(prefix="mantissa-llama-")
        self.process = self.session = self.base = None

    async def start(self):
        model = os.path.join(self.folder, "model")
        os.mkdir(model)
        source = os.environ["MANTISSA_MODEL"]
        for file in os.listdir(source):
            if file != "config.json":
                os.symlink(os.path.join(source, file), os.path.join(model, file))
        with open(os.path.join(source, "config.json")) as file:
            config = json.load(file)
        # llama-server runs a model beyond the context that it was trained for.
        config["max_position_embeddings"] = max(config["max_position_embeddings"], self.context)
        with open(os.path.join(model, "config.json"), "w") as file:
            json.dump(config, file)
        template = TEMPLATES["chatml"]
        if "chat-template" in self.flags:
            template = TEMPLATES.get(self.flags["chat-template"], self.flags["chat-template"])
        if "chat-template-file" in self.flags:
            with open(self.flags["chat-template-file"]) as file:
                template = file.read()
        if "bos_token" not in template:
            # llama-server adds the token that begins a text, which its templates leave out.
            template = "{{ bos_token }}" + template
        with open(os.path.join(model, "chat_template.jinja"), "w") as file:
            file.write(template)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.base = f"http://127.0.0.1:{port}"
        args = [os.environ["MANTISSA"], "serve", model, "--host", "127.0.0.1", "--port", str(port)]
        args += ["--parallel", str(self.slots), "--context", str(self.context)]
        # llama-server lets pages of any origin use it, unless a flag says otherwise.
        args += ["--cors", self.flags.get("cors-origins", "*")]
        if self.key:
            path = os.path.join(self.folder, "keys")
            with open(path, "w") as file:
                file.write(self.key + "\n")
            args += ["--api-key-file", path]
        self.process = await asyncio.create_subprocess_exec(*args)
        self.session = ClientSession(timeout=ClientTimeout(total=None))
        for _ in range(600):
            try:
                async with self.session.get(self.base + "/health") as response:
                    if response.status == 200:
                        return
            except OSError:
                pass
            if self.process.returncode is not None:
                sys.exit(f"mantissa serve ended with {self.process.returncode}")
            await asyncio.sleep(0.05)
        sys.exit("mantissa serve does not answer")

    async def stop(self):
        if self.session:
            await self.session.close()
        if self.process and self.process.returncode is None:
            self.process.terminate()
            await self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    # Requests to mantissa serve.

    def headers(self, request):
        names = ("Authorization", "X-Api-Key", "Content-Type", "anthropic-version")
        return {name: request.headers[name] for name in names if name in request.headers}

    def own(self):
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    async def call(self, path, body, headers=None):
        async with self.session.post(self.base + path, json=body, headers=headers or self.own()) as response:
            return response.status, await response.json(content_type=None)

    async def events(self, path, body, headers):
        """Data of the events of a stream; an error response is raised."""
        async with self.session.post(self.base + path, json=body, headers=headers) as response:
            if response.status != 200:
                raise Failed(response.status, await response.json(content_type=None))
            async for line in response.content:
                line = line.decode().strip()
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line[6:])

    async def tokens(self, text, special=False):
        _, body = await self.call("/tokenize", {"content": text, "add_special": special})
        return body["tokens"]

    async def prompt_ids(self, prompt):
        """Tokens of a prompt of llama-server: a text, tokens, a mixture of both, or an object with the text."""
        if isinstance(prompt, dict):
            if "multimodal_data" in prompt:
                raise Failed(501, error(501, "This server does not support multimodal.", "not_supported_error"))
            prompt = prompt.get("prompt_string", "")
        if isinstance(prompt, str):
            return await self.tokens(prompt, special=True)
        ids = []
        for part in prompt:
            ids += await self.tokens(part) if isinstance(part, str) else [part]
        return ids

    def translate(self, body):
        """Names and defaults of sampling as mantissa serve has them."""
        out = dict(body)
        for theirs, ours in (("repeat_penalty", "repetition_penalty"), ("n_predict", "max_tokens")):
            if theirs in out:
                out.setdefault(ours, out.pop(theirs))
        for name, value in (("temperature", self.temperature), ("seed", self.seed), ("top_k", 40), ("top_p", 0.95),
                            ("min_p", 0.05)):
            if out.get(name) is None:
                out[name] = value
        if out["seed"] == -1:
            del out["seed"]
        limit = out.get("max_tokens") if out.get("max_tokens") is not None else out.get("max_completion_tokens")
        if not isinstance(limit, int) or limit < 0:
            limit = self.n_predict if self.n_predict > 0 else None
        out.pop("max_completion_tokens", None)
        out.pop("max_tokens", None)
        if limit is not None:
            out["max_tokens"] = limit
        out["sampler"] = "llama.cpp"
        for name in ("cache_prompt", "id_slot", "timings_per_token", "verbose", "response_fields",
                     "return_tokens", "n_probs", "post_sampling_probs", "backend_sampling", "speculative.p_min"):
            out.pop(name, None)
        out.pop("model", None)
        return out

    def variables(self, body):
        """Variables that llama-server gives to chat templates."""
        out = {"date_string": time.strftime("%d %b %Y"), "datetime": time.strftime("%b %d %Y %H:%M:%S GMT")}
        out["enable_thinking"] = self.flags.get("reasoning") != "off"
        return {**out, **(body.get("chat_template_kwargs") or {})}

    async def biases(self, given):
        """Logit biases by token: llama-server takes texts too."""
        pairs = given.items() if isinstance(given, dict) else given
        out = {}
        for key, value in pairs:
            value = -100 if value is False else value
            if isinstance(key, str) and not key.isdigit():
                for token in await self.tokens(key):
                    out[str(token)] = value
            else:
                out[str(key)] = value
        return out

    def timings(self, usage, begin, first, end):
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        prompt, predicted = usage["prompt_tokens"] - cached, usage.get("completion_tokens") or 0
        prompt_ms, predicted_ms = max((first - begin) * 1e3, 1e-3), max((end - first) * 1e3, 1e-3)
        # The first token comes with the prompt.
        steps = max(predicted - 1, 0)
        if steps == 0:
            predicted_ms = 0.0
        for name, value in (("prompt", prompt), ("cached", cached), ("prompt_s", prompt_ms / 1e3),
                            ("predicted", predicted), ("predicted_s", predicted_ms / 1e3), ("decode", predicted)):
            self.counters[name] += value
        return {
            "cache_n": cached, "prompt_n": prompt, "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / max(prompt, 1), "prompt_per_second": 1e3 * prompt / prompt_ms,
            "predicted_n": predicted, "predicted_ms": predicted_ms,
            "predicted_per_token_ms": predicted_ms / steps if steps else 0.0,
            "predicted_per_second": 1e3 * steps / predicted_ms if steps else 0.0,
        }


def prompt_timings(progress):
    """Timings while a prompt is computed."""
    done, ms = progress["processed"] - progress["cache"], float(progress["time_ms"])
    if done == 0:
        ms = 0.0
    return {
        "cache_n": progress["cache"], "prompt_n": done, "prompt_ms": ms,
        "prompt_per_token_ms": ms / max(done, 1), "prompt_per_second": 1e3 * done / ms if ms else 0.0,
        "predicted_n": 0, "predicted_ms": 0.0, "predicted_per_token_ms": 0.0, "predicted_per_second": 0.0,
    }


class Failed(Exception):
    def __init__(self, status, body):
        super().__init__(str(body))
        self.status, self.body = status, body


def error(code, message, kind):
    return {"error": {"code": code, "message": message, "type": kind}}


def reply(status, body):
    return web.json_response(body, status=status)


routes = web.RouteTableDef()


def handler(function):
    """Answers failures in llama-server's form."""
    async def wrapped(request):
        shim = request.app["shim"]
        try:
            return await function(shim, request)
        except Failed as failed:
            body = failed.body
            if failed.status == 401:
                body = error(401, "Invalid API Key", "authentication_error")
            elif failed.status == 400 and "context" in json.dumps(body):
                n = getattr(failed, "prompt_tokens", None) or request.get("prompt_tokens") or shim.context + 1
                body = error(400, "the request exceeds the available context size", "exceed_context_size_error")
                body["error"].update(n_prompt_tokens=n, n_ctx=shim.context)
            # llama-server answers an image that it cannot read with 500.
            status = 500 if "image input is not supported" in json.dumps(body) else failed.status
            return reply(status, body)
    return wrapped


async def read(request):
    try:
        return await request.json()
    except ValueError as failure:
        raise Failed(400, error(400, str(failure), "invalid_request_error")) from failure


async def stream(request):
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


async def send(response, data, name=None):
    head = f"event: {name}\n" if name else ""
    await response.write(f"{head}data: {json.dumps(data)}\n\n".encode())


# llama-server's own completion.

class Completion:
    """One completion of llama-server: the request, and its response from the events of /v1/completions."""

    def __init__(self, shim, body, ids):
        self.shim, self.body, self.ids = shim, body, ids
        self.text, self.tokens, self.probabilities = "", [], []
        self.usage, self.stop_type, self.stopping_word = None, "none", ""
        self.begin = self.first = time.time()

    async def run(self, headers):
        """Yields the part of each event."""
        shim, body = self.shim, self.body
        ours = shim.translate(body)
        ours.update(prompt=self.ids, stream=True, stream_options={"include_usage": True}, return_token_ids=True)
        if body.get("n_probs"):
            ours["logprobs"] = body["n_probs"]
        if body.get("logit_bias"):
            ours["logit_bias"] = await shim.biases(body["logit_bias"])
        asked = ours.get("max_tokens")
        room = shim.context - len(self.ids)
        if asked is None or asked > room > 0:
            ours["max_tokens"] = max(room, 1)
        self.cut = asked is None or asked > room
        async for event in shim.events("/v1/completions", ours, headers):
            if event.get("usage"):
                self.usage = event["usage"]
            if event.get("prompt_progress"):
                yield event["prompt_progress"], None, None
                continue
            for choice in event.get("choices", []):
                if not self.text and not self.tokens:
                    self.first = time.time()
                ids = choice.get("token_ids") or []
                self.text += choice["text"]
                self.tokens += ids
                probabilities = self.probability(choice.get("logprobs"), ids)
                self.probabilities += probabilities
                if choice.get("finish_reason"):
                    word = choice.get("stop_reason")
                    kinds = {"length": "limit", "stop": "word" if isinstance(word, str) else "eos"}
                    self.stop_type = kinds.get(choice["finish_reason"], "none")
                    self.stopping_word = word if isinstance(word, str) else ""
                if ids or choice["text"]:
                    yield choice["text"], ids, probabilities
        self.end = time.time()

    def probability(self, logprobs, ids):
        if not logprobs:
            return []
        post = self.body.get("post_sampling_probs")
        value, top = ("prob", "top_probs") if post else ("logprob", "top_logprobs")
        number = (lambda x: 2.718281828459045 ** x) if post else (lambda x: x)
        out = []
        for at, (token, own, others) in enumerate(zip(logprobs["tokens"], logprobs["token_logprobs"],
                                                      logprobs["top_logprobs"])):
            entry = lambda text, x, id: {"id": id, "token": text, "bytes": list(text.encode()), value: number(x)}
            item = entry(token, own, ids[at] if at < len(ids) else 1)
            item[top] = [entry(text, x, 1) for text, x in others.items()]
            out.append(item)
        return out

    def settings(self):
        body, shim = self.body, self.shim
        translated = shim.translate(body)
        bias = [{"token": 2, "bias": None}] if body.get("ignore_eos") else []
        return {
            "n_predict": translated.get("max_tokens", -1), "seed": translated.get("seed", shim.seed),
            "temperature": translated["temperature"], "top_k": translated["top_k"], "top_p": translated["top_p"],
            "min_p": translated["min_p"], "logit_bias": bias, "adaptive_target": -1.0, "adaptive_decay": 0.9,
            "stop": body.get("stop") or [], "stream": bool(body.get("stream")),
        }

    async def final(self):
        shim = self.shim
        _, text = await shim.call("/detokenize", {"tokens": self.ids, "special": True})
        usage = self.usage or {"prompt_tokens": len(self.ids), "completion_tokens": len(self.tokens)}
        prompt = text.get("content", "")
        if self.ids[:1] == [1]:
            prompt = "<s> " + prompt.removeprefix("<s>").lstrip(" ")
        out = {
            "index": 0, "content": "" if self.body.get("stream") else self.text, "stop": True,
            "tokens": self.tokens if self.body.get("return_tokens") else [], "id_slot": 0, "model": shim.name,
            "tokens_predicted": usage["completion_tokens"], "tokens_evaluated": usage["prompt_tokens"],
            "generation_settings": self.settings(), "prompt": prompt, "has_new_line": "\n" in self.text,
            "truncated": bool(self.cut and self.stop_type == "limit"), "stop_type": self.stop_type,
            "stopping_word": self.stopping_word, "tokens_cached": usage["prompt_tokens"] + usage["completion_tokens"],
            "timings": shim.timings(usage, self.begin, self.first, self.end),
        }
        if self.probabilities:
            out["completion_probabilities"] = self.probabilities
        if self.body.get("response_fields"):
            out = select(out, self.body["response_fields"])
        return out


def select(body, fields):
    out = {}
    for field in fields:
        value = body
        for part in field.split("/"):
            value = value.get(part, {}) if isinstance(value, dict) else {}
        if value != {}:
            out[field] = value
    return out


async def completion(shim, request):
    body = await read(request)
    headers = shim.headers(request)
    prompt = body.get("prompt")
    if shim.key and shim.key not in (headers.get("Authorization", "")[7:], headers.get("X-Api-Key", "")):
        raise Failed(401, {})
    if prompt is None:
        raise Failed(400, error(400, "\"prompt\" must be provided", "invalid_request_error"))
    several = isinstance(prompt, list) and prompt and (
        any(isinstance(part, (list, dict)) for part in prompt) or all(isinstance(part, str) for part in prompt))
    ids = [await shim.prompt_ids(part) for part in (prompt if several else [prompt])]
    for one in ids:
        if len(one) >= shim.context:
            failed = Failed(400, error(400, "context", ""))
            failed.prompt_tokens = len(one)
            raise failed
    runs = [Completion(shim, body, one) for one in ids]
    if body.get("stream"):
        response = None
        async for text, tokens, probabilities in runs[0].run(headers):
            response = response or await stream(request)
            if tokens is None:
                # How much of the prompt has been computed.
                part = {"index": 0, "content": "", "tokens": [], "stop": False, "prompt_progress": text}
                part["timings"] = prompt_timings(text)
                await send(response, part)
                continue
            part = {"index": 0, "content": text, "tokens": tokens, "stop": False, "id_slot": 0}
            if probabilities:
                part["completion_probabilities"] = probabilities
            await send(response, part)
        response = response or await stream(request)
        await send(response, await runs[0].final())
        return response

    async def whole(run):
        async for _ in run.run(headers):
            pass
        return await run.final()

    out = await asyncio.gather(*(whole(run) for run in runs))
    return reply(200, list(out) if several else out[0])


# Endpoints that both have.

def passes(path, kind):
    async def forward(shim, request):
        body = await read(request)
        headers = shim.headers(request)
        begin = time.time()
        ours = shim.translate(body) if kind != "messages" else dict(body)
        # llama-server serves every name with its model.
        ours.pop("model", None)
        if kind == "chat":
            ours["chat_template_kwargs"] = shim.variables(body)
            continue_last(ours)
        if kind == "messages" and "temperature" not in ours:
            ours["temperature"] = shim.temperature
        if kind == "responses":
            limit = ours.pop("max_tokens", None)
            ours.setdefault("max_output_tokens", limit)
        if kind in ("chat", "completions") and body.get("stream"):
            ours["stream_options"] = {"include_usage": True}
        if kind == "chat" and body.get("continue_final_message") and body.get("add_generation_prompt"):
            raise Failed(400, error(400, "Cannot set both add_generation_prompt and continue_final_message",
                                    "invalid_request_error"))
        if not body.get("stream"):
            status, out = await shim.call(path, ours, headers)
            if status != 200:
                raise Failed(status, out)
            if kind in ("chat", "completions"):
                end = time.time()
                out["system_fingerprint"] = FINGERPRINT
                out["timings"] = shim.timings(out["usage"], begin, begin + (end - begin) / 2, end)
            if kind == "chat" and body.get("verbose", "verbose" in shim.flags):
                out["__verbose"] = {"prompt": "<s> " + await rendered(shim, body)}
            return reply(200, out)
        response, first, made = None, None, 0
        async for event in shim.events(path, ours, headers):
            first = first or time.time()
            response = response or await stream(request)
            if kind in ("chat", "completions"):
                event["system_fingerprint"] = FINGERPRINT
                if kind == "chat":
                    event["model"] = shim.name
                    for choice in event["choices"]:
                        if choice["delta"].get("role"):
                            choice["delta"]["content"] = None
                if event.get("usage") and not event.get("choices"):
                    event["timings"] = shim.timings(event["usage"], begin, first, time.time())
                    if kind == "completions":
                        continue
            if kind == "responses" and body.get("timings_per_token"):
                made += event.get("type") == "response.output_text.delta"
                usage = (event.get("response") or {}).get("usage")
                if usage:
                    named = {"prompt_tokens": usage["input_tokens"], "completion_tokens": usage["output_tokens"]}
                    event["timings"] = shim.timings(named, begin, first, time.time())
                elif event.get("type") == "response.output_text.delta":
                    seconds = max(time.time() - first, 1e-6)
                    event["timings"] = {"predicted_n": made, "predicted_ms": 1e3 * seconds,
                                        "predicted_per_second": made / seconds, "prompt_per_second": 0.0}
            await send(response, event, event.get("type") if kind in ("messages", "responses") else None)
        response = response or await stream(request)
        if kind in ("chat", "completions"):
            await response.write(b"data: [DONE]\n\n")
        return response
    return forward


def continue_last(body):
    """llama-server goes on with a last message of the assistant without being asked to."""
    messages = body.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if isinstance(last, dict) and last.get("role") == "assistant" and body.get("add_generation_prompt") is None:
        body.setdefault("continue_final_message", True)


async def rendered(shim, body):
    body = dict(body)
    continue_last(body)
    fields = {name: body[name] for name in ("messages", "tools", "add_generation_prompt", "continue_final_message")
              if name in body}
    fields["chat_template_kwargs"] = shim.variables(body)
    status, out = await shim.call("/apply-template", fields)
    if status != 200:
        raise Failed(status, out)
    return out["prompt"].removeprefix("<s>")


async def apply_template(shim, request):
    return reply(200, {"prompt": await rendered(shim, await read(request))})


async def input_tokens(shim, request):
    text = await rendered(shim, await read(request))
    return reply(200, {"input_tokens": len(await shim.tokens(text, special=True))})


def same(path):
    async def forward(shim, request):
        body = await read(request)
        body.pop("model", None)
        status, out = await shim.call(path, body, shim.headers(request))
        if status != 200:
            raise Failed(status, out)
        return reply(status, out)
    return forward


async def health(shim, request):
    async with shim.session.get(shim.base + "/health") as response:
        return reply(response.status, {"status": "ok"})


async def preflight(shim, request):
    """Passes a browser's question whether a page may use the server on."""
    path = "/v1" + request.path if request.path == "/completions" else request.path
    names = ("Origin", "Access-Control-Request-Method", "Access-Control-Request-Headers")
    headers = {name: request.headers[name] for name in names if name in request.headers}
    async with shim.session.options(shim.base + path, headers=headers) as response:
        kept = {name: value for name, value in response.headers.items() if name.lower().startswith("access-control-")}
        return web.Response(status=response.status, headers=kept)


async def props(shim, request):
    return reply(200, {
        "model_path": "stories260K.gguf", "model_alias": shim.name, "total_slots": shim.slots,
        "default_generation_settings": {"n_ctx": shim.context, "params": {"seed": shim.seed}},
    })


async def models(shim, request):
    tags = str(shim.flags.get("tags", "")).split(",") if "tags" in shim.flags else []
    entry = {"id": shim.name, "aliases": shim.aliases, "tags": tags, "object": "model", "owned_by": "mantissa"}
    return reply(200, {"object": "list", "data": [entry]})


async def slots(shim, request):
    if "slots" not in shim.flags:
        return reply(501, error(501, "This server does not support slots endpoint.", "not_supported_error"))
    async with shim.session.get(shim.base + "/slots", headers=shim.own()) as response:
        ours = await response.json()
    busy = sum(1 for slot in (ours if isinstance(ours, list) else ours.get("slots", [])) if slot.get("is_processing"))
    return reply(200, [
        {"id": at, "n_ctx": shim.context, "is_processing": at < busy, "next_token": [{"n_remain": -1, "n_decoded": 0}]}
        for at in range(shim.slots)
    ])


async def metrics(shim, request):
    if "metrics" not in shim.flags:
        return reply(501, error(501, "This server does not support metrics endpoint.", "not_supported_error"))
    count, lines = shim.counters, []

    def metric(name, kind, value):
        lines.extend([f"# HELP llamacpp:{name} {name}", f"# TYPE llamacpp:{name} {kind}", f"llamacpp:{name} {value}"])

    for name, value in (("prompt_tokens_total", count["prompt"]), ("prompt_tokens_cached_total", count["cached"]),
                        ("prompt_seconds_total", count["prompt_s"]), ("tokens_predicted_total", count["predicted"]),
                        ("tokens_predicted_seconds_total", count["predicted_s"]), ("n_decode_total", count["decode"]),
                        ("n_tokens_max", 0), ("spec_decode_num_draft_tokens_total", 0),
                        ("spec_decode_num_accepted_tokens_total", 0), ("spec_decode_num_drafts_total", 0)):
        metric(name, "counter", value)
    for name in ("prompt_tokens_seconds", "predicted_tokens_seconds", "requests_processing", "requests_deferred",
                 "n_busy_slots_per_decode"):
        metric(name, "gauge", 0)
    head = {"Process-Start-Time-Unix": str(int(time.time())), "Content-Type": "text/plain; version=0.0.4"}
    return web.Response(text="\n".join(lines) + "\n", headers=head)


async def page(shim, request):
    if "no-ui" in shim.flags:
        return reply(404, error(404, "File Not Found", "not_found_error"))
    async with shim.session.get(shim.base + "/") as response:
        return web.Response(status=response.status, body=await response.read(), content_type="text/html")


async def main():
    flags = parse(sys.argv[1:])
    shim = Shim(flags)
    app = web.Application(client_max_size=64 << 20)
    app["shim"] = shim
    post = {
        "/completion": completion, "/completions": completion,
        "/v1/completions": passes("/v1/completions", "completions"),
        "/chat/completions": passes("/v1/chat/completions", "chat"),
        "/v1/chat/completions": passes("/v1/chat/completions", "chat"),
        "/chat/completions/input_tokens": input_tokens, "/v1/chat/completions/input_tokens": input_tokens,
        "/responses": passes("/v1/responses", "responses"), "/v1/responses": passes("/v1/responses", "responses"),
        "/v1/messages": passes("/v1/messages", "messages"),
        "/v1/messages/count_tokens": same("/v1/messages/count_tokens"),
        "/v1/embeddings": same("/v1/embeddings"), "/tokenize": same("/tokenize"),
        "/detokenize": same("/detokenize"), "/apply-template": apply_template,
    }
    get = {"/health": health, "/props": props, "/models": models, "/v1/models": models, "/slots": slots,
           "/metrics": metrics, "/": page}
    for path, function in post.items():
        app.router.add_post(path, handler(function))
        app.router.add_options(path, handler(preflight))
    for path, function in get.items():
        app.router.add_get(path, handler(function))
    await shim.start()
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    for host in str(flags.get("host", "127.0.0.1")).split(","):
        await web.TCPSite(runner, host.strip(), int(flags["port"])).start()
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    await stop.wait()
    await runner.cleanup()
    await shim.stop()


if __name__ == "__main__":
    asyncio.run(main())
