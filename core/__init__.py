"""The vocabulary: trees, specs, keys, scan, transforms, checkpoints, config, interop, devices."""
