"""mmkit: train, tune and evaluate Cambrian-1, Ferret and OpenCLIP from the same notebooks and the same config."""

import os

# Where torch_xla is installed, transformers and accelerate take every machine for a TPU and open its devices on import.
# The xla backend talks to torch_xla itself and needs none of that.
os.environ["USE_TORCH_XLA"] = os.environ.get("USE_TORCH_XLA", "0")
