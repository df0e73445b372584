"""``python -m mmkit`` is the command line."""

from __future__ import annotations

from mmkit.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
