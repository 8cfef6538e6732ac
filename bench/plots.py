#!/usr/bin/env python3
"""Plots of the decode speed against batch and against depth, each beside its limit.

    bench/plots.py measure MODEL --mantissa BINARY --work FOLDER --out SWEEPS.json
    bench/plots.py draw SWEEPS.json FOLDER

The first form quantizes MODEL, a folder in bf16, to 8 and to 4 bits, and runs `mantissa bench` over batches and depths: about 6
minutes for 1.24 B parameters on two cores. The second writes speed-batch.svg and speed-depth.svg, which need no other file and adapt
to dark pages.
"""

import argparse
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys

import peers

WEIGHTS = [("W16 (bf16)", None), ("W8 (int8)", "rtn-int8-channel"), ("W4 (int4-g128)", "rtn-int4-g128")]
CACHES = [("f16", "f16"), ("int8", "int8"), ("int4", "int4")]

# Readable on white and on black.
COLOURS = ["#3b82c4", "#d9822b", "#2f9e68", "#9b6fc8"]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 420, 64, 112, 44, 52
STYLE = """text{font:12px sans-serif;fill:#333}.title{font-weight:bold;font-size:14px}.grid{stroke:#8884;stroke-width:1}
@media(prefers-color-scheme:dark){text{fill:#ddd}}"""


def run(command):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {command[0]}: exit {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def measure(args):
    """Runs the sweeps and writes their reports."""
    args.work.mkdir(parents=True, exist_ok=True)
    common = ["--threads", args.threads, "--reps", args.reps, "--gen", args.gen, "--json", "--quiet"]
    found = {"machine": peers.machine(), "threads": args.threads, "model": args.model.name, "batch": {}, "depth": {}}
    if args.out.exists():
        found |= json.loads(args.out.read_text())
    for name, recipe in WEIGHTS:
        folder = args.work / recipe if recipe else args.model
        if recipe and not folder.exists():
            run([args.mantissa, "quantize", args.model, "--recipe", recipe, "--out", folder, "--verify=false", "--quiet"])
        if name in found["batch"]:
            continue
        command = [args.mantissa, "bench", folder, "--prompt", 64, "--batch", args.batch, "--explain", *common]
        report = json.loads(run(command))
        report["weight_bytes"] = sum(row["bytes"] for row in report.pop("kernels"))
        found["batch"][name] = report
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"batch {name}: {[round(r['tg_tokens_per_s'], 1) for r in report['runs']]}", file=sys.stderr, flush=True)
    for name, kv in CACHES:
        if name in found["depth"]:
            continue
        command = [args.mantissa, "bench", folder, "--prompt", 0, "--depth", args.depth, "--kv", kv, *common]
        found["depth"][name] = json.loads(run(command))
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"depth {name}: {[round(r['tg_tokens_per_s'], 1) for r in found['depth'][name]['runs']]}", file=sys.stderr, flush=True)
    for recipe in (recipe for _, recipe in WEIGHTS if recipe):
        if not args.keep:
            shutil.rmtree(args.work / recipe)


def bandwidth_limit(r):
    """Tokens/s at which the bytes of a run would take the whole read bandwidth."""
    return r["tg_tokens_per_s"] / r["tg_share_of_bandwidth"]


def batch_series(found):
    """Name, measured and limiting (batch, tokens/s) of every width of weights."""
    # Two operations for each weight and token; bf16 weights have two bytes.
    operations = found["batch"][WEIGHTS[0][0]]["weight_bytes"]
    for name, report in found["batch"].items():
        floats = report.get("machine_bf16_gflops") or report.get("machine_f32_gflops")
        peak = floats if name.startswith("W16") else report.get("machine_int8_gops", floats)
        measured = [(r["batch"], r["tg_tokens_per_s"]) for r in report["runs"]]
        limit = [(r["batch"], min(bandwidth_limit(r), peak * 1e9 / operations)) for r in report["runs"]]
        yield name, measured, limit


def depth_series(found):
    """Name, measured and limiting (depth, tokens/s) of every KV scheme."""
    for name, report in found["depth"].items():
        yield name, [(r["depth"], r["tg_tokens_per_s"]) for r in report["runs"]], [(r["depth"], bandwidth_limit(r)) for r in report["runs"]]


def ticks(low, high):
    """Round values of a logarithmic axis."""
    steps = [m * 10**e for e in range(-1, 6) for m in (1, 2, 5)]
    return [s for s in steps if low <= s <= high]


def label(value):
    return f"{value:g}"


def spread(places, gap):
    """Moves labels apart, downwards from the top."""
    moved, last = {}, -math.inf
    for name, y in sorted(places.items(), key=lambda item: item[1]):
        last = max(y, last + gap)
        moved[name] = last
    return moved


def plot(title, x_name, series, log_x, x_ticks):
    """SVG of measured lines with points, and of limits as dashed lines."""
    series = list(series)
    values = [y for _, *lines in series for line in lines for _, y in line]
    xs = [x for _, measured, _ in series for x, _ in measured]
    low, high = min(values) * 0.8, max(values) * 1.15
    scale = math.log if log_x else float
    x0, x1 = scale(min(xs)), scale(max(xs))
    across = lambda x: LEFT + (scale(x) - x0) / ((x1 - x0) or 1) * (WIDTH - LEFT - RIGHT)
    # A narrow range of speeds needs no logarithms.
    wide = high / low > 8
    up = math.log if wide else float
    base = up(low) if wide else 0.0
    down = lambda y: HEIGHT - BOTTOM - (up(y) - base) / (up(high) - base) * (HEIGHT - TOP - BOTTOM)
    step = next(step for step in (m * 10**e for e in range(9) for m in (1, 2, 5)) if high / step < 9)
    y_ticks = ticks(low, high) if wide else range(0, int(high) + 1, step)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{title}">',
           f"<style>{STYLE}</style>", f'<text class="title" x="{LEFT}" y="18">{title}</text>',
           f'<text x="{LEFT}" y="35">solid: measured; dashed: limit (read bandwidth, or peak of the product instruction)</text>']
    for y in y_ticks:
        out.append(f'<path class="grid" d="M{LEFT} {down(y):.1f}H{WIDTH - RIGHT}"/><text x="{LEFT - 6}" y="{down(y) + 4:.1f}" text-anchor="end">{label(y)}</text>')
    for x in x_ticks:
        out.append(f'<path class="grid" d="M{across(x):.1f} {TOP}V{HEIGHT - BOTTOM}"/><text x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{label(x)}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{x_name}</text>')
    out.append(f'<text transform="translate(16 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">decode, tokens/s</text>')
    names = spread({name: down(measured[-1][1]) for name, measured, _ in series}, 14)
    for (name, measured, limit), colour in zip(series, COLOURS):
        for line, dash in [(limit, ' stroke-dasharray="5 4" opacity=".7"'), (measured, "")]:
            points = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in line)
            out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        out += [f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="3.5" fill="{colour}"><title>{name}: {y:.1f} tok/s at {x}</title></circle>' for x, y in measured]
        out.append(f'<text x="{WIDTH - RIGHT + 8}" y="{names[name] + 4:.1f}" style="fill:{colour}">{name}</text>')
    return "\n".join([*out, "</svg>", ""])


def draw(args):
    found = json.loads(args.sweeps.read_text())
    cpu = f"{found['machine']['cpu']}, {found['threads']} threads"
    batches = [r["batch"] for r in next(iter(found["batch"].values()))["runs"]]
    depths = [r["depth"] for r in next(iter(found["depth"].values()))["runs"]]
    plots = {
        "speed-batch.svg": plot(f"Decode against sequences at once ({cpu})", "sequences", batch_series(found), True, batches),
        "speed-depth.svg": plot(f"Decode against depth, W4 ({cpu})", "tokens in the KV cache", depth_series(found), False, depths[1:]),
    }
    for name, text in plots.items():
        (args.folder / name).write_text(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    sweep = commands.add_parser("measure")
    sweep.add_argument("model", type=pathlib.Path)
    sweep.add_argument("--mantissa", required=True, metavar="BINARY")
    sweep.add_argument("--work", type=pathlib.Path, required=True, metavar="FOLDER", help="for the quantized models")
    sweep.add_argument("--out", type=pathlib.Path, required=True, metavar="FILE", help="a run that ended early continues it")
    sweep.add_argument("--keep", action="store_true", help="keep the quantized models")
    sweep.add_argument("--threads", type=int, default=os.cpu_count())
    sweep.add_argument("--batch", default="1,2,4,8,16,32,64")
    sweep.add_argument("--depth", default="16,1024,2048,4096,8192")
    sweep.add_argument("--gen", type=int, default=12, metavar="N")
    sweep.add_argument("--reps", type=int, default=1, metavar="N")
    sweep.set_defaults(run=measure)
    picture = commands.add_parser("draw")
    picture.add_argument("sweeps", type=pathlib.Path)
    picture.add_argument("folder", type=pathlib.Path)
    picture.set_defaults(run=draw)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
