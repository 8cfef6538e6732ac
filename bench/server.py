#!/usr/bin/env python3
"""Loads `mantissa serve` as many clients do and measures it.

    bench/server.py load MANTISSA MODEL [--clients 64] [--minutes 10] [--parallel 16] [--keys] [--out load.json]
    bench/server.py streams MANTISSA MODEL [--parallel 16] [--form]
    bench/server.py prefix MANTISSA MODEL [--prompt 2000]
    bench/server.py stop MANTISSA MODEL [--drain 5]
    bench/server.py forms MANTISSA MODEL [--rounds 40] [--threads 1]
    bench/server.py first MANTISSA MODEL.gguf --llama LLAMA_SERVER [--threads 2] [--rounds 9]

Each starts a server on a free port of the loopback. `load`: clients with prompts and answers of mixed lengths, one in twenty of which
disconnects within its answer; compares every whole answer with the one that the server gives alone, counts errors and refusals (429,
503: the client waits as Retry-After says), and prints memory over time; with --keys each client has a key of its own. Prints times between tokens and the scheduler's share of a step.
`streams`: tokens/s of 1, 2, 4, 8 and 16 streams, medians of three rounds; with --form 16 streams free and held to a schema, in turn. `prefix`: 16 requests that share a long prompt, and how many of its
tokens were computed. `stop`: SIGTERM under load, and the time to the end. `forms`: processor time of an answer in a form against one without, in turn, with
the same prompt and number of tokens. `first`: time to the first token of `/v1/chat/completions`, of prompts of three lengths that
no earlier one begins with, against llama-server with the same file and threads: both serve at once and are asked in turn.
"""

import argparse
import asyncio
import json
import pathlib
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

ITEM = {"type": "object", "properties": {"name": {"type": "string"}, "count": {"type": "integer"}}, "required": ["name", "count"], "additionalProperties": False}
FORMS = {"expression": {"regex": "(?s:.)*"}, "schema": {"json": {"type": "array", "items": ITEM, "minItems": 400}}}
WORDS = "the little dog ran to the big tree and found a red ball that his friend had lost in the park on a sunny day".split()


class Server:
    def __init__(self, args, *flags):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [args.mantissa, "serve", args.model, "--port", str(self.port), "--parallel", str(args.parallel), "--quiet", *flags]
        # The first key is that of the metrics.
        self.keys = [f"key-{i}" for i in range(args.clients + 1)] if args.keys else [None]
        if args.keys:
            self.file = tempfile.NamedTemporaryFile("w", suffix=".keys")
            self.file.write("\n".join(self.keys))
            self.file.flush()
            command += ["--api-key-file", self.file.name]
        self.process = subprocess.Popen(command)
        for _ in range(300):
            try:
                self.get("/health")
                return
            except OSError:
                time.sleep(0.1)
        sys.exit("the server did not start")

    def get(self, path):
        headers = {"Authorization": f"Bearer {self.keys[0]}"} if self.keys[0] else {}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=headers)
        return urllib.request.urlopen(request, timeout=10).read().decode()

    def processes(self):
        """The server's process and those that it started, which hold grammars and render templates."""
        parents = {}
        for folder in pathlib.Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
                except OSError:
                    pass
        found = [self.process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return [pathlib.Path(f"/proc/{pid}") for pid in found]

    def memory(self):
        """Resident MB of all processes, without what they share with files."""
        total = 0
        for process in self.processes():
            try:
                status = (process / "status").read_text()
            except OSError:
                continue
            total += sum(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("RssAnon"))
        return total

    def metric(self, name):
        """Sum of a metric over its labels."""
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? ([-+.\de]+)$", self.get("/metrics"), re.M))

    def shares(self):
        """Time between steps, and in steps but outside of the model, as shares of the time in steps; and the processor time of the engine's thread
        and its wait for a processor as shares of the time at work."""
        between, step, passes = (self.metric(f"mantissa_{name}_seconds_total") for name in ("scheduler", "step", "pass"))
        processor = self.metric("mantissa_scheduler_processor_seconds_total")
        shares = {"between steps": between / step, "of it on a processor": processor / step, "planning and sampling": (step - passes) / step}
        for task in pathlib.Path(f"/proc/{self.process.pid}/task").iterdir():
            if (task / "comm").read_text().strip() == "engine":
                run, wait = (int(word) / 1e9 for word in (task / "schedstat").read_text().split()[:2])
                shares |= {"engine thread runs": run / (step + between), "waits for a processor": wait / (step + between)}
        return shares

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


class Refused(Exception):
    """The server has no room; carries the seconds to wait."""


async def stream(port, body, leave_after=None, key=None):
    """Sends a completion with a key, if there is one; returns its text, the times of its events and its usage. Leaves after that many events, if given."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps({"stream": True, "stream_options": {"include_usage": True}, **body}).encode()
    given = f"Authorization: Bearer {key}\r\n" if key else ""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n{given}Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    text, times, usage = "", [], None
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        status = int(head.split()[1])
        if status in (429, 503):
            raise Refused(float(re.search(r"(?i)retry-after: (\d+)", head)[1]))
        if status != 200:
            raise RuntimeError(f"status {status}: {(await reader.read(1000)).decode()}")
        while True:
            line = (await reader.readline()).decode().strip()
            if line == "data: [DONE]":
                return text, times, usage
            if not line and reader.at_eof():
                raise RuntimeError("the stream ended early")
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            usage = event.get("usage") or usage
            if event["choices"]:
                text += event["choices"][0]["text"]
                times.append(time.perf_counter())
            if leave_after is not None and len(times) >= leave_after:
                return None, times, None
    finally:
        writer.close()


def percentile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def requests(rng, count):
    """Prompts and lengths: most are short, some long."""
    made = []
    for _ in range(count):
        words = rng.choice([4, 8, 16, 32, 64, 150])
        prompt = " ".join(rng.choice(WORDS) for _ in range(words))
        made.append({"prompt": prompt, "max_tokens": rng.choice([8, 16, 32, 64, 128]), "temperature": 0, "ignore_eos": True})
    return made


async def load(args):
    server, rng = Server(args, "--queue", "32"), random.Random(1)
    bodies = requests(rng, 200)
    alone = [(await stream(server.port, body, key=server.keys[0]))[0] for body in bodies]
    counts, gaps, firsts, memory = {"whole": 0, "left": 0, "refused": 0, "errors": 0, "different": 0, "tokens": 0}, [], [], []
    faults, begin = [], time.perf_counter()
    end = begin + 60 * args.minutes

    async def client(seed):
        rng, key = random.Random(seed), server.keys[(seed + 1) % len(server.keys)]
        while time.perf_counter() < end:
            at = rng.randrange(len(bodies))
            leaves = rng.randint(1, 6) if rng.random() < 0.05 else None
            sent = time.perf_counter()
            try:
                text, times, usage = await stream(server.port, bodies[at], leaves, key)
            except Refused as refused:
                counts["refused"] += 1
                await asyncio.sleep(refused.args[0] * rng.uniform(0.5, 1.5))
                continue
            except (RuntimeError, OSError, asyncio.IncompleteReadError) as error:
                counts["errors"] += 1
                faults.append(repr(error))
                continue
            firsts.append(times[0] - sent)
            gaps.extend(b - a for a, b in zip(times, times[1:]))
            if text is None:
                counts["left"] += 1
                continue
            counts["whole"] += 1
            counts["tokens"] += usage["completion_tokens"]
            counts["different"] += text != alone[at]

    async def watch():
        while time.perf_counter() < end:
            memory.append(server.memory())
            await asyncio.sleep(5)

    await asyncio.gather(watch(), *(client(seed) for seed in range(args.clients)))
    await asyncio.sleep(1)
    seconds = time.perf_counter() - begin
    slots = json.loads(server.get("/slots"))
    shares = server.shares()
    half = len(memory) // 2
    result = {
        "clients": args.clients, "parallel": args.parallel, "seconds": seconds, **counts, "faults": faults[:5], "slots_left": len(slots),
        "tokens_per_second": counts["tokens"] / seconds, "between_tokens_ms": {p: 1e3 * percentile(gaps, p / 100) for p in (50, 99)},
        "first_token_ms": {p: 1e3 * percentile(firsts, p / 100) for p in (50, 99)},
        "memory_mb": {"first_half": statistics.fmean(memory[:half] or [0]), "second_half": statistics.fmean(memory[half:]), "peak": max(memory)},
        "shares": shares,
    }
    result["exit_code"] = server.stop()
    print(json.dumps(result, indent=1))
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    return 0 if counts["errors"] == counts["different"] == len(slots) == result["exit_code"] == 0 else 1


async def streams(args):
    server, figures = Server(args), {}
    for round in range(4 if args.form else 3):
        for count in (1, 2, 4, 8, 16) if not args.form else (16,):
            bodies = [{"prompt": f"Story {i}: " + " ".join(WORDS), "max_tokens": 128, "temperature": 0, "ignore_eos": True} for i in range(count)]
            for name, form in [("free", {}), ("schema", {"structured_outputs": FORMS["schema"]})][: 2 if args.form else 1]:
                begin = time.perf_counter()
                done = await asyncio.gather(*(stream(server.port, {**body, **form}) for body in bodies))
                tokens = sum(usage["completion_tokens"] for _, _, usage in done)
                # The first round of forms compiles them.
                if round or not args.form:
                    figures.setdefault((count, name), []).append(tokens / (time.perf_counter() - begin))
    shares = server.shares()
    server.stop()
    medians = {key: statistics.median(values) for key, values in figures.items()}
    first = next(iter(medians.values()))
    for (count, name), value in medians.items():
        print(f"{count:3} streams, {name}: {value:8.1f} tokens/s, {value / first:.2f} of the first line")
    print(", ".join(f"{name} {share:.2%}" for name, share in shares.items()))
    return 0


async def prefix(args):
    server, rng = Server(args), random.Random(2)
    text = " ".join(rng.choice(WORDS) for _ in range(args.prompt))
    bodies = [{"prompt": f"{text} and {WORDS[i]}", "max_tokens": 4, "temperature": 0, "ignore_eos": True} for i in range(16)]
    done = await asyncio.gather(*(stream(server.port, body) for body in bodies))
    usages = [usage for _, _, usage in done]
    prompt = sum(usage["prompt_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    print(f"16 prompts of {usages[0]['prompt_tokens']} tokens: {prompt - cached} tokens computed, {cached} shared")
    server.stop()
    return 0 if prompt - cached < 2 * usages[0]["prompt_tokens"] + 16 * 96 else 1


async def first_token(port, body):
    """Seconds from the request to the first event with text of a chat answer, and tokens of the prompt."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps({"stream": True, "stream_options": {"include_usage": True}, **body}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    begin, first, tokens = time.perf_counter(), None, None
    writer.write(head.encode() + data)
    async for line in reader:
        line = line.decode().strip()
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        if event.get("usage"):
            tokens = event["usage"]["prompt_tokens"]
        if first is None and any(choice["delta"].get("content") for choice in event["choices"]):
            first = time.perf_counter() - begin
    writer.close()
    return first, tokens


async def forms(args):
    """The expression allows every text, so its answer is the free one; the schema allows an array of objects of any length."""
    server, tokens = Server(args, "--threads", str(args.threads)), 200
    def processor():
        """Seconds of all threads of all processes, which are idle between requests."""
        tasks = [task for process in server.processes() for task in (process / "task").iterdir()]
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    async def cost(body):
        begin = processor()
        text, _, usage = await stream(server.port, body)
        # The thread of the engine publishes its load after the answer.
        await asyncio.sleep(0.05)
        return processor() - begin, text, usage["completion_tokens"]

    ratios, added, different = {name: [] for name in FORMS}, {name: [] for name in FORMS}, 0
    for at in range(args.rounds + 1):
        body = {"prompt": "A list of words: " + " ".join(WORDS[at % 5:]), "max_tokens": tokens, "temperature": 0.8, "seed": at, "ignore_eos": True}
        for name, form in FORMS.items():
            order = [body, {**body, "structured_outputs": form}]
            costs = [await cost(one) for one in (order if at % 2 else order[::-1])]
            free, formed = costs if at % 2 else costs[::-1]
            if free[2] != formed[2]:
                continue
            different += name == "expression" and free[1] != formed[1]
            # The first round warms up and compiles.
            if at:
                ratios[name].append(formed[0] / free[0])
                added[name].append(1e6 * (formed[0] - free[0]) / tokens)
    server.stop()
    for name, values in ratios.items():
        values.sort()
        n = len(values)
        spread = f"quartiles {values[n // 4]:.4f} and {values[3 * n // 4]:.4f}"
        print(f"{name}: {n} pairs of {tokens} tokens, median {statistics.median(values):.4f} of the free answer, {spread}; {statistics.median(added[name]):.0f} us a token more")
    print(f"{different} answers differ that should not")
    return 0


async def first(args):
    ours = Server(args, "--threads", str(args.threads))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [args.llama, "-m", args.model, "--port", str(port), "-t", str(args.threads), "-np", str(args.parallel), "-c", str(2048 * args.parallel)]
    theirs = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10)
            break
        except OSError:
            time.sleep(0.1)
    rng = random.Random(3)
    try:
        for words in (8, 100, 400):
            times, counts = {"mantissa": [], "llama-server": []}, set()
            # The first round warms up.
            for at in range(args.rounds + 1):
                servers = [("mantissa", ours.port), ("llama-server", port)]
                for name, place in servers if at % 2 else servers[::-1]:
                    text = " ".join(rng.choice(WORDS) for _ in range(words))
                    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
                    seconds, tokens = await first_token(place, body)
                    counts.add(tokens)
                    if at:
                        times[name].append(1e3 * seconds)
            medians = {name: statistics.median(values) for name, values in times.items()}
            ratio = statistics.median(a / b for a, b in zip(times["mantissa"], times["llama-server"]))
            print(f"{min(counts)} to {max(counts)} tokens: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in medians.items()) + f", median of pairs {ratio:.3f}")
    finally:
        theirs.kill()
        theirs.wait()
        ours.stop()
    return 0


async def stop(args):
    server = Server(args, "--drain", str(args.drain))
    bodies = [{"prompt": f"{i}", "max_tokens": 100000, "temperature": 0, "ignore_eos": True} for i in range(args.parallel)]
    tasks = [asyncio.create_task(stream(server.port, body)) for body in bodies]
    await asyncio.sleep(2)
    begin = time.perf_counter()
    server.process.send_signal(signal.SIGTERM)
    code = await asyncio.to_thread(server.process.wait, 60)
    seconds = time.perf_counter() - begin
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    print(f"SIGTERM under {len(tasks)} streams: exit code {code} after {seconds:.2f} s; {sum(isinstance(e, Exception) for e in ends)} streams ended by it")
    return 0 if code == 0 and seconds < args.drain + 2 else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measure", choices=["load", "streams", "prefix", "stop", "forms", "first"])
    parser.add_argument("mantissa")
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--parallel", type=int, default=16)
    parser.add_argument("--keys", action="store_true", help="a key for each client")
    parser.add_argument("--prompt", type=int, default=2000, help="words of the shared prompt")
    parser.add_argument("--drain", type=int, default=5)
    parser.add_argument("--llama", help="llama-server's binary")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--form", action="store_true", help="16 streams free and held to a schema")
    parser.add_argument("--out")
    args = parser.parse_args()
    sys.exit(asyncio.run({"load": load, "streams": streams, "prefix": prefix, "stop": stop, "forms": forms, "first": first}[args.measure](args)))


if __name__ == "__main__":
    main()
