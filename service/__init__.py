"""The allocator process, its light parent ``serve``, and the command line."""
