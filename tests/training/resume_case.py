"""``resume_case.py FOLDER RESUME SEES [STAGE]``: two processes resume one run; the second sees a shared folder as it was before.

SEES is ``old``: its list of the folder lacks steps 3 and 4; ``nothing``: it cannot read step 4 at all; ``no-export``: it cannot read any
export; ``no-list``: it finds no file at all, but reads what it is told to. Prints what became of each.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tiny_run import tiny_run

from mmkit.errors import UserError
from mmkit.storage import Store
from mmkit.training import loop, weights


def main():
    folder, resume, sees, *stage = sys.argv[1:]
    if os.environ["RANK"] == "1":
        see(sees)
    run = tiny_run(
        Path(folder), resume=resume, steps=5, backend={"kind": "torch", "processes": 2}, checkpoint={"save_every": 1, "keep_last": 9},
        stage=(stage or ["pretrain"])[0],
    )  # fmt: skip
    first = []
    try:
        result = loop.train(run, on_log=lambda row: first.append(row["step"]))
        report = {"steps": result.steps, "first": first[:1]}
    except UserError as error:
        report = {"error": str(error)}
    print(json.dumps(report), flush=True)


def see(sees):
    folders, read = Store.folders, Store.read
    if sees == "no-list":
        Store.size, Store.folders = (lambda self, name: None), (lambda self: [])
        return
    if sees == "no-export":
        from mmkit.models import pretrained

        def hollow(config, export):
            raise FileNotFoundError(2, "No such file or directory", f"{export}/config.json")

        weights.hollow = pretrained.hollow = hollow
        return
    if sees == "old":
        Store.folders = lambda self: [name for name in folders(self) if name not in ("step-00000003", "step-00000004")]
        return

    def blind(self, name, *args):
        if "step-00000004" in self.path(name):
            raise FileNotFoundError(2, "No such file or directory", self.path(name))
        return read(self, name, *args)

    Store.read = blind


if __name__ == "__main__":
    main()
