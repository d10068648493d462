"""How each quantization method stores a matrix in safetensors files. `read.py` chooses the method."""
