"""Writes train/sgd.safetensors: six steps of torch.optim.SGD on 600 values, plain, with momentum, with Nesterov's.

Run in an environment with torch: python make_sgd.py
"""
import json
import pathlib
import struct

import torch

N, STEPS = 600, 6
VARIANTS = {
    "plain": dict(lr=0.1),
    "momentum": dict(lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": dict(lr=0.02, momentum=0.95, nesterov=True, weight_decay=0.1),
}

torch.manual_seed(5)
torch.set_num_threads(1)
start = torch.randn(N)
grads = torch.randn(STEPS, N) * torch.logspace(-4, 1, N)
tensors = {"p0": start, "grads": grads}
for name, options in VARIANTS.items():
    param = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([param], foreach=False, fused=False, **options)
    params = []
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
        params.append(param.detach().clone())
    tensors[f"sgd_{name}.params"] = torch.stack(params)
    if "momentum" in options:
        tensors[f"sgd_{name}.buffer"] = optimizer.state[param]["momentum_buffer"].clone()

header = {"__metadata__": {"writer": f"torch {torch.__version__}", "variants": str(VARIANTS)}}
data = b""
for name, tensor in tensors.items():
    values = tensor.contiguous().numpy().astype("<f4").tobytes()
    header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(values)]}
    data += values
text = json.dumps(header).encode()
text += b" " * (-len(text) % 8)
out = pathlib.Path(__file__).parent / "train" / "sgd.safetensors"
out.write_bytes(struct.pack("<Q", len(text)) + text + data)
