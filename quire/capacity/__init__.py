"""Capacity: what a step costs, and a simulator that runs the real scheduler on a virtual clock.

It loads no model. `bench/phases.py` measures the steps that costs are fitted to; `quire simulate` runs the simulator.
"""
