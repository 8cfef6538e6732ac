#!/usr/bin/env python3
"""Fine-tunes a model with peft and bitsandbytes on CPU, on the tokens of a mantissa run, and prints its losses as JSON.

    python peft_qlora.py MODEL RUN OUT.jsonl --seed 0

MODEL is a Hugging Face folder, RUN a folder that `mantissa finetune` wrote: its `config.toml` gives rank, alpha, learning
rate, steps, batch and window, its `tokens.safetensors` the data. Windows are those of the run, in another order: the seed
draws it and the initial A. Writes the losses, processor seconds, peak memory, and the loss on 64 windows of the text
`--held-out` before and after.

On CPU, bitsandbytes 0.50 has no backward through its 4-bit product (torch warns), so that layers below others get a part of
their gradient only. `--dequantized` trains over the same base as dense weights, with exact gradients.

Needs torch, transformers, peft, bitsandbytes (CPU), tomllib.
"""

import argparse
import json
import resource
import time
import tomllib
from pathlib import Path

import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig


def nll(model, windows):
    total, count = 0.0, 0
    with torch.no_grad():
        for ids in windows:
            ids = torch.as_tensor(ids)[None]
            logits = model(input_ids=ids, use_cache=False).logits.float()
            total += torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").item()
            count += ids.shape[1] - 1
    return total / count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dequantized", action="store_true", help="keep the dequantized base instead of its codes")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    settings = tomllib.loads((args.run / "config.toml").read_text())
    adapter, data = settings["adapter"], settings["data"]
    steps, lr = settings["schedule"]["steps"], settings["optimizer"]["lr"]
    warmup = settings["schedule"]["warmup"]
    with safe_open(args.run / "tokens.safetensors", "pt") as file:
        tokens = torch.cat([file.get_tensor(name).flatten() for name in file.keys() if "tokens" in name]).long()
    dtype = torch.bfloat16 if settings["precision"]["policy"] == "bf16" else torch.float32
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    start = time.process_time()
    if args.dequantized:
        base = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
        for name, module in base.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                codes, state = quantize_4bit(module.weight.data, quant_type="nf4", compress_statistics=True)
                module.weight.data = dequantize_4bit(codes, state).to(dtype)
    else:
        base = AutoModelForCausalLM.from_pretrained(
            args.model, dtype=dtype, quantization_config=quantization, device_map="cpu"
        )
        base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    config = LoraConfig(
        r=adapter["rank"], lora_alpha=adapter["alpha"], lora_dropout=adapter["dropout"], target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    held = []
    if args.held_out:
        ids = tokenizer(args.held_out.read_text(), add_special_tokens=False)["input_ids"]
        held = [ids[i : i + data["length"]] for i in range(0, len(ids) - data["length"], data["length"])][:64]
    before = nll(model, held) if held else None
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    length, batch = data["length"], data["batch"]
    windows = (len(tokens) - 1) // length
    order = torch.cat([torch.randperm(windows) for _ in range(steps * batch // windows + 1)])
    loaded, losses = time.process_time(), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / warmup)
        chosen = order[step * batch : (step + 1) * batch]
        ids = torch.stack([tokens[i * length : i * length + length + 1] for i in chosen.tolist()])
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())
    done = time.process_time()
    result = {
        "seed": args.seed,
        "losses": losses,
        "held_out_before": before,
        "held_out_after": nll(model, held) if held else None,
        "load_seconds": loaded - start,
        "step_seconds": (done - loaded) / steps,
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    args.out.write_text(json.dumps(result) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "losses"}), sum(losses[-10:]) / 10)


if __name__ == "__main__":
    main()
