"""What needs several processes: exported programs, the persistent cache, several hosts."""
