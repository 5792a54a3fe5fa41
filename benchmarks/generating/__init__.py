"""What `benchmarks.engine` is made of: the workload, the ways of generating it, and what single passes cost."""
