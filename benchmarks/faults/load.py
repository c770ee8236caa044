"""An audit of many small cells: the cost per cell beside its work, the growth of memory, the size of the folder.

    python benchmarks/faults/load.py --cells 2000

Writes docs/results/reliability.md.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from record import record
from small import digits

from gradveil.auditing.case import Case
from gradveil.auditing.limits import Execution
from gradveil.auditing.plan import make_plan
from gradveil.auditing.progress import Display
from gradveil.auditing.run import run_audit
from gradveil.auditing.spec import make_spec
from gradveil.storage.run_folder import CellName, StoredCell


class Watch(Display):
    """Records when each cell ended, how long its work took, and the memory of the process."""

    def __init__(self) -> None:
        self.ends: list[float] = [time.perf_counter()]
        self.work: list[float] = []
        self.memory: list[int] = []

    def end(self, cell: CellName, stored: StoredCell) -> None:
        self.ends.append(time.perf_counter())
        self.work.append(stored.seconds or 0.0)
        self.memory.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=2000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="gradveil-load-") as name:
        root = Path(name)
        defenses = [f"gaussian:std={i / 1000}" for i in range(1, options.cells // 2)]  # two cells each
        values = {"data": str(digits(root / "small.npz")), "defenses": defenses, "attacks": "linear", "victims": 1}
        case, watch = Case(make_spec(values)), Watch()
        total = len(make_plan(case))
        began = time.perf_counter()
        run_audit(case, Execution(out=root / "run", workers=0), watch)
        seconds = time.perf_counter() - began
        size = sum(p.stat().st_size for p in (root / "run").rglob("*") if p.is_file())
        stored = sum(p.stat().st_size for p in (root / "run" / "tensors").iterdir())
        again = time.perf_counter()
        run_audit(case, Execution(out=root / "run", workers=0))
        again = time.perf_counter() - again
    spans = [b - a for a, b in zip(watch.ends, watch.ends[1:], strict=False)]
    beside = [1000 * (span - work) for span, work in zip(spans, watch.work, strict=True)]
    tenth = max(1, len(spans) // 10)
    first, last = statistics.median(beside[:tenth]), statistics.median(beside[-tenth:])
    early, late = watch.memory[tenth], watch.memory[-1]
    lines = [
        "| cells | seconds | beside its work, per cell: first tenth | last tenth | memory after a tenth | at the end |"
        " folder | of it tensors | the same command again |",
        "|---|---|---|---|---|---|---|---|---|",
        f"| {total} | {seconds:.0f} | {first:.1f} ms | {last:.1f} ms | {early / 2**20:.0f} MB | {late / 2**20:.0f} MB |"
        f" {size / 2**20:.1f} MB | {stored / 2**20:.1f} MB | {again:.1f} s |",
    ]
    print("\n".join(lines))
    record("Load", "load.py", lines)


if __name__ == "__main__":
    main()
