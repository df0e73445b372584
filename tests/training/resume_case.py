"""``resume_case.py FOLDER RESUME SEES``: two processes resume one run; the second sees a shared folder as it was before.

SEES is ``old``: its list of the folder lacks steps 3 and 4; or ``nothing``: it cannot read step 4 at all. Prints what became of each.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tiny_run import tiny_run

from mmkit.errors import UserError
from mmkit.storage import Store
from mmkit.training import loop


def main():
    folder, resume, sees = sys.argv[1:]
    if os.environ["RANK"] == "1":
        see(sees)
    run = tiny_run(
        Path(folder), resume=resume, steps=5, backend={"kind": "torch", "processes": 2}, checkpoint={"save_every": 1, "keep_last": 9}
    )
    first = []
    try:
        result = loop.train(run, on_log=lambda row: first.append(row["step"]))
        report = {"steps": result.steps, "first": first[:1]}
    except UserError as error:
        report = {"error": str(error)}
    print(json.dumps(report), flush=True)


def see(sees):
    folders, read = Store.folders, Store.read
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
