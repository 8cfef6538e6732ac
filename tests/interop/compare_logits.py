#!/usr/bin/env python3
"""Compares two logits files (safetensors with `logits` F32[W,T,V] and `input_ids` I64[W,T]).

    python compare_logits.py A B [--tol 1e-3]

Prints the largest and the mean absolute difference, KL(A || B) in nats per position and the top-1 agreement. Exit code
0: the largest difference is within the tolerance; 1: it is not, or a logit is not finite; 2: the files do not hold the
same windows or shapes.
"""

import argparse
import json
import sys

import numpy as np
from safetensors.numpy import load_file


def main():
    args = parse_args()
    a, b = load_file(args.a), load_file(args.b)
    refuse_unequal(a, b)
    x, y = a["logits"].astype(np.float64), b["logits"].astype(np.float64)
    difference = np.abs(x - y)
    worst = np.unravel_index(difference.argmax(), difference.shape)
    passed = bool(np.isfinite(x).all() and np.isfinite(y).all() and difference.max() <= args.tol)
    print(json.dumps({
        "max_abs": float(difference.max()),
        "max_abs_at": [int(i) for i in worst],
        "mean_abs": float(difference.mean()),
        "kl": float(kl(x, y).mean()),
        "top1": float((x.argmax(-1) == y.argmax(-1)).mean()),
        "tolerance": args.tol,
        "pass": passed,
    }))
    sys.exit(0 if passed else 1)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a")
    parser.add_argument("b")
    parser.add_argument("--tol", type=float, default=1e-3)
    return parser.parse_args()


def refuse_unequal(a, b):
    for tensors, label in ((a, "A"), (b, "B")):
        if "logits" not in tensors or "input_ids" not in tensors:
            refuse(f"{label} holds {sorted(tensors)}, not `logits` and `input_ids`")
    if a["logits"].shape != b["logits"].shape or a["logits"].size == 0:
        refuse(f"logits are {a['logits'].shape} in A and {b['logits'].shape} in B")
    if not np.array_equal(a["input_ids"], b["input_ids"]):
        refuse("A and B were run on different tokens")


def refuse(message):
    print(f"compare_logits: {message}", file=sys.stderr)
    sys.exit(2)


def kl(x, y):
    p, q = log_softmax(x), log_softmax(y)
    return (np.exp(p) * (p - q)).sum(-1)


def log_softmax(x):
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


if __name__ == "__main__":
    main()
