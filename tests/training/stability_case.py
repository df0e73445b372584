"""Two processes watch their losses; the loss of process 1 becomes NaN at step 3."""

import json
import math

from mmkit.config import BackendConfig, StabilityConfig
from mmkit.sharding.backend import create
from mmkit.training.stability import StabilityGuard


def main():
    backend = create(BackendConfig(kind="torch"), "fp32")
    guard = StabilityGuard(StabilityConfig(), None, backend.any_device, backend.is_main)
    step, decision = 0, None
    while not decision:
        step += 1
        decision = guard.observe(step, math.nan if step == 3 and backend.rank == 1 else 1.0)
    backend.close()
    print(json.dumps({"steps": step, "action": decision.action, "cause": decision.cause}))


if __name__ == "__main__":
    main()
