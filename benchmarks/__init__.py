"""Benchmarks: `python -m benchmarks [NAME ...]`. docs/benchmarks.md says what each measures."""
