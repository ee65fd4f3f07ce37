"""Measure the experience buffer: append, sample, cut and restore of a million samples; non-zero when short.

python benchmarks/buffer.py [--samples N] [--payload-bytes B] [--batch B] [--directory D] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from slackwater.engine.experience import ExperienceBuffer
from slackwater.engine.samples import Caller, PromptOrder, Sample

WHO = Caller(timeline=1)
GOALS = {
    "append_per_second": (20_000, "at least"),
    "sample_512_milliseconds": (20.0, "at most"),
    "cut_blocked_milliseconds": (100.0, "at most"),
    "restore_samples_per_second": (200_000, "at least"),
}


def main() -> int:
    """Run all four measurements in one directory and compare with the goals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--payload-bytes", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--strategy", default="uniform")
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as root:
        figures = measure(Path(root), options)
    short = []
    for name, (goal, sense) in GOALS.items():
        good = figures[name] >= goal if sense == "at least" else figures[name] <= goal
        short += [] if good else [name]
        print(f"{name:30} {figures[name]:14,.1f}   {sense} {goal:>10,}   {'ok' if good else 'SHORT'}")
    if options.json:
        options.json.write_text(json.dumps(figures | {"short": short}, indent=2) + "\n")
    return 1 if short else 0


def measure(root: Path, options: argparse.Namespace) -> dict[str, float]:
    """Fill a buffer, sample from it, cut it, restore it; figures by name."""
    order = PromptOrder([f"prompt-{number}" for number in range(options.samples)], epochs=1)
    buffer = ExperienceBuffer(
        root / "live",
        prompts=order,
        batch_size=options.samples,
        max_staleness_steps=1,
        strategy=options.strategy,
    ).open()
    buffer.fence(1)
    append_seconds = fill(buffer, options)
    sample_seconds = []
    for step in range(1, 21):
        began = time.perf_counter()
        buffer.lease(WHO, step, 512)
        sample_seconds.append(time.perf_counter() - began)
        buffer.trained(WHO, step)
        buffer.step_done(WHO, step)
    began = time.perf_counter()
    part = buffer.cut(20, root / "cut")
    cut_seconds = time.perf_counter() - began
    buffer.fence(2)
    began = time.perf_counter()
    buffer.restore(root / "cut", part, 2)
    restore_seconds = time.perf_counter() - began
    landed = buffer.statistics()["counts"]["landed"]
    buffer.close()
    return {
        "samples": options.samples,
        "payload_bytes": options.payload_bytes,
        "append_per_second": options.samples / append_seconds,
        "sample_512_milliseconds": statistics.median(sample_seconds) * 1e3,
        "sample_512_worst_milliseconds": max(sample_seconds) * 1e3,
        "cut_blocked_milliseconds": part.blocked_seconds * 1e3,
        "cut_total_seconds": cut_seconds,
        "restore_seconds": restore_seconds,
        "restore_samples_per_second": landed / restore_seconds,
    }


def fill(buffer: ExperienceBuffer, options: argparse.Namespace) -> float:
    """Land every sample in batches and make them durable; seconds spent in the buffer."""
    spent = 0.0
    payload = bytes(options.payload_bytes)
    for _ in range(0, options.samples, options.batch):
        dispatched = buffer.next_prompts(WHO, options.batch)
        samples = [
            Sample(id=name, spans=((1, 0, 9),), payload=payload, reward=1.0)
            for item in dispatched
            for name in item.ids()
        ]
        began = time.perf_counter()
        buffer.land(WHO, samples)
        spent += time.perf_counter() - began
    began = time.perf_counter()
    buffer.sync()
    return spent + time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
