#!/usr/bin/env python3
"""Peak anonymous memory of `mantissa quantize` or `mantissa run`, predicted and measured.

    bench/memory.py BINARY WORK_FOLDER [MODEL ...]
    bench/memory.py --run BINARY WORK_FOLDER [MODEL ...]
    bench/memory.py --dry-run BINARY WORK_FOLDER [MODEL ...]

The third form compares what `run`, `eval` and `eval --engine fast` say with `--dry-run` with what they take, on each MODEL (which has a
tokenizer) and on the synthetic one: anonymous memory, and resident file pages beside it. The second form runs a prompt of 400 tokens in each of several formats, with int8 keys and values and with a draft model. The first
form runs four recipes on each MODEL, and on a synthetic one of 0.2 GB made in WORK_FOLDER. The measured peak is the larger of the
highest RssAnon in /proc/PID/status, sampled about every millisecond, and the final VmHWM minus file pages, which misses no
peak. Exit code 1 if a prediction is more than 10 % off.
"""

import json
import pathlib
import shutil
import subprocess
import sys

RECIPES = ["rtn-int4-g128", "nvfp4", "gptq-int4-g128", "gptaq-int4-g128"]
SYNTH = "--preset tiny --hidden 3072 --layers 1 --heads 24 --kv-heads 8 --ffn 8192 --vocab 2048 --context 1024".split()
TOLERANCE = 0.10

# Recipes and output formats of --run; its synthetic model has the tokenizer of the embedded one.
RUN = [("bf16", None), ("rtn-int8-channel", None), ("rtn-int4-g128", None), ("rtn-int3-g128", None), ("nf4", None), ("nvfp4", None), ("mxfp4", None),
       ("fp8-dynamic", None), ("mxfp6-e2m3", None), ("rtn-q4_0", "gguf"), ("rtn-q4_k", "gguf"), ("rtn-q8_0", "gguf"), ("rtn-q2_k", "gguf"), ("rtn-f32", "gguf")]
TOKENIZER = pathlib.Path(__file__).parent.parent / "crates/mantissa-jobs/demo/model"

# Calibration windows of 128 tokens each, ids below 100.
WINDOWS = 64


def status(pid):
    """Fields of /proc/PID/status in bytes; empty once the process is gone."""
    try:
        lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {k: int(v.split()[0]) * 1024 for k, _, v in (l.partition(":") for l in lines) if v.endswith("kB")}


def peak(command, resident=None):
    """Peak anonymous memory of a command, which must succeed; adds the bytes of its file pages to `resident`."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    anonymous, high, files = 0, 0, 0
    while process.poll() is None:
        now = status(process.pid)
        if now.get("RssAnon"):
            anonymous, high = max(anonymous, now["RssAnon"]), now["VmHWM"]
            files = now["RssFile"] + now["RssShmem"]
            if resident is not None:
                resident.append(now["RssFile"])
    if process.returncode:
        sys.exit(f"{' '.join(command)}: exit {process.returncode}")
    return max(anonymous, high - files)


def run(binary, work, models):
    """Compares the prediction of `run` with the measurement in every format; the number of wrong ones."""
    wrong = 0
    print("model        format         KV cache  draft  predicted MB  measured MB   ratio")
    for model in models:
        for recipe, form in RUN:
            out = work / ("out.gguf" if form else "out")
            command = [binary, "quantize", str(model), "--recipe", recipe, "--out", str(out), "--overwrite", "--quiet"]
            if subprocess.run([*command, *(["--format", form] if form else [])], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
                print(f"{model.name:12} {recipe:14} cannot be made")
                continue
            prompt = "Once upon a time there was a little dog. " * 40
            for more in ([], ["--kv", "int8"], ["--draft", str(model)]):
                report = work / "run.json"
                command = [binary, "run", str(out), "-p", prompt, "-n", "100", "--threads", "2", "--quiet", "--overwrite", f"--json={report}", *more]
                measured = peak(command)
                predicted = json.loads(report.read_text())["predicted_peak_memory"]
                ratio = predicted / measured
                wrong += abs(ratio - 1) > TOLERANCE
                kinds = f"{'int8' if '--kv' in more else 'f16':8}  {'yes' if '--draft' in more else 'no':5}"
                print(f"{model.name:12} {recipe:14} {kinds} {predicted / 1e6:12.1f} {measured / 1e6:12.1f} {ratio:7.3f}", flush=True)
            shutil.rmtree(out) if out.is_dir() else out.unlink()
    return wrong


def dry_run(binary, work, models):
    """Compares the predictions of dry runs with the measurements; the number of wrong ones among models above 100 MB."""
    wrong = 0
    text = work / "text.txt"
    text.write_text("Once upon a time there was a little dog. " * 400)
    print("model        command           predicted MB  measured MB   ratio   files MB, said and at the end")
    for model in models:
        context = str(min(512, json.loads((model / "config.json").read_text())["max_position_embeddings"]))
        prompt = ["-p", "Once upon a time there was a little dog. " * 6, "-n", "60"]
        evaluate = ["--text", str(text), "--context", context]
        for name, arguments in (("run", prompt), ("eval", evaluate), ("eval fast", [*evaluate, "--engine", "fast"])):
            command = [binary, name.split()[0], str(model), *arguments, "--threads", "2", "--quiet"]
            said = json.loads(subprocess.check_output([*command, "--dry-run", "--json"]))
            files = []
            measured, predicted = peak([*command, f"--json={work / 'report.json'}", "--overwrite"], files), said["predicted_peak_memory"]
            ratio = predicted / measured
            wrong += abs(ratio - 1) > TOLERANCE and measured > 100e6
            beside = f"{said['resident_files'] / 1e6:.1f}, {max(files) / 1e6:.1f}"
            print(f"{model.name:12} {name:16} {predicted / 1e6:13.1f} {measured / 1e6:12.1f} {ratio:7.3f}   {beside}", flush=True)
    return wrong


def main():
    dry = sys.argv[1] == "--dry-run"
    if dry:
        sys.argv.pop(1)
    runs = sys.argv[1] == "--run"
    if runs:
        sys.argv.pop(1)
    binary, work = sys.argv[1], pathlib.Path(sys.argv[2])
    synthetic = work / "synthetic"
    subprocess.run([binary, "synth", "--out", synthetic, "--quiet", *SYNTH], check=True, stdout=subprocess.DEVNULL)
    if runs or dry:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TOKENIZER / name, synthetic / name)
        wrong = (dry_run if dry else run)(binary, work, [synthetic, *map(pathlib.Path, sys.argv[3:])])
        shutil.rmtree(synthetic)
        sys.exit(1 if wrong else 0)
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
