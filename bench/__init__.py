"""Benchmarks: each ``bench_*.py`` has ``main(out)``, prints a table and writes its figures under ``out``."""
