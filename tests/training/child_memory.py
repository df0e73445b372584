"""``torchrun child_memory.py FOLDER SETTINGS``: assembles a run and writes what memory this process took for it at most, in bytes."""

import json
import sys
from pathlib import Path

from tiny_run import tiny_run

from mmkit.training.assemble import assemble


def status(field: str) -> int:
    """A field of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    small = json.loads(json.dumps(settings))
    small["model"]["language"]["source"] = "random"
    small["model"]["language"]["architecture"] |= {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    assemble(tiny_run(folder, **small)).backend.clear()  # libraries loaded, pools made
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    state = assemble(tiny_run(folder, **settings))
    (folder / f"rank-{state.backend.rank}.json").write_text(json.dumps(status("VmHWM") - before))
