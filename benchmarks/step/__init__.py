"""The two sides of `benchmarks.training_step`, apart from it so that only their own processes import their trainers."""
