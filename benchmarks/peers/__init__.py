"""The parts of benchmarks/cpu_peers.py: the work, how each engine is called, and the report.

Modules named run_* run in a peer's environment and import only `workload`. The others run in quire's environment.
"""
