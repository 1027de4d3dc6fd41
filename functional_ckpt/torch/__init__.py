"""Torch's side: tensors and DTensors as leaves, process groups as `Gather`. Imported only where torch is used."""
