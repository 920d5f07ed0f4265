"""A reader of W&B's offline files, for tests: LevelDB-style 32 KiB blocks of protobuf records. A torn tail reads up to the tear."""

import json
import struct
from pathlib import Path

from wandb.proto import wandb_internal_pb2

BLOCK = 32768


def records(path):
    """Yield every Record of a `.wandb` file."""
    data = Path(path).read_bytes()
    assert data[:4] == b":W&B", "not a W&B file"
    position, parts = 7, b""
    while position + 7 <= len(data):
        left = BLOCK - position % BLOCK
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        payload = data[position + 7 : position + 7 + length]
        if len(payload) < length or kind == 0:
            return
        position += 7 + length
        parts = payload if kind in (1, 2) else parts + payload  # 1 full, 2 first, 3 middle, 4 last
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record


def read_offline(folder):
    """Return (rows of history as dicts, metric definitions name -> step metric, run ids) of all offline runs below a folder."""
    rows, defined, ids = [], {}, []
    for file in sorted(Path(folder).rglob("run-*.wandb")):
        for record in records(file):
            if record.HasField("run"):
                ids.append(record.run.run_id)
            if record.HasField("history"):
                rows.append(
                    {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
                )
            if record.HasField("metric"):
                defined[record.metric.name or record.metric.glob_name] = record.metric.step_metric
    return rows, defined, ids
