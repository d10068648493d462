"""Recordings of a running server: the file's format, its writer and reader, comparisons and exports.

`engine/recorder.py` makes the lines in the engine's process, the server's process writes them. `bench/replay.py`
replays a recording. Nothing here runs a model.
"""
