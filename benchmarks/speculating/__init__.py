"""What `benchmarks.speculation` is made of: questions, the drafts that answer for each other, one measured play, and two runs end to end."""
