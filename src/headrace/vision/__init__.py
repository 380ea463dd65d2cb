"""The image path: normalisation and frame stacks."""
