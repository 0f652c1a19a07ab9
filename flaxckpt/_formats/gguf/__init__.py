"""Reads GGUF, the format of llama.cpp."""
