"""Agents: programs that run their own loop and ask the policy over OpenAI's HTTP API, and what is recorded of that."""
