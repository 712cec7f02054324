"""Benchmarks, each a program: python -m benchmarks.engine. What the server sets before it loads torch is set here."""

from tei_grpc import cpus

cpus.tune_process()
