"""The parts of the rollout benchmarks: scripts from traces, a bed of real scheduler and workers to play them on, and the same in virtual time."""
