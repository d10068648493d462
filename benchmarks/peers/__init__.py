"""The parts of benchmarks/cpu_peers.py: what is asked of each engine, how each is called, and how it is shown.

Modules named run_* execute inside a peer's own environment and import `workload` only; the rest runs beside quire.
"""
