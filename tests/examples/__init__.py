"""The examples and the README, run as a user runs them."""
