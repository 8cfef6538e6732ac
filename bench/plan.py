#!/usr/bin/env python3
"""Compares the speeds that `mantissa plan` predicts for a CPU with those that `mantissa bench` measures.

    python3 bench/plan.py --mantissa target/release/mantissa --work /tmp/plan [--fit] [--json out.json]

Two synthetic models of different shapes, six formats, prefill and decoding, two depths, two batches. Costs of the
kernels (`CPU_KERNELS` in crates/mantissa-plan/src/hardware/devices.rs) are fitted to the first model alone (--fit prints
them); the second one checks them. A measurement is the fastest of --reps repetitions, as are the limits of the machine
in the same run. Each run waits until the machine is idle for two seconds (--patience seconds at most).
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

# Precision of the plan's table, recipe; the recipes round to nearest, which the kernels cannot tell from others.
FORMATS = {
    "BF16": None,
    "W8A8 FP8": "fp8-dynamic",
    "W8A16 INT8": "rtn-int8-channel",
    "Q8_0": "q8_0",
    "W4A16 INT4": "rtn-int4-g128-asym",
    "W4A16 NF4": "nf4",
}
# Scheme in CPU_KERNELS.
SCHEMES = {"BF16": "bf16", "W8A8 FP8": "fp8", "W8A16 INT8": "int8", "Q8_0": "q8_0", "W4A16 INT4": "int4", "W4A16 NF4": "nf4"}
MODELS = {
    "fitted": ["--preset", "1b", "--layers", "5", "--vocab", "32000", "--context", "8192"],
    "checked": ["--preset", "1b", "--hidden", "1536", "--heads", "12", "--kv-heads", "4", "--ffn", "6144",
                "--layers", "8", "--vocab", "49152", "--context", "8192"],
}
PROMPT, GENERATED = 256, 12
DEPTHS, BATCHES = [0, 512], [1, 4]


def busy():
    """Idle and total jiffies."""
    fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)


def wait_until_idle(patience):
    """Waits for two idle seconds; true if they came."""
    quiet, end = 0, time.time() + patience
    while quiet < 2 and time.time() < end:
        before = busy()
        time.sleep(1)
        after = busy()
        idle = (after[0] - before[0]) / max(1, after[1] - before[1])
        quiet = quiet + 1 if idle > 0.85 else 0
    return quiet >= 2


def run(args, *command):
    done = subprocess.run([args.mantissa, *map(str, command)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{command}: {done.stderr}")
    return done.stdout


def make(args):
    """Writes the models under every format."""
    paths = {}
    for model, flags in MODELS.items():
        source = args.work / model
        if not source.exists():
            run(args, "synth", "--out", source, *flags)
        for name, recipe in FORMATS.items():
            path = source
            if recipe:
                path = args.work / (f"{model}-{recipe}" + (".gguf" if recipe.startswith("q") else ""))
                if not path.exists():
                    run(args, "quantize", source, "--recipe", recipe, "--out", path, "--quiet", "--threads", args.threads)
            paths[model, name] = path
    return paths


def measure(args, path):
    """Measures one model, or reads an earlier measurement."""
    file = args.work / f"bench-{path.name}.json"
    if not file.exists():
        idle = wait_until_idle(args.patience)
        run(args, "bench", path, "--threads", args.threads, "--prompt", PROMPT, "--gen", GENERATED, "--reps", args.reps,
            "--depth", ",".join(map(str, DEPTHS)), "--batch", ",".join(map(str, BATCHES)), f"--json={file}", "--quiet")
        report = json.loads(file.read_text())
        report["idle_before"] = idle
        file.write_text(json.dumps(report))
    return json.loads(file.read_text())


def predict(args, path, source, name, depth, batch):
    """Predicted tokens/s of a prompt and of decoding."""
    start = max(depth, 1)
    report = json.loads(run(args, "plan", source, "--hardware", args.work / f"bench-{path.name}.json", "--kv", "f16",
                            "--batch", batch, "--prefill", start, "--decode", GENERATED, "--context", start + GENERATED, "--json"))
    row = next(row for row in report["rows"] if row["precision"]["name"] == name)
    return row["decode"]["tokens_per_s"]


def predict_prompt(args, path, source, name):
    report = json.loads(run(args, "plan", source, "--hardware", args.work / f"bench-{path.name}.json", "--kv", "f16",
                            "--prefill", PROMPT, "--decode", 1, "--context", PROMPT + 1, "--json"))
    row = next(row for row in report["rows"] if row["precision"]["name"] == name)
    return row["prefill"]["tokens_per_s"]


def sizes(source):
    """Weights of the linear layers, and of the head."""
    c = json.loads((source / "config.json").read_text())
    h, f, n = c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"]
    kv = h * c["num_key_value_heads"] // c["num_attention_heads"]
    return n * (2 * h * h + 2 * h * kv + 3 * h * f), c["vocab_size"] * h


def fit(args, paths):
    """Costs of the kernels from the first model, in operations at the peak for each weight."""
    linear, head = sizes(args.work / "fitted")

    def times(name):
        report = measure(args, paths["fitted", name])
        best = {(r["depth"], r["batch"]): r["batch"] / max(r["tg_range"]) for r in report["runs"]}
        peak = report["machine_bf16_gflops" if name in ("BF16", "W8A8 FP8") else "machine_int8_gops"] * 1e9
        return best, 1 / max(report["pp_range"]), peak

    best, prompt, peak = times("BF16")
    one, four = best[0, 1], best[0, 4]
    token = max(0.0, (four - one) / 3 * peak / (linear + head))
    costs = {"BF16": (one * peak / (linear + head) - token, token, prompt * peak / linear)}
    of_head = lambda b: (costs["BF16"][0] + costs["BF16"][1] * b) * head / peak
    for name in FORMATS:
        if name == "BF16":
            continue
        best, prompt, peak_of = times(name)
        own = name == "Q8_0"  # its head is q8_0
        weights = linear + head if own else linear
        one, four = (best[0, b] - (0 if own else of_head(b)) for b in (1, 4))
        token = max(0.0, (four - one) / 3 * peak_of / weights)
        costs[name] = (one * peak_of / weights - token, token, prompt * peak_of / linear)
    for name, (fixed, token, prompt) in costs.items():
        print(f'    KernelCost {{ scheme: "{SCHEMES[name]}", fixed: {fixed:.1f}, token: {token:.1f}, prompt: {prompt:.1f} }},')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mantissa", default="target/release/mantissa")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--patience", type=float, default=120)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    paths = make(args)
    reports = {key: measure(args, path) for key, path in paths.items()}
    if args.fit:
        fit(args, paths)
    rows = []
    for (model, name), path in paths.items():
        source, report = args.work / model, reports[model, name]
        cases = [("prefill", 0, 1, max(report["pp_range"]), predict_prompt(args, path, source, name))]
        for r in report["runs"]:
            predicted = predict(args, path, source, name, r["depth"], r["batch"])
            cases.append(("decode", r["depth"], r["batch"], max(r["tg_range"]), predicted))
        for phase, depth, batch, measured, predicted in cases:
            rows.append({"model": model, "precision": name, "phase": phase, "depth": depth, "batch": batch,
                         "measured": measured, "predicted": predicted, "ratio": predicted[1] / measured,
                         "idle_before": report["idle_before"]})
    print("| model | precision | phase | depth | batch | measured | predicted | ratio |")
    print("|---|---|---|--:|--:|--:|--:|--:|")
    for r in rows:
        print(f"| {r['model']} | {r['precision']} | {r['phase']} | {r['depth']} | {r['batch']} | {r['measured']:.1f} |"
              f" {r['predicted'][1]:.1f} | {r['ratio']:.2f} |")
    for model in MODELS:
        own = [r for r in rows if r["model"] == model]
        near = sum(abs(r["ratio"] - 1) <= 0.15 for r in own)
        print(f"{model}: {near} of {len(own)} within 15 %, idle before {sum(r['idle_before'] for r in own)}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
