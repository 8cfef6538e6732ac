#!/usr/bin/env python3
"""Loads a model trained by mantissa in transformers and compares logits, text and chat template.

    python trained.py MANTISSA [TEXT]

Trains the preset `small` for some steps on TEXT (default: the stories of the embedded model), loads the run's folder `model` with
AutoModelForCausalLM and AutoTokenizer, and checks that every weight is loaded, that the tokenizer gives the ids of the binary,
that the perplexity agrees with `mantissa eval` within 0.1 %, that greedy continuations are the same, and that the chat template
renders. Prints a line for each check; exit 1 if one fails.

    pip install torch==2.15.0 transformers==5.23.0 jinja2
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

STORIES = Path(__file__).parents[2] / "crates/mantissa-jobs/demo/text/stories.txt"
PROMPT = "Once upon a time"


def main():
    binary, text = Path(sys.argv[1]).resolve(), Path(sys.argv[2] if len(sys.argv) > 2 else STORIES).resolve()
    failed = False

    def check(name, passed, detail=""):
        nonlocal failed
        failed |= not passed
        print(f"{'ok    ' if passed else 'FAILED'} {name} {detail}")

    with tempfile.TemporaryDirectory() as work:
        call = lambda *arguments: subprocess.run([binary, *arguments], cwd=work, check=True, capture_output=True, text=True).stdout
        Path(work, "run.toml").write_text(call("train", "--init", "small", "--data", str(text)))
        steps = ["--set", "schedule.steps=40", "--set", "schedule.warmup=5", "--set", "validation.every=20"]
        done = json.loads(call("train", "run.toml", *steps, "--json", "--quiet"))
        model_dir = Path(work, "runs/small/model")
        model, info = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, output_loading_info=True)
        missing = [name for name in info["missing_keys"] if name != "lm_head.weight"]
        check("weights", not missing and not info["unexpected_keys"], str(missing or ""))
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        ids = tokenizer(PROMPT)["input_ids"]
        ours = json.loads(call("run", str(model_dir), "-p", PROMPT, "-n", "12", "--json", "--quiet"))
        check("prompt", len(ids) == ours["prompt_tokens"], f"{len(ids)} tokens")
        with torch.no_grad():
            new = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
        # The binary quantizes activations of its fast engine; the first tokens must agree.
        check("greedy text", new[:4] == ours["tokens"][:4], repr(tokenizer.decode(new)))
        sample = Path(work, "sample.txt")
        sample.write_text(text.read_text()[:400])
        report = json.loads(call("eval", str(model_dir), "--text", str(sample), "--json", "--quiet"))
        window = torch.tensor([tokenizer(sample.read_text())["input_ids"][:256]])
        with torch.no_grad():
            loss = model(window, labels=window).loss.item()
        check("loss", abs(loss - report["nll"]) < 1e-3 * loss, f"{loss:.5f} for {report['nll']:.5f}")
        rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
        check("chat template", rendered.endswith("Hi"), repr(rendered))
        check("best checkpoint", done["validation_loss"] is not None, str(done["validation_loss"]))
    sys.exit(failed)


if __name__ == "__main__":
    main()
