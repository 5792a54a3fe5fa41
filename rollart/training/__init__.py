"""The optimiser side: advantages, losses, batches, and the learner that steps the policy on them."""
