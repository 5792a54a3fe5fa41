"""The two sides of `benchmarks.time_to_reward`, apart from it so that only their own processes import their trainers."""
