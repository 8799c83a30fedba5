"""What the figures of ``bench/`` are compared with. Each server is a process of its own."""
