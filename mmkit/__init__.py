"""mmkit: train, tune and evaluate Cambrian-1, Ferret and OpenCLIP from the same notebooks and the same config."""

import os

# Where torch_xla is installed, transformers and accelerate take every machine for a TPU and open its devices on import.
# The xla backend talks to torch_xla itself and needs none of that.
os.environ["USE_TORCH_XLA"] = os.environ.get("USE_TORCH_XLA", "0")

# OpenMP's threads spin at the end of each parallel region. Where other work shares the cores they burn what it needs, and
# the thread they wait for comes no sooner: training there takes several times as long. The library reads this once, when
# torch loads it.
os.environ["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY") or "PASSIVE"
