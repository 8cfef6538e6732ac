#!/usr/bin/env python3
"""Quantizes a model by many recipes and measures each: the tables of docs/results/weights.md.

    bench/weights.py MANTISSA MODEL WINDOWS.json WORK [--jobs N] [--threads N] [--recipes NAME ...]

WINDOWS.json holds token windows: `calib`, `eval_mix` and further keys that begin with eval_, on which the recipes of OUT_OF_DOMAIN are
measured too. Appends one JSON line per recipe to WORK/results.jsonl (processor seconds, bytes, and what `eval --json` prints for
each key) and deletes the quantized model. A recipe that is in the file already is left out, so that a run can be continued. `table`
as the only further argument prints WORK/results.jsonl as Markdown; `figures` with --name MODEL puts its rows in place of those of the same model and
recipe in the table that the program reads (crates/mantissa-plan/src/figures/recipes.tsv), from which the results pages are generated.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import shutil
import subprocess

UNCALIBRATED = ["rtn-int8-channel", "w8a8", "mxfp8", "fp8-dynamic", "nf4", "nvfp4", "rtn-int4-g128-asym", "rtn-int4-g128", "mxfp4", "rtn-int3-g128-asym"]
CALIBRATED = [
    "gptq-int4-g128", "gptq-int4-g128-asym", "gptq-nvfp4", "gptaq-int4-g128-asym", "gptaq-nvfp4", "gptaq-int4-g128", "gptq-mxfp4:ct",
    "gptq-int3-g128-asym", "gptaq-int3-g128-asym", "awq-int4-g128-asym", "hqq-int4-g64", "rotate-w4a4", "spin-w4a4", "w8a8-smooth",
    "nvfp4-w4a4", "rtn-mse-int4-g128-asym", "gptq-int2-g32-asym", "autoround-int4-g128", "qtip-trellis3", "qtip-trellis2",
    "spqr-int3-g16", "scalesweep-gptaq-nvfp4", "qtip-trellis4", "autoround-nvfp4", "brecq-int4-g128", "efficientqat-int2-g32",
]
GGUF = ["q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0", "iq4_xs", "q3_k_m", "iq3_xxs", "q2_k", "iq2_xs"]
OUT_OF_DOMAIN = {
    "w8a8", "fp8-dynamic", "nvfp4", "mxfp4", "rtn-int4-g128", "rtn-int4-g128-asym", "rtn-int3-g128-asym", "gptq-int4-g128", "gptq-nvfp4",
    "gptaq-int4-g128-asym", "q4_k_m", "qtip-trellis3",
}


def timed(command, log):
    """Returns the exit code and the processor seconds."""
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen([str(part) for part in command], stdout=file, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime


def measure(args, recipe, keys):
    tag = recipe.replace(":", "_")
    out = args.work / (f"{tag}.gguf" if recipe in GGUF else tag)
    common = ["--overwrite", "--quiet", "--threads", args.threads]
    calibration = [] if recipe in UNCALIBRATED else ["--calibration-tokens", f"{args.windows}:calib"]
    command = [args.mantissa, "quantize", args.model, "--recipe", recipe, "--out", out, *calibration, *common]
    code, seconds = timed(command, args.work / f"{tag}.log")
    result = {"recipe": recipe, "rc": code, "cpu_s": seconds}
    if code != 0:
        return result | {"log": (args.work / f"{tag}.log").read_text()[-500:]}
    for key in keys:
        if key != "eval_mix" and recipe not in OUT_OF_DOMAIN:
            continue
        report = args.work / f"{tag}.{key}.json"
        tokens = f"{args.windows}:{key}"
        command = [args.mantissa, "eval", out, "--reference", args.model, "--tokens", tokens, f"--json={report}", *common]
        timed(command, args.work / f"{tag}.eval.log")
        result[key] = json.loads(report.read_text())
    if out.is_dir():
        result["bytes"] = sum(path.stat().st_size for path in out.rglob("*.safetensors"))
        shutil.rmtree(out)
    else:
        result["bytes"] = out.stat().st_size
        out.unlink()
    return result


def figure(value, digits=5):
    return f"{value:.{digits}f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.{digits}f}"


def table(path):
    results = [json.loads(line) for line in path.read_text().splitlines()]
    print("| recipe | bytes | KL | top-1, % | ΔNLL | CPU-s |\n|---|--:|---|---|---|--:|")
    for result in sorted((r for r in results if "eval_mix" in r), key=lambda r: r["eval_mix"]["kl"]):
        mix = result["eval_mix"]
        kl = f"{figure(mix['kl'])} ± {figure(mix['kl_se'])}"
        sign = "+" if mix["delta_nll"] >= 0 else "-"
        delta = f"{sign}{figure(abs(mix['delta_nll']))} ± {figure(mix['delta_nll_se'])}"
        print(f"| `{result['recipe']}` | {result['bytes']} | {kl} | {100 * mix['top1']:.2f} | {delta} | {result['cpu_s']:.0f} |")


FIGURES = pathlib.Path(__file__).parent.parent / "crates/mantissa-plan/src/figures/recipes.tsv"


def figures(path, model):
    """Columns: model, recipe, format, bits, MB, KL, its error, top-1, ΔNLL, its error, seconds. Bits of an earlier row stay."""
    head, *rows = (line.split("\t") for line in FIGURES.read_text().splitlines())
    rows = {tuple(row[:3]): row for row in rows}
    for result in map(json.loads, path.read_text().splitlines()):
        mix = result.get("eval_mix")
        if mix is None:
            continue
        key = (model, result["recipe"], "")
        bits = rows.get(key, [""] * 4)[3]
        measured = [f"{result['bytes'] / 1e6:.2f}", f"{mix['kl']:.5f}", f"{mix['kl_se']:.5f}", f"{100 * mix['top1']:.2f}"]
        delta = [f"{mix['delta_nll']:.5f}", f"{mix['delta_nll_se']:.5f}", f"{result['cpu_s']:.0f}"]
        rows[key] = [*key, bits, *measured, *delta]
    order = {name: at for at, name in enumerate(dict.fromkeys(row[0] for row in rows.values()))}
    lines = [head, *sorted(rows.values(), key=lambda row: (order[row[0]], float(row[5])))]
    FIGURES.write_text("".join("\t".join(line) + "\n" for line in lines))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mantissa", type=pathlib.Path)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("windows", type=pathlib.Path)
    parser.add_argument("work", type=pathlib.Path)
    parser.add_argument("action", nargs="?", choices=["table", "figures"])
    parser.add_argument("--name", help="model of the figures, such as ref-32m")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--recipes", nargs="*", default=UNCALIBRATED + CALIBRATED + GGUF)
    args = parser.parse_args()
    results = args.work / "results.jsonl"
    if args.action == "table":
        return table(results)
    if args.action == "figures":
        return figures(results, args.name)
    args.work.mkdir(parents=True, exist_ok=True)
    done = {json.loads(line)["recipe"] for line in results.read_text().splitlines()} if results.exists() else set()
    keys = [key for key in json.loads(args.windows.read_text()) if key.startswith("eval_")]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        jobs = [pool.submit(measure, args, recipe, keys) for recipe in args.recipes if recipe not in done]
        for job in concurrent.futures.as_completed(jobs):
            result = job.result()
            with open(results, "a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
            print(result["recipe"], result["rc"], round(result["cpu_s"]), result.get("eval_mix", {}).get("kl"), flush=True)


if __name__ == "__main__":
    main()
