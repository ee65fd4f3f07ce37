"""Measure a save: how long training stands still, when the bytes are durable, what it costs; beside its peers.

python benchmarks/save.py [--case mix1|mix2|tiny20k] [--runs N] [--scale F] [--directory D] [--json]

Runs are interleaved, files are new names, fsync is included for every peer; a run beside which other
processes used more than 0.2 cores is repeated, at most 10 times, then the case is reported as noisy.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from slackwater.engine.pieces import Piece
from slackwater.engine.snapshot import Snapshotter

Tensors = dict[str, torch.Tensor]
FOREIGN_CORES = 0.2
ATTEMPTS = 10
SETTINGS = {
    "dcp_thread": "async_save, thread, cached DefaultStager, FileSystemWriter(thread_count=2, sync_files=True)",
    "dcp_process": "async_save, process, cached DefaultStager with shared memory, the same writer",
    "torch_save": "torch.save, fsync",
    "save_file": "safetensors.torch.save_file, fsync",
    "torchsnapshot": "Snapshot.async_take, then fsync of every file",
}


def make_case(name: str, scale: float) -> Tensors:
    """Weights in bf16 with fp32 moments of a small transformer (mix1, mix2), or 20,000 tiny tensors."""
    generator = torch.Generator().manual_seed(0)
    if name == "tiny20k":
        count = max(1, int(20_000 * scale))
        return {f"t{i}": torch.rand(2048, generator=generator) for i in range(count)}
    layers, found = (24 if name == "mix1" else 48), {}
    width = max(64, int(640 * scale**0.5) // 64 * 64)
    for layer in range(layers):
        shapes = {"q": (width, width), "k": (width, width), "v": (width, width), "o": (width, width)}
        shapes |= {"up": (4 * width, width), "down": (width, 4 * width), "norm1": (width,), "norm2": (width,)}
        for kind, shape in shapes.items():
            weight = torch.rand(shape, generator=generator)
            key = f"layers.{layer}.{kind}"
            found[f"model/{key}"] = weight.bfloat16()
            found[f"optim/{key}/exp_avg"] = weight * 0.1
            found[f"optim/{key}/exp_avg_sq"] = weight * 0.01
            found[f"optim/{key}/step"] = torch.tensor(7.0)
    return found


def fsync_tree(root: Path) -> None:
    """Make every file and directory below `root` durable."""
    for path in [root, *root.rglob("*")]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


Wait = Callable[[], None]
Save = Callable[[Tensors, Path], Wait]  # returns when training may go on; the wait ends when durable


class Ours:
    """Snapshot in the caller, write in a thread, as the trainer adapter does."""

    def __init__(self) -> None:
        self.snapshotter = Snapshotter()
        self.pool = ThreadPoolExecutor(1)

    def __call__(self, tensors: Tensors, directory: Path) -> Wait:
        staged = self.snapshotter.stage([Piece.of(name, value) for name, value in tensors.items()])
        written = self.pool.submit(staged.write_part, directory)
        return lambda: written.result() and None


class Dcp:
    """torch.distributed.checkpoint.async_save with a stager that is kept."""

    def __init__(self, process: bool) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self.kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=process,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        self.stager = DefaultStager(options)

    def __call__(self, tensors: Tensors, directory: Path) -> Wait:
        writer = dcp.FileSystemWriter(directory / "dcp", thread_count=2, sync_files=True)
        made: Any = dcp.async_save(
            dict(tensors), storage_writer=writer, async_stager=self.stager, async_checkpointer_type=self.kind
        )
        future = getattr(made, "upload_completion", made)
        return lambda: future.result() and None


def torch_save(tensors: Tensors, directory: Path) -> Wait:
    """Blocks to the end, like most training scripts."""
    with (directory / "state.pt").open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())
    return lambda: None


def save_safetensors(tensors: Tensors, directory: Path) -> Wait:
    """Blocks to the end."""
    save_file(tensors, directory / "state.safetensors")
    fsync_tree(directory)
    return lambda: None


def torchsnapshot_take(tensors: Tensors, directory: Path) -> Wait:
    """Raises ImportError where it is not installed."""
    import torchsnapshot  # type: ignore[import-not-found]

    pending = torchsnapshot.Snapshot.async_take(
        str(directory / "snap"), {"state": torchsnapshot.StateDict(**tensors)}
    )

    def wait() -> None:
        pending.wait()
        fsync_tree(directory)

    return wait


def cpu_seconds() -> float:
    """CPU of this process and of its finished children."""
    spent = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in spent)


def tree_cpu_seconds() -> float:
    """CPU of this process and of its living children: DCP's process goes on living."""
    total = cpu_seconds()
    ticks = os.sysconf("SC_CLK_TCK")
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            total += (int(fields[11]) + int(fields[12])) / ticks
    return total


def busy_seconds() -> float:
    """CPU that the whole machine has spent, waiting for disks not counted."""
    fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def resident_bytes() -> int:
    """This process's resident memory, now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(save: Save, tensors: Tensors, root: Path) -> dict[str, float]:
    """One save into a new directory, which is removed outside of the measured time."""
    directory = Path(tempfile.mkdtemp(dir=root))
    resident, cpu, busy, start = resident_bytes(), tree_cpu_seconds(), busy_seconds(), time.perf_counter()
    try:
        wait = save(tensors, directory)
        block = time.perf_counter() - start
        wait()
        durable = time.perf_counter() - start
        spent = tree_cpu_seconds() - cpu
        foreign = max(0.0, busy_seconds() - busy - spent) / durable
        grown = max(0, resident_bytes() - resident)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    gib = sum(t.nbytes for t in tensors.values()) / 2**30
    return {
        "block_s": block, "durable_s": durable, "cpu_s_per_gib": spent / gib,
        "peak_extra_bytes": grown, "foreign_cores": foreign,
    }  # fmt: skip


def floor_seconds(tensors: Tensors) -> float:
    """memmove of the same bytes into memory that is already there: nothing copies faster with one thread."""
    size = max(t.nbytes for t in tensors.values())
    target = torch.zeros(size, dtype=torch.uint8)
    start = time.perf_counter()
    for tensor in tensors.values():
        ctypes.memmove(target.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    return time.perf_counter() - start


def run_case(name: str, options: argparse.Namespace, root: Path) -> dict[str, Any]:
    """All savers in turn, `runs` times after one round that only warms them; medians."""
    tensors = make_case(name, options.scale)
    savers: dict[str, Save] = {
        "ours": Ours(), "dcp_thread": Dcp(False), "dcp_process": Dcp(True), "torch_save": torch_save,
        "save_file": save_safetensors, "torchsnapshot": torchsnapshot_take,
    }  # fmt: skip
    left_out: dict[str, str] = {}
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in savers}
    floors: list[float] = []
    noisy = False
    for run in range(options.runs + 1):
        floors.append(floor_seconds(tensors))
        for kind, save in savers.items():
            if kind in left_out:
                continue
            for attempt in range(ATTEMPTS if run else 1):
                try:
                    figures = measure(save, tensors, root)
                except Exception as error:  # a peer that cannot run here is reported, not hidden
                    if kind == "ours":
                        raise
                    left_out[kind] = f"{type(error).__name__}: {error}"[:200]
                    break
                if figures["foreign_cores"] <= FOREIGN_CORES or options.accept_noise:
                    break
                noisy = noisy or attempt == ATTEMPTS - 1
            else:
                attempt = ATTEMPTS
            if run and kind not in left_out:
                found[kind].append(figures)
    table = {k: {n: statistics.median(f[n] for f in v) for n in v[0]} for k, v in found.items() if v}
    ours = table.pop("ours")
    ratios = {
        f"{kind}_over_ours": {n: peer[n] / ours[n] for n in ("block_s", "durable_s", "cpu_s_per_gib")}
        for kind, peer in table.items()
    }
    ratios["block_over_memmove"] = ours["block_s"] / statistics.median(floors)
    return {
        "case": name, "tensors": len(tensors), "size_bytes": sum(t.nbytes for t in tensors.values()),
        "runs": options.runs, "noisy": noisy or options.accept_noise, "ours": ours, "peers": table, "ratios": ratios,
        "left_out": left_out, "settings": SETTINGS, "memmove_s": statistics.median(floors),
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    """The table for people."""
    gib = result["size_bytes"] / 2**30
    print(
        f"{result['case']}: {result['tensors']} tensors, {gib:.2f} GiB{' (NOISY)' if result['noisy'] else ''}"
    )
    for kind, row in {"ours": result["ours"], **result["peers"]}.items():
        print(f"  {kind:14} block {row['block_s']:8.3f} s  durable {row['durable_s']:8.3f} s  ", end="")
        print(f"cpu {row['cpu_s_per_gib']:6.2f} s/GiB  extra {row['peak_extra_bytes'] / 2**20:8.0f} MiB")
    print(f"  blocked / memmove floor: {result['ratios']['block_over_memmove']:.2f}")
    for kind, reason in result["left_out"].items():
        print(f"  {kind}: left out: {reason}")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=("mix1", "mix2", "tiny20k"), action="append")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--scale", type=float, default=1.0, help="a part of the case's size, for a quick look"
    )
    parser.add_argument("--accept-noise", action="store_true", help="keep runs beside which others worked")
    parser.add_argument("--directory", type=Path, help="on the disk to measure")
    parser.add_argument("--json", action="store_true", help="print JSON, one line a case, and no table")
    options = parser.parse_args()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with tempfile.TemporaryDirectory(dir=options.directory) as root:
            for name in options.case or ("mix1", "mix2", "tiny20k"):
                result = run_case(name, options, Path(root))
                print(json.dumps(result)) if options.json else show(result)
    finally:
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
