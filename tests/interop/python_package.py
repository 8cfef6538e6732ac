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
    if there("lm_eval"):
        tasks_of_lm_eval()


if __name__ == "__main__":
    main()
