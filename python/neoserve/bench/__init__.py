"""What measures speed; clients of the public faces."""
