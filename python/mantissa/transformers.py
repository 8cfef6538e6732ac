"""Models of mantissa in transformers: ``import mantissa.transformers``, then ``AutoModelForCausalLM.from_pretrained``.

A folder in the format ``native``, which ``quantize(…, format="native")`` writes in any scheme, loads as any other. A dense model
is quantized first: ``from_pretrained(model, quantization_config=MantissaConfig("rtn-int4-g128"))``. Linear layers multiply on
the kernels of ``mantissa run``, on the processor. transformers 5 and torch must be installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from . import _core
from ._commands import quantize
from ._tensor import Tensor
from .errors import InputError

__all__ = ["MantissaConfig", "MantissaLinear", "MantissaQuantizer"]

_METHOD = "mantissa"
"""Method in the ``quantization_config`` of folders in the format ``native``."""


@register_quantization_config(_METHOD)
class MantissaConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """How a dense model is quantized when it is loaded; without a recipe, the folder is one that ``quantize`` wrote.

    ``arguments`` are those of :func:`mantissa.quantize`, such as ``keep`` and ``calibration``. The quantized folder is kept in
    ``folder``, or for the time of the process.
    """

    def __init__(
        self,
        recipe: str | None = None,
        *,
        folder: str | os.PathLike[str] | None = None,
        threads: int | None = None,
        arguments: dict[str, Any] | None = None,
        **stored: Any,
    ) -> None:
        self.quant_method = _METHOD
        self.recipe = recipe
        self.folder = None if folder is None else os.fspath(folder)
        self.threads = threads
        self.arguments = dict(arguments or {})
        stored.pop("quant_method", None)
        self.stored = stored

    def to_dict(self) -> dict[str, Any]:
        """Return what ``config.json`` of a saved model says: the folder's own fields, since what is saved is quantized."""
        return {"quant_method": _METHOD, **self.stored}

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the same as :meth:`to_dict`."""
        return self.to_dict()


class _Multiply(torch.autograd.Function):  # type: ignore[misc]
    """Product of a quantized layer; the gradient of its input is that of the dequantized weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: MantissaLinear) -> torch.Tensor:
        ctx.layer = layer
        rows = x.detach().reshape(-1, layer.in_features).to(torch.float32).contiguous()
        out = layer.core.forward(Tensor.from_dlpack(rows)._core)
        return torch.from_dlpack(Tensor(out)).reshape(*x.shape[:-1], layer.out_features).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        [gradient] = gradients
        weight = ctx.layer.dequantized()
        return (gradient.to(torch.float32) @ weight).to(gradient.dtype), None


class MantissaLinear(torch.nn.Linear):  # type: ignore[misc]
    """Linear layer with a quantized weight, which does not train. Adapters of PEFT go around it."""

    def __init__(
        self, core: _core.CoreLinear, weights: _core.CoreWeights, name: str, place: int | None, dtype: torch.dtype
    ) -> None:
        torch.nn.Module.__init__(self)
        self.core = core
        self.out_features, self.in_features = core.shape
        self._weights = weights
        self._index = place
        self._name = name
        # What asks a layer for its device and dtype finds a tensor without elements, which no checkpoint has.
        self.register_buffer("weight", torch.empty(0, dtype=dtype, device="cpu"), persistent=False)
        self.register_parameter("bias", None)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``input Wᵀ + b``."""
        out: torch.Tensor = _Multiply.apply(input, self)
        return out

    def dequantized(self) -> torch.Tensor:
        """Return the weight as float32, dequantized at each call."""
        read = None if self._index is None else self._weights.read(self._index)
        if read is None:
            raise InputError(f"{self._name}: expected a weight of its own, got one that is part of another; fix: none")
        weight: torch.Tensor = torch.from_dlpack(Tensor(read))
        return weight

    def extra_repr(self) -> str:
        """Describe the layer."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bytes={self.core.bytes}"


@register_quantizer(_METHOD)
class MantissaQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts the layers of a quantized folder into a model."""

    requires_calibration = False
    requires_parameters_quantization = False

    def __init__(self, quantization_config: MantissaConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._folder: str | None = None

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse devices other than the processor."""
        devices = {str(device) for device in device_map.values()} if isinstance(device_map, dict) else {str(device_map)}
        if device_map is not None and not devices <= {"cpu", "auto", ""}:
            raise InputError(f'device_map: expected "cpu", got {", ".join(sorted(devices))}; fix: device_map="cpu"')

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        config = self.quantization_config
        source = getattr(model.config, "_name_or_path", None) or model.name_or_path
        folder = source if config.recipe is None else self._quantized(source, config)
        self._folder = folder
        weights = self._weights = _core.CoreWeights(folder)
        dtype = getattr(model, "dtype", torch.float32)
        # Codes and scales are read by this package; a dense model's weights are the folder's, quantized.
        ignored = {rf"^{re.escape(module)}\." for module in weights.linears()}
        model._keys_to_ignore_on_load_unexpected = set(model._keys_to_ignore_on_load_unexpected or ()) | ignored
        places = {name: place for place, name in enumerate(weights.names())}
        for index, module in enumerate(weights.linears()):
            parent, _, child = module.rpartition(".")
            name = module + ".weight"
            core = weights.linear(index, config.threads)
            if core is not None:
                setattr(model.get_submodule(parent), child, MantissaLinear(core, weights, name, places.get(name), dtype))

    def _quantized(self, source: str, config: MantissaConfig) -> str:
        """Return the folder of the quantized model, which is made unless it is there."""
        out = config.folder
        if out is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="mantissa-")
            what = hashlib.sha256(json.dumps([source, config.recipe]).encode()).hexdigest()[:12]
            out = str(Path(self._scratch.name, what))
        quantize(source, config.recipe or "auto", out=out, format="native", **config.arguments)
        written = json.loads(Path(out, "config.json").read_text(encoding="utf-8"))["quantization_config"]
        config.stored = {name: value for name, value in written.items() if name != "quant_method"}
        return out

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        # Every other weight as the folder has it: tables may be quantized too.
        weights = self._weights
        replaced = {module + ".weight" for module in weights.linears()}
        own = dict(model.named_parameters(remove_duplicate=False))
        for index, name in enumerate(weights.names()):
            parameter = own.get(name)
            if parameter is None or name in replaced or parameter.numel() == 0:
                continue
            read = weights.read(index)
            if read is not None:
                with torch.no_grad():
                    parameter.copy_(torch.from_dlpack(Tensor(read)).to(parameter.dtype))

    def get_state_dict_and_metadata(self, model: Any, *args: Any, **kwargs: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return the folder's own tensors: what is saved loads as what was loaded."""
        from safetensors import safe_open

        tensors: dict[str, torch.Tensor] = {}
        metadata: dict[str, str] = {}
        for file in sorted(Path(str(self._folder)).glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                metadata.update(opened.metadata() or {})
                tensors.update({name: opened.get_tensor(name) for name in opened.keys()})
        return tensors, metadata

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Return true: the folder's tensors are saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: adapters train, through the gradient of the dequantized weight."""
        return True
