"""``torchrun child_run.py FOLDER SETTINGS``: one tiny run with the JSON settings, by several processes."""

import json
import sys
from pathlib import Path

from tiny_run import tiny_run

from mmkit.training.loop import train

if __name__ == "__main__":
    result = train(tiny_run(Path(sys.argv[1]), **json.loads(sys.argv[2])))
    print(f"{result.reason} {result.steps}", flush=True)
