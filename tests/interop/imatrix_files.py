#!/usr/bin/env python3
"""Exchanges importance matrices between mantissa and the `gguf` package, in both of llama.cpp's encodings.

    python imatrix_files.py MANTISSA MODEL CALIBRATION.txt [--recipe q4_k_m]

`mantissa imatrix` writes the GGUF encoding; the package reads it, with the keys and shapes of llama-imatrix. With the same values,
written by the package as GGUF and by this script as the older .dat, `mantissa quantize --imatrix` must write the same tensors.
Exit code 1 if it does not.
"""

import argparse
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFWriter


def run(*arguments):
    subprocess.run([str(argument) for argument in arguments], check=True, stdout=subprocess.DEVNULL)


def read(path):
    """Sums and counts by the name of the weight."""
    reader = GGUFReader(path)
    kind = reader.fields["general.type"].contents()
    assert kind == "imatrix", kind
    for key in ("imatrix.chunk_count", "imatrix.chunk_size"):
        assert reader.fields[key].contents() > 0, key
    assert len(reader.fields["imatrix.datasets"].contents()) == 1
    tensors = {tensor.name: np.array(tensor.data, np.float32) for tensor in reader.tensors}
    names = sorted(name.removesuffix(".in_sum2") for name in tensors if name.endswith(".in_sum2"))
    assert len(tensors) == 2 * len(names) > 0
    return {name: (tensors[f"{name}.in_sum2"], tensors[f"{name}.counts"]) for name in names}


def write_gguf(path, entries):
    writer = GGUFWriter(path, "")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["text"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, (sums, counts) in entries.items():
        writer.add_tensor(f"{name}.in_sum2", sums)
        writer.add_tensor(f"{name}.counts", counts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_dat(path, entries):
    """Format of llama.cpp's imatrix.cpp before 2025-07: means times calls, here one call."""
    text = lambda name: struct.pack("<i", len(name.encode())) + name.encode()
    out = [struct.pack("<i", len(entries))]
    for name, (sums, counts) in entries.items():
        means = (sums / counts).astype(np.float32).reshape(-1)
        out += [text(name), struct.pack("<ii", 1, means.size), means.tobytes()]
    out += [struct.pack("<i", 1), text("text")]
    path.write_bytes(b"".join(out))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mantissa", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("--recipe", default="q4_k_m")
    args = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        ours = folder / "ours.gguf"
        run(args.mantissa, "imatrix", args.model, "--calibration", args.calibration, "--overwrite", "--out", ours, "--quiet")
        entries = read(ours)
        write_gguf(folder / "theirs.gguf", entries)
        write_dat(folder / "theirs.dat", entries)
        written = {}
        for name in ("ours.gguf", "theirs.gguf", "theirs.dat", None):
            out = folder / f"quantized-{name}.gguf"
            given = ["--imatrix", folder / name] if name else []
            run(args.mantissa, "quantize", args.model, "--recipe", args.recipe, *given, "--overwrite", "--out", out, "--quiet")
            written[name] = {tensor.name: tensor.data.tobytes() for tensor in GGUFReader(out).tensors}
        for name in ("theirs.gguf", "theirs.dat"):
            apart = [tensor for tensor, data in written[name].items() if data != written["ours.gguf"][tensor]]
            print(f"{name:12} {len(entries)} weights, {len(apart)} of {len(written[name])} tensors differ from ours")
            failed |= bool(apart)
        without = sum(data != written["ours.gguf"][tensor] for tensor, data in written[None].items())
        print(f"{'none':12} {without} tensors differ")
        failed |= without == 0
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
