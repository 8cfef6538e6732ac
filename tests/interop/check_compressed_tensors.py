#!/usr/bin/env python3
"""Quantizes a model by each recipe, loads the output with transformers + compressed-tensors, and compares logits with ours.

    check_compressed_tensors.py MANTISSA MODEL TOKENS.json:KEY [--windows 4] [--tol 1e-3] [--recipes R ...]

Recipes with activation quantization are compared on their weights: `input_activations` is removed from a copy of the config,
because one flipped rounding in an activation changes every later token (README.md, "Tolerance").
Exit code 1 if a logit differs by more than the tolerance.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

RECIPES = [
    "rtn-int4-g32", "rtn-int4-g32-asym", "rtn-int3-g32", "rtn-int8-channel", "rtn-int4-channel-asym", "rtn-int8-channel+int8-token",
    "rtn-fp8-e4m3-channel", "rtn-fp8-e4m3-tensor", "rtn-fp8-e4m3-channel+fp8-e4m3-token", "rtn-nvfp4", "rtn-mxfp4", "rtn-mxfp4:ct",
    "rtn-mxfp8-e4m3",
]
HERE = pathlib.Path(__file__).resolve().parent


def run(*command):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def without_activations(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = None
    path.write_text(json.dumps(config))


def check(recipe, args, folder):
    out = folder / recipe.replace(":", "_")
    run(args.mantissa, "quantize", args.model, "--recipe", recipe, "--format", "compressed-tensors", "--overwrite", "--out", out, "--quiet")
    if "+" in recipe:
        without_activations(out)
    file, key = args.tokens.rsplit(":", 1)
    windows = json.loads(pathlib.Path(file).read_text())[key][: args.windows]
    tokens = folder / "windows.json"
    tokens.write_text(json.dumps({"w": windows}))
    ours, theirs = folder / "ours.safetensors", folder / "theirs.safetensors"
    run(args.mantissa, "eval", out, "--tokens", f"{tokens}:w", "--overwrite", "--logits", ours, "--quiet")
    # transformers loads asymmetric files only by a path that rounds each weight to the dtype of its scale (bf16 in a bf16
    # model: logits move by 0.02), so these are decoded by the package itself, in float32.
    via = "package" if "asym" in recipe else "auto"
    script = HERE / "compressed_tensors_logits.py"
    run(sys.executable, script, out, "--tokens", f"{tokens}:w", "--windows", args.windows, "--via", via, "--out", theirs)
    compared = subprocess.run([sys.executable, HERE / "compare_logits.py", ours, theirs, "--tol", str(args.tol)], capture_output=True, text=True)
    print(f"{recipe}: {compared.stdout.strip().splitlines()[-1]}", flush=True)
    shutil.rmtree(out)
    return compared.returncode == 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("mantissa")
    parser.add_argument("model")
    parser.add_argument("tokens")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--tol", type=float, default=1e-3)
    parser.add_argument("--recipes", nargs="*", default=RECIPES)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = {recipe: check(recipe, args, pathlib.Path(folder)) for recipe in args.recipes}
    print(f"{sum(results.values())} passed, {len(results) - sum(results.values())} failed")
    sys.exit(0 if all(results.values()) else 1)


if __name__ == "__main__":
    main()
