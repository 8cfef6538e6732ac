"""Writes tests/data/events/events.out.tfevents.golden with TensorBoard's own messages and its record writer, and reads it back.

    pip install tensorboard==2.21.0
    python3 tests/data/make_events.py

The events are those of the tests of crates/mantissa-store/src/event_file.rs.
"""

import math
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.record_writer import RecordWriter

FILE = Path(__file__).parent / "events" / "events.out.tfevents.golden"
BEGIN = 1.7e9


def text(tag, content):
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, tensor_shape=shape, string_val=[content.encode()])
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Event(wall_time=BEGIN, summary=Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=metadata)]))


def scalars(step):
    values = [Summary.Value(tag="train/loss", simple_value=4.5 / step)]
    if step % 2 == 0:
        values.append(Summary.Value(tag="validation/loss", simple_value=math.nan))
    return Event(wall_time=BEGIN + step, step=step, summary=Summary(value=values))


def main():
    events = [Event(wall_time=BEGIN, file_version="brain.Event:2"), text("run", "runs/first"), text("settings", "seed = 1\n")]
    events += [scalars(step) for step in range(1, 5)]
    FILE.parent.mkdir(exist_ok=True)
    with FILE.open("wb") as file:
        writer = RecordWriter(file)
        for event in events:
            writer.write(event.SerializeToString())
        writer.flush()
    read = EventAccumulator(str(FILE), size_guidance={"scalars": 0, "tensors": 0})
    read.Reload()
    assert [event.step for event in read.Scalars("train/loss")] == [1, 2, 3, 4]
    assert read.Tensors("settings")[0].tensor_proto.string_val[0] == b"seed = 1\n"


if __name__ == "__main__":
    main()
