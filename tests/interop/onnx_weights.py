#!/usr/bin/env python3
"""Checks the ONNX graph of a folder that `mantissa quantize --format onnx` wrote.

    python onnx_weights.py DIR DENSE.safetensors

`onnx.checker` checks the file with its external data; ONNX Runtime on the CPU and, with `--reference`, onnx's own reference evaluator run it. Every output,
the weight that a DequantizeLinear node computes, must equal the tensor of that name in DENSE.safetensors bit for bit, which
`cargo run --release -p mantissa-model --example dense -- DIR DENSE.safetensors` writes with our decoder. Exit 1 if one does not.
Needs `pip install onnx==1.23.2 onnxruntime==1.31.1 safetensors numpy`.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from safetensors.numpy import load_file


def main():
    args = parse_args()
    path = args.folder / "model.onnx"
    onnx.checker.check_model(str(path), full_check=True)
    expected = load_file(args.dense)
    graph = onnx.load(path, load_external_data=False).graph
    names = [output.name for output in graph.output]
    engines = {"onnxruntime": runtime(path, names)}
    if args.reference:
        engines["reference"] = reference(path, names)
    report, ok = {"nodes": len(graph.node)}, bool(names)
    for engine, outputs in engines.items():
        worst = max(float(np.abs(found.astype(np.float64) - expected[name]).max()) for name, found in zip(names, outputs))
        equal = sum(bool(np.array_equal(found, expected[name])) for name, found in zip(names, outputs))
        report[engine] = {"equal": equal, "of": len(names), "largest_difference": worst}
        ok &= equal == len(names)
    print(json.dumps(report))
    sys.exit(not ok)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("dense", type=Path)
    parser.add_argument("--reference", action="store_true", help="onnx's reference evaluator as well")
    return parser.parse_args()


def runtime(path, names):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(names, {})


def reference(path, names):
    from onnx.reference import ReferenceEvaluator

    return ReferenceEvaluator(onnx.load(path)).run(names, {})


if __name__ == "__main__":
    main()
