#!/usr/bin/env python3
"""Compares the time that `mantissa quantize --dry-run` predicts with the time that the run takes, for every method.

    bench/predict.py MANTISSA MODEL [--only REGEX] [--threads N] [--out NAME]

One recipe of each method and transform on MODEL with 32 windows of the built-in calibration text. Each run follows its own prediction, so that
both see the same machine. Prints predicted and measured seconds, CPU seconds, and their ratio; exits 1 if one is further
than a factor of 1.5 off (runs under 5 s count as right if predicted under 10 s). Writes NAME.json and NAME.md with --out.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

RECIPES = [
    "rtn-int4-g128", "rtn-mse-int4-g128", "hqq-int4-g64", "gptq-int4-g128", "gptaq-int4-g128", "foem-int4-g128", "spqr-int4-g128",
    "autoround-int4-g128", "autoround-adam-int4-g128", "omniquant-int4-g128", "adaround-int4-g128", "brecq-int4-g128",
    "block-ap-int4-g128", "qtip-trellis3", "scalesweep-nvfp4", "scalesweep-gptq-nvfp4", "scalesweep-gptaq-nvfp4", "soar-nvfp4",
    "soar-gptq-nvfp4", "soar-gptaq-nvfp4", "awq-rtn-int4-g128", "smooth-rtn-int8-channel+int8-token", "rotate-gptq-int4-g128",
    "spin-rtn-int4-channel+int4-token", "rtn-int4-g128+e2e",
]
FACTOR = 1.5


def run(mantissa, model, recipe, threads, out):
    command = [mantissa, "quantize", model, "--recipe", recipe, "--format", "native", "--out", out, "--calibration", "default", "--samples", "32",
               "--threads", str(threads), "--quiet", "--json"]
    done = subprocess.run([*command, "--dry-run"], capture_output=True, text=True)
    if done.returncode != 0:
        return {"recipe": recipe, "error": done.stderr.strip().splitlines()[-1]}
    predicted = json.loads(done.stdout)["predicted_seconds"]
    start = time.monotonic()
    with open(os.devnull, "w") as nothing:
        process = subprocess.Popen(command, stdout=nothing, stderr=subprocess.PIPE)
        error = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        return {"recipe": recipe, "error": error.decode().strip().splitlines()[-1]}
    return {"recipe": recipe, "predicted": predicted, "seconds": seconds, "cpu_seconds": usage.ru_utime + usage.ru_stime}


def right(row):
    if "error" in row:
        return False
    if row["seconds"] < 5 and row["predicted"] < 10:
        return True
    return 1 / FACTOR <= row["predicted"] / row["seconds"] <= FACTOR


def line(row):
    if "error" in row:
        return f"| `{row['recipe']}` | {row['error']} | | | |"
    ratio = row["predicted"] / row["seconds"]
    return f"| `{row['recipe']}` | {row['predicted']:.1f} | {row['seconds']:.1f} | {row['cpu_seconds']:.1f} | {ratio:.2f}{'' if right(row) else ' !'} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mantissa"), parser.add_argument("model")
    parser.add_argument("--only", default=".")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out")
    arguments = parser.parse_args()
    head = "| recipe | predicted s | s | CPU s | ratio |\n|---|---|---|---|---|"
    print(head, flush=True)
    rows = []
    for recipe in filter(re.compile(arguments.only).search, RECIPES):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(run(arguments.mantissa, arguments.model, recipe, arguments.threads, pathlib.Path(folder) / "out"))
        print(line(rows[-1]), flush=True)
    if arguments.out:
        pathlib.Path(arguments.out + ".json").write_text(json.dumps(rows, indent=1) + "\n")
        pathlib.Path(arguments.out + ".md").write_text("\n".join([head, *map(line, rows)]) + "\n")
    wrong = [row["recipe"] for row in rows if not right(row)]
    print(f"{len(rows)} recipes, {len(wrong)} further than a factor of {FACTOR} off{': ' + ', '.join(wrong) if wrong else ''}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
