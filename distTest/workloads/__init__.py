"""The chats, shapes and runs that checks and benchmarks share."""
