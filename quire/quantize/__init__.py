"""`quire quantize`: makes a smaller model of a model, layer by layer, and says what that costs.

`job.py` is the way in. A `Scheme` says how a matrix is quantized, an `Output` how the files are written. Nothing here
loads torch.
"""
