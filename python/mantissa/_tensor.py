"""Tensors, which other libraries read without a copy, and their quantization."""

from __future__ import annotations

from typing import Any

from . import _core
from .errors import InputError

__all__ = ["QuantizedTensor", "Tensor", "quantize_tensor"]


class Tensor:
    """A tensor in main memory, row by row. ``torch.from_dlpack`` and ``numpy.asarray`` take it without a copy."""

    def __init__(self, core: _core.CoreArray) -> None:
        self._core = core

    @staticmethod
    def from_dlpack(x: Any) -> Tensor:
        """Take a tensor of another library that speaks DLPack, without a copy if it has no gaps.

        Types: float32, bfloat16, float16, float64, uint8, int8, uint16, int32, int64.
        """
        if hasattr(x, "detach"):
            # torch gives no tensor away that has a gradient.
            x = x.detach()
        return Tensor(_core.CoreArray.taken(x.__dlpack__()))

    @property
    def dtype(self) -> str:
        """Name of the element type, such as ``"float32"``."""
        return self._core.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return tuple(self._core.shape)

    @property
    def address(self) -> int:
        """Address of the first element."""
        return self._core.address

    def __dlpack__(
        self, *, stream: object = None, max_version: object = None, dl_device: object = None, copy: bool | None = None
    ) -> Any:
        if copy:
            raise BufferError("mantissa.Tensor: expected copy=False or None, got True; fix: copy the result")
        return self._core.dlpack_capsule()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._core.device()

    def numpy(self) -> Any:
        """Return the tensor as a numpy array, without a copy. bfloat16 is the type of ``ml_dtypes`` where it is installed,
        else float32, which is a copy."""
        import numpy

        if self.dtype != "bfloat16":
            return numpy.from_dlpack(self)
        try:
            import ml_dtypes
        except ImportError:
            return numpy.from_dlpack(Tensor(self._core.float()))
        return numpy.from_dlpack(Tensor(self._core.bits())).view(ml_dtypes.bfloat16)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy()
        array = array if dtype is None else array.astype(dtype, copy=False)
        return array.copy() if copy else array

    def tobytes(self) -> bytes:
        """Return the elements' bytes, little-endian, row by row."""
        return self._core.tobytes()

    def tolist(self) -> Any:
        """Return the values as nested lists.

        >>> import mantissa
        >>> mantissa.quantize_tensor([[1.0, 0.0], [0.0, -2.0]], "bf16").dequantize().tolist()
        [[1.0, 0.0], [0.0, -2.0]]
        """
        kinds = {"float32": "f", "float64": "d", "uint8": "B", "int8": "b", "uint16": "H", "int32": "i", "int64": "q"}
        data = self if self.dtype in kinds else Tensor(self._core.float())
        if 0 in self.shape:
            return []
        return memoryview(data.tobytes()).cast(kinds[data.dtype], self.shape).tolist()  # type: ignore[call-overload]

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0

    def __repr__(self) -> str:
        return f"Tensor(shape={self.shape}, dtype={self.dtype})"


class QuantizedTensor:
    """Codes and scales of a matrix. Made by :func:`quantize_tensor`."""

    def __init__(self, core: _core.CoreTensor) -> None:
        self._core = core

    @property
    def scheme(self) -> str:
        """Scheme with its rules."""
        return self._core.scheme

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes of what was quantized."""
        return tuple(self._core.shape)

    @property
    def bits_per_weight(self) -> float:
        """Bits of each weight, scales and zero points included."""
        return self._core.bits_per_weight

    @property
    def codes(self) -> Tensor:
        """Codes as bytes, little-endian: one code for each element, or whole blocks of a codec."""
        return Tensor(self._core.codes())

    @property
    def scales(self) -> Tensor:
        """Scale codes as bytes, little-endian, one for each block."""
        return Tensor(self._core.scales())

    @property
    def zeros(self) -> list[int]:
        """Zero points, one for each block; empty for a symmetric scheme."""
        return self._core.zeros()

    def dequantize(self) -> Tensor:
        """Return the values as float32.

        >>> import mantissa
        >>> mantissa.quantize_tensor([[0.0, 1.0, -1.0, 0.5]], "fp8-e4m3-channel").dequantize().tolist()[0][1:3]
        [1.0, -1.0]
        """
        return Tensor(self._core.dequantize())


def quantize_tensor(x: Any, scheme: str) -> QuantizedTensor:
    """Quantize a tensor to nearest under a scheme such as ``"int4-g32"`` or ``"nvfp4"``.

    ``x`` is a nested list, a tensor of torch or another library that speaks DLPack, or what numpy makes an array of; its last
    axis holds the elements of rows.

    >>> import mantissa
    >>> q = mantissa.quantize_tensor([[1.0] * 32], "int4-g32")
    >>> q.bits_per_weight
    5.0
    """
    return QuantizedTensor(_core.quantize_tensor(_array(x), scheme))


def _array(x: Any) -> _core.CoreArray:
    """Return a tensor of what was given."""
    if isinstance(x, Tensor):
        return x._core
    if isinstance(x, (list, tuple)):
        return _of_lists(x)
    if hasattr(x, "__dlpack__"):
        if hasattr(x, "cpu"):
            x = x.cpu()
        try:
            return Tensor.from_dlpack(x)._core
        except BufferError:
            # numpy gives away no array that must not be written, and none in another byte order.
            pass
    import numpy

    return Tensor.from_dlpack(numpy.array(x, dtype=numpy.float32))._core


def _of_lists(x: Any) -> _core.CoreArray:
    """Return a tensor of nested lists."""
    import array

    shape: list[int] = []
    level: Any = x
    while isinstance(level, (list, tuple)):
        shape.append(len(level))
        level = level[0] if level else None
    flat: list[Any] = list(x)
    for size in shape[1:]:
        if any(not isinstance(row, (list, tuple)) or len(row) != size for row in flat):
            raise InputError(f"x: expected rows of {size} elements, got rows of other lengths")
        flat = [item for row in flat for item in row]
    try:
        values = array.array("f", flat)
    except (TypeError, OverflowError) as error:
        raise InputError(f"x: expected numbers in rows of one length, got {error}") from None
    return _core.CoreArray.from_floats(values.tobytes(), shape)
