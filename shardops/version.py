"""The version, in one place: the build reads it from here; and the oldest JAX that will do."""

__version__ = "0.1.0"
OLDEST_JAX = "0.10.2"
