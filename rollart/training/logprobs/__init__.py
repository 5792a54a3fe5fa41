"""Log-probabilities under the reference and the proximal policy as a stage of their own, on workers that train nothing."""
