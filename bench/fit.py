#!/usr/bin/env python3
"""Compares mixed precision by `mantissa fit` with uniform recipes of at most the same bits.

    python3 bench/fit.py MANTISSA MODEL WINDOWS.json WORK [--method qtip] [--schemes trellis2,trellis3,...]
        [--budgets 4.5,3.5,2.5] [--uniform RECIPE ...] [--fit-on eval_mix] [--others eval_stories,eval_wiki] [--threads 1]

WINDOWS.json holds token windows by key, `calib` among them. `fit` measures its candidates once (--measurements) on every
other of the first 32 windows of --fit-on; all results are KL against MODEL on the remaining windows and on --others.
Standard errors of a difference are those of unpaired means, which are too large rather than too small.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path


def run(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        print(" ".join(map(str, command)), done.stderr[-600:], file=sys.stderr)
    return done


def measure(args, windows, out, keys):
    figures = {}
    for key in keys:
        found = run(args.mantissa, "eval", out, "--reference", args.model, "--tokens", f"{windows}:{key}", "--json", "--quiet",
                    "--threads", args.threads)
        if found.returncode == 0:
            report = json.loads(found.stdout)
            figures[key] = [report["kl"], report["kl_se"]]
    return figures


def bits_of(out):
    quality = out / "quality.json" if out.is_dir() else Path(f"{out}.quality.json")
    return json.loads(quality.read_text())["linear_bits_per_weight"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("mantissa", "model", "windows", "work"):
        parser.add_argument(name)
    parser.add_argument("--method", default="qtip")
    parser.add_argument("--schemes", default="trellis2,trellis3,trellis4,trellis5,trellis6")
    parser.add_argument("--budgets", default="4.5,3.5,2.5")
    parser.add_argument("--uniform", nargs="*", default=[])
    parser.add_argument("--fit-on", default="eval_mix")
    parser.add_argument("--others", default="")
    parser.add_argument("--threads", default="1")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    given = json.loads(Path(args.windows).read_text())
    chosen = set(range(0, 32, 2))
    given["rest"] = [window for at, window in enumerate(given[args.fit_on]) if at not in chosen]
    windows = work / "windows.json"
    windows.write_text(json.dumps(given))
    keys = ["rest", *filter(None, args.others.split(","))]
    rows = json.loads((work / "rows.json").read_text()) if (work / "rows.json").exists() else []

    def done(name):
        return any(row["name"] == name for row in rows)

    def add(name, out, begin, **more):
        row = {"name": name, "bits": bits_of(out), "kl": measure(args, windows, out, keys), "seconds": time.time() - begin, **more}
        rows.append(row)
        (work / "rows.json").write_text(json.dumps(rows, indent=1))
        print(json.dumps(row), flush=True)

    for recipe in args.uniform:
        begin = time.time()
        if done(recipe):
            continue
        found = run(args.mantissa, "quantize", args.model, "--recipe", recipe, "--out", work / recipe, "--overwrite", "--quiet", "--json",
                    "--threads", args.threads, "--calibration-tokens", f"{windows}:calib")
        if found.returncode == 0:
            # A recipe of GGUF writes a file into the folder.
            add(recipe, Path(json.loads(found.stdout)["output"]), begin)
    for budget in args.budgets.split(","):
        name, begin = f"fit {args.method} {budget}", time.time()
        out = work / name.replace(" ", "-").replace(".", "_")
        if done(name):
            continue
        found = run(args.mantissa, "fit", args.model, "--budget", f"{budget}bpw", "--method", args.method, "--schemes", args.schemes,
                    "--calibration-tokens", f"{windows}:calib", "--tokens", f"{windows}:{args.fit_on}", "--measurements",
                    work / f"measured-{args.method}", "--overwrite", "--threads", args.threads, "--quiet", "--json", "--out", out)
        if found.returncode == 0:
            add(name, out, begin, predicted=json.loads(found.stdout)["predicted_kl"], budget=float(budget))
    uniform = [row for row in rows if not row["name"].startswith("fit ")]
    print("| budget | fit: bits | windows | KL | best uniform recipe | KL | less, % | difference / SE |")
    print("|--:|--:|---|--:|---|--:|--:|--:|")
    for row in (row for row in rows if row["name"].startswith(f"fit {args.method} ")):
        for key in keys:
            rivals = [u for u in uniform if u["bits"] <= row["budget"] + 0.005 and key in u["kl"]]
            if not rivals or key not in row["kl"]:
                continue
            best = min(rivals, key=lambda u: u["kl"][key][0])
            (a, sa), (b, sb) = row["kl"][key], best["kl"][key]
            print(f"| {row['budget']} | {row['bits']:.3f} | {key} | {a:.5f} ± {sa:.5f} | `{best['name']}` ({best['bits']:.3f}) | {b:.5f} ± {sb:.5f} |"
                  f" {100 * (1 - a / b):.1f} | {(b - a) / math.hypot(sa, sb):.1f} |")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
