"""How each quantization method stores a matrix in safetensors files. `read.py` chooses a scheme by the configuration."""
