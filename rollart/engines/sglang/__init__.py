"""SGLang as an engine: how its server is started and watched. Speaks none of its HTTP API; that is the client's."""
