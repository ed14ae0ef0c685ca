"""Memory that ranks share: segments (who maps what where) and the heap allocator (which bytes are whose)."""
