#!/usr/bin/env python3
"""Trains ref-32m on one GPU with PyTorch.

    train_torch.py TEXT TOKENIZER OUT SECONDS [EPOCHS]

Llama, hidden 512, ffn 1792, 8 layers, 8 heads of 64, 4 KV heads, vocabulary 8192, tied embeddings, context 1024. bf16 autocast with
f32 weights, AdamW (.9, .95), weight decay .1 on matrices, batches of 64 windows of 1024 tokens, gradients clipped at 1, 200 steps of
warm-up, constant, linear decay to zero over the last 40 %. Ends after EPOCHS passes or SECONDS, whichever is first (the length is settled
after the first 60 steps by their speed). Writes OUT/model-*.safetensors in bf16 and the Hugging Face files, and OUT/log.json.
"""

import json
import pathlib
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn

VOCAB, WIDTH, FFN, LAYERS, HEADS, KV, HEAD, CONTEXT, THETA, EPS = 8192, 512, 1792, 8, 8, 4, 64, 1024, 10000.0, 1e-5
BATCH, LR, WARMUP, DECAY = 64, 2e-3, 200, 0.4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(WIDTH, HEADS * HEAD, bias=False), nn.Linear(WIDTH, KV * HEAD, bias=False)
        self.v_proj, self.o_proj = nn.Linear(WIDTH, KV * HEAD, bias=False), nn.Linear(HEADS * HEAD, WIDTH, bias=False)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, HEADS, HEAD).transpose(1, 2)
        k = self.k_proj(x).view(b, t, KV, HEAD).transpose(1, 2)
        v = self.v_proj(x).view(b, t, KV, HEAD).transpose(1, 2)

        def rotate(y):
            low, high = y.chunk(2, -1)
            return (y * cos + torch.cat([-high, low], -1) * sin).to(v.dtype)

        k, v = (y.repeat_interleave(HEADS // KV, 1) for y in (rotate(k), v))
        return self.o_proj(F.scaled_dot_product_attention(rotate(q), k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(*s, bias=False) for s in ((WIDTH, FFN), (WIDTH, FFN), (FFN, WIDTH)))

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = Attention(), Mlp()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(WIDTH, eps=EPS), nn.RMSNorm(WIDTH, eps=EPS)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, eps=EPS)
        angles = torch.outer(torch.arange(CONTEXT).float(), THETA ** (-torch.arange(0, HEAD, 2).float() / HEAD))
        self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1), persistent=False)
        self.register_buffer("sin", torch.cat([angles.sin()] * 2, -1), persistent=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
        for layer in self.layers:
            for p in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
                nn.init.normal_(p, std=0.02 / (2 * LAYERS) ** 0.5)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]])
        return F.linear(self.norm(x), self.embed_tokens.weight)


def loss_of(model, window):
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(window[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten().long())


def main():
    text, tokenizer, out, seconds = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]), float(sys.argv[4])
    epochs = float(sys.argv[5]) if len(sys.argv) > 5 else 6
    begin = time.time()
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    tok = Tokenizer.from_file(tokenizer)
    documents = [d for d in open(text, encoding="utf-8").read().split("\n<|endoftext|>\n") if d]
    ids = []
    for i in range(0, len(documents), 2000):
        for e in tok.encode_batch(documents[i : i + 2000]):
            ids.append(np.array(e.ids + [0], dtype=np.int32))
    tokens = np.concatenate(ids)
    print(f"{len(tokens)} tokens, {time.time() - begin:.0f} s", flush=True)
    data = torch.from_numpy(tokens).cuda()
    held, data = data[-200_000:], data[:-200_000]
    model = Llama().cuda()
    print(sum(p.numel() for p in model.parameters()), "parameters", flush=True)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)
    compiled = torch.compile(model)
    windows = held[: len(held) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)

    def validate():
        with torch.no_grad():
            return float(np.mean([loss_of(compiled, windows[i : i + 64]).item() for i in range(0, 128, 64)]))

    # One epoch: windows from a random offset, in random order.
    def order():
        while True:
            offset = torch.randint(0, CONTEXT, ()).item()
            starts = torch.arange(offset, len(data) - CONTEXT - 1, CONTEXT, device="cuda")
            yield from starts[torch.randperm(len(starts), device="cuda")][: len(starts) // BATCH * BATCH].view(-1, BATCH)

    span = torch.arange(CONTEXT + 1, device="cuda")
    most = int(epochs * len(data) / (BATCH * CONTEXT))
    total, log, mark = most, [], time.time()
    for step, starts in enumerate(order()):
        if step == 60:
            torch.cuda.synchronize()
            per = (time.time() - mark) / 40
            left = seconds - (time.time() - begin) - 5
            total = min(most, 60 + int(left / per))
            print(f"{BATCH * CONTEXT / per:.0f} tokens/s, {total} steps", flush=True)
        if step == 20:
            torch.cuda.synchronize()
            mark = time.time()
        if step >= total:
            break
        rate = min(1.0, (step + 1) / WARMUP, max(0.0, (total - step) / (DECAY * total)))
        for group in optimizer.param_groups:
            group["lr"] = LR * rate
        loss = loss_of(compiled, data[starts[:, None] + span])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0 or step == total - 1:
            entry = {"step": step, "tokens": (step + 1) * BATCH * CONTEXT, "loss": loss.item(), "seconds": time.time() - begin}
            if step % 500 == 0 or step == total - 1:
                entry["validation_loss"] = validate()
            log.append(entry)
            print(entry, flush=True)
    save(model, out)
    (out / "log.json").write_text(json.dumps({"tokens": len(tokens), "steps": total, "seconds": time.time() - begin, "curve": log}))
    print(f"done, {time.time() - begin:.0f} s", flush=True)


def save(model, out):
    out.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": p.detach().to(torch.bfloat16).cpu().contiguous() for name, p in model.named_parameters()}
    shards, size = [{}], 0
    for name in sorted(tensors):
        bytes_ = tensors[name].numel() * 2
        if size + bytes_ > 15_500_000:
            shards, size = shards + [{}], 0
        shards[-1][name] = tensors[name]
        size += bytes_
    index = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05}-of-{len(shards):05}.safetensors"
        save_file(shard, out / name, metadata={"format": "pt"})
        index |= {key: name for key in shard}
    whole = {"metadata": {"total_size": sum(t.numel() * 2 for t in tensors.values())}, "weight_map": index}
    (out / "model.safetensors.index.json").write_text(json.dumps(whole))
    config = dict(architectures=["LlamaForCausalLM"], model_type="llama", attention_bias=False, mlp_bias=False, hidden_act="silu",
                  hidden_size=WIDTH, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
                  num_key_value_heads=KV, head_dim=HEAD, vocab_size=VOCAB, max_position_embeddings=CONTEXT, rms_norm_eps=EPS,
                  rope_theta=THETA, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, torch_dtype="bfloat16")
    (out / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    main()
