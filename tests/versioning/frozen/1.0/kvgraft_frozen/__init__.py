"""Two components written for contract API 1.0; they stand for what others wrote then."""
