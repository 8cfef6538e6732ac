#!/usr/bin/env python3
"""Measures the loss that a precision recipe costs: trains the same model on the same tokens with each, and compares.

    bench/training/gap.py MANTISSA TEXT_DIR WORK_DIR [--init MODEL] [--steps N] [--batch N] [--length N] [--lr LR] [--seeds 1 2 3]
                          [--threads N] [--only NAME ...]

MANTISSA is the binary, TEXT_DIR as for train_ref.py. The model, the texts and the optimizer are those of ref-8m.toml; --steps
sets the tokens. With --init every arm continues the trained model in folder MODEL instead of random weights: two runs from random
weights drift apart by more than most recipes cost, so that dozens of seeds would be needed; from trained weights at a moderate
learning rate the spread is a tenth. The arm fp32 shows the spread. An arm is a policy, or a policy with changed keys. WORK_DIR keeps every finished run, so the command resumes and
can be widened by more steps of other arms or seeds. Prints each arm's validation loss less that of bf16 with the same seed, in
nats and in percent, and writes gap.json.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

import train_ref

NVFP4 = ["precision.policy=nvfp4"]
ARMS = {
    "bf16": ["precision.policy=bf16"],
    "fp32": ["precision.policy=fp32"],
    "fp8-delayed": ["precision.policy=fp8-delayed"],
    "fp8-current": ["precision.policy=fp8-current"],
    "fp8-blockwise": ["precision.policy=fp8-blockwise"],
    "mxfp8": ["precision.policy=mxfp8"],
    "int8-rowwise": ["precision.policy=int8-rowwise"],
    "nvfp4": NVFP4,
    "nvfp4, all layers": [*NVFP4, 'precision.keep={ first = 0.0, last = 0.0, dtype = "bf16" }'],
    "nvfp4 without RHT": [*NVFP4, "precision.wgrad.hadamard={ order = 1 }"],
    "nvfp4 without SR": [*NVFP4, 'precision.dgrad.dy="nvfp4:te"', 'precision.wgrad.dy="nvfp4:te"'],
    "nvfp4 without 2-D": [*NVFP4, 'precision.fprop.w="nvfp4:te"', 'precision.dgrad.w="nvfp4:te"'],
    "quartet": ["precision.policy=quartet"],
    "quartet2": ["precision.policy=quartet2"],
    "tetrajet2": ["precision.policy=tetrajet2"],
}


def run(args, arm, seed):
    """Trains one arm, unless it is done; returns its last validation loss."""
    start = f"-{args.init.name}" if args.init else ""
    name = f"{arm.replace(', ', '-').replace(' ', '-')}{start}-{args.steps}x{args.batch}x{args.length}-lr{args.lr:g}-{seed}"
    folder = args.work / name
    if not (folder / "model").is_dir():
        changes = [
            f"out={name}", f"seed={seed}", f"data.length={args.length}", f"data.batch={args.batch}", f"schedule.steps={args.steps}",
            "schedule.kind=linear", f"schedule.warmup={max(args.steps // 20, 1)}", f"optimizer.lr={args.lr}", f"validation.every={args.steps}",
            "validation.batches=64", f"samples.every={args.steps}", f"checkpoint.every={args.steps}", "checkpoint.best=false",
            "telemetry.every=0", *ARMS[arm],
        ]
        command = [args.mantissa, "train", args.work / "gap.toml", "--quiet", "--restart"]
        command += [part for change in changes for part in ("--set", change)]
        command += [] if args.threads is None else ["--threads", str(args.threads)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    losses = [json.loads(line).get("validation_loss") for line in (folder / "log.jsonl").read_text().splitlines()]
    return [loss for loss in losses if loss is not None][-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mantissa", type=pathlib.Path)
    parser.add_argument("texts", type=pathlib.Path)
    parser.add_argument("work", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--init", type=pathlib.Path)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="NAME")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    train_ref.prepare(args.texts, args.work)
    text = (train_ref.HERE / "ref-8m.toml").read_text(encoding="utf-8")
    timed = ("minutes = ", "decay_share = ")
    lines = [line for line in text.splitlines() if not line.startswith(timed)]
    settings = "\n".join(lines) + "\n"
    if args.init:
        # The trained model brings its own architecture and tokenizer.
        before, after = settings.split("[model.architecture]")
        settings = before + f'[model]\ninit = "{args.init.resolve()}"\n\n' + after[after.index("[data]") :]
    (args.work / "gap.toml").write_text(settings, encoding="utf-8")
    table = {}
    for seed in args.seeds:
        base = run(args, "bf16", seed)
        print(f"seed {seed}: bf16 {base:.4f} nats/token", file=sys.stderr)
        for arm in args.only:
            loss = run(args, arm, seed)
            table.setdefault(arm, []).append({"seed": seed, "loss": loss, "gap": loss - base, "percent": 100 * (loss / base - 1)})
            print(f"  {arm:<20} {loss - base:+.4f} nats, {100 * (loss / base - 1):+.2f} %", file=sys.stderr)
    result = {"steps": args.steps, "tokens": args.steps * args.batch * args.length, "arms": table}
    (args.work / "gap.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"| recipe | loss above bf16, {result['tokens']} tokens | percent | range over {len(args.seeds)} seeds |\n|---|---|---|---|")
    for arm, runs in table.items():
        gaps = [one["gap"] for one in runs]
        percent = statistics.mean(one["percent"] for one in runs)
        print(f"| {arm} | {statistics.mean(gaps):+.4f} | {percent:+.2f} | {min(gaps):+.4f} to {max(gaps):+.4f} |")


if __name__ == "__main__":
    main()
