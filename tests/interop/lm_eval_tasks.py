#!/usr/bin/env python3
"""Compares accuracies of lm-evaluation-harness with those of `mantissa eval --task` on the same task files.

usage: lm_eval_tasks.py MANTISSA MODEL [--url http://127.0.0.1:8080] [--limit N] TASK.jsonl [TASK.jsonl …]

The harness measures through `mantissa serve` (its model `local-completions`), so with the fast engine; `mantissa eval
--engine fast --task` measures the same file. Exits 1 if an accuracy differs by more than --tolerance (default 0).
Needs lm_eval, datasets, requests.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

import lm_eval
import requests
from lm_eval.tasks import TaskManager

CHOICES = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
  - metric: acc_norm
"""

GENERATE = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{target}}}}"
target_delimiter: ""
generation_kwargs:
  until: {stop}
  max_gen_toks: {tokens}
  do_sample: false
  temperature: 0.0
filter_list:
  - name: stripped
    filter:
      - function: remove_whitespace
      - function: take_first
metric_list:
  - metric: exact_match
"""


def harness(url, model, files, limit):
    """Accuracies of the harness: task -> (acc, acc_norm or None)."""
    name = requests.get(url + "/v1/models").json()["data"][0]["id"]
    with tempfile.TemporaryDirectory() as folder:
        names = []
        for file in files:
            with open(file) as lines:
                items = [json.loads(line) for line in lines if line.strip()]
            task = "mantissa_" + os.path.splitext(os.path.basename(file))[0]
            names.append(task)
            # One schema for all lines: the harness reads the file as a table.
            keep = ("prompt", "choices", "answer") if "choices" in items[0] else ("prompt", "target")
            cleaned = os.path.join(folder, task + ".jsonl")
            with open(cleaned, "w") as out:
                out.writelines(json.dumps({key: item[key] for key in keep}) + "\n" for item in items)
            form = CHOICES if "choices" in items[0] else GENERATE
            text = form.format(name=task, file=cleaned, stop=json.dumps(items[0].get("stop", ["\n"])),
                               tokens=items[0].get("max_tokens", 64))
            with open(os.path.join(folder, task + ".yaml"), "w") as out:
                out.write(text)
        arguments = (f"model={name},base_url={url}/v1/completions,tokenizer={model},tokenizer_backend=huggingface,"
                     "num_concurrent=1,max_retries=1")
        found = lm_eval.simple_evaluate(
            model="local-completions", model_args=arguments, tasks=names, limit=limit, bootstrap_iters=0,
            task_manager=TaskManager(include_path=folder, include_defaults=False))
    results = {}
    for task in names:
        row = found["results"][task]
        accuracy = row.get("acc,none", row.get("exact_match,stripped"))
        results[task] = (accuracy, row.get("acc_norm,none"))
    return results


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("mantissa")
    parser.add_argument("model")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--tolerance", type=float, default=0.0)
    args = parser.parse_args()
    theirs = harness(args.url, args.model, args.files, None)
    command = [args.mantissa, "eval", args.model, "--engine", "fast", "--json", "--quiet"]
    for file in args.files:
        command += ["--task", file]
    ours = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    worst = 0.0
    for file, (task, (accuracy, norm)), own in zip(args.files, theirs.items(), ours["tasks"]):
        pairs = [(accuracy, own["accuracy"])] + ([(norm, own["accuracy_norm"])] if norm is not None else [])
        print(f"{os.path.basename(file)}: {own['items']} items, harness and mantissa: "
              + "; ".join(f"{a:.4f} {b:.4f}" for a, b in pairs))
        worst = max([worst, *(abs(a - b) for a, b in pairs)])
    print(f"largest difference {worst:.4f}")
    sys.exit(0 if worst <= args.tolerance else 1)


if __name__ == "__main__":
    main()
