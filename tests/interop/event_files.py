#!/usr/bin/env python3
"""Reads the event files of a training run with TensorBoard, and compares them with the log of the run.

    pip install tensorboard==2.21.0
    tests/interop/event_files.py RUN DIR

DIR is that of `mantissa train … --tensorboard DIR`. Prints the number of steps and tags; fails if a step is missing, written
twice, or differs from log.jsonl.
"""

import json
import math
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TAGS = {"train/loss": "loss", "train/smoothed_loss": "smoothed_loss", "train/grad_norm": "grad_norm", "train/learning_rate": "lr",
        "train/tokens": "tokens", "train/tokens_per_s": "tokens_per_s", "validation/loss": "validation_loss"}


def main(run, folder):
    log = [json.loads(line) for line in (Path(run) / "log.jsonl").read_text().splitlines()]
    read = EventAccumulator(str(Path(folder) / Path(run).name), size_guidance={"scalars": 0, "tensors": 0})
    read.Reload()
    found = set(read.Tags()["scalars"])
    for tag, key in TAGS.items():
        expected = [(line["step"], line[key]) for line in log if line.get(key) is not None]
        events = [(event.step, event.value) for event in read.Scalars(tag)] if tag in found else []
        assert [step for step, _ in events] == [step for step, _ in expected], f"{tag}: {events} {expected}"
        for (step, theirs), (_, ours) in zip(events, expected):
            assert math.isclose(theirs, ours, rel_tol=1e-6), f"{tag}: step {step}: {theirs} {ours}"
    times = [event.wall_time for event in read.Scalars("train/loss")]
    assert times == sorted(times), times
    settings = read.Tensors("settings")[0].tensor_proto.string_val[0].decode()
    assert "[optimizer]" in settings
    print(f"{len(log)} steps, {len(found)} tags")


if __name__ == "__main__":
    main(*sys.argv[1:])
