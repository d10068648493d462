"""Batch jobs: many rows of prompts from a file, their answers to a file, and a ledger that survives any crash.

`quire batch` calls `job.py`. Rows are answered by the server's own application, without a socket.
"""
