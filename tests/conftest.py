"""Settings that must stand before any library is imported."""

import os

# Triton decides at import whether kernels are compiled for a GPU or interpreted on the CPU: here they are interpreted
os.environ["TRITON_INTERPRET"] = "1"
