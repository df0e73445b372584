"""Benchmarks as tasks: documents, prompts, metrics, expected counts."""
