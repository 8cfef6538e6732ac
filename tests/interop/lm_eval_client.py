#!/usr/bin/env python3
"""Compares log-likelihoods of lm-evaluation-harness through `mantissa serve` with `mantissa eval` on the same tokens.

usage: lm_eval_client.py MANTISSA MODEL [--url http://127.0.0.1:8080]

The harness' model `local-completions` sends token ids with echo. `mantissa eval --engine fast` and `--engine reference`
measure the same windows. Exits 1 if a log-likelihood differs from the fast engine's by more than 1e-3.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

import requests
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

CONTEXTS = ["Once upon a time", "The little dog was very", "Lily and her mom went to the", "One day, a big bear saw a",
            "Tom was sad because his", "They played in the park until"]
ENDINGS = [" there was a little girl.", " happy and ran home.", " red ball on the table", " went to sleep.",
           " zebra quantum algebra", " friend gave him a toy, and they all laughed together."]


def nll(mantissa, model, engine, windows):
    with tempfile.TemporaryDirectory() as folder:
        tokens, sums = os.path.join(folder, "windows.json"), os.path.join(folder, "sums.json")
        with open(tokens, "w") as file:
            json.dump(windows, file)
        subprocess.run([mantissa, "eval", model, "--tokens", tokens, "--engine", engine, "--per-window", sums, "--quiet"],
                       check=True, stdout=subprocess.DEVNULL)
        with open(sums) as file:
            return [window["nll_sum"] for window in json.load(file)["windows"]]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("mantissa")
    parser.add_argument("model")
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    args = parser.parse_args()
    name = requests.get(args.url + "/v1/models").json()["data"][0]["id"]
    harness = LocalCompletionsAPI(base_url=args.url + "/v1/completions", model=name, tokenizer=args.model,
                                  tokenizer_backend="huggingface", num_concurrent=4, max_retries=1)
    pairs = [(context, ending) for context in CONTEXTS for ending in ENDINGS]
    found = harness.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)])
    encoded = [harness._encode_pair(*pair) for pair in pairs]
    worst = {}
    for engine in ("fast", "reference"):
        whole = nll(args.mantissa, args.model, engine, [context + ending for context, ending in encoded])
        begin = nll(args.mantissa, args.model, engine, [context for context, _ in encoded])
        differences = [abs(-(a - b) - x) for a, b, (x, _) in zip(whole, begin, found)]
        worst[engine] = max(differences)
        print(f"{engine}: {len(pairs)} log-likelihoods, largest difference {worst[engine]:.2e}")
    sys.exit(1 if worst["fast"] > 1e-3 else 0)


if __name__ == "__main__":
    main()
