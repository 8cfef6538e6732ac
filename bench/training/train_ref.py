#!/usr/bin/env python3
"""Trains a reference model within a number of minutes: prepares the texts, trains, checkpoints, exports, measures.

    bench/training/train_ref.py MANTISSA TEXT_DIR WORK_DIR [--size 8m|60m] [--minutes N] [--threads N]

MANTISSA is the binary, TEXT_DIR holds the texts that crates/mantissa-jobs/demo/training/prepare.py names and, if there,
tinyshakespeare.txt. WORK_DIR gets train/, held-out/, the settings and the run's folder, whose folder `model` is the result. The
same command resumes a run that was cut short: the time counts over all processes, and the decay of the learning rate begins
when 80 % of it is used. Prints the perplexity on the held-out texts, and writes it to WORK_DIR/ref-SIZE.json with the minutes,
steps and tokens of the run.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
PREPARE = HERE.parents[1] / "crates/mantissa-jobs/demo/training/prepare.py"
# For the text before the first step and the export after the last.
RESERVE_MINUTES = 0.5


def prepare(texts, work):
    """Writes train/ and held-out/, once."""
    if (work / "train/plays.txt").exists():
        return
    subprocess.run([sys.executable, PREPARE, texts, work], check=True)
    plays = texts / "tinyshakespeare.txt"
    text = plays.read_text(encoding="utf-8") if plays.exists() else ""
    # The last tenth is held out from every reference model.
    scenes = text[: len(text) * 9 // 10].split("\n\n")
    documents = ["\n\n".join(scenes[i : i + 20]) for i in range(0, len(scenes), 20)]
    (work / "train/plays.txt").write_text("".join(d + "\n<|endoftext|>\n" for d in documents), encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mantissa", type=pathlib.Path)
    parser.add_argument("texts", type=pathlib.Path)
    parser.add_argument("work", type=pathlib.Path)
    parser.add_argument("--size", choices=["8m", "60m"], default="60m")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    begin, name = time.monotonic(), f"ref-{args.size}"
    args.work.mkdir(parents=True, exist_ok=True)
    prepare(args.texts, args.work)
    settings = args.work / f"{name}.toml"
    if not settings.exists():
        minutes = args.minutes - RESERVE_MINUTES - (time.monotonic() - begin) / 60
        if minutes <= 0:
            sys.exit(f"--minutes {args.minutes}: expected more than {RESERVE_MINUTES}")
        text = (HERE / settings.name).read_text(encoding="utf-8")
        lines = [f"minutes = {minutes:.3f}" if line.startswith("minutes = ") else line for line in text.splitlines()]
        settings.write_text("\n".join(lines) + "\n", encoding="utf-8")
    run = args.work / name
    threads = [] if args.threads is None else ["--threads", str(args.threads)]
    begun = any(run.glob("checkpoints/step-*.safetensors"))
    command = [args.mantissa, "train", settings, *threads, "--json"] + (["--resume"] if begun else [])
    done = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    held_out = {}
    for domain in ("stories", "prose", "code"):
        text = args.work / f"held-out/{domain}.txt"
        command = [args.mantissa, "eval", run / "model", "--text", text, "--split", "<|endoftext|>", "--json", "--quiet", *threads]
        held_out[domain] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    subprocess.run([args.mantissa, "report", run, "--quiet"], check=True)
    result = {"minutes": (time.monotonic() - begin) / 60, "train": done, "held_out": held_out}
    (args.work / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{name}: {done['steps']} steps, {done['tokens']} tokens, {result['minutes']:.1f} minutes, model {run / 'model'}")
    for domain, report in held_out.items():
        print(f"  {domain}: perplexity {report['ppl']:.3f}")


if __name__ == "__main__":
    main()
