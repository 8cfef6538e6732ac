#!/usr/bin/env python3
"""Loads `mantissa serve` as many clients do and measures it.

    bench/server.py load MANTISSA MODEL [--clients 64] [--minutes 10] [--parallel 16] [--out load.json]
    bench/server.py streams MANTISSA MODEL [--parallel 16]
    bench/server.py prefix MANTISSA MODEL [--prompt 2000]
    bench/server.py stop MANTISSA MODEL [--drain 5]

Each starts a server on a free port of the loopback. `load`: clients with prompts and answers of mixed lengths, one in twenty of which
disconnects within its answer; compares every whole answer with the one that the server gives alone, counts errors and refusals (429,
503: the client waits as Retry-After says), and prints memory over time, times between tokens and the scheduler's share of a step.
`streams`: tokens/s of 1, 2, 4, 8 and 16 streams, medians of three rounds. `prefix`: 16 requests that share a long prompt, and how many of its
tokens were computed. `stop`: SIGTERM under load, and the time to the end.
"""

import argparse
import asyncio
import json
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request

WORDS = "the little dog ran to the big tree and found a red ball that his friend had lost in the park on a sunny day".split()


class Server:
    def __init__(self, args, *flags):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [args.mantissa, "serve", args.model, "--port", str(self.port), "--parallel", str(args.parallel), "--quiet", *flags]
        self.process = subprocess.Popen(command)
        for _ in range(300):
            try:
                self.get("/health")
                return
            except OSError:
                time.sleep(0.1)
        sys.exit("the server did not start")

    def get(self, path):
        return urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10).read().decode()

    def memory(self):
        """Resident MB."""
        with open(f"/proc/{self.process.pid}/status", encoding="utf-8") as status:
            return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))

    def metric(self, name):
        """Sum of a metric over its labels."""
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? ([-+.\de]+)$", self.get("/metrics"), re.M))

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


class Refused(Exception):
    """The server has no room; carries the seconds to wait."""


async def stream(port, body, leave_after=None):
    """Sends a completion; returns its text, the times of its events and its usage. Leaves after that many events, if given."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps({"stream": True, "stream_options": {"include_usage": True}, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
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
    alone = [(await stream(server.port, body))[0] for body in bodies]
    counts, gaps, firsts, memory = {"whole": 0, "left": 0, "refused": 0, "errors": 0, "different": 0, "tokens": 0}, [], [], []
    faults, begin = [], time.perf_counter()
    end = begin + 60 * args.minutes

    async def client(seed):
        rng = random.Random(seed)
        while time.perf_counter() < end:
            at = rng.randrange(len(bodies))
            leaves = rng.randint(1, 6) if rng.random() < 0.05 else None
            sent = time.perf_counter()
            try:
                text, times, usage = await stream(server.port, bodies[at], leaves)
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
    scheduler, steps = (server.metric(f"mantissa_{name}_seconds_total") for name in ("scheduler", "step"))
    half = len(memory) // 2
    result = {
        "clients": args.clients, "parallel": args.parallel, "seconds": seconds, **counts, "faults": faults[:5], "slots_left": len(slots),
        "tokens_per_second": counts["tokens"] / seconds, "between_tokens_ms": {p: 1e3 * percentile(gaps, p / 100) for p in (50, 99)},
        "first_token_ms": {p: 1e3 * percentile(firsts, p / 100) for p in (50, 99)},
        "memory_mb": {"first_half": statistics.fmean(memory[:half] or [0]), "second_half": statistics.fmean(memory[half:]), "peak": max(memory)},
        "scheduler_share": scheduler / steps if steps else None,
    }
    result["exit_code"] = server.stop()
    print(json.dumps(result, indent=1))
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    return 0 if counts["errors"] == counts["different"] == len(slots) == result["exit_code"] == 0 else 1


async def streams(args):
    server, figures = Server(args), {}
    for _ in range(3):
        for count in (1, 2, 4, 8, 16):
            bodies = [{"prompt": f"Story {i}: " + " ".join(WORDS), "max_tokens": 128, "temperature": 0, "ignore_eos": True} for i in range(count)]
            begin = time.perf_counter()
            await asyncio.gather(*(stream(server.port, body) for body in bodies))
            figures.setdefault(count, []).append(128 * count / (time.perf_counter() - begin))
    server.stop()
    medians = {count: statistics.median(values) for count, values in figures.items()}
    for count, value in medians.items():
        print(f"{count:3} streams: {value:8.1f} tokens/s, {value / medians[1]:.2f} of one")
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
    parser.add_argument("measure", choices=["load", "streams", "prefix", "stop"])
    parser.add_argument("mantissa")
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--parallel", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=2000, help="words of the shared prompt")
    parser.add_argument("--drain", type=int, default=5)
    parser.add_argument("--out")
    args = parser.parse_args()
    sys.exit(asyncio.run({"load": load, "streams": streams, "prefix": prefix, "stop": stop}[args.measure](args)))


if __name__ == "__main__":
    main()
