"""mmkit: train, tune and evaluate Cambrian-1, Ferret and OpenCLIP from the same notebooks and the same config."""
