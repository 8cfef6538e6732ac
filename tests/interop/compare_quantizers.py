#!/usr/bin/env python3
"""Compares our GGUF quantizer with llama.cpp's (through llama-cpp-python), with the same importance matrix.

    compare_quantizers.py MANTISSA MODEL TEXT --work DIR (--tokens WINDOWS.json[:KEY] | --text FILE [--limit TOKENS])
                          [--types q4_k_m ...] [--json OUT.json]

MANTISSA is the binary and MODEL a dense Hugging Face folder. `mantissa imatrix` computes the importance
matrix on TEXT; both quantizers use it; `mantissa eval --reference MODEL` measures both files on the windows or the text. Prints a table with the
paired difference of the KLs in nats and its standard error, with windows as the unit. llama.cpp quantizes a bf16 GGUF file that mantissa wrote, so that weights and tokenizer are the same.
Exit code 0 if none of our types is worse by more than two standard errors.
"""

import argparse
import ctypes
import json
import math
import os
import subprocess
import sys

TYPES = ["q2_k", "q3_k_m", "q4_k_m", "q5_k_m", "q6_k", "iq2_xs", "iq3_s", "iq4_xs"]

# llama_ftype of llama.cpp's include/llama.h.
FILE_TYPES = {
    "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10, "q3_k_s": 11, "q3_k_m": 12, "q3_k_l": 13,
    "q4_k_s": 14, "q4_k_m": 15, "q5_k_s": 16, "q5_k_m": 17, "q6_k": 18, "iq2_xxs": 19, "iq2_xs": 20, "q2_k_s": 21,
    "iq3_xs": 22, "iq3_xxs": 23, "iq1_s": 24, "iq4_nl": 25, "iq3_s": 26, "iq3_m": 27, "iq2_s": 28, "iq2_m": 29,
    "iq4_xs": 30, "iq1_m": 31,
}


def mantissa(binary, *args):
    done = subprocess.run([binary, *args, "--quiet"], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"mantissa {' '.join(args)}: {done.stderr}")
    return done.stdout


def means(path):
    """Returns mean squares by tensor, as llama-quantize reads them from a file."""
    import numpy as np
    from gguf import GGUFReader

    tensors = {t.name: np.array(t.data, dtype=np.float32).reshape(-1) for t in GGUFReader(path).tensors}
    names = [name.removesuffix(".in_sum2") for name in tensors if name.endswith(".in_sum2")]
    return {name: tensors[f"{name}.in_sum2"] / tensors[f"{name}.counts"][0] for name in names}


def llama_quantize(source, out, file_type, importance, threads):
    import llama_cpp

    entries = (llama_cpp.llama_model_imatrix_data * (len(importance) + 1))()
    for entry, (name, values) in zip(entries, importance.items()):
        entry.name = name.encode()
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        entry.size = len(values)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[file_type]
    params.nthread = threads
    params.imatrix = ctypes.cast(entries, ctypes.POINTER(llama_cpp.llama_model_imatrix_data))
    if llama_cpp.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(params)) != 0:
        sys.exit(f"llama.cpp could not quantize to {file_type}")


def measure(args, path):
    """Returns the figures, and the KL of each window."""
    windows = path + ".windows.json"
    on = ["--tokens", args.tokens] if args.tokens else ["--text", args.text_to_measure, *(["--limit", args.limit] if args.limit else [])]
    figures = mantissa(args.mantissa, "eval", path, "--reference", args.model, *on, "--overwrite", "--per-window", windows, "--json")
    with open(windows) as file:
        found = json.load(file)
    rows = found["windows"]
    return json.loads(figures), [(row["kl_sum"] / row["tokens"], row["tokens"]) for row in rows]


def paired(ours, theirs):
    """Returns the difference of mean KL per token and its standard error, with windows weighted by their tokens."""
    total = sum(n for _, n in ours)
    differences = [(a - b, n) for (a, n), (b, _) in zip(ours, theirs)]
    mean = sum(d * n for d, n in differences) / total
    square = sum(((d - mean) * n) ** 2 for d, n in differences)
    k = len(differences)
    return mean, math.sqrt(square * k / max(k - 1, 1)) / total


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mantissa")
    parser.add_argument("model")
    parser.add_argument("text")
    measured = parser.add_mutually_exclusive_group(required=True)
    measured.add_argument("--tokens")
    measured.add_argument("--text", dest="text_to_measure")
    parser.add_argument("--limit")
    parser.add_argument("--work", required=True)
    parser.add_argument("--types", nargs="*", default=TYPES)
    parser.add_argument("--samples", default="128")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json")
    args = parser.parse_args()
    os.makedirs(args.work, exist_ok=True)
    at = lambda name: os.path.join(args.work, name)
    mantissa(args.mantissa, "imatrix", args.model, "--calibration", args.text, "--samples", args.samples, "--overwrite", "--out", at("imatrix.gguf"))
    mantissa(args.mantissa, "quantize", args.model, "--recipe", "rtn-bf16", "--format", "gguf", "--overwrite", "--out", at("bf16.gguf"))
    importance = means(at("imatrix.gguf"))
    rows, worse = [], 0
    print("| type | bytes | KL, ours | KL, llama.cpp | difference (paired) | top-1, ours | llama.cpp |\n|---|---|---|---|---|---|---|")
    for file_type in args.types:
        ours, theirs = at(f"ours-{file_type}.gguf"), at(f"theirs-{file_type}.gguf")
        mantissa(
            args.mantissa, "quantize", args.model, "--recipe", file_type, "--imatrix", at("imatrix.gguf"), "--overwrite", "--out", ours,
        )
        llama_quantize(at("bf16.gguf"), theirs, file_type, importance, args.threads)
        (a, a_windows), (b, b_windows) = measure(args, ours), measure(args, theirs)
        difference, error = paired(a_windows, b_windows)
        worse += difference > 2 * error
        rows.append({
            "type": file_type, "bytes": os.path.getsize(ours), "bytes_theirs": os.path.getsize(theirs),
            "ours": a, "theirs": b, "difference": difference, "difference_se": error,
        })
        print(
            f"| {file_type} | {os.path.getsize(ours)} | {a['kl']:.5f} ± {a['kl_se']:.5f} | {b['kl']:.5f} ± {b['kl_se']:.5f} "
            f"| {difference:+.5f} ± {error:.5f} | {100 * a['top1']:.2f} % | {100 * b['top1']:.2f} % |",
            flush=True,
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)
    sys.exit(1 if worse else 0)


if __name__ == "__main__":
    main()
