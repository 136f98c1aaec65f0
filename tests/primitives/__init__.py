"""Values, gradients and errors of each op, on one device."""
