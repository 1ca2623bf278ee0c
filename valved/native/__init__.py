"""The hot path in C, reached through cffi. See README.md in this folder."""
