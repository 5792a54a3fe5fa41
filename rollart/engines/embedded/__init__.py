"""The embedded torch engine: SGLang's HTTP protocol over a transformers model, for laptops, tests and small policies."""
