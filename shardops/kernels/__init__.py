"""GPU kernels: launch plans, just-in-time compilation, and the calls that run them.

Everything here runs while JAX lowers an op for CUDA. Nothing here is imported for CPU use.
"""
