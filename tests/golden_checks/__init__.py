"""Comparisons with vectors that the original implementations computed; one module a topic, chosen in `tests/test_golden.py`."""
