"""Generation: the client and its router, the embedded torch engine, and the host that owns an engine process on a worker."""
