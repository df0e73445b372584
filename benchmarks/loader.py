"""Pictures per second out of tar shards by worker processes: mmkit's loader beside webdataset + DataLoader, same files, same transform.

    python benchmarks/loader.py [--samples 2000] [--side 480] [--workers 2] [--rounds 3] [--out benchmarks/results/loader.csv]
    python benchmarks/loader.py --lines 7000000        # memory of the line index of a JSONL file of so many lines

mmkit twice: with the shards indexed before the clock starts, and streamed as they are for sets too large to index. They take turns, so a noisy
machine hurts all alike; the best round counts. Workers decode with Pillow, crop at random, normalise and batch.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BATCH = 64


def write_shards(folder: Path, samples: int, side: int, per_shard: int = 250) -> str:
    """Tar shards of JPEG pictures with captions; returns their pattern."""
    import numpy as np
    from PIL import Image

    from mmkit.data.tar_writer import ShardWriter

    rng = np.random.default_rng(0)
    waves = np.linspace(0, 9, side)
    with ShardWriter(str(folder), max_samples=per_shard) as writer:
        for number in range(samples):
            light = np.sin(waves[:, None, None] * rng.uniform(1, 3) + waves[None, :, None] * rng.uniform(1, 3) + np.arange(3))
            pixels = (light * 90 + 128 + rng.normal(0, 9, light.shape)).clip(0, 255).astype(np.uint8)
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "JPEG", quality=90)
            writer.write(f"{number:06d}", {"jpg": buffer.getvalue(), "txt": f"picture {number}"})
    return f"{folder}/{{{0:05d}..{(samples - 1) // per_shard:05d}}}.tar"


def transform():
    """open_clip's training transform at 224 pixels."""
    import open_clip

    return open_clip.image_transform(224, is_train=True, aug_cfg=open_clip.AugmentationCfg(scale=(0.9, 1.0)))


def tokenize(texts: list[str]):
    """Stands in for a tokenizer, so that pictures alone are compared."""
    import torch

    return torch.zeros(len(texts), 77, dtype=torch.int64)


def ours(pattern: str, samples: int, workers: int, streamed: bool) -> float:
    """Seconds for as many samples as there are."""
    from mmkit.config import ClipConfig, DataConfig, SourceConfig
    from mmkit.data.loader import loader

    source = SourceConfig(name="shards", format="webdataset", path=pattern)
    data = DataConfig(sources=(source,), workers=workers, resampled=streamed, samples_per_epoch=100 * samples if streamed else None)
    stream = loader(data, ClipConfig(name="bench"), tokenize, [transform()], train=True, device_batch=BATCH)
    with stream:
        next(stream)  # processes are started
        start, seen = time.perf_counter(), 0
        while seen < samples - BATCH:
            seen += next(stream).n_samples
        return (time.perf_counter() - start) / seen * samples


def theirs(pattern: str, samples: int, workers: int) -> float:
    """Seconds for every sample once, by webdataset's usual pipeline."""
    import torch
    import webdataset

    pictures = transform()

    def pair(sample):
        return pictures(sample["jpg"]), sample["txt"]

    data = webdataset.WebDataset(pattern, shardshuffle=100, nodesplitter=webdataset.split_by_node, seed=0, empty_check=False)
    data = data.shuffle(1000, initial=100).decode("pilrgb").map(pair).batched(BATCH)
    stream = iter(torch.utils.data.DataLoader(data, batch_size=None, num_workers=workers))
    next(stream)
    start, seen = time.perf_counter(), 0
    for images, texts in stream:
        tokenize(texts)
        seen += len(images)
    return (time.perf_counter() - start) / seen * samples


def compare(samples: int, side: int, workers: int, rounds: int) -> list[dict]:
    """One row a loader."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        pattern = write_shards(Path(place), samples, side)
        times: dict[str, list[float]] = {"mmkit, indexed": [], "mmkit, streamed": [], "webdataset": []}
        for _ in range(rounds):
            times["mmkit, indexed"].append(ours(pattern, samples, workers, False))
            times["mmkit, streamed"].append(ours(pattern, samples, workers, True))
            times["webdataset"].append(theirs(pattern, samples, workers))
    fields = {"workers": workers, "samples": samples, "side": side}
    return [{"loader": name, **fields, "images_per_second": round(samples / min(found), 1)} for name, found in times.items()]


def line_index_memory(lines: int) -> dict:
    """Bytes a process needs more after opening a generated JSONL file and reading 1,000 of its lines at random."""
    import random

    import psutil

    from mmkit.data.jsonl_index import JsonLines

    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "lines.jsonl"
        record = json.dumps({"image": "a/b.jpg", "conversations": [{"from": "human", "value": "what?"}, {"from": "gpt", "value": "a kite"}]})[1:]
        with path.open("w") as file:
            for start in range(0, lines, 100_000):
                file.writelines(f'{{"id": {number}, {record}\n' for number in range(start, min(start + 100_000, lines)))
        process = psutil.Process(os.getpid())
        before = process.memory_info().rss
        start = time.perf_counter()
        records = JsonLines(path)
        built = time.perf_counter() - start
        for _ in range(1000):
            number = random.randrange(lines)
            assert records[number]["id"] == number
        return {
            "lines": len(records),
            "file_mb": round(path.stat().st_size / 1e6),
            "index_seconds": round(built, 1),
            "memory_mb": round((process.memory_info().rss - before) / 1e6, 1),
        }


def main() -> None:
    """Runs what is asked for, prints it, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--side", type=int, default=480, help="pixels of the square pictures")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lines", type=int, default=0, help="measure the line index of a JSONL file instead")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    if options.lines:
        rows = [line_index_memory(options.lines)]
    else:
        rows = compare(options.samples, options.side, options.workers, options.rounds)
    for row in rows:
        print(row)
    if options.out:
        with open(options.out, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
