"""The ops in Triton, for NVIDIA GPUs. Importing this loads nothing; `ops` is the backend."""
