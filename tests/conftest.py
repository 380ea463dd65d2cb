"""Settings that must stand before any library is imported."""

import os

# Triton decides at import whether kernels are compiled for a GPU or interpreted on the CPU, which is how they are tested
os.environ["TRITON_INTERPRET"] = "1"
