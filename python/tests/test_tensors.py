"""Tensors: exchange without copies, and quantization."""

from __future__ import annotations

import gc
import json
import resource

import pytest

import mantissa


def test_quantization() -> None:
    rows = [[0.1 * i - 1.5 for i in range(32)], [0.01 * i for i in range(32)]]
    q = mantissa.quantize_tensor(rows, "int4-g32")
    assert (q.shape, q.bits_per_weight, q.codes.shape, q.scales.shape) == ((2, 32), 5.0, (64,), (8,))
    back = q.dequantize().tolist()
    assert max(abs(a - b) for row, out in zip(rows, back) for a, b in zip(row, out)) < 0.12
    for name in mantissa.schemes():
        try:
            made = mantissa.quantize_tensor([[float(i % 7) for i in range(256)]] * 4, name)
        except mantissa.InputError as error:
            assert error.expected
            continue
        assert made.dequantize().shape == (4, 256)


@pytest.mark.parametrize(
    ("rows", "scheme", "words"),
    [
        ([[1.0, 2.0], [3.0]], "int8-channel", "other lengths"),
        ([[1.0]], "int99", "scheme"),
        ([[float("nan"), 1.0]], "int8-channel", "values"),
        ([], "int8-channel", "at least one"),
        ([["a"]], "int8-channel", "numbers"),
        ([1.0, [2.0]], "int8-channel", "numbers"),
    ],
)
def test_what_is_no_tensor_is_refused(rows: object, scheme: str, words: str) -> None:
    with pytest.raises(mantissa.InputError, match=words):
        mantissa.quantize_tensor(rows, scheme)


def test_a_tensor_given_away_outlives_its_maker() -> None:
    numpy = pytest.importorskip("numpy")
    q = mantissa.quantize_tensor([[1.0, -2.0, 0.5, 0.0]], "fp8-e4m3-channel").dequantize()
    address = q.address
    array = numpy.from_dlpack(q)
    assert array.ctypes.data == address
    del q
    gc.collect()
    assert array.tolist() == [[1.0, -2.0, 0.5, 0.0]]


def test_tensors_of_numpy_are_taken_without_a_copy() -> None:
    numpy = pytest.importorskip("numpy")
    for dtype in ("float32", "float16", "float64", "uint8", "int8", "uint16", "int32", "int64"):
        array = numpy.arange(12, dtype=dtype).reshape(3, 4)
        tensor = mantissa.Tensor.from_dlpack(array)
        assert (tensor.dtype, tensor.shape, tensor.address) == (dtype, (3, 4), array.ctypes.data)
        assert tensor.tolist() == array.tolist()
        assert tensor.numpy().ctypes.data == array.ctypes.data
    turned = numpy.arange(12, dtype="float32").reshape(3, 4).T
    assert mantissa.Tensor.from_dlpack(turned).tolist() == turned.tolist()
    reverse = numpy.arange(6, dtype="float32")[::-2]
    assert mantissa.Tensor.from_dlpack(reverse).tolist() == reverse.tolist()
    with pytest.raises(BufferError):
        mantissa.Tensor.from_dlpack(numpy.zeros(2, dtype="float32")).__dlpack__(copy=True)


def test_numpy_arrays_quantize() -> None:
    numpy = pytest.importorskip("numpy")
    x = numpy.linspace(-1, 1, 3 * 4 * 32, dtype="float32").reshape(3, 4, 32)
    q = mantissa.quantize_tensor(x, "int8-g32")
    assert numpy.abs(numpy.asarray(q.dequantize()) - x).max() < 0.01
    for other in (x.astype("float64"), x.tolist(), numpy.asfortranarray(x), x.astype(">f4")):
        assert mantissa.quantize_tensor(other, "int8-g32").codes.tobytes() == q.codes.tobytes()


def test_torch_tensors_exchange() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8):
        x = torch.ones(2, 32, dtype=dtype)
        tensor = mantissa.Tensor.from_dlpack(x)
        assert tensor.address == x.data_ptr()
        assert torch.from_dlpack(tensor).data_ptr() == x.data_ptr()
    x = torch.randn(4, 64, dtype=torch.bfloat16, requires_grad=True)
    codes = mantissa.quantize_tensor(x, "int4-g32").codes.tolist()
    assert codes == mantissa.quantize_tensor(x.float().tolist(), "int4-g32").codes.tolist()


def test_exchange_leaves_no_memory() -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.zeros((256, 1024), dtype="float32")

    def exchange() -> None:
        for _ in range(500):
            numpy.from_dlpack(mantissa.Tensor.from_dlpack(array))
            mantissa.Tensor.from_dlpack(array).__dlpack__()

    exchange()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    exchange()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4_000


def test_a_state_dict_is_the_dense_checkpoint(tmp_path) -> None:  # type: ignore[no-untyped-def]
    inside = {tensor["name"]: tensor["shape"] for tensor in mantissa.inspect("demo", tensors=True).tensors}
    seen = {name: list(tensor.shape) for name, tensor in mantissa.load("demo").state_dict()}
    assert seen == inside
    mantissa.quantize("demo", "rtn-int8-channel", out=tmp_path / "q")
    exact = dict(mantissa.load("demo").state_dict())
    for name, tensor in mantissa.load(tmp_path / "q").state_dict():
        expected = exact[name].tolist()
        flat = [row if isinstance(row, list) else [row] for row in expected]
        ours = [row if isinstance(row, list) else [row] for row in tensor.tolist()]
        largest = max(abs(value) for row in flat for value in row)
        assert max(abs(a - b) for one, two in zip(flat, ours) for a, b in zip(one, two)) <= largest / 100
    assert json.loads(mantissa.inspect("demo").json())["parameters"] == sum(
        len(tensor.tobytes()) // 4 for tensor in exact.values()
    )
