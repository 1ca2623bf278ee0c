"""TensorRT-LLM, PyTorch backend: experimental, and reports only (calls.py). Its memory is never taken."""
