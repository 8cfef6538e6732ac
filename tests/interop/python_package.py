#!/usr/bin/env python3
"""Judges the Python package beside the libraries that it works with: torch, ml_dtypes, lm-evaluation-harness.

    PYTHONPATH=python python3 tests/interop/python_package.py [MODEL]

Each part says so where its library is not installed. MODEL is `demo` unless named.
"""

from __future__ import annotations

import importlib.util
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import mantissa

MODEL = sys.argv[1] if len(sys.argv) > 1 else "demo"


def there(name: str) -> bool:
    found = importlib.util.find_spec(name) is not None
    if not found:
        print(f"{name}: not installed, skipped")
    return found


def tensors_of_torch() -> None:
    import torch

    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64):
        x = torch.arange(64).reshape(2, 32).to(dtype)
        tensor = mantissa.Tensor.from_dlpack(x)
        back = torch.from_dlpack(tensor)
        assert tensor.address == x.data_ptr() == back.data_ptr() and back.dtype == dtype and torch.equal(back, x)
    x = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)
    for scheme in ("int4-g32", "nvfp4", "fp8-e4m3-channel", "q4_k"):
        ours = mantissa.quantize_tensor(x, scheme).dequantize()
        assert ours.tolist() == mantissa.quantize_tensor(x.detach().float().tolist(), scheme).dequantize().tolist()
    turned = torch.randn(32, 64).T
    assert torch.from_dlpack(mantissa.Tensor.from_dlpack(turned)).equal(turned)
    state = {name: torch.from_dlpack(tensor) for name, tensor in mantissa.load(MODEL).state_dict()}
    print(f"torch {torch.__version__}: pointers equal both ways, {len(state)} weights of {MODEL}")


def tensors_of_ml_dtypes() -> None:
    import ml_dtypes
    import numpy
    import torch

    x = torch.randn(4, 8, dtype=torch.bfloat16)
    array = mantissa.Tensor.from_dlpack(x).numpy()
    assert array.dtype == ml_dtypes.bfloat16 and numpy.array_equal(array.astype("float32"), x.float().numpy())
    print("ml_dtypes: bfloat16 is its type")


def models_of_transformers() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    import mantissa.transformers
    from mantissa.transformers import MantissaConfig

    ids = torch.tensor([mantissa.load(MODEL).encode("Once upon a time there was a little girl who had a dog.")])
    with tempfile.TemporaryDirectory() as folder:
        for recipe in ("rtn-int4-g32", "rtn-nvfp4", "rtn-fp8-e4m3-channel", "rtn-q8_0", "rtn-int8-channel+int8-token"):
            out = Path(folder, recipe)
            mantissa.quantize(MODEL, recipe, out=out, format="native")
            model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
            logits = model(ids).logits[0]
            assert torch.isfinite(logits).all()
            ours = mantissa.load(out)
            values = torch.log_softmax(logits.float(), -1)
            theirs = [values[i, token].item() for i, token in enumerate(ids[0, 1:].tolist())]
            expected = ours.logprobs(ids[0].tolist())
            worst = max(abs(a - b) for a, b in zip(theirs, expected))
            greedy = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :].tolist()
            own = ours.generate(ids[0].tolist(), max_new_tokens=16)[0].tokens
            saved = Path(folder, recipe + "-saved")
            model.save_pretrained(saved)
            again = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
            equal = torch.equal(again(ids).logits, model(ids).logits)
            print(f"{recipe}: log-probabilities within {worst:.2e} of ours, greedy text equal: {greedy == own}, saved equal: {equal}")
            assert equal
        if not Path(MODEL).is_dir():
            print("transformers: a dense model that is quantized when it is loaded, and PEFT, want a folder: skipped")
            return
        model = AutoModelForCausalLM.from_pretrained(
            MODEL, dtype=torch.float32, quantization_config=MantissaConfig("rtn-int4-g32")
        )
        logits = model(ids).logits
        model.save_pretrained(Path(folder, "made"))
        again = AutoModelForCausalLM.from_pretrained(Path(folder, "made"), dtype=torch.float32)
        assert torch.equal(again(ids).logits, logits)
        print("transformers: quantized when it is loaded, saved and loaded again: equal logits")
        if there("peft"):
            from peft import LoraConfig, get_peft_model

            torch.manual_seed(0)
            tuned = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))
            optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-3)
            losses = []
            for _ in range(20):
                loss = tuned(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            assert losses[-1] < losses[0]
            print(f"peft: loss of LoRA over 20 steps {losses[0]:.4f} to {losses[-1]:.4f}")


def speed_beside_bitsandbytes() -> None:
    """Tokens/s of `generate` of transformers over our linear layers and over those of bitsandbytes (NF4), in turns."""
    import bitsandbytes
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    import mantissa.transformers
    from mantissa.transformers import MantissaConfig

    # One thread each: two of one core would only wait for each other.
    torch.set_num_threads(1)
    ids = torch.tensor([mantissa.load(MODEL).encode("Once upon a time there was a little girl who had a dog.")])
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    models = {
        f"bitsandbytes {bitsandbytes.__version__}, nf4": AutoModelForCausalLM.from_pretrained(
            MODEL, dtype=torch.bfloat16, device_map="cpu", quantization_config=nf4
        ),
        "torch, bf16": AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16),
        "mantissa, int4-g32": AutoModelForCausalLM.from_pretrained(
            MODEL, dtype=torch.float32, quantization_config=MantissaConfig("rtn-int4-g32", threads=1)
        ),
    }
    rates: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(6):
        for name, model in models.items():
            start = time.perf_counter()
            made = model.generate(ids, max_new_tokens=48, min_new_tokens=48, do_sample=False)
            if turn:
                rates[name].append((made.shape[1] - ids.shape[1]) / (time.perf_counter() - start))
    for name, values in rates.items():
        print(f"generate of transformers, {name}: {statistics.median(values):.1f} tokens/s (of {len(values)})")


def lora_beside_our_trainer() -> None:
    """Loss of 20 steps of LoRA on the same quantized weights and the same tokens: PEFT over our layers, and `finetune`."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    import mantissa.transformers

    prompt = "Once upon a time"
    completion = " there was a little girl who had a dog. They went to the park and played with a red ball."
    source = mantissa.load(MODEL)
    tokens = source.encode(prompt + completion)
    end = json.loads(Path(MODEL, "config.json").read_text())["eos_token_id"]
    ids = torch.tensor([[*tokens, end]])
    # The loss is on the completion and its end, as in `finetune`.
    labels = ids.clone()
    labels[0, : len(source.encode(prompt))] = -100
    last = []
    with tempfile.TemporaryDirectory() as folder:
        mantissa.quantize(MODEL, "rtn-int4-g32", out=Path(folder, "base"), format="native", verify=False)
        for seed in range(6):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_pretrained(Path(folder, "base"), dtype=torch.float32)
            tuned = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))
            optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0)
            theirs = []
            for _ in range(20):
                loss = tuned(input_ids=ids, labels=labels).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                theirs.append(loss.item())
            run = mantissa.finetune(
                Path(folder, "base"), [{"prompt": prompt, "completion": completion}] * 20, out=Path(folder, f"run-{seed}"), adapter="lora", rank=8, alpha=16,
                target=["q_proj", "v_proj"], lr=1e-3, batch=1, steps=20, policy="fp32", length=ids.shape[1], validation=0, seed=seed,
                # The loop above clips no gradient.
                set=["schedule.kind=constant", "schedule.warmup=0", "optimizer.max_norm=1e9"],
            )
            ours = run.history["loss"]
            print(f"LoRA, seed {seed}: loss {theirs[0]:.4f} to {theirs[-1]:.4f} by PEFT, {ours[0]:.4f} to {ours[-1]:.4f} by finetune")
            last.append((theirs[-1], ours[-1]))
    peft, own = (statistics.mean(values) for values in zip(*last))
    print(f"LoRA: mean loss after 20 steps {peft:.4f} by PEFT, {own:.4f} by finetune")
    assert abs(peft - own) < 0.01


def tasks_of_lm_eval() -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from mantissa.lm_eval import MantissaLM

    draw = random.Random(0)
    words = "time dog ball house tree happy little girl boy sun run jump play mother garden bird".split()
    begins = ["Once upon a", "The little girl had a red", "She was very", "They went to the", "The dog saw a", "He wanted to"]
    items = []
    for _ in range(60):
        choices = draw.sample(words, 4)
        items.append({"prompt": draw.choice(begins), "choices": [" " + word for word in choices], "answer": draw.randrange(4)})
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "items.jsonl")
        data.write_text("".join(json.dumps(item) + "\n" for item in items))
        Path(folder, "t.yaml").write_text(
            f"task: tiny\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
            'output_type: multiple_choice\ndoc_to_text: "{{prompt}}"\ndoc_to_choice: "{{choices}}"\n'
            'doc_to_target: "{{answer}}"\ntarget_delimiter: ""\nmetric_list: [{metric: acc}]\n'
        )
        theirs = simple_evaluate(MantissaLM(MODEL), tasks=["tiny"], task_manager=TaskManager(include_path=folder))
        ours = mantissa.evaluate(MODEL, tasks=[data], engine="fast")
    accuracy = theirs["results"]["tiny"]["acc,none"]
    [task] = ours["tasks"]
    assert abs(accuracy - task["accuracy"]) < 1e-9, (accuracy, task)
    print(f"lm_eval: accuracy {accuracy:.4f} of {len(items)} items, that of eval --task --engine fast")


def main() -> None:
    begin = time.perf_counter()
    model = mantissa.load(MODEL)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        [answer] = model.generate("Once upon a time", max_new_tokens=64, ignore_eos=True)
        times.append(len(answer.tokens) / (time.perf_counter() - start))
    print(f"{MODEL}: loaded and run in {time.perf_counter() - begin:.1f} s, {statistics.median(times):.0f} tokens/s")
    if there("torch"):
        tensors_of_torch()
        if there("ml_dtypes"):
            tensors_of_ml_dtypes()
    if there("torch") and there("transformers"):
        models_of_transformers()
        if Path(MODEL).is_dir() and there("bitsandbytes"):
            speed_beside_bitsandbytes()
        if Path(MODEL).is_dir() and there("peft"):
            lora_beside_our_trainer()
    if there("lm_eval"):
        tasks_of_lm_eval()


if __name__ == "__main__":
    main()
