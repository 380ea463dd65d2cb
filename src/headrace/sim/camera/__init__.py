"""Cameras: the protocol, the native renderer with its kernels, MuJoCo's and Warp's renderers."""
