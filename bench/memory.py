#!/usr/bin/env python3
"""Peak anonymous memory of `mantissa quantize`, predicted by --dry-run and measured.

    bench/memory.py BINARY WORK_FOLDER [MODEL ...]

Runs four recipes on each MODEL, and on a synthetic one of 0.2 GB made in WORK_FOLDER. The measured peak is the larger of the
highest RssAnon in /proc/PID/status, sampled about every millisecond, and the final VmHWM minus file pages, which misses no
peak. Exit code 1 if a prediction is more than 10 % off.
"""

import json
import pathlib
import shutil
import subprocess
import sys

RECIPES = ["rtn-int4-g128", "nvfp4", "gptq-int4-g128", "gptaq-int4-g128"]
SYNTH = "--preset tiny --hidden 3072 --layers 1 --heads 24 --kv-heads 8 --ffn 8192 --vocab 2000".split()
TOLERANCE = 0.10

# Calibration windows of 128 tokens each, ids below 100.
WINDOWS = 64


def status(pid):
    """Fields of /proc/PID/status in bytes; empty once the process is gone."""
    try:
        lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {k: int(v.split()[0]) * 1024 for k, _, v in (l.partition(":") for l in lines) if v.endswith("kB")}


def peak(command):
    """Peak anonymous memory of a command, which must succeed."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    anonymous, high, files = 0, 0, 0
    while process.poll() is None:
        now = status(process.pid)
        if now.get("RssAnon"):
            anonymous, high = max(anonymous, now["RssAnon"]), now["VmHWM"]
            files = now["RssFile"] + now["RssShmem"]
    if process.returncode:
        sys.exit(f"{' '.join(command)}: exit {process.returncode}")
    return max(anonymous, high - files)


def main():
    binary, work = sys.argv[1], pathlib.Path(sys.argv[2])
    synthetic = work / "synthetic"
    subprocess.run([binary, "synth", "--out", synthetic, "--quiet", *SYNTH], check=True, stdout=subprocess.DEVNULL)
    windows = work / "windows.json"
    windows.write_text(json.dumps([[(w * w + 7 * i + i * i) % 100 for i in range(128)] for w in range(WINDOWS)]))
    wrong = 0
    print("model        recipe         verify  predicted MB  measured MB   ratio")
    for model in [synthetic, *map(pathlib.Path, sys.argv[3:])]:
        for recipe in RECIPES:
            for verify in ("true", "false"):
                out = work / "out"
                command = [binary, "quantize", str(model), "--recipe", recipe, "--overwrite", "--out", str(out), "--quiet"]
                command += [f"--verify={verify}", "--threads", "2"]
                if recipe.startswith("gpt"):
                    command += ["--calibration-tokens", str(windows)]
                plan = json.loads(subprocess.check_output([*command, "--dry-run", "--json"]))
                predicted, measured = plan["predicted_peak_memory"], peak(command)
                ratio = predicted / measured
                wrong += abs(ratio - 1) > TOLERANCE
                figures = f"{predicted / 1e6:12.1f} {measured / 1e6:12.1f} {ratio:7.3f}"
                print(f"{model.name:12} {recipe:14} {verify:6} {figures}", flush=True)
                shutil.rmtree(out)
    shutil.rmtree(synthetic)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
