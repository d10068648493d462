"""The networks of draft heads in torch, one file a kind. Names of parameters are those of tensors in the files."""
