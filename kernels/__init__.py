"""The ops the model is made of: PyTorch here (ops.py), NKI kernels beside it."""
