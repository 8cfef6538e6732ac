#!/usr/bin/env python3
"""Training over ranks, measured: what gradients in few bits cost in loss, and what leaves and ranks cost in time.

    bench/ranks.py MANTISSA TEXT loss [--steps N] [--seeds N] [--size SIZE] [--formats A,B,...]
    bench/ranks.py MANTISSA TEXT time [--steps N] [--rounds N] [--size SIZE]
    bench/ranks.py MANTISSA TEXT memory [--ranks N]

loss trains SIZE (`mantissa train --init`) on TEXT with each format and seed and prints the held-out loss of the last step: mean
over seeds, and the mean and standard error of the difference to f32 with the same seed. All have eight leaves.

time runs the same number of windows a step as one leaf (the run without [parallel]), as eight leaves in one process, and over
ranks of threads, in turns; prints medians of seconds a step, wall and CPU, and their ratios to one leaf.

memory runs 4 steps of a model of 31 M parameters in f32 with AdamW as N processes of mpiexec (on PATH), one batch each, with each
stage of ZeRO; prints the peak of anonymous memory of rank 0 and the largest of the others, and what --dry-run predicts for one.
"""

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

EIGHT = ["parallel.leaves=8", "data.accumulate=8"]


def train(args, folder, name, settings, more=()):
    """Trains, and returns the lines of the log, and seconds of wall and CPU time."""
    out = pathlib.Path(folder) / name
    made = subprocess.run([args.mantissa, "train", "--init", args.size, "--data", str(pathlib.Path(args.text).resolve())],
                          check=True, capture_output=True, text=True)
    config = pathlib.Path(folder) / f"{name}.toml"
    config.write_text(made.stdout)
    all_settings = [f"out={out}", f"schedule.steps={args.steps}", f"schedule.warmup={args.steps // 10}", "telemetry.every=0",
                    "samples.prompts=[]", *settings]
    sets = [word for setting in all_settings for word in ("--set", setting)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.monotonic()
    subprocess.run([args.mantissa, "train", str(config), "--quiet", *sets, *more], check=True, stdout=subprocess.DEVNULL)
    wall = time.monotonic() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return lines, wall, cpu


def windows(args):
    """Windows of a step of the preset."""
    made = subprocess.run([args.mantissa, "train", "--init", args.size, "--data", args.text], check=True, capture_output=True,
                          text=True).stdout
    return int(made.split("\nbatch = ")[1].split()[0])


def loss(args):
    batch = f"data.batch={max(1, windows(args) // 8)}"
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, args.seeds + 1):
            for form in args.formats.split(","):
                settings = [*EIGHT, batch, f"parallel.gradients={form}", f"seed={seed}"]
                # Two ranks are faster, and have the bits of one.
                lines, *_ = train(args, folder, f"{form}-{seed}", settings, ["--ranks", "2"])
                found.setdefault(form, []).append(lines[-1]["validation_loss"])
                print(f"{form} seed {seed}: {found[form][-1]:.4f}", flush=True)
    print("\n| gradients | held-out loss | against f32 |\n|---|--:|--:|")
    for form, losses in found.items():
        differences = [a - b for a, b in zip(losses, found["f32"])]
        error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
        against = "" if form == "f32" else f"{statistics.mean(differences):+.4f} ± {error:.4f}"
        print(f"| `{form}` | {statistics.mean(losses):.4f} | {against} |")


def times(args):
    batch = max(1, windows(args) // 8)
    one = [f"data.batch={8 * batch}"]
    eight = [*EIGHT, f"data.batch={batch}"]
    ways = {"one leaf": (one, ()), "eight leaves": (eight, ()), "2 ranks": (eight, ("--ranks", "2")),
            "2 ranks, ZeRO 1": ([*eight, "parallel.zero=1"], ("--ranks", "2")), "4 ranks, ZeRO 1": ([*eight, "parallel.zero=1"], ("--ranks", "4")),
            "2 ranks, int8-g256": ([*eight, "parallel.gradients=int8-g256"], ("--ranks", "2"))}
    seconds = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.rounds):
            for i, (way, (settings, more)) in enumerate(ways.items()):
                lines, _, cpu = train(args, folder, f"{turn}-{i}", [*settings, "validation.share=0"], more)
                # The first step loads code and pages.
                wall = (lines[-1]["seconds"] - lines[0]["seconds"]) / (len(lines) - 1)
                seconds[way].append((wall, cpu / len(lines)))
                print(f"{way}: {wall:.3f} s a step", flush=True)
    print("\n| | s/step | ratio | CPU s/step |\n|---|--:|--:|--:|")
    for way, found in seconds.items():
        ratio = statistics.median(a[0] / b[0] for a, b in zip(found, seconds["one leaf"]))
        wall, cpu = (statistics.median(of) for of in zip(*found))
        print(f"| {way} | {wall:.3f} | {ratio:.2f} | {cpu:.3f} |")


def watched(arguments):
    """Runs a rank and prints its number and the peak of its anonymous memory in MB, as its last line."""
    # The launcher talks to a rank over an open file.
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, close_fds=False)
    peak = 0
    while process.poll() is None:
        try:
            status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
            peak = max(peak, int(status.split("RssAnon:")[1].split()[0]))
        except (OSError, IndexError):
            pass
        time.sleep(0.002)
    print(f"PEAK {os.environ.get('PMI_RANK', '0')} {peak / 1000:.1f}", flush=True)
    return process.returncode


def memory(args):
    shape = ["hidden_size=512", "intermediate_size=1536", "num_hidden_layers=8", "num_attention_heads=8", "num_key_value_heads=8", "vocab_size=8192"]
    settings = [*(f"model.architecture.{field}" for field in shape), "precision.policy=fp32", "data.length=64", "data.batch=1",
                f"data.accumulate={args.ranks}", f"parallel.leaves={args.ranks}", "schedule.steps=4", "schedule.warmup=1", "telemetry.every=0",
                "validation.share=0", "samples.prompts=[]", "checkpoint.every=4"]
    print(f"| ZeRO, {args.ranks} ranks | predicted for a rank, MB | rank 0 | others, at most |\n|---|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        made = subprocess.run([args.mantissa, "train", "--init", "small", "--data", str(pathlib.Path(args.text).resolve())],
                              check=True, capture_output=True, text=True)
        config = pathlib.Path(folder) / "run.toml"
        config.write_text(made.stdout)
        for zero in range(4):
            sets = [word for setting in [*settings, f"out={folder}/{zero}", f"parallel.zero={zero}"] for word in ("--set", setting)]
            command = [args.mantissa, "train", str(config), "--threads", "1", "--quiet", *sets]
            mpi = ["mpiexec", "-n", str(args.ranks)]
            dry = subprocess.run([*mpi, *command, "--dry-run", "--json"], check=True, capture_output=True, text=True).stdout
            predicted = json.loads(dry)["predicted_peak_memory"] / 1e6
            ran = subprocess.run([*mpi, sys.executable, __file__, *command, "watched"], check=True, capture_output=True, text=True).stdout
            peaks = {int(line.split()[1]): float(line.split()[2]) for line in ran.splitlines() if line.startswith("PEAK")}
            others = max(peak for rank, peak in peaks.items() if rank > 0)
            print(f"| {zero} | {predicted:.0f} | {peaks[0]:.0f} | {others:.0f} |", flush=True)


def main():
    if sys.argv[-1] == "watched":
        sys.exit(watched(sys.argv[1:-1]))
    parser = argparse.ArgumentParser()
    parser.add_argument("mantissa")
    parser.add_argument("text")
    parser.add_argument("what", choices=["loss", "time", "memory"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--size", default="small")
    parser.add_argument("--formats", default="f32,int8-g256,fp8-e4m3-g256,int4-g64+hadamard,int4-g64,sign")
    args = parser.parse_args()
    {"loss": loss, "time": times, "memory": memory}[args.what](args)


if __name__ == "__main__":
    main()
