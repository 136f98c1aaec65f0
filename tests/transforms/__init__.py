"""Every op on every route under every transformation of JAX: one table, tested and printed."""
